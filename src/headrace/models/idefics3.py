"""Encoder of pictures of Idefics3 and SmolVLM (Laurençon et al. 2024).

SigLIP's tower (Zhai et al. 2023) over the patches of a tile, then the rows of each square of
patches concatenated ("pixel shuffle"), and one product into the width of the language model. A
picture is several tiles, each a separate input. Patches are in the order of their squares, so that
a square is a `window`; otherwise the order does not matter, since all patches attend to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..base.arch_fields import Fields
from ..base.errors import UnsupportedModel
from ..base.filming import Film, Sampling
from ..base.graph import TOKENS, EmbedSpec, Graph, Value
from ..base.tiling import Tiling
from ..layers.description import Description
from ..layers.encoder import side_by_side, siglip
from .picture_arch import (
    ACTIVATIONS,
    CHANNELS,
    MOST_PATCHES,
    PictureArch,
    Videos,
    pixel_numbers,
    squares,
    tower_arch,
    tower_fields,
)

TOWER, JOINT = "model.vision_model", "model.connector.modality_projection.proj"
"""Names of the encoder's tensors, and of the product after it."""
PATCHES, PLACES = f"{TOWER}.embeddings.patch_embedding", f"{TOWER}.embeddings.position_embedding"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
"""Tokens of the family's prompts: around tiles, and before the whole picture."""
_LANCZOS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Pictures(PictureArch):
    """See `PictureArch`."""

    side: int
    """Patches of a side of a tile."""
    trained: int
    """Positions of a side of the table."""

    PATCHES = PATCHES
    KINDS = ("idefics3", "smolvlm")
    PREFIXES = (f"{TOWER}.", f"{JOINT}.")

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> Idefics3Pictures:
        fields, tower = Fields(config, "config.json"), tower_fields(config)
        width = tower.integer("hidden_size", 16, 4_096, 1_152)
        heads = tower.integer("num_attention_heads", 1, 64, 16)
        patch = tower.integer("patch_size", 1, 64, 32)
        factor = fields.integer("scale_factor", 1, 8, 2)
        tower.expect("num_channels", CHANNELS)
        read = Fields(processing, "the config of pictures")
        tile = _edge(read, "max_image_size", 364)
        side = _side(tile, patch, factor)
        arch = tower_arch(tower, width, heads, 12, 3_072, side**2, ACTIVATIONS)
        splits = read.flag("do_image_splitting", True)
        return cls(
            kind=str(config.get("model_type")),
            arch=arch,
            patch=patch,
            factor=factor,
            hidden=hidden,
            place=fields.integer("image_token_id", 0, 2**24, 128_257),
            sizing=Tiling(_edge(read, "size", 4 * 364), tile, splits),
            side=side,
            trained=tower.integer("image_size", patch, 4_096, 224) // patch,
            **pixel_numbers(read, _LANCZOS, [0.5] * CHANNELS, [0.5] * CHANNELS),
        )

    def filming(self, config: Mapping[str, Any], processing: Mapping[str, Any]) -> Videos | None:
        """Read SmolVLM's processing of videos: frames of one tile, like pictures that are not
        split.

        A template writes the pictures' token for them; the videos' token is plain text there."""
        if self.kind != "smolvlm":
            return None
        read = Fields(processing, "the config of videos")
        given = read.mapping("video_sampling") or {}
        sampled = Fields(given, f"{read.where}: video_sampling")
        tile = _edge(read, "max_image_size", 364)
        if tile != self.side * self.patch:
            raise UnsupportedModel(
                f"{read.where}: max_image_size is {tile}; that of pictures is "
                f"{self.side * self.patch}",
                param="max_image_size",
            )
        key = "video_size" if "video_size" in given else "size"
        longest = _edge(sampled if key in given else read, key, 4 * 364)
        rate = sampled.number("fps", 0.01, 1_000.0, read.number("fps", 0.01, 1_000.0, 1.0))
        most = sampled.integer("max_frames", 1, 1 << 12, read.integer("num_frames", 1, 1 << 12, 64))
        return Videos(
            Sampling("centred", rate, 1, most),
            Tiling(longest, tile, False),
            place=self.place,
            written=self.place,
            **pixel_numbers(read, _LANCZOS, [0.5] * CHANNELS, [0.5] * CHANNELS),
        )

    def prompt_of(self, token: str, film: Film) -> str:
        one = f"{AROUND}{WHOLE}{token}{AROUND}"
        return one + "".join(f"{_stamp(time)}{one}" for time in film.times[1:])

    def around_film(self, film: Film) -> tuple[str, str]:
        whole = int(film.seconds)
        clock = f"{whole // 3_600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
        if days := whole // 86_400:
            hours = f"{whole // 3_600 % 24}:{clock.partition(':')[2]}"
            clock = f"{days} day{'s' if days > 1 else ''}, {hours}"
        count = number_words(len(film.frames))
        before = f"You are provided the following series of {count} frames from a {clock} "
        return f"{before}[H:MM:SS] video.\n{_stamp(film.times[0])}", "\n\n"

    @property
    def rows(self) -> int:
        """Rows of the language model for a tile."""
        return self.rows_of(self.side**2)

    @property
    def least_rows(self) -> int:
        return self.rows

    def order(self) -> list[tuple[int, int]]:
        """List (row, column) in the tile of each patch, in the order of the encoder's input."""
        return squares(self.side, self.side, self.factor)

    def positions(self) -> list[int]:
        """List the row of the table of positions of each patch, in the same order.

        It is the row of the same place in a tile of the trained size. transformers computes it in
        fp32, which is off by one for some sides, such as 19, but not for those of the known models
        (26, 27, 32).
        """
        at = [place * self.trained // self.side for place in range(self.side)]
        return [at[row] * self.trained + at[column] for row, column in self.order()]

    def prompt(self, token: str, rows: int, columns: int) -> str:
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{AROUND}<row_{row}_col_{column}>{token}"
            text += "\n"
        return text + ("\n" if rows else "") + f"{AROUND}{WHOLE}{token}{AROUND}"

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name == f"{PLACES}.weight":
            return self.trained**2, shape[1]
        return PictureArch.stored(self, name, shape)

    def picked(self, name: str) -> list[int] | None:
        return self.positions() if name == f"{PLACES}.weight" else None

    def describe(self) -> Graph:
        arch = self.arch
        to = Description(arch)
        square, patches = self.factor**2, Value(TOKENS, self.width)
        x = to.linear(patches, PATCHES, outputs=arch.hidden, bias=True)
        x = to.add(x, to.embed(PLACES, arch.max_context, EmbedSpec("positions")))
        x = siglip(to, x, TOWER)
        wide = side_by_side(to, x, square)
        return to.graph((patches,), hidden=to.linear(wide, JOINT, outputs=self.hidden))


_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"


def number_words(number: int) -> str:
    """Write a number below 10,000 in English words, as num2words does."""
    if number < 20:
        return _SMALL[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_SMALL[one]}" if one else "")
    if number < 1_000:
        head, rest = divmod(number, 100)
        return f"{_SMALL[head]} hundred" + (f" and {number_words(rest)}" if rest else "")
    head, rest = divmod(number, 1_000)
    joint = " and " if rest < 100 else ", "
    return f"{number_words(head)} thousand" + (f"{joint}{number_words(rest)}" if rest else "")


def _stamp(time: float) -> str:
    return f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"


def _side(tile: int, patch: int, factor: int) -> int:
    """Return the patches of a side of a tile. Raises `UnsupportedModel`."""
    if tile % patch or tile // patch % factor:
        raise UnsupportedModel(
            f"max_image_size is {tile}; a tile must have whole squares of {factor} patches of "
            f"{patch} pixels",
            param="max_image_size",
        )
    if (tile // patch) ** 2 > MOST_PATCHES:
        raise UnsupportedModel(
            f"max_image_size is {tile}: a tile of {(tile // patch) ** 2:,} patches, at most "
            f"{MOST_PATCHES:,} are run",
            param="max_image_size",
        )
    return tile // patch


def _edge(fields: Fields, key: str, default: int) -> int:
    stated = fields.mapping(key) or {"longest_edge": default}
    return Fields(stated, f"{fields.where}: {key}").integer("longest_edge", 1, 1 << 14)
