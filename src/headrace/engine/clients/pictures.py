"""Pictures and videos of prompts, decoded and cut into the patches that a model's encoder reads.

Nothing here knows the model's weights; the encoder is a part of the model and runs in its worker.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ...base.errors import InvalidRequest, UnsupportedModel
from ...base.filming import Film
from ...base.modelfiles import ModelFiles
from ...base.spec import InputSpan
from ...dist.payloads import MOST_OF_ONE, SealedInputs
from ...loader.pictures import open_pictures
from ...loader.towers import MOST_INPUTS
from ...media import (
    PICTURE_REFUSALS,
    VIDEO_REFUSALS,
    OnChild,
    PictureLimits,
    VideoLimits,
    decode_picture,
    decode_video,
    levels,
)
from ...models.picture_arch import CHANNELS, PictureArch
from ...text.tokenizer import Tokenizer
from .kept_pictures import (
    KeptPictures,
    PictureShape,
    PreparedPicture,
    PreparedTile,
    SealedPicture,
)

Codes = npt.NDArray[np.uint8]
LIMITS, VIDEO_LIMITS = PictureLimits(), VideoLimits()
FORM = 2
"""Version of the pixels: within one, equal tiles have equal names."""


class PicturePrompts:
    """Preparation of one model's pictures. `read` and `prepare` may be called from any thread."""

    limits, video_limits = LIMITS, VIDEO_LIMITS

    def __init__(self, picture: PictureArch, tokenizer: Tokenizer, model: str) -> None:
        """`model`: name of the model, hashed into the names of tiles. Raises `UnsupportedModel` if
        the tokenizer lacks the token of pictures."""
        self.picture = picture
        self.payloads = SealedInputs()
        """Tiles in memory that the engine reads, too. For one thread."""
        self.levels = levels(picture.scale, picture.mean, picture.deviation, brief=picture.brief)
        """Numbers of the bytes, for `SealedInputs.hold`."""
        self.kept = KeptPictures(self.payloads, self.levels)
        place, films = tokenizer.id_to_token(picture.place), picture.videos
        self._film_levels, named = self.levels, {place or "": picture.place, **picture.marks}
        if films is not None:
            self._film_levels = levels(films.scale, films.mean, films.deviation)
            named |= {tokenizer.id_to_token(films.place) or "": films.place}
        for name, token in named.items():
            found = tokenizer.encode(name)
            if len(found) != 1 or token not in (None, *found):
                raise UnsupportedModel(
                    f"config.json: the token {name!r} of pictures is {token}, which is none of "
                    "this model",
                    param="image_token_id",
                )
        written = picture.written
        self._written = written if isinstance(written, int) else tokenizer.encode(written)[0]
        self._tokenizer, self._token = tokenizer, place or ""
        self._between = tokenizer.encode(picture.between)
        arch = picture.arch
        numbers = picture.patch, arch.hidden, arch.layers, picture.hidden
        said = type(picture).KINDS[0], FORM, model, *numbers
        self._name = repr((*said, self.levels.tolist())).encode()
        self._film_name = repr((*said, self._film_levels.tolist())).encode()
        heads = MOST_INPUTS * (self.levels.nbytes + 16)
        self.most_rows = (MOST_OF_ONE - heads) // (picture.factor**2 * picture.width)
        """Most rows of one request's pictures, whose memory is bounded like its owner's. A video's
        row counts once per frame."""
        self._order = lru_cache(maxsize=8)(self._order_of)
        self._text = lru_cache(maxsize=64)(self._text_of)

    @property
    def place(self) -> int:
        """The token that stands for a picture in a template."""
        return self._written

    def place_of(self, film: bool) -> int:
        """Return the token that stands for a picture, or a video (`film`), in a template."""
        place = self.film_place if film else self.place
        assert place is not None, "the model takes videos"
        return place

    @property
    def places(self) -> list[int]:
        """Tokens that stand for pictures and videos in a template."""
        places = self.place, self.film_place
        return list(dict.fromkeys(place for place in places if place is not None))

    @property
    def film_place(self) -> int | None:
        """The token that stands for a video in a template; None: the model takes none."""
        return None if self.picture.videos is None else self.picture.videos.written

    def frames_of(self, film: bool) -> int:
        """Return the frames of a tile; a row has this many times the bytes of a picture's row."""
        return self.picture.videos.sampling.together if film and self.picture.videos else 1

    def read(
        self,
        data: bytes,
        param: str,
        small: bool,
        most: int,
        on_child: OnChild | None = None,
    ) -> PreparedPicture:
        """Decode a file and cut it into tiles of at most `most` rows together; `small`: low detail.
        Raises as `media.decode_picture`."""
        picture = self.picture
        rule = picture.sizing.small() if small else picture.sizing
        tiles = max(1, min(most // picture.least_rows, self.limits.tiles))
        resized = min(most * picture.row_pixels, self.limits.resized)
        limits = replace(self.limits, tiles=tiles, resized=resized)
        made = decode_picture(data, rule, limits, param, on_child)
        return PreparedPicture([self.prepare(tile) for tile in made.tiles], made.rows, made.columns)

    def read_video(
        self,
        data: bytes,
        param: str,
        frames: int,
        most: int,
        on_child: OnChild | None = None,
    ) -> PreparedPicture:
        """Decode a video and make tiles of its frames, of at most `most` rows together. `frames`:
        most frames, 0: the processor's own limit. Raises as `media.decode_video`."""
        picture, films = self.picture, self.picture.videos
        assert films is not None, "the model takes videos"
        sampling, together = films.sampling, films.sampling.together
        if frames:
            sampling = sampling.lowered(frames)
        limits, pixels = self.video_limits, most * picture.row_pixels * together
        limits = replace(
            limits,
            tile=min(limits.tile, picture.arch.max_context * picture.patch**2),
            resized=min(limits.resized, pixels),
        )
        made = decode_video(data, sampling, films.sizing, limits, param, on_child)
        return self.prepare_video(made.frames, made.film)

    def prepare_video(self, frames: Codes, film: Film) -> PreparedPicture:
        """Arrange the pixels of the frames [n, height, width, 3] of a video."""
        films, tiles = self.picture.videos, []
        assert films is not None, "the model takes videos"
        together = films.sampling.together
        for at in range(0, len(frames), together):
            some = frames[at : at + together]
            some = np.concatenate([some, some[-1:].repeat(together - len(some), 0)])
            tiles.append(self._prepared(some, self._film_name))
        return PreparedPicture(tiles, 0, 0, film, self._film_levels)

    def check_rows(self, length: int, most: int, param: str, film: Film | None = None) -> int:
        """Return the rows of a picture or a video. Raises `InvalidRequest` if they are more than
        `most`."""
        if length > most:
            refusals = PICTURE_REFUSALS if film is None else VIDEO_REFUSALS
            raise InvalidRequest(refusals["tiles"], param=param)
        return length

    def prepare(self, tile: Codes) -> PreparedTile:
        """Arrange the pixels of a tile [height, width, 3] as the encoder reads them."""
        return self._prepared(tile[None], self._name)

    def _prepared(self, frames: Codes, name: bytes) -> PreparedTile:
        """Arrange the pixels of a tile [frames, height, width, 3]; `name`: what is done to all."""
        picture, patch, count = self.picture, self.picture.patch, len(frames)
        rows, columns = (side // patch for side in frames.shape[1:3])
        cells = frames.reshape(count, rows, patch, columns, patch, CHANNELS)
        cells = cells.transpose(1, 3, 5, 0, 2, 4).reshape(rows * columns, -1)
        patches = np.ascontiguousarray(cells[self._order(rows, columns)])
        digest = blake2b(name, digest_size=32)
        digest.update(f"{rows} {columns} {f'{count} ' if count > 1 else ''}".encode())
        digest.update(patches.tobytes())
        if picture.extra:
            patches = np.pad(patches, ((0, picture.extra), (0, 0)))
        grid = columns // picture.factor if picture.gridded else 0
        return PreparedTile(patches, digest.digest(), picture.rows_of(len(patches)), grid)

    def expand(
        self, prompt: list[int], shapes: list[PictureShape], sealed: list[SealedPicture]
    ) -> tuple[list[int], list[InputSpan]]:
        """Return the prompt with each `place` replaced by a picture's tokens, and its inputs, one
        per tile.

        `shapes`: of each picture; `sealed`: the pictures. If empty, the prompt is only counted and
        has no inputs.
        """
        ids: list[int] = []
        spans: list[InputSpan] = []
        for number, shape in enumerate(shapes):
            film = shape.film
            at = prompt.index(self.place_of(film is not None))
            ids, prompt = ids + prompt[:at], prompt[at + 1 :]
            before, after = (
                self.picture.around(shape.rows, shape.columns)
                if film is None
                else self.picture.around_film(film)
            )
            if before or after:
                ids, prompt = self._joined(ids, before), self._joined(prompt, after, ends=False)
            tokens = self.ids(shape)
            if sealed:
                spans += self._spans(sealed[number], tokens, len(ids))
            ids += tokens
        return ids + prompt, spans

    def _joined(self, ids: list[int], text: str, *, ends: bool = True) -> list[int]:
        """Return the tokens of a prompt with a text appended, or put before it (not `ends`). The
        prompt's own text up to the next special token is tokenised together with it."""
        tokenizer, special = self._tokenizer, self._tokenizer.special_ids
        each = reversed(ids) if ends else iter(ids)
        count = next((at for at, token in enumerate(each) if token in special), len(ids))
        if ends:
            kept = ids[: len(ids) - count]
            text = tokenizer.decode(ids[len(kept) :], skip_special=False) + text
            return kept + tokenizer.encode(text, special=False)
        text += tokenizer.decode(ids[:count], skip_special=False)
        return tokenizer.encode(text, special=False) + ids[count:]

    def _spans(self, made: SealedPicture, tokens: tuple[int, ...], begin: int) -> list[InputSpan]:
        """Return the inputs of a picture whose tokens begin at `begin`."""
        spans, at, picture, film = [], 0, self.picture, made.film
        place = picture.place if film is None else self._film_token
        times = None if film is None else picture.times(film)
        lines = made.each // made.grid - 1 if self._between else 0
        for number, digest in enumerate(made.digests):
            at, source = tokens.index(place, at), made.source(number)
            span = InputSpan(
                begin + at,
                made.each + lines,
                "picture" if film is None else "video",
                digest,
                source,
                made.units,
                made.grid,
                parted=bool(self._between),
                mutual=picture.mutual,
                follows=times is not None and number > 0,
                time=0 if times is None else times[number],
            )
            spans.append(span)
            at += span.length
        return spans

    def ids(self, shape: PictureShape) -> tuple[int, ...]:
        """Return the tokens that the model's processor writes for a picture, with one
        `PictureArch.place` for each row of the language model."""
        film = shape.film
        place = self.picture.place if film is None else self._film_token
        tile = [place] * shape.each
        if self._between:
            line = [*tile[: shape.grid], *self._between]
            tile = (line * (shape.each // shape.grid))[:-1]
        ids: list[int] = []
        text = self._text(shape.rows, shape.columns) if film is None else self._text_of_film(film)
        for token in text:
            ids += tile if token == place else [token]
        return tuple(ids)

    @property
    def _film_token(self) -> int:
        assert self.picture.videos is not None, "the model takes videos"
        return self.picture.videos.place

    def _text_of(self, rows: int, columns: int) -> list[int]:
        return self._tokenizer.encode(self.picture.prompt(self._token, rows, columns))

    def _text_of_film(self, film: Film) -> list[int]:
        token = self._tokenizer.id_to_token(self._film_token) or ""
        return self._tokenizer.encode(self.picture.prompt_of(token, film))

    def _order_of(self, rows: int, columns: int) -> npt.NDArray[np.int64]:
        order = np.array(self.picture.laid(rows, columns).order)
        found: npt.NDArray[np.int64] = order[:, 0] * columns + order[:, 1]
        return found


def open_picture_prompts(files: ModelFiles, tokenizer: Tokenizer) -> PicturePrompts | None:
    """Return the preparation of pictures for an open model; None if it takes none."""
    picture = open_pictures(files)
    return None if picture is None else PicturePrompts(picture, tokenizer, files.name)
