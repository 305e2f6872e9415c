"""Panels that are kept between starts: the same bits, and weights are not read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ModelFileError
from headrace.kernels.cpu.library import LAYOUT
from headrace.loader.panels import PanelShelf
from headrace.speech.files import WhisperFiles, open_whisper
from headrace.speech.network import Chunk, Network, Team

from .test_network import heard


def counted(files: WhisperFiles, read: list[str]) -> WhisperFiles:
    def tensor(name: str) -> Any:
        found = files.tensor(name)
        if found.ndim > 1 and "embed_positions" not in name:
            read.append(name)
        return found

    return replace(files, tensor=tensor)


def opened(files: WhisperFiles, kept: Path) -> tuple[np.ndarray, PanelShelf]:
    shelf = PanelShelf(files, kept, LAYOUT, least=0)
    network = Network(files, Team(1), "int8", windows=1, sequences=1, shelf=shelf)
    heard(network, 1, 0)
    return network.decode([Chunk(0, 0, 0, [257, 258, 261, 40], [3])]).copy(), shelf


def test_the_next_start_finds_them(folder: Path, network: Network, tmp_path: Path) -> None:
    files, read = open_whisper(folder), list[str]()
    without = Network(files, Team(1), "int8", windows=1, sequences=1)
    heard(without, 1, 0)
    wanted = without.decode([Chunk(0, 0, 0, [257, 258, 261, 40], [3])]).copy()
    first, _ = opened(counted(files, read), tmp_path)
    assert np.array_equal(first, wanted)
    everything = len(read)
    assert everything == 2 + 2 * 4 + 2 * 7 + 1  # Convolutions, layers, the head.
    read.clear()
    again, shelf = opened(counted(files, read), tmp_path)
    assert np.array_equal(again, wanted)
    assert shelf.outcome in ("mapped", "copied")
    assert len(read) == 2, "one of each kind proves that it is laid out as it would be now"


def test_those_of_another_file_are_not_used(folder: Path, network: Network, tmp_path: Path) -> None:
    """Weights of one shape and other numbers, under the same path."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    before, _ = opened(open_whisper(copy), tmp_path)
    data = bytearray((copy / "model.safetensors").read_bytes())
    numbers = np.frombuffer(data, np.float32, 1_000, len(data) - 4_000)
    numbers *= -1
    (copy / "model.safetensors").write_bytes(data)
    after, _ = opened(open_whisper(copy), tmp_path)
    assert not np.array_equal(before, after)
    fresh = Network(open_whisper(copy), Team(1), "int8", windows=1, sequences=1)
    heard(fresh, 1, 0)
    assert np.array_equal(after, fresh.decode([Chunk(0, 0, 0, [257, 258, 261, 40], [3])]))


def test_a_matrix_of_another_shape_is_refused_by_name(folder: Path, network: Network) -> None:
    files = open_whisper(folder)

    def tensor(name: str) -> Any:
        found = files.tensor(name)
        return found[:-1] if name.endswith("layers.1.fc1.weight") else found

    with pytest.raises(ModelFileError, match=r"layers\.1\.fc1\.weight is \(511, 128\), not \(512"):
        Network(replace(files, tensor=tensor), Team(1), "int8", windows=1, sequences=1)
