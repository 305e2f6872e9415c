"""Encoder of pictures of InternVL 2.5 and 3 (Chen et al. 2024, Zhu et al. 2025).

A vision transformer over the patches of a tile and one class token, then the rows of each square of
patches concatenated, and two products. The class token is the last row of the input and in no
square, so it is dropped after the layers. Its own numbers are in the last row of the table of
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, ActivationSpec, EmbedSpec, Graph, Value
from ..base.tiling import Matching
from ..layers.description import Description
from ..layers.encoder import bidirectional, side_by_side
from ..layers.feed_forward import two_products
from .picture_arch import (
    CHANNELS,
    CLIP,
    EXACT,
    MOST_PATCHES,
    ClassToken,
    PictureArch,
    check_tile,
    pixel_numbers,
    tower_arch,
    tower_fields,
)

TOWER, JOINT = "vision_tower", "multi_modal_projector"
PATCHES = f"{TOWER}.embeddings.patch_embeddings.projection"
PLACES, CLASS = f"{TOWER}.embeddings.position_embeddings", f"{TOWER}.embeddings.cls_token"
FACTOR = 2
_BICUBIC = 3
_LAST = {
    f"{part}.{end}": one
    for one, part in (("lambda_1", "attention.projection_layer"), ("lambda_2", "mlp.fc2"))
    for end in ("weight", "bias")
}
"""Product of a layer → the vector that multiplies its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVlPictures(PictureArch):
    """See `PictureArch`."""

    side: int
    """Patches of a side of a tile."""
    biased: bool
    """Whether queries, keys and values have biases."""
    normed: bool
    """Whether queries and keys are normed."""
    rms: bool
    """Whether the norms of layers are RMS norms."""
    ends: bool
    """Whether there is a norm after the last layer."""

    PATCHES = PATCHES
    KINDS = ("internvl",)
    PREFIXES = (f"{TOWER}.", f"{JOINT}.")
    RENAMED = {f"model.{TOWER}.": f"{TOWER}.", f"model.{JOINT}.": f"{JOINT}."}  # noqa: RUF012

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> InternVlPictures:
        fields, tower = Fields(config, "config.json"), tower_fields(config)
        read = Fields(processing, "the config of pictures")
        width = tower.integer("hidden_size", 16, 8_192, 1_024)
        heads = tower.integer("num_attention_heads", 1, 64, 16)
        patch, tile = _square(tower, "patch_size", 14), _square(tower, "image_size", 448)
        side = tile // patch
        if tile % patch or side % FACTOR or side**2 > MOST_PATCHES:
            raise UnsupportedModel(
                f"{tower.where}: image_size is {tile}; a tile must have whole squares of {FACTOR} "
                f"patches of {patch} pixels, {MOST_PATCHES:,} patches at most",
                param="image_size",
            )
        for one, key, value in (
            (tower, "num_channels", CHANNELS),
            (tower, "use_absolute_position_embeddings", True),
            (fields, "downsample_ratio", 1 / FACTOR),
            (fields, "projector_hidden_act", "gelu"),
            (fields, "vision_feature_layer", -1),
            (fields, "vision_feature_select_strategy", "default"),
        ):
            one.expect(key, value)
        check_tile(read, tile)
        arch = tower_arch(tower, width, heads, 24, 4_096, side**2 + 1, EXACT)
        least = read.integer("min_patches", 1, 64, 1)
        return cls(
            kind=str(config.get("model_type")),
            arch=arch,
            patch=patch,
            factor=FACTOR,
            hidden=hidden,
            place=fields.integer("image_token_id", 0, 2**24, 151_667),
            sizing=Matching(tile, least, read.integer("max_patches", least, 64, 12)),
            side=side,
            biased=tower.flag("attention_bias", False),
            normed=tower.flag("use_qk_norm", False),
            rms=tower.word("norm_type", ("layer_norm", "rms_norm"), "layer_norm") == "rms_norm",
            ends=not tower.flag("use_mean_pooling", True),
            **pixel_numbers(read, _BICUBIC, *CLIP),
        )

    @property
    def extra(self) -> int:
        return 1

    @property
    def least_rows(self) -> int:
        return self.rows_of(self.side**2)

    @property
    def token(self) -> ClassToken:
        return ClassToken(f"{PLACES}.weight", PLACES, CLASS, PATCHES)

    def prompt(self, token: str, rows: int, columns: int) -> str:
        return f"<img>{token * self.tiles_of(rows, columns)}</img>"

    def scaled(self, name: str) -> str:
        layer, _, product = name.removeprefix(f"{TOWER}.encoder.layer.").partition(".")
        return f"{TOWER}.encoder.layer.{layer}.{_LAST[product]}" if product in _LAST else ""

    @property
    def beside(self) -> dict[str, tuple[int, ...]]:
        width, vectors = self.arch.hidden, ("lambda_1", "lambda_2")
        layers = [f"{TOWER}.encoder.layer.{layer}" for layer in range(self.arch.layers)]
        found = {f"{at}.{one}": (width,) for at in layers for one in vectors}
        return {**found, CLASS: (1, 1, width), PLACES: (1, self.side**2 + 1, width)}

    def describe(self) -> Graph:
        arch, square = self.arch, FACTOR**2
        to, patches = Description(arch), Value(TOKENS, self.width)
        norm = to.rms_norm if self.rms else to.layer_norm
        x = to.linear(patches, PATCHES, outputs=arch.hidden, bias=True)
        x = to.add(x, to.embed(PLACES, arch.max_context, EmbedSpec("positions")))
        for layer in range(arch.layers):
            at = f"{TOWER}.encoder.layer.{layer}"
            own = f"{at}.attention"
            mixed = bidirectional(
                to,
                layer,
                norm(x, f"{at}.layernorm_before"),
                [f"{own}.{letter}_proj" for letter in "qkv"],
                f"{own}.projection_layer",
                norms=[f"{own}.{letter}_norm" for letter in "qk"] if self.normed else (),
                bias=self.biased,
            )
            x = to.add(x, mixed)
            normed, products = norm(x, f"{at}.layernorm_after"), (f"{at}.mlp.fc1", f"{at}.mlp.fc2")
            x = to.add(x, two_products(to, normed, *products, ActivationSpec(arch.activation)))
        if self.ends:
            x = to.layer_norm(x, f"{TOWER}.layernorm")
        wide = side_by_side(to, x, square)
        x = self._projected(to, wide)
        return to.graph((patches,), hidden=x)

    def _projected(self, to: Description, x: Value) -> Value:
        x = to.layer_norm(x, f"{JOINT}.layer_norm")
        x = to.linear(x, f"{JOINT}.linear_1", outputs=self.hidden, bias=True, purpose="up")
        x = to.activate(x, ActivationSpec("gelu"))
        return to.linear(x, f"{JOINT}.linear_2", outputs=self.hidden, bias=True, purpose="down")


def _square(tower: Fields, key: str, default: int) -> int:
    """Read a side that the config has for both sides."""
    stated = tower.raw(key)
    if isinstance(stated, list) and len(stated) == 2 and stated[0] == stated[1]:
        return Fields({key: stated[0]}, tower.where).integer(key, 1, 4_096)
    return tower.integer(key, 1, 4_096, default)
