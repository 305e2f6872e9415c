"""Pictures of prompts, as a language model's encoder reads them: decoded, cut, as patches.

Nothing here knows the model's weights; the encoder is a part of the model and runs in its worker.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.errors import InvalidRequest, UnsupportedModel
from ...base.modelfiles import ModelFiles
from ...base.spec import InputSpan
from ...dist.payloads import MOST_OF_ONE, SealedInputs
from ...loader.pictures import open_pictures
from ...loader.towers import MOST_INPUTS
from ...media import PICTURE_REFUSALS, OnChild, PictureLimits, decode_picture, levels
from ...models.pictures import CHANNELS, KINDS, PictureArch
from ...text.tokenizer import Tokenizer
from .kept_pictures import KeptPictures, SealedPicture

Codes = npt.NDArray[np.uint8]
LIMITS = PictureLimits()
FORM = 1
"""Version of the pixels: equal tiles have equal names as long as it stands."""
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
"""Tokens of the family's prompts: around tiles, and before the whole picture."""


class PreparedTile(NamedTuple):
    """A tile as the encoder takes it."""

    patches: Codes
    """[patches, 3 · patch²]: the bytes of each patch, channel by channel."""
    digest: bytes
    """`InputSpan.digest`."""


class PreparedPicture(NamedTuple):
    """The tiles of a picture, in the order of the prompt."""

    tiles: list[PreparedTile]
    rows: int
    columns: int


class PicturePrompts:
    """Preparation of one model's pictures. `read` and `prepare` may be called from any thread."""

    limits = LIMITS

    def __init__(self, picture: PictureArch, tokenizer: Tokenizer, model: str) -> None:
        """`model`: name of the model, of which names of tiles are a part. Raises
        `UnsupportedModel` if the tokenizer lacks the token of pictures."""
        self.picture = picture
        self.payloads = SealedInputs()
        """Tiles in memory that the engine reads, too. For one thread."""
        self.levels = levels(picture.scale, picture.mean, picture.deviation)
        """Numbers of the bytes, for `SealedInputs.hold`."""
        self.kept = KeptPictures(self.payloads, self.levels)
        place = tokenizer.id_to_token(picture.place)
        if place is None or tokenizer.encode(place) != [picture.place]:
            raise UnsupportedModel(
                f"config.json: image_token_id is {picture.place}, which is no token of this model",
                param="image_token_id",
            )
        self._tokenizer, self._token = tokenizer, place
        arch = picture.arch
        said = KINDS[0], FORM, model, picture.patch, arch.hidden, arch.layers, picture.hidden
        self._name = repr((*said, self.levels.tolist())).encode()
        order = np.array(picture.order())
        self._order = order[:, 0] * picture.side + order[:, 1]
        heads = MOST_INPUTS * (self.levels.nbytes + 16)
        self.most_tiles = (MOST_OF_ONE - heads) // (picture.side**2 * picture.width)
        """Tiles of one request, whose memory is bounded as its owner's is."""
        self.ids = lru_cache(maxsize=64)(self._ids)
        """Prompt of a picture by its (rows, columns): ids, with `place` for each row of a tile."""

    @property
    def place(self) -> int:
        """The token that stands for a row of a picture, and in a template for a whole one."""
        return self.picture.place

    def read(
        self,
        data: bytes,
        param: str,
        whole: bool,
        most: int,
        on_child: OnChild | None = None,
    ) -> PreparedPicture:
        """Decode a file and cut it into at most `most` tiles; `whole`: into one. Raises as
        `media.decode_picture`."""
        tiling = self.picture.tiling
        if whole:
            tiling = tiling._replace(split=False)
        limits = replace(self.limits, tiles=max(1, min(most, self.limits.tiles)))
        made = decode_picture(data, tiling, limits, param, on_child)
        tiles = [self.prepare(tile) for tile in made.tiles]
        return PreparedPicture(tiles, made.rows, made.columns)

    def check_tiles(self, rows: int, columns: int, most: int, param: str) -> int:
        """Return the tiles of a picture, cut into rows and columns. Raises `InvalidRequest` if they
        are more than `most`."""
        tiles = rows * columns + 1
        if tiles > most:
            raise InvalidRequest(PICTURE_REFUSALS["tiles"], param=param)
        return tiles

    def prepare(self, tile: Codes) -> PreparedTile:
        """Arrange the pixels of a tile [side, side, 3] as the encoder reads them."""
        side, patch = self.picture.side, self.picture.patch
        cells = tile.reshape(side, patch, side, patch, CHANNELS).transpose(0, 2, 4, 1, 3)
        patches = np.ascontiguousarray(cells.reshape(side * side, -1)[self._order])
        digest = blake2b(self._name, digest_size=32)
        digest.update(patches.tobytes())
        return PreparedTile(patches, digest.digest())

    def expand(
        self, prompt: list[int], grids: list[tuple[int, int]], sealed: list[SealedPicture]
    ) -> tuple[list[int], list[InputSpan]]:
        """Return a prompt in which each `place` has become the tokens of a picture, and its inputs,
        one for each tile.

        `grids`: rows and columns of each picture; `sealed`: the pictures; empty: the prompt is only
        counted, and has no inputs.
        """
        ids: list[int] = []
        spans: list[InputSpan] = []
        after = 0
        for number, grid in enumerate(grids):
            at = prompt.index(self.place, after)
            ids += prompt[after:at]
            tokens = self.ids(*grid)
            if sealed:
                spans += self._spans(sealed[number], tokens, len(ids))
            ids += tokens
            after = at + 1
        return ids + prompt[after:], spans

    def _spans(self, made: SealedPicture, tokens: tuple[int, ...], begin: int) -> list[InputSpan]:
        """Return the inputs of a picture whose tokens begin at `begin`."""
        spans, at, rows = [], 0, self.picture.rows
        for number, digest in enumerate(made.digests):
            at = tokens.index(self.place, at)
            source = made.source(number)
            spans.append(InputSpan(begin + at, rows, "picture", digest, source, made.units))
            at += rows
        return spans

    def _ids(self, rows: int, columns: int) -> tuple[int, ...]:
        """Return the tokens that the model's processor writes for a picture."""
        tile = self._token * self.picture.rows
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{AROUND}<row_{row}_col_{column}>{tile}"
            text += "\n"
        text += ("\n" if rows else "") + f"{AROUND}{WHOLE}{tile}{AROUND}"
        return tuple(self._tokenizer.encode(text))


def open_picture_prompts(files: ModelFiles, tokenizer: Tokenizer) -> PicturePrompts | None:
    """Return the preparation of pictures for an open model; None if it takes none."""
    picture = open_pictures(files)
    return None if picture is None else PicturePrompts(picture, tokenizer, files.name)
