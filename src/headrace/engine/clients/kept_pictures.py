"""Pictures kept in sealed memory after their request. When a later turn of the conversation sends
them again, none is decoded, resized or sealed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.errors import Overloaded

if TYPE_CHECKING:
    from ...base.encodings import SealedHandle
    from ...base.filming import Film
    from ...dist.payloads import SealedInput, SealedInputs

MOST_BYTES = 64 << 20
"""Bytes of kept pictures: four that fill the largest grid of SmolVLM."""
MOST_PICTURES = 64
Name = tuple[str, bytes, bool | int]
"""Owner of a picture, name of its content, and whether it has low detail; for a video, -1 minus the
frame limit that was asked for."""


class PreparedTile(NamedTuple):
    """A tile as the encoder takes it."""

    patches: npt.NDArray[np.uint8]
    """[patches, 3 · patch²]: the bytes of each patch, channel by channel."""
    digest: bytes
    """`InputSpan.digest`."""
    rows: int
    """Rows of the language model."""
    columns: int
    """`InputSpan.columns`."""


class PictureShape(NamedTuple):
    """A picture cut into `rows` × `columns` tiles (0: it is one), of `each` rows of the language
    model; a row of a tile's grid has `grid` of them (0: it has none). A video has `film`."""

    rows: int
    columns: int
    each: int
    grid: int = 0
    film: Film | None = None


class PreparedPicture(NamedTuple):
    """The tiles of a picture or a video, in the order of the prompt."""

    tiles: list[PreparedTile]
    rows: int
    columns: int
    film: Film | None = None
    """Frames of a video; None: it is a picture."""
    levels: npt.NDArray[np.float32] | None = None
    """Values of a video's bytes."""

    @property
    def length(self) -> int:
        """Rows of the language model for all tiles."""
        return sum(tile.rows for tile in self.tiles)

    @property
    def shape(self) -> PictureShape:
        """Shape of its tiles, which are alike."""
        first = self.tiles[0]
        return PictureShape(self.rows, self.columns, first.rows, first.columns, self.film)


class SealedPicture(NamedTuple):
    """The tiles of a picture in one sealed memory, in the order of the prompt."""

    sealed: SealedInput
    digests: tuple[bytes, ...]
    """`PreparedTile.digest` of each."""
    units: int
    """Units of the encoder in a tile."""
    rows: int
    columns: int
    each: int
    """Rows of the language model for a tile."""
    grid: int
    """`InputSpan.columns` of a tile."""
    film: Film | None = None

    @property
    def length(self) -> int:
        """Rows of the language model for all tiles."""
        return self.each * len(self.digests)

    @property
    def shape(self) -> PictureShape:
        return PictureShape(self.rows, self.columns, self.each, self.grid, self.film)

    def source(self, tile: int) -> SealedHandle:
        """Return the handle of a tile."""
        return self.sealed.part(tile * self.units, self.units)


class KeptPictures:
    """Pictures of earlier requests; the least recently used are dropped first. Only the owner of a
    picture finds it. For one thread.

    Their bytes count in `SealedInputs` like others, and they are dropped when a request lacks room.
    """

    def __init__(
        self,
        payloads: SealedInputs,
        levels: npt.NDArray[np.float32],
        most: int = MOST_BYTES,
        most_pictures: int = MOST_PICTURES,
    ) -> None:
        """`levels`: values of the bytes, as `SealedInputs.hold` takes them; `most`: bytes."""
        self._payloads, self._levels = payloads, levels
        self._most, self._most_pictures = most, most_pictures
        self._kept: OrderedDict[Name, SealedPicture] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, name: Name) -> SealedPicture | None:
        """Return a kept picture, which is then the last to go."""
        found = self._kept.get(name)
        if found is not None:
            self._kept.move_to_end(name)
        return found

    def hold(
        self,
        name: Name,
        tiles: Sequence[PreparedTile],
        rows: int,
        columns: int,
        film: Film | None = None,
        levels: npt.NDArray[np.float32] | None = None,
    ) -> SealedPicture:
        """Seal a picture, whose tiles are alike, and keep it. `film`, `levels`: of a video. Raises
        as `SealedInputs.hold`."""
        first = tiles[0]
        patches = np.concatenate([tile.patches for tile in tiles])
        sealed = self._seal(name[0], patches, self._levels if levels is None else levels)
        digests = tuple(tile.digest for tile in tiles)
        shape = len(first.patches), rows, columns, first.rows, first.columns, film
        held = SealedPicture(sealed, digests, *shape)
        self._drop(name)
        if sealed.size <= self._most:
            while self.bytes + sealed.size > self._most or len(self._kept) >= self._most_pictures:
                self._drop(next(iter(self._kept)))
            self._kept[name] = held
            self.bytes += sealed.size
        return held

    def clear(self) -> None:
        """Drop all; requests in work keep theirs until they end."""
        self._kept.clear()
        self.bytes = 0

    def _seal(
        self, owner: str, patches: npt.NDArray[np.uint8], levels: npt.NDArray[np.float32]
    ) -> SealedInput:
        """Seal patches; if room is lacking, drop kept pictures, the owner's own ones first."""
        while True:
            try:
                return self._payloads.hold(owner, patches, levels)
            except Overloaded:
                if not self._kept:
                    raise
            own = (name for name in self._kept if name[0] == owner)
            self._drop(next(own, next(iter(self._kept))))

    def _drop(self, name: Name) -> None:
        gone = self._kept.pop(name, None)
        if gone is not None:
            self.bytes -= gone.sealed.size
