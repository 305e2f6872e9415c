"""Encoder of pictures of Llama 4 (Meta 2025).

A vision transformer over the patches of a tile and one class token, with positions from a table and
ropes by row and column; then rows of each square of patches side by side, two products with GELU
after each, and one more into the width of the language model. The class token is the last row of
the input and is not turned: its place is before the first row and column, from which patches count
from one. The processor computes in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arch import Rope
from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, ActivationSpec, EmbedSpec, Graph, Value
from ..base.tiling import Padding
from ..layers.description import Description
from ..layers.encoder import bidirectional, side_by_side
from ..layers.feed_forward import two_products
from .picture_arch import (
    CHANNELS,
    MOST_PATCHES,
    ClassToken,
    PictureArch,
    check_tile,
    head_size,
    pixel_numbers,
    tower_arch,
    tower_fields,
)

TOWER, JOINT = "vision_model", "multi_modal_projector"
PATCHES, PLACES = f"{TOWER}.patch_embedding.linear", f"{TOWER}.positional_embedding_vlm"
CLASS, ADAPTER = f"{TOWER}.class_embedding", f"{TOWER}.vision_adapter.mlp"
BEGIN, WHOLE, END = "<|image_start|>", "<|image|>", "<|image_end|>"
"""Tokens around those of a picture, and before those of the whole one, which a template has for
all."""
RIGHT, BELOW = "<|tile_x_separator|>", "<|tile_y_separator|>"
"""Tokens between the tiles of a row, and after a row."""
FACTOR = 2
_BILINEAR = 2
_EPS = 1e-5
"""Epsilon of the tower's norms, which no config states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Pictures(PictureArch):
    """See `PictureArch`."""

    side: int
    """Patches of a side of a tile."""
    adapted: int
    """Width of the adapter's products."""

    PATCHES = PATCHES
    KINDS = ("llama4",)
    PREFIXES = (f"{TOWER}.", f"{JOINT}.")

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> Llama4Pictures:
        fields, tower = Fields(config, "config.json"), tower_fields(config)
        read = Fields(processing, "the config of pictures")
        width = tower.integer("hidden_size", 16, 4_096, 768)
        heads = tower.integer("num_attention_heads", 1, 64, 16)
        size = head_size(width, heads)
        patch, tile = (
            tower.integer("patch_size", 1, 64, 14),
            tower.integer("image_size", 1, 4_096, 448),
        )
        side = tile // patch
        if tile % patch or side % FACTOR or side**2 > MOST_PATCHES or size % 4:
            raise UnsupportedModel(
                f"{tower.where}: image_size is {tile}, a head has {size} numbers; a tile must have "
                f"whole squares of {FACTOR} patches of {patch} pixels, {MOST_PATCHES:,} patches at "
                "most, and a head a multiple of 4",
                param="image_size",
            )
        adapted = tower.integer("projector_output_dim", 1, 1 << 15, 4_096)
        check_tile(read, tile)
        for one, key, value in (
            (tower, "num_channels", CHANNELS),
            (tower, "hidden_act", "gelu"),
            (tower, "pixel_shuffle_ratio", 1 / FACTOR),
            (tower, "projector_input_dim", adapted),
            (tower, "vision_output_dim", adapted),
            (tower, "multi_modal_projector_bias", False),
            (tower, "vision_feature_select_strategy", "default"),
            (tower, "intermediate_size", FACTOR**2 * width),
            (read, "resize_to_max_canvas", False),
        ):
            one.expect(key, value)
        turning = Fields(tower.mapping("rope_parameters") or {}, f"{tower.where}: rope_parameters")
        turning.expect("rope_type", "default")
        theta = tower.number("rope_theta", 1.0, 1e12, 10_000.0)
        quarter = size // 4
        rope = Rope(
            turning.number("rope_theta", 1.0, 1e12, theta),
            "axial",
            axes=(1,) * quarter + (0,) * quarter,
        )
        sizes = width, heads, 34, 5_632, side**2 + 1
        arch = tower_arch(tower, *sizes, eps=_EPS, activation="gelu", rope=rope)
        return cls(
            kind=str(config.get("model_type")),
            arch=arch,
            patch=patch,
            factor=FACTOR,
            hidden=hidden,
            place=fields.integer("image_token_index", 0, 2**24, 200_092),
            sizing=Padding(tile, read.integer("max_patches", 1, 64, 16)),
            side=side,
            adapted=adapted,
            **pixel_numbers(read, _BILINEAR, [0.5] * CHANNELS, [0.5] * CHANNELS),
        )

    @property
    def written(self) -> int | str:
        return WHOLE

    @property
    def marks(self) -> Mapping[str, int | None]:
        return dict.fromkeys((BEGIN, WHOLE, END, RIGHT, BELOW))

    @property
    def brief(self) -> bool:
        return True

    @property
    def extra(self) -> int:
        return 1

    @property
    def gridded(self) -> bool:
        return True

    @property
    def most_tiles(self) -> int:
        assert isinstance(self.sizing, Padding)
        return 1 + self.sizing.most

    @property
    def least_rows(self) -> int:
        return self.rows_of(self.side**2)

    @property
    def token(self) -> ClassToken:
        return ClassToken(f"{PLACES}.weight", PLACES, CLASS, PATCHES, last=True, biased=False)

    @property
    def beside(self) -> dict[str, tuple[int, ...]]:
        width = self.arch.hidden
        return {CLASS: (width,), PLACES: (self.arch.max_context, width)}

    def prompt(self, token: str, rows: int, columns: int) -> str:
        tiles = (RIGHT.join([token] * columns) + BELOW) * rows
        return f"{BEGIN}{tiles}{WHOLE}{token}{END}"

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def picked(self, name: str) -> list[int] | None:
        """Return the rows of queries and keys with the halves of a pair apart: the files have them
        next to each other."""
        if not name.rpartition(".")[0].endswith(("q_proj", "k_proj")):
            return None
        size, half = self.arch.head_dim, self.arch.head_dim // 2
        return [
            head * size + 2 * pair + end
            for head in range(self.arch.heads)
            for end in range(2)
            for pair in range(half)
        ]

    def describe(self) -> Graph:
        arch, act = self.arch, ActivationSpec("gelu")
        to, patches = Description(arch), Value(TOKENS, self.width)
        x = to.linear(patches, PATCHES, outputs=arch.hidden)
        x = to.add(x, to.embed(PLACES, arch.max_context, EmbedSpec("positions")))
        x = to.layer_norm(x, f"{TOWER}.layernorm_pre")
        for layer in range(arch.layers):
            at = f"{TOWER}.model.layers.{layer}"
            mixed = bidirectional(
                to,
                layer,
                to.layer_norm(x, f"{at}.input_layernorm"),
                [f"{at}.self_attn.{letter}_proj" for letter in "qkv"],
                f"{at}.self_attn.o_proj",
                arch.rope,
            )
            x = to.add(x, mixed)
            normed = to.layer_norm(x, f"{at}.post_attention_layernorm")
            x = to.add(x, two_products(to, normed, f"{at}.mlp.fc1", f"{at}.mlp.fc2", act))
        x = side_by_side(to, to.layer_norm(x, f"{TOWER}.layernorm_post"), FACTOR**2)
        for product in ("fc1", "fc2"):
            x = to.linear(x, f"{ADAPTER}.{product}", outputs=self.adapted)
            x = to.activate(x, act)
        return to.graph((patches,), hidden=to.linear(x, f"{JOINT}.linear_1", outputs=self.hidden))
