"""Panels that are kept between starts: the same bits, and weights are not read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.base.modelfiles import ModelFiles
from headrace.kernels.cpu.library import LAYOUT
from headrace.loader.panels import PanelShelf
from headrace.loader.whisper import open_transcription

from .whisper_parts import WhisperParts, sound

pytestmark = pytest.mark.usefixtures("built")


def with_tensors(files: ModelFiles, tensor: Any) -> ModelFiles:
    opened = files.opened
    return replace(files, opened=opened._replace(files=replace(opened.files, tensor=tensor)))


def counted(files: ModelFiles, read: list[str]) -> ModelFiles:
    given = files.opened.files.tensor

    def tensor(name: str) -> Any:
        found = given(name)
        if found.ndim > 1 and "embed_positions" not in name:
            read.append(name)
        return found

    return with_tensors(files, tensor)


def logits(files: ModelFiles, shelf: PanelShelf | None = None) -> np.ndarray:
    parts = WhisperParts(files, "int8", windows=1, rows=1, shelf=shelf)
    parts.encode(sound(1), 0)
    return parts.logits(0, 0, [257, 258, 261, 40])[-1]


def opened(files: ModelFiles, kept: Path) -> tuple[np.ndarray, PanelShelf]:
    shelf = PanelShelf(files, kept, LAYOUT, least=0)
    return logits(files, shelf), shelf


def test_the_next_start_finds_them(folder: Path, tmp_path: Path) -> None:
    files, read = open_transcription(folder, coded=True), list[str]()
    wanted = logits(files)
    first, _ = opened(counted(files, read), tmp_path)
    assert np.array_equal(first, wanted)
    everything = len(read)
    assert everything == 2 + 2 * 4 + 2 * 7  # Convolutions and layers; the head is the embedding.
    read.clear()
    again, shelf = opened(counted(files, read), tmp_path)
    assert np.array_equal(again, wanted)
    assert shelf.outcome in ("mapped", "copied")
    assert len(read) == 4, "convolutions, and one of each part proves how codes are laid out"


def test_those_of_another_file_are_not_used(folder: Path, tmp_path: Path) -> None:
    """Weights of one shape and other numbers, under the same path."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    before, _ = opened(open_transcription(copy, coded=True), tmp_path)
    data = bytearray((copy / "model.safetensors").read_bytes())
    numbers = np.frombuffer(data, np.float32, 1_000, len(data) - 4_000)
    numbers *= -1
    (copy / "model.safetensors").write_bytes(data)
    after, _ = opened(open_transcription(copy, coded=True), tmp_path)
    assert not np.array_equal(before, after)
    assert np.array_equal(after, logits(open_transcription(copy, coded=True)))


def test_a_matrix_of_another_shape_is_refused_by_name(folder: Path) -> None:
    files = open_transcription(folder, coded=True)
    given = files.opened.files.tensor

    def tensor(name: str) -> Any:
        found = given(name)
        return found[:-1] if name.endswith("layers.1.fc1.weight") else found

    with pytest.raises(ModelFileError, match=r"layers\.1\.fc1\.weight is \(511, 128\), not \(512"):
        logits(with_tensors(files, tensor))
