"""A GGUF with its dense matrices quantised; the metadata stays byte for byte.

Vectors, routers and already quantised tensors stay as they are. A file is read a piece at a time,
and the same file gives the same bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..kernels.cpu.encode import Encoder
from ..loader.gguf import DEFAULT_ALIGNMENT, MAGIC, GgufFile
from ..quant.ggml_types import BY_NAME, DENSE, GgmlType

PIECE = 1 << 22
"""Weights that are read, quantised and written before the next."""
ROUTER = re.compile(r"ffn_gate_inp|\.gate\.weight$|router")
"""Matrices that choose experts: small, and a wrong choice costs a whole expert."""
ENDS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True, slots=True)
class GgufTypes:
    """Types of matrices; the second of each applies if a row is not whole blocks of the first."""

    inner: tuple[str, str]
    ends: tuple[str, str]
    """Types of the embedding and the head, which every token uses."""
    number: int
    """Number of ggml's `general.file_type`."""


TARGETS = {
    "q8_0": GgufTypes(("Q8_0", "Q8_0"), ("Q8_0", "Q8_0"), 7),
    "q6_k": GgufTypes(("Q6_K", "Q8_0"), ("Q6_K", "Q8_0"), 18),
    "q4_k": GgufTypes(("Q4_K", "Q5_0"), ("Q6_K", "Q8_0"), 15),
}


@dataclass(slots=True)
class Tally:
    """Number of quantised matrices, and their types."""

    advance: Callable[[int], None]
    """Callback for the number of bytes read."""
    matrices: int = 0
    weights: int = 0
    kinds: set[str] | frozenset[str] = frozenset()

    def add(self, kind: str, weights: int) -> None:
        self.matrices, self.weights = self.matrices + 1, self.weights + weights
        self.kinds = {*self.kinds, kind}


def write_gguf(source: Path, out: BinaryIO, to: str, encode: Encoder, tally: Tally) -> None:
    """Write the GGUF at `source` quantised. Raises `ModelFileError`."""
    file, target = GgufFile(source), TARGETS[to]
    align = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    tensors = list(file.tensors.values())
    kinds = {one.name: _kind(one.name, one.shape, one.type, target) for one in tensors}
    entries, count = _entries(file, target.number)
    head, at = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), count) + entries), 0
    for one in tensors:
        name, kind = one.name.encode(), kinds[one.name]
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape[::-1])
        head += struct.pack("<IQ", kind.number, at)
        at += _up(math.prod(one.shape) // kind.block * kind.nbytes, align)
    out.write(head.ljust(_up(len(head), align), b"\0"))
    for one in tensors:
        kind, data, wrote = kinds[one.name], file.view(one.name), 0
        if kind == one.type:
            wrote = out.write(data.tobytes())
        else:
            tally.add(kind.name, data.size)
            rows = data.reshape(-1, one.shape[-1])
            step = max(1, PIECE // rows.shape[1])
            for first in range(0, len(rows), step):
                wrote += out.write(encode(kind.name, rows[first : first + step]).tobytes())
        out.write(bytes(_up(wrote, align) - wrote))
        tally.advance(one.nbytes)


def _kind(name: str, shape: tuple[int, ...], was: GgmlType, target: GgufTypes) -> GgmlType:
    """Return a tensor's new type; the old one if it stays."""
    matrix = len(shape) >= 2 and name.endswith(".weight") and "norm" not in name
    if not matrix or ROUTER.search(name) or was.name not in DENSE:
        return was
    wished = target.ends if name in ENDS else target.inner
    fitting = (BY_NAME[one] for one in wished if shape[-1] % BY_NAME[one].block == 0)
    return next(fitting, was)


def _entries(file: GgufFile, number: int) -> tuple[bytes, int]:
    """Return (the metadata with its new type and ggml's version of the blocks, number of
    entries)."""
    entries, count = bytearray(file.entries()), len(file.metadata)
    for key, value in (("general.file_type", number), ("general.quantization_version", 2)):
        head = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 4)
        at = entries.find(head)
        if at >= 0:
            entries[at + len(head) : at + len(head) + 4] = struct.pack("<I", value)
        elif key not in file.metadata:
            entries += head + struct.pack("<I", value)
            count += 1
    return bytes(entries), count


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
