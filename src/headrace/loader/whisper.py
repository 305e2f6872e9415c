"""A Whisper as a model of the one loader: its decoder is the text part, its encoder another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..base.graph import Graph, WeightRef
from ..base.modelfiles import ModelFiles
from ..models.whisper import HEAD
from .q8_0 import LateBlocks, LateNumbers
from .weight_source import Named
from .whisper_files import TABLE, WhisperFiles, open_whisper

FORMAT = "whisper"
"""`ModelFiles.format` of both layouts of folders."""
Array = npt.NDArray[Any]


class OpenedWhisper(NamedTuple):
    """An open Whisper, in `ModelFiles.opened`."""

    files: WhisperFiles
    coded: bool
    """Whether matrices are quantised to eight bits, except the convolutions, which are 3 % of the
    work."""


def open_transcription(folder: Path, *, coded: bool) -> ModelFiles:
    """Open a folder of Whisper in CTranslate2's or Hugging Face's layout. `coded`: see
    `OpenedWhisper`. Raises `ModelFileError`, `UnsupportedModel`."""
    files = open_whisper(folder)
    return ModelFiles(
        name=folder.name,
        format=FORMAT,
        path=folder,
        weights=files.weights,
        arch=files.arch.text,
        tokenizer=folder / "tokenizer.json",
        chat_template=None,
        eos_ids=(files.special.end,),
        opened=OpenedWhisper(files, coded),
    )


def whisper_of(files: ModelFiles) -> OpenedWhisper | None:
    """Return the open Whisper of a model; None if it is not a Whisper."""
    return files.opened if isinstance(files.opened, OpenedWhisper) else None


def whisper_weights(opened: OpenedWhisper, graph: Graph) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of a part's graph; matrices are read when they are
    taken. Raises `ModelFileError`."""
    for ref in graph.weights():
        (name,) = ref.names
        if ref.role == "vector":
            yield name, _shaped(opened.files.tensor(name).astype(np.float32), name, *ref.rows)
        elif ref.role == "embed":
            data = opened.files.table if name == TABLE else opened.files.tensor(name)
            yield name, _shaped(data, name, *ref.rows, ref.width)
        else:
            yield name, _matrix(opened, name, ref)


def _matrix(opened: OpenedWhisper, name: str, ref: WeightRef) -> Named:
    files, shape = opened.files, (ref.out, ref.width)
    read = partial(_read, files, TABLE if name == f"{HEAD}.weight" else name, shape)
    if opened.coded and ".conv" not in name:
        return LateBlocks(name, shape, read)
    return LateNumbers(shape, "float16" if files.file_bytes == 2 else "float32", read)


def _read(files: WhisperFiles, name: str, shape: tuple[int, int]) -> Array:
    data = files.table if name == TABLE else files.tensor(name)
    if data.ndim == 3:
        # A window of three frames is three consecutive rows.
        data = data.transpose(0, 2, 1).reshape(len(data), -1)
    return np.ascontiguousarray(_shaped(data, name, *shape))


def _shaped(data: Array, name: str, *shape: int) -> Array:
    if data.shape != shape:
        raise ModelFileError(f"{name} is {data.shape}, not {shape}")
    return data
