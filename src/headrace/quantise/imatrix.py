"""llama.cpp's importance matrix, in its GGUF form: the diagonal of every product's Gram matrix.

Its file has two tensors for each of the model's, `NAME.in_sum2` (Σ x² of each column) and
`NAME.counts` (rows), of stacked experts one after the other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..loader.gguf import DEFAULT_ALIGNMENT, MAGIC, GgufFile
from .solve import Floats
from .statistic import Statistic

SUMS, COUNTS = ".in_sum2", ".counts"
LARGEST_SUM = 1e30
"""Σ x² of all columns of a matrix, at most: products with it stay within fp32."""
MOST_ROWS = 2**53
"""Rows of a matrix, at most."""


@dataclass(frozen=True, slots=True)
class Importance:
    """The importance of one tensor's inputs."""

    sums: Floats
    """[matrices, in]: Σ x² of each column."""
    counts: npt.NDArray[np.int64]
    """[matrices]: rows."""


def write_imatrix(
    out: BinaryIO, found: Mapping[str, Importance], text: str, chunks: int, size: int
) -> None:
    """Write the file. `text`: name of the data; `chunks` windows of `size` tokens."""
    entries = b"".join(
        (
            _string("general.type") + struct.pack("<I", 8) + _string("imatrix"),
            _string("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + _string(text),
            _string("imatrix.chunk_count") + struct.pack("<II", 4, chunks),
            _string("imatrix.chunk_size") + struct.pack("<II", 4, size),
        )
    )
    arrays: dict[str, Floats] = {}
    for name, one in sorted(found.items()):
        arrays[name + SUMS] = one.sums.astype("<f4")
        arrays[name + COUNTS] = one.counts.astype("<f4")[:, None]
    head, at = bytearray(MAGIC + struct.pack("<IQQ", 3, len(arrays), 4) + entries), 0
    for name, array in arrays.items():
        head += _string(name) + struct.pack("<IQQIQ", 2, *array.shape[::-1], 0, at)
        at += -(-array.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    out.write(head.ljust(-(-len(head) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT, b"\0"))
    for array in arrays.values():
        out.write(array.tobytes() + bytes(-array.nbytes % DEFAULT_ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def is_imatrix(path: Path) -> bool:
    """Return whether a file begins like a GGUF."""
    try:
        if not path.is_file():
            return False  # To open a pipe waits for its writer.
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_imatrix(path: Path) -> dict[str, Importance]:
    """Read a file by tensor. Raises `ModelFileError` for another kind of file, and for sums and
    counts that are negative, not finite or out of bounds."""
    file = GgufFile(path)
    if file.metadata.get("general.type") != "imatrix":
        raise ModelFileError(f"{path.name}: general.type must be imatrix", param="text")
    found = {}
    for name, info in file.tensors.items():
        if not name.endswith(SUMS):
            continue
        tensor = name.removesuffix(SUMS)
        counts = file.tensors.get(tensor + COUNTS)
        if counts is None or {info.type.name, counts.type.name} != {"F32"}:
            raise ModelFileError(
                f"{path.name}: {tensor:.100} needs counts, both in F32", param="text"
            )
        width = info.shape[-1]
        sums = np.asarray(file.view(name)).reshape(-1, width)
        rows = np.asarray(file.view(counts.name)).reshape(-1)
        sound = np.isfinite(sums).all() and np.isfinite(rows).all()
        if len(rows) != len(sums) or not sound or (sums < 0).any() or (rows < 0).any():
            raise ModelFileError(
                f"{path.name}: {tensor:.100} must have finite sums from 0 on, and a count for each "
                f"of {math.prod(info.shape) // width} matrices",
                param="text",
            )
        if (sums.sum(1, dtype=np.float64) > LARGEST_SUM).any() or (rows > MOST_ROWS).any():
            raise ModelFileError(
                f"{path.name}: {tensor:.100} must have sums of at most {LARGEST_SUM:.0e} in all "
                f"for a matrix, and counts of at most {MOST_ROWS}",
                param="text",
            )
        found[tensor] = Importance(sums, rows.astype(np.int64))
    if not found:
        raise ModelFileError(f"{path.name}: no importance of any tensor", param="text")
    return found


def fits(one: Importance | None, names: Sequence[str], width: int) -> bool:
    """Return whether an importance is of a tensor with these matrices and knows a row."""
    if one is None or not names or not one.counts.any():
        return False
    return one.sums.shape[1] == width and len(names) % len(one.sums) == 0


def statistics_of(
    one: Importance | None, names: Sequence[str], width: int
) -> list[Statistic | None]:
    """Return statistics of a tensor's matrices `names`, with a diagonal for G; None where no row
    is known, or if the importance is of other matrices."""
    if one is None or not fits(one, names, width):
        return [None] * len(names)
    each = len(names) // len(one.sums)
    made: list[Statistic | None] = []
    for sums, count in zip(one.sums, one.counts, strict=True):
        none = np.zeros((0, len(sums)), np.float32)
        known = int(count) and Statistic(int(count), np.diag(sums), np.sqrt(sums), none)
        made += [known or None] * each
    return made


def importance_of(stats: Sequence[Statistic | None], matrices: int) -> Importance | None:
    """Return the importance of a tensor with these statistics of its matrices; None without any."""
    each = max(1, len(stats) // matrices)
    some: list[Any] = []
    for number in range(matrices):
        mine = stats[number * each : (number + 1) * each]
        some.append(next((one for one in mine if one is not None), None))
    width = next((len(one.gram) for one in some if one is not None), 0)
    if not width:
        return None
    sums = [np.zeros(width, np.float32) if one is None else np.diagonal(one.gram) for one in some]
    counts = [0 if one is None else one.count for one in some]
    return Importance(np.stack(sums), np.array(counts, np.int64))
