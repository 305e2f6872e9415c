"""The encoder part of a language model that takes more than text: sounds or pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from ..base.graph import Graph
from ..base.modelfiles import ModelFiles
from ..models.pictures import describe_pictures
from ..models.sounds import describe_sounds
from ..models.whisper import describe_encoder
from .picture_layout import Layouts, layouts
from .pictures import open_pictures, picture_weights
from .sounds import open_sounds, sound_weights
from .weight_source import Named
from .whisper import whisper_of, whisper_weights

MOST_INPUTS = 16
"""Maximum sounds or pictures of a conversation; as many are kept encoded."""
MOST_WINDOWS = 10
"""Windows of Whisper that are read at a time."""


class Tower(NamedTuple):
    """An encoder part whose weights are not loaded."""

    reads: str
    """Kind of its inputs: "sounds" or "pictures"."""
    graph: Graph
    weights: Callable[[], Iterator[tuple[str, Named]]]
    items: int
    """Encodings of the largest size that are kept."""
    units: int
    """Maximum units of an encoding."""
    layouts: Layouts | None = None
    """Numbers of a step that follow from an input's shape; None: only its units matter."""
    atom: int = 0
    """Maximum tokens of a prompt that see each other (`InputSpan.mutual`)."""
    frames: int = 1
    """Frames of a unit's row; an input of one frame repeats it in all of them."""
    coded: bool = False
    """Whether its products and its attention are in codes of eight bits."""

    @property
    def width(self) -> int:
        """Numbers of a row of an encoding: those for each place of the language model, side by
        side."""
        return sum(value.width for value in self.graph.outputs.values())

    @property
    def rows(self) -> int:
        """Rows of the largest encoding."""
        return self.graph.outputs["hidden"].rows.of(self.units)


def open_tower(files: ModelFiles) -> Tower | None:
    """Return the encoder part of an open model; None if it takes text alone. Raises
    `ModelFileError`, `UnsupportedModel`."""
    whisper = whisper_of(files)
    if whisper is not None:
        graph = describe_encoder(whisper.files.arch)
        weights = partial(whisper_weights, whisper, graph)
        units = whisper.files.arch.frames
        return Tower("sounds", graph, weights, MOST_WINDOWS, units, coded=whisper.coded)
    sound = open_sounds(files)
    if sound is not None:
        weights, graph = partial(sound_weights, files, sound), describe_sounds(sound)
        return Tower("sounds", graph, weights, MOST_INPUTS, sound.arch.max_context)
    picture = open_pictures(files)
    if picture is None:
        return None
    return Tower(
        "pictures",
        describe_pictures(picture),
        partial(picture_weights, files, picture),
        MOST_INPUTS * picture.most_tiles,
        picture.arch.max_context,
        layouts(files, picture),
        picture.rows_of(picture.arch.max_context) if picture.mutual else 0,
        picture.frames,
    )
