"""Common parts of picture encoders: the interface of each family, and the processor's config."""

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
"""Most patches of a tile, all of which attend to all."""
ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
EXACT: Mapping[str, Activation] = {"gelu": "gelu", **ACTIVATIONS}
"""`ACTIVATIONS` in the order that a config without one asks for: the exact one first."""


CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and deviation of the pixels of many families (Radford et al. 2021)."""


class ClassToken(NamedTuple):
    """Names of tensors from which the position table of patches and a class token is made."""

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
    """Bounds of the windows in which some layers attend; []: no windows."""
    back: list[int] = []  # noqa: RUF012
    """Index of the encoder's row for each row of the prompt; []: both have the same order."""


class Videos(NamedTuple):
    """A family's processing of videos; a tile is made of `sampling.together` frames."""

    sampling: Sampling
    sizing: Sizing
    """Rule for resizing frames; each remains one tile."""
    scale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    place: int
    """Token that stands for a row of a video."""
    written: int
    """Token that stands for a video in a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureArch:
    """An encoder of pictures, and its processor. The unit of a step is a patch; a square of patches
    becomes one row of the language model. A family is a subclass."""

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
    """Rule for resizing and splitting pictures, unless a request wants low detail."""
    scale: float
    """Factor on a pixel's byte, before the mean is subtracted."""
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    videos: Videos | None = None
    """None: the family does not take videos."""

    KINDS: ClassVar[tuple[str, ...]]
    """Values of `model_type` of its configs."""
    PREFIXES: ClassVar[tuple[str, ...]]
    """Prefixes of its tensors' names in the graph."""
    PATCHES: ClassVar[str]
    """The product of patches, without `.weight`."""
    RENAMED: ClassVar[Mapping[str, str]] = {}
    """Prefix of names in a folder → in the graph."""

    @classmethod
    def read(
        cls, config: Mapping[str, Any], processing: Mapping[str, Any], hidden: int
    ) -> PictureArch:
        """See `pictures.picture_arch`."""
        raise NotImplementedError

    def filming(self, config: Mapping[str, Any], processing: Mapping[str, Any]) -> Videos | None:
        """Read the processing of videos; `processing`: the config of the video processor. Raises
        `ModelFileError`, `UnsupportedModel`."""
        return None

    @property
    def width(self) -> int:
        """Numbers of a picture's patch: rows of pixels of each channel."""
        return CHANNELS * self.patch**2

    @property
    def frames(self) -> int:
        """Frames of a patch of the encoder; a picture is repeated in all of them."""
        return 1

    @property
    def row_pixels(self) -> int:
        """Pixels of a square."""
        return (self.factor * self.patch) ** 2

    @property
    def most_tiles(self) -> int:
        """Tiles of the square picture with the most tiles."""
        return cut(1, 1, self.sizing).tiles

    @property
    def least_rows(self) -> int:
        """Rows of the language model for the smallest picture."""
        return 1

    @property
    def gridded(self) -> bool:
        """Whether tiles differ in shape, so that an encoding has a shape."""
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
        """Text → id of tokens that prompts name; None: the config lacks the id."""
        return {}

    @property
    def between(self) -> str:
        """Token in the prompt after each row of a tile's grid except the last; "": no token."""
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
        """The class token's tables, if there is one."""
        return None

    def tiles_of(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a picture cut into rows × columns."""
        return rows * columns + 1

    def rows_of(self, units: int) -> int:
        """Return the rows of the language model for a tile of this many patches."""
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
        """Return the processor's texts before and after `prompt`. They are tokenised together with
        the adjacent text."""
        return "", ""

    def prompt_of(self, token: str, film: Film) -> str:
        """Return the text that the processor writes for a video, with one `token` for each tile."""
        raise NotImplementedError

    def around_film(self, film: Film) -> tuple[str, str]:
        """Return the processor's texts before and after `prompt_of`; see `around`."""
        return "", ""

    def times(self, film: Film) -> list[int] | None:
        """Return `InputSpan.time` of a video's tiles; None: each is rotated like a picture."""
        return None

    def stored(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the files of a tensor with this `shape` in the graph."""
        if name == f"{self.PATCHES}.weight":
            frames = () if self.frames == 1 else (self.frames,)
            return shape[0], CHANNELS, *frames, self.patch, self.patch
        return shape

    def turned(self, name: str) -> bool:
        """Return whether the files have a matrix transposed."""
        return False

    def apart(self, name: str) -> int:
        """Return the number of parts whose columns alternate in a stored matrix; in the graph each
        part's columns are contiguous."""
        return 1

    def scaled(self, name: str) -> str:
        """Return the name of the vector that multiplies the rows of a stored tensor; "" without
        one."""
        return ""

    def picked(self, name: str) -> list[int] | None:
        """Return the rows of a stored tensor that the graph uses, in order; None: all of them."""
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


def tower_arch(
    tower: Fields,
    width: int,
    heads: int,
    layers: int,
    inner: int,
    most: int,
    activations: Mapping[str, Activation] | None = None,
    *,
    eps: float | None = None,
    **more: Any,
) -> ModelArch:
    """Read the layers of an encoder.

    `layers`, `inner`: numbers of layers and width of the feed-forward in a config without them;
    `most`: patches and class tokens of the largest tile; `activations`: by name, the first being
    that of a config without any; `eps`: epsilon of all norms, if no config states it. Raises
    `ModelFileError`, `UnsupportedModel`.
    """
    if activations is not None:
        word = tower.word("hidden_act", activations, next(iter(activations)))
        more["activation"] = activations[word]
    return ModelArch(
        family="pictures",
        vocab_size=1,
        hidden=width,
        layers=tower.integer("num_hidden_layers", 1, 128, layers),
        heads=heads,
        kv_heads=heads,
        head_dim=head_size(width, heads),
        intermediate=tower.integer("intermediate_size", 1, 1 << 16, inner),
        max_context=most,
        norm_eps=tower.number("layer_norm_eps", 1e-12, 1e-1, 1e-6) if eps is None else eps,
        **more,
    )


def check_tile(read: Fields, tile: int) -> None:
    """Check that the processor makes tiles of the encoder's side."""
    size = Fields(read.mapping("size") or {}, f"{read.where}: size")
    for key in ("height", "width"):
        size.expect(key, tile)


def pixel_numbers(
    read: Fields, resample: int, mean: Sequence[float], deviation: Sequence[float]
) -> dict[str, Any]:
    """Read the processor's scaling of pixels: the fields `scale`, `mean`, `deviation` of a
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
