"""Parts that encoders of pictures share: what every family states, and its processor's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..base.arch import Activation, ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.filming import Film, Sampling
from ..base.graph import Graph
from ..base.tiling import Sizing, cut

CHANNELS = 3
MOST_PATCHES = 1 << 14
"""Patches of a tile, all of which attend to all."""
ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of the pixels of many families (Radford et al. 2021)."""


class ClassToken(NamedTuple):
    """Names of tensors from which the table of positions of patches and a class token is made."""

    table: str
    """Table of the graph: the patches' rows, then one for the class token."""
    positions: str
    """[..., 1 + patches, D], the class token's first unless `last`."""
    token: str
    """[..., D]."""
    patches: str
    """The product of patches, without `.weight`: the class token's own row of it is taken off."""
    last: bool = False
    biased: bool = True
    """Whether the product has a bias."""


class Laid(NamedTuple):
    """The patches of a grid in the order of the encoder's input."""

    order: list[tuple[int, int]]
    """(row, column) of each."""
    windows: list[int] = []  # noqa: RUF012 - never changed
    """Bounds of the windows in which some layers attend; []: there are none."""
    back: list[int] = []  # noqa: RUF012
    """Number of the encoder's row for each row of the prompt; []: both have one order."""


class Videos(NamedTuple):
    """A family's processing of videos; a tile is made of `sampling.together` frames."""

    sampling: Sampling
    sizing: Sizing
    """Rule by which frames are resized; each stays one tile."""
    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    place: int
    """Token that stands for a row of a video."""
    written: int
    """Token that stands for a video in a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArch:
    """An encoder of pictures, and what its processor makes of them. The unit of a step is a patch;
    a square of patches becomes one row of the language model. A family is a subclass."""

    kind: str
    """`model_type` of the config."""
    arch: ModelArch
    """Its layers; `max_context` counts the patches of the largest tile."""
    patch: int
    """Pixels of a side of a patch."""
    factor: int
    """Patches of a side of a square."""
    hidden: int
    """Width of the language model."""
    place: int
    """Token that stands for a row of a picture."""
    sizing: Sizing
    """Rule by which pictures are resized and split, unless a request wants little detail."""
    scale: float
    """Factor on a byte of a pixel, before the mean is taken off."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    videos: Videos | None = None
    """None: the family takes no videos."""

    KINDS: ClassVar[tuple[str, ...]]
    """Values of `model_type` of its configs."""
    PREFIXES: ClassVar[tuple[str, ...]]
    """Beginnings of its tensors' names in the graph."""
    PATCHES: ClassVar[str]
    """The product of patches, without `.weight`."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Beginning of names in a folder → in the graph."""

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> PictureArch:
        """See `pictures.picture_arch`."""
        raise NotImplementedError

    def filming(self, config: Mapping[str, Any], processing: Mapping[str, Any]) -> Videos | None:
        """Read what is made of videos; `processing`: the config of their own processor. Raises
        `ModelFileError`, `UnsupportedModel`."""
        return None

    @property
    def width(self) -> int:
        """Numbers of a patch of a picture: rows of pixels of each channel."""
        return CHANNELS * self.patch**2

    @property
    def frames(self) -> int:
        """Frames of a patch of the encoder; a picture is the same one in all."""
        return 1

    @property
    def row_pixels(self) -> int:
        """Pixels of a square."""
        return (self.factor * self.patch) ** 2

    @property
    def most_tiles(self) -> int:
        """Tiles of the picture with the most of them, a square one."""
        return cut(1, 1, self.sizing).tiles

    @property
    def least_rows(self) -> int:
        """Rows of the language model for the smallest picture."""
        return 1

    @property
    def gridded(self) -> bool:
        """Whether tiles differ in shape, so that an encoding has one."""
        return False

    @property
    def written(self) -> int | str:
        """Token that stands for a picture in a template; its text, if the config does not state
        it."""
        return self.place

    @property
    def brief(self) -> bool:
        """Whether the processor computes in bfloat16."""
        return False

    @property
    def marks(self) -> Mapping[str, int | None]:
        """Tokens that prompts name, text → id; None: the config does not state it."""
        return {}

    @property
    def between(self) -> str:
        """Token that the prompt has after each row of a tile's grid but the last; "": none."""
        return ""

    @property
    def mutual(self) -> bool:
        """`InputSpan.mutual` of a tile."""
        return False

    @property
    def extra(self) -> int:
        """Rows of the encoder's input after the patches: class tokens."""
        return 0

    @property
    def token(self) -> ClassToken | None:
        """The table that has the numbers of a class token, if there is one."""
        return None

    def tiles_of(self, rows: int, columns: int) -> int:
        """Return the tiles of a picture cut into rows × columns."""
        return rows * columns + 1

    def rows_of(self, units: int) -> int:
        """Return the rows of the language model for a tile of so many patches."""
        return units // self.factor**2

    def laid(self, rows: int, columns: int) -> Laid:
        """Lay out a tile of rows × columns patches: square by square."""
        return Laid(squares(rows, columns, self.factor))

    def describe(self) -> Graph:
        """Describe the graph of a tile of N patches: patches [N, `width`] → `hidden` [N / factor²,
        D], and further outputs of that shape."""
        raise NotImplementedError

    @property
    def beside(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of tensors that are not in the graph: see `loader.picture_layout`."""
        return {}

    def prompt(self, token: str, rows: int, columns: int) -> str:
        """Return the text that the processor writes for a picture cut into rows × columns tiles,
        with one `token` for each tile."""
        raise NotImplementedError

    def around(self, rows: int, columns: int) -> tuple[str, str]:
        """Return what the processor writes before and after `prompt`, which becomes tokens together
        with the text that stands there."""
        return "", ""

    def prompt_of(self, token: str, film: Film) -> str:
        """Return the text that the processor writes for a video, with one `token` for each tile."""
        raise NotImplementedError

    def around_film(self, film: Film) -> tuple[str, str]:
        """Return what the processor writes before and after `prompt_of`; see `around`."""
        return "", ""

    def times(self, film: Film) -> list[int] | None:
        """Return `InputSpan.time` of the tiles of a video; None: each is turned as a picture."""
        return None

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the files of a tensor that the graph has with `shape`."""
        if name == f"{self.PATCHES}.weight":
            frames = () if self.frames == 1 else (self.frames,)
            return shape[0], CHANNELS, *frames, self.patch, self.patch
        return shape

    def turned(self, name: str) -> bool:
        """Tell whether the files have a matrix the other way round."""
        return False

    def apart(self, name: str) -> int:
        """Return into how many parts the columns of a stored matrix are dealt in turns; the graph
        has each part's together."""
        return 1

    def scaled(self, name: str) -> str:
        """Return the name of the vector by which the rows of a stored tensor are multiplied; ""
        without one."""
        return ""

    def picked(self, name: str) -> list[int] | None:
        """Return the rows of a stored tensor that the graph's has, in order; None: all of them."""
        return None


def squares(rows: int, columns: int, factor: int) -> list[tuple[int, int]]:
    """List (row, column) of the patches of a grid, square by square."""
    inside = range(factor)
    return [
        (row + below, column + right)
        for row in range(0, rows, factor)
        for column in range(0, columns, factor)
        for below in inside
        for right in inside
    ]


def tower_fields(config: Mapping[str, Any]) -> Fields:
    """Return the reader of the encoder's own part of a `config.json`. Raises `ModelFileError`."""
    given = Fields(config, "config.json").mapping("vision_config")
    if given is None:
        raise ModelFileError("config.json: vision_config is missing", param="vision_config")
    return Fields(given, "config.json: vision_config")


def head_size(width: int, heads: int) -> int:
    """Return the numbers of a head. Raises `UnsupportedModel` unless heads share the width."""
    if width % heads:
        raise UnsupportedModel(
            "config.json: vision_config: hidden_size must be a multiple of num_attention_heads"
        )
    return width // heads


def pixel_numbers(
    read: Fields, resample: int, mean: Sequence[float], deviation: Sequence[float]
) -> dict[str, Any]:
    """Read what the processor does to pixels: the fields `scale`, `mean`, `deviation` of a
    `PictureArch`. `resample`: its only supported filter. Raises `ModelFileError`,
    `UnsupportedModel`."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        read.expect(key, True)
    read.expect("resample", resample)
    return {
        "scale": read.number("rescale_factor", 1e-6, 1.0, 1 / 255),
        "mean": _channels(read, "image_mean", -10.0, mean),
        "deviation": _channels(read, "image_std", 1e-6, deviation),
    }


def _channels(fields: Fields, key: str, low: float, default: Sequence[float]) -> tuple[float, ...]:
    stated = fields.raw(key)
    stated = list(default) if stated is None else stated
    stated = [stated] * CHANNELS if isinstance(stated, int | float) else stated
    if not isinstance(stated, Sequence) or len(stated) != CHANNELS:
        raise ModelFileError(f"{fields.where}: {key} must be three numbers", param=key)
    numbers = Fields({str(at): one for at, one in enumerate(stated)}, f"{fields.where}: {key}")
    return tuple(numbers.number(str(at), low, 10.0) for at in range(CHANNELS))
