"""Encoder of pictures of Gemma 3 (Gemma team 2025).

SigLIP's tower over the patches of a square picture, then the mean of each square of patches, a norm
and one product. A picture's tokens in the language model attend to each other. A long picture may
be followed by its parts ("pan and scan").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, EmbedSpec, Graph, Value
from ..base.tiling import Panning
from ..layers.description import Description
from ..layers.encoder import side_by_side, siglip
from .picture_arch import (
    ACTIVATIONS,
    CHANNELS,
    MOST_PATCHES,
    PictureArch,
    check_tile,
    pixel_numbers,
    tower_arch,
    tower_fields,
)

TOWER, JOINT = "vision_tower", "multi_modal_projector"
PATCHES, PLACES = f"{TOWER}.embeddings.patch_embedding", f"{TOWER}.embeddings.position_embedding"
NORM, PROJECTION = f"{JOINT}.mm_soft_emb_norm", f"{JOINT}.mm_input_projection"
BEGIN, END = "<start_of_image>", "<end_of_image>"
"""Tokens around those of a picture; the first stands for a whole picture in a template."""
_BILINEAR = 2
_MOST_CROPS = 16
"""Most parts of a picture, and the fewest pixels of a part's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaPictures(PictureArch):
    """See `PictureArch`."""

    side: int
    """Patches of a side of a tile."""
    begin: int
    """Id of `BEGIN`."""
    end: int
    """Id of `END`."""

    PATCHES = PATCHES
    KINDS = ("gemma3",)
    PREFIXES = (f"{TOWER}.", f"{JOINT}.")
    RENAMED = {  # noqa: RUF012
        f"{lead}{old}": new
        for lead in ("model.", "")
        for old, new in (
            (f"{JOINT}.mm_input_projection_weight", f"{PROJECTION}.weight"),
            (f"{TOWER}.vision_model.", f"{TOWER}."),
            (f"{TOWER}.", f"{TOWER}."),
            (f"{JOINT}.", f"{JOINT}."),
        )
    }

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> GemmaPictures:
        fields, tower = Fields(config, "config.json"), tower_fields(config)
        read = Fields(processing, "the config of pictures")
        width = tower.integer("hidden_size", 16, 4_096, 768)
        heads = tower.integer("num_attention_heads", 1, 64, 12)
        patch, tile = (
            tower.integer("patch_size", 1, 64, 16),
            tower.integer("image_size", 1, 4_096, 224),
        )
        tower.expect("num_channels", CHANNELS)
        check_tile(read, tile)
        tokens = fields.integer("mm_tokens_per_image", 1, MOST_PATCHES, 256)
        side, across = tile // patch, isqrt(tokens)
        if tile % patch or across**2 != tokens or side % across or side**2 > MOST_PATCHES:
            raise UnsupportedModel(
                f"config.json: {tokens} tokens of a picture of {tile} pixels; they must be a "
                f"square of whole squares of patches of {patch} pixels, at most {MOST_PATCHES:,}",
                param="mm_tokens_per_image",
            )
        sizes = width, heads, 12, 3_072, side**2
        arch = tower_arch(tower, *sizes, ACTIVATIONS, norm_offset=1.0)
        return cls(
            kind=str(config.get("model_type")),
            arch=arch,
            patch=patch,
            factor=side // across,
            hidden=hidden,
            place=fields.integer("image_token_index", 0, 2**24, 262_144),
            begin=fields.integer("boi_token_index", 0, 2**24, 255_999),
            end=fields.integer("eoi_token_index", 0, 2**24, 256_000),
            sizing=_panning(read, tile),
            side=side,
            **pixel_numbers(read, _BILINEAR, [0.5] * CHANNELS, [0.5] * CHANNELS),
        )

    @property
    def written(self) -> int:
        return self.begin

    @property
    def marks(self) -> Mapping[str, int | None]:
        return {BEGIN: self.begin, END: self.end}

    @property
    def mutual(self) -> bool:
        return True

    @property
    def most_tiles(self) -> int:
        assert isinstance(self.sizing, Panning)
        return 1 + self.sizing.most

    @property
    def least_rows(self) -> int:
        return self.rows_of(self.side**2)

    def prompt(self, token: str, rows: int, columns: int) -> str:
        one = f"{BEGIN}{token}{END}"
        if not rows:
            return one
        crops = " ".join([f"\n\n{one}\n\n"] * (rows * columns))
        return f"{one}\n\n and here are some crops to help you see better {crops}".rstrip("\n")

    def around(self, rows: int, columns: int) -> tuple[str, str]:
        return "Here is the original image \n\n" if rows else "\n\n", "\n\n"

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.turned(name) else PictureArch.stored(self, name, shape)

    def turned(self, name: str) -> bool:
        return name == f"{PROJECTION}.weight"

    def picked(self, name: str) -> list[int] | None:
        if name != f"{PLACES}.weight":
            return None
        return [row * self.side + column for row, column in self.laid(self.side, self.side).order]

    def describe(self) -> Graph:
        arch, square = self.arch, self.factor**2
        to, patches = Description(arch), Value(TOKENS, self.width)
        x = to.linear(patches, PATCHES, outputs=arch.hidden, bias=True)
        x = to.add(x, to.embed(PLACES, arch.max_context, EmbedSpec("positions")))
        x = siglip(to, x, TOWER)
        wide = side_by_side(to, x, square)
        mean, *others = to.parts(wide, [arch.hidden] * square)
        for other in others:
            mean = to.add(mean, other)
        mean = to.rms_norm(to.scale(mean, 1 / square), NORM)
        return to.graph((patches,), hidden=to.linear(mean, PROJECTION, outputs=self.hidden))


def _panning(read: Fields, tile: int) -> Panning:
    """Read the rule that cuts long pictures into parts, if there is one."""
    if not read.flag("do_pan_and_scan", False):
        return Panning(tile)
    return Panning(
        tile,
        read.integer("pan_and_scan_max_num_crops", 1, _MOST_CROPS, 4),
        read.integer("pan_and_scan_min_crop_size", _MOST_CROPS, 1 << 14, 256),
        read.number("pan_and_scan_min_ratio_to_activate", 1.0, 1e3, 1.2),
    )
