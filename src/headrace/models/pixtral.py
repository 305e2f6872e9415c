"""Encoder of pictures of Pixtral (Agrawal et al. 2024) and of Mistral Small 3.1 after it.

A picture keeps its shape: a grid of patches, each rotated by its row and column. Between the rows
of the grid the prompt has a token without encoder output. Pixtral makes a row for each patch,
Mistral Small one for each square of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arch import Activation, ModelArch, Rope
from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, ActivationSpec, Graph, NormSpec, Value
from ..base.tiling import Bounding
from ..layers.description import Description, vector
from ..layers.encoder import bidirectional, side_by_side
from .picture_arch import (
    ACTIVATIONS,
    CHANNELS,
    CLIP,
    EXACT,
    MOST_PATCHES,
    PictureArch,
    head_size,
    pixel_numbers,
    tower_arch,
    tower_fields,
)

TOWER, JOINT = "vision_tower", "multi_modal_projector"
PATCHES, MERGER = f"{TOWER}.patch_conv", f"{JOINT}.patch_merger.merging_layer"
BREAK, END = "[IMG_BREAK]", "[IMG_END]"
"""Tokens after each row of a picture except the last, and after that one."""
_BICUBIC = 3
_EPS = 1e-5
"""Epsilon of all norms of the tower, which no config states."""
_ACTS: Mapping[str, Activation] = {**EXACT, "silu": "silu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralPictures(PictureArch):
    """See `PictureArch`."""

    eps: float
    """Epsilon of the norm before patches are merged; 0: no merging."""
    biased: bool
    """Whether the last two products have biases."""
    projects: Activation
    """Function between these two."""

    PATCHES = PATCHES
    KINDS = ("llava", "mistral3")
    PREFIXES = (f"{TOWER}.", f"{JOINT}.")
    RENAMED = {f"model.{TOWER}.": f"{TOWER}.", f"model.{JOINT}.": f"{JOINT}."}  # noqa: RUF012

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> PixtralPictures:
        fields, tower = Fields(config, "config.json"), tower_fields(config)
        read = Fields(processing, "the config of pictures")
        kind = fields.word("model_type", cls.KINDS)
        tower.word("model_type", ("pixtral",))
        merges = kind == "mistral3"
        factor = fields.integer("spatial_merge_size", 1, 8, 2) if merges else 1
        for one, key, value in (
            (tower, "num_channels", CHANNELS),
            (fields, "vision_feature_layer", -1),
            (fields, "vision_feature_select_strategy", "full"),
        ):
            one.expect(key, value)
        patch = tower.integer("patch_size", 1, 64, 14 if merges else 16)
        sizing = _bounding(read, patch, factor)
        text = Fields(fields.mapping("text_config") or {}, "config.json: text_config")
        return cls(
            kind=kind,
            arch=_arch(tower, (sizing.largest // patch) ** 2),
            patch=patch,
            factor=factor,
            hidden=hidden,
            place=fields.integer("image_token_index", 0, 2**24, 10 if merges else 32_000),
            sizing=sizing,
            eps=text.number("rms_norm_eps", 1e-12, 1e-1, 1e-5) if merges else 0.0,
            biased=fields.flag("multimodal_projector_bias", not merges),
            projects=ACTIVATIONS[fields.word("projector_hidden_act", ACTIVATIONS, "gelu")],
            **pixel_numbers(read, _BICUBIC, *CLIP),
        )

    @property
    def gridded(self) -> bool:
        return True

    @property
    def between(self) -> str:
        return BREAK

    @property
    def marks(self) -> Mapping[str, int | None]:
        return {BREAK: None, END: None}

    def prompt(self, token: str, rows: int, columns: int) -> str:
        return f"{token}{END}"

    def apart(self, name: str) -> int:
        return self.factor**2 if name == f"{MERGER}.weight" else 1

    def describe(self) -> Graph:
        arch = self.arch
        to, patches = Description(arch), Value(TOKENS, self.width)
        x = to.linear(patches, PATCHES, outputs=arch.hidden)
        x = to.rms_norm(x, f"{TOWER}.ln_pre")
        for layer in range(arch.layers):
            at = f"{TOWER}.transformer.layers.{layer}"
            mixed = bidirectional(
                to,
                layer,
                to.rms_norm(x, f"{at}.attention_norm"),
                [f"{at}.attention.{letter}_proj" for letter in "qkv"],
                f"{at}.attention.o_proj",
                arch.rope,
                bias=False,
                output_bias=False,
            )
            x = to.add(x, mixed)
            normed, both = to.rms_norm(x, f"{at}.ffn_norm"), [arch.intermediate] * 2
            names = f"{at}.feed_forward.gate_proj", f"{at}.feed_forward.up_proj"
            inner = to.linear(normed, *names, outputs=both, purpose="gate_up")
            inner = to.gated(inner, ActivationSpec(arch.activation))
            down = f"{at}.feed_forward.down_proj"
            x = to.add(x, to.linear(inner, down, outputs=arch.hidden, purpose="down"))
        x = self._merged(to, x) if self.eps else x
        first, second = f"{JOINT}.linear_1", f"{JOINT}.linear_2"
        x = to.linear(x, first, outputs=self.hidden, bias=self.biased, purpose="up")
        x = to.activate(x, ActivationSpec(self.projects))
        x = to.linear(x, second, outputs=self.hidden, bias=self.biased, purpose="down")
        return to.graph((patches,), hidden=x)

    def _merged(self, to: Description, x: Value) -> Value:
        """Describe a norm of each patch, and one product over a square's concatenated patches."""
        square, width = self.factor**2, self.arch.hidden
        gain = vector([f"{JOINT}.norm.weight"], [width])
        x = to.node("norm", (x,), width, [gain], NormSpec("rms", self.eps))
        wide = side_by_side(to, x, square)
        return to.linear(wide, MERGER, outputs=width)


def _arch(tower: Fields, most: int) -> ModelArch:
    """Read the layers. `most`: patches of the largest picture."""
    width = tower.integer("hidden_size", 16, 4_096, 1_024)
    heads = tower.integer("num_attention_heads", 1, 64, 16)
    size = head_size(width, heads)
    if size % 4 or tower.raw("head_dim") not in (None, size):
        raise UnsupportedModel(
            f"{tower.where}: heads have {size} numbers, which must be a multiple of 4 and their "
            "head_dim",
            param="num_attention_heads",
        )
    turning = Fields(tower.mapping("rope_parameters") or {}, f"{tower.where}: rope_parameters")
    turning.expect("rope_type", "axial", "default")
    theta = tower.number("rope_theta", 1.0, 1e12, 10_000.0)
    theta = turning.number("rope_theta", 1.0, 1e12, theta)
    rope = Rope(theta, "dealt", axes=(0,) * (size // 4) + (1,) * (size // 4))
    return tower_arch(tower, width, heads, 24, 4_096, most, _ACTS, eps=_EPS, rope=rope)


def _bounding(read: Fields, patch: int, factor: int) -> Bounding:
    """Read the largest side of a picture, in pixels."""
    size = Fields(read.mapping("size") or {"longest_edge": 1_024}, f"{read.where}: size")
    found = Bounding(patch * factor, size.integer("longest_edge", 1, 1 << 14))
    patches = (found.largest // patch) ** 2
    if patches > MOST_PATCHES:
        raise UnsupportedModel(
            f"{size.where}: longest_edge is {found.longest}: a picture of {patches:,} patches, at "
            f"most {MOST_PATCHES:,} are run",
            param="longest_edge",
        )
    return found
