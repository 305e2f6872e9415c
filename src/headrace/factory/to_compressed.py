"""Safetensors with their linear layers as integers, in the format of compressed-tensors.

Engines that read compressed-tensors read it: int8 with a scale for each output, int4 with one for
each group of a row. Embeddings, heads, vectors, routers and image encoders stay as they are.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.errors import UnsupportedModel
from ..kernels.arrays import floats
from ..kernels.cpu.encode import LARGEST, Encoder, bounded
from ..loader.jsonfile import read_json
from ..loader.safetensors_file import SIZES, StoredTensor, read_header
from .to_gguf import ROUTER, Tally

Floats = npt.NDArray[np.float32]
TARGETS = {"int8": 8, "int4": 4}
"""Bits of a code."""
GROUPS = (128, 64, 32, 16)
"""Inputs that share a scale of int4: the largest that divides every row."""
LAYER = re.compile(r"\blayers\.\d+\..*\.weight$")
ELSEWHERE = re.compile("visual|vision|audio|norm")
"""Names outside the linear layers of the stack."""
IGNORED = ["lm_head", "re:.*(gate|router)$", "re:.*(visual|vision|audio).*"]


class Folder:
    """The safetensors files of a model, and their quantised form."""

    def __init__(self, shards: dict[str, Path], to: str, encode: Encoder) -> None:
        """Read the headers of `shards`, by name. Raises `ModelFileError`; `UnsupportedModel` if
        rows of the linear layers have no common group."""
        self._bits, self._encode = TARGETS[to], encode
        self._shards = {name: read_header(path) for name, path in shards.items()}
        widths = {
            one.shape[1]
            for stored in self._shards.values()
            for name, one in stored.items()
            if _linear(name, one)
        }
        fitting = (size for size in GROUPS if not any(width % size for width in widths))
        group = next(fitting, None)
        if group is None:
            raise UnsupportedModel(
                f"rows of {max(widths)} weights have no group of {GROUPS[-1]}", param="quantise_to"
            )
        self._group = group

    def write(self, shard: str, out: BinaryIO, tally: Tally) -> None:
        """Write one file in its quantised form."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, one in self._shards[shard].items():
            for new, dtype, shape in self._parts(name, one):
                size = math.prod(shape) * SIZES[dtype]
                header[new] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
                at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for name, one in self._shards[shard].items():
            data = one.read()
            if _linear(name, one):
                tally.add(f"int{self._bits}", data.size)
                for part in self._quantised(floats(data), one):
                    out.write(part.tobytes())
            else:
                out.write(data.tobytes())
            tally.advance(one.nbytes)

    def index(self) -> bytes:
        """Write the document that maps tensors to files."""
        found = [
            (new, shard, math.prod(shape) * SIZES[dtype])
            for shard, stored in self._shards.items()
            for name, one in stored.items()
            for new, dtype, shape in self._parts(name, one)
        ]
        total = sum(size for *_, size in found)
        names = {name: shard for name, shard, _ in found}
        return _json({"metadata": {"total_size": total}, "weight_map": names})

    def config(self, path: Path) -> bytes:
        """Write `config.json` with the format of the weights. Raises `ModelFileError`."""
        whole = self._bits == 8
        weights = {
            "num_bits": self._bits,
            "type": "int",
            "symmetric": True,
            "dynamic": False,
            "strategy": "channel" if whole else "group",
            "group_size": None if whole else self._group,
        }
        told = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if whole else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": IGNORED,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        }
        return _json({**read_json(path), "quantization_config": told})

    def _parts(self, name: str, one: StoredTensor) -> Iterator[tuple[str, str, list[int]]]:
        """Yield (name, type, shape) of each tensor that one becomes."""
        if not _linear(name, one):
            yield name, one.dtype, list(one.shape)
            return
        out, width = one.shape
        groups = 1 if self._bits == 8 else width // self._group
        if self._bits == 8:
            yield name, "I8", [out, width]
        else:
            yield f"{name}_packed", "I32", [out, width // 8]
        yield f"{name}_scale", one.dtype, [out, groups]
        if self._bits == 4:
            yield f"{name}_shape", "I64", [2]

    def _quantised(self, weight: Floats, one: StoredTensor) -> Iterable[npt.NDArray[Any]]:
        """Return codes, scales [out, groups] and, for packed ones, the shape; see `_parts`."""
        out, width = weight.shape
        if self._bits == 8:
            stored, scales = _rounded(_nearest(weight), one.dtype)
            return _codes_of(weight, scales, 128), stored
        groups = weight.reshape(-1, self._group)
        stored, scales = _rounded(self._encode.symmetric(groups, 8), one.dtype)
        nibbles = (_codes_of(groups, scales, 8) + 8).astype(np.uint8).reshape(out, -1, 2)
        packed = nibbles[:, :, 0] | nibbles[:, :, 1] << 4  # Low bits first.
        return packed, stored, np.array([out, width], "<i8")


def _linear(name: str, one: StoredTensor) -> bool:
    """Return whether it is a dense linear layer of the stack."""
    dense = len(one.shape) == 2 and one.dtype in ("F32", "F16", "BF16")
    return (
        dense and bool(LAYER.search(name)) and not (ELSEWHERE.search(name) or ROUTER.search(name))
    )


def _nearest(rows: Floats) -> Floats:
    """Return the scale [n] of each row [n, g] that makes its largest weight 127."""
    top: Floats = np.abs(rows).max(axis=1)
    bounded(bool((top <= LARGEST).all()))
    scale: Floats = top / np.float32(127)
    return scale


def _codes_of(groups: Floats, scales: Floats, half: int) -> npt.NDArray[np.int8]:
    """Return the codes -half … half - 1 of groups [n, g] by the scales [n] as they are stored."""
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)[:, None]
    return np.clip(np.rint(groups * inverse), -half, half - 1).astype(np.int8)


def _rounded(scales: Floats, dtype: str) -> tuple[npt.NDArray[Any], Floats]:
    """Return (the scales as stored in this type, their values)."""
    if dtype == "BF16":
        bits = scales.view(np.uint32)
        stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        return stored, (stored.astype(np.uint32) << 16).view(np.float32)
    stored = scales.astype("<f4" if dtype == "F32" else "<f2")
    return stored, stored.astype(np.float32)


def _json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"
