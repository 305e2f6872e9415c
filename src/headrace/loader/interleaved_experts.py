"""Experts in the layouts of two families' safetensors: gpt-oss interleaves rows of gate and up,
Llama 4 has gate before up.

Dense experts are stacks of transposed matrices [experts, in, out]. MXFP4 (OCP Microscaling Formats
1.0) has `_blocks` [experts, out, in / 32, 16] of two numbers a byte and `_scales` [experts, out, in
/ 32]; they are converted to GGUF's blocks, without loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError, UnsupportedModel
from ..kernels.weights import BlockWeight, LateWeight
from ..quant.ggml_types import BY_NAME, DENSE
from .safetensors_file import StoredTensor

Host = npt.NDArray[Any]
_BLOCK = BY_NAME["MXFP4"].block
_NO_NUMBER = 255
"""E8M0's NaN."""


STACKS = (".mlp.experts.", ".feed_forward.experts.")
"""Parts of the names of stacks."""


def canonical_stem(stem: str) -> str:
    """Return our name of a stack in a multimodal Llama 4, the same as in the text model."""
    at = stem.index("layers.")
    return f"model.{stem[at:].replace('.feed_forward.', '.mlp.', 1)}"


class _Reads:
    """Cache of the last expert read: gate and up are taken one after the other."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, Host]] = {}

    def __call__(self, stack: StoredTensor, expert: int) -> Host:
        number, found = self._last.get(stack.begin, (-1, None))
        if found is None or number != expert:
            self._last.clear()
            found = stack.part(expert).read()
            self._last[stack.begin] = expert, found
        return found


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One matrix or bias of one expert, read when it is taken."""

    source: StoredTensor
    expert: int
    rows: slice
    """Outputs of the source that it takes."""
    shape: tuple[int, ...]
    scales: StoredTensor | None = None
    """Scales (powers of two) if the source is MXFP4."""
    reads: _Reads = field(default_factory=_Reads, compare=False)

    @property
    def host_dtype(self) -> str:
        """Return the type as `kernels.arrays.dtype_name` names it, or MXFP4."""
        return self.source.host_dtype if self.scales is None else "MXFP4"

    def read(self) -> Host | BlockWeight:
        """Read its numbers [shape]; raises `ModelFileError`."""
        data = self.reads(self.source, self.expert)
        if self.scales is None:
            outputs = data if data.ndim == 1 else data.T
            return np.ascontiguousarray(outputs[self.rows])
        scales = self.scales.part(self.expert).read()[self.rows]
        if (scales == _NO_NUMBER).any():
            raise ModelFileError(f"{self.source.shard.name}: a scale of its experts is no number")
        rows, width = self.shape
        return BlockWeight("MXFP4", _blocks(data[self.rows], scales), (rows, width))

    def late(self, name: str) -> LateWeight:
        """Return a late weight of this MXFP4 part under the model's `name`."""

        def read() -> BlockWeight:
            made = self.read()
            assert isinstance(made, BlockWeight)
            return replace(made, name=name)

        rows, width = self.shape
        return LateWeight(name, (rows, width), None, read)


def _blocks(codes: Host, scales: Host) -> Host:
    """Convert codes [rows, blocks, 16] and scales [rows, blocks] to GGUF's [rows, blocks · 17].

    A block is its scale, then numbers i and i + 16 in byte i; the source has numbers 2i and 2i + 1
    there.
    """
    first, second = np.moveaxis(np.ascontiguousarray(codes).view(np.uint64), -1, 0)
    low, high = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
    four = np.uint64(4)
    # Bytes of even numbers and of odd ones, eight at a time; then they are interleaved.
    even = (first & low) | (second << four & high)
    odd = (first >> four & low) | (second & high)
    pairs = even.view(np.uint8) | odd.view(np.uint8).astype("<u2") << 8
    made = np.empty((*scales.shape, 1 + _BLOCK // 2), np.uint8)
    made[..., 0] = scales
    made[..., 1:] = pairs.view(np.uint8).reshape(codes.shape)
    return made.reshape(len(scales), -1)


def expert_parts(
    stored: Mapping[str, StoredTensor], *, turns: bool = True
) -> dict[str, ExpertPart]:
    """Return canonical name → part, of all expert tensors of a gpt-oss model (`turns`: gate and up
    interleaved), or of a Llama 4 without `turns`.

    Raises `ModelFileError` for a tensor that is unknown or misshapen.
    """
    parts: dict[str, ExpertPart] = {}
    reads = _Reads()
    for name, tensor in stored.items():
        if not any(at in name for at in STACKS):
            continue
        stem, _, kind = name.rpartition(".")
        matrix, _, form = kind.partition("_proj")
        if matrix not in ("gate_up", "down") or form not in ("", "_bias", "_blocks", "_scales"):
            raise ModelFileError(f"tensor {name!r:.100} is no stack of experts")
        if form == "_scales" and name.removesuffix("_scales") + "_blocks" in stored:
            continue
        outputs, shape = _shape(name, tensor, form)
        scales = None
        if form == "_blocks":
            scales = stored.get(name.removesuffix("_blocks") + "_scales")
            if scales is None or scales.shape != tensor.shape[:-1] or scales.dtype != "U8":
                raise ModelFileError(f"tensor {name!r:.100} lacks its scales")
        both = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
        if not turns:
            both = {"gate": slice(0, outputs // 2), "up": slice(outputs // 2, None)}
            stem = canonical_stem(stem)
        suffix = "bias" if form == "_bias" else "weight"
        for part, rows in (both if matrix == "gate_up" else {"down": slice(None)}).items():
            own = (len(range(outputs)[rows]), *shape)
            for expert in range(tensor.shape[0]):
                canonical = f"{stem}.{expert}.{part}_proj.{suffix}"
                parts[canonical] = ExpertPart(tensor, expert, rows, own, scales, reads)
    return parts


def _shape(name: str, tensor: StoredTensor, form: str) -> tuple[int, tuple[int, ...]]:
    """Return (outputs, the remaining dimensions of each expert's part) of a stack."""
    match form, tensor.shape:
        case "_bias", (_, outputs):
            rest: tuple[int, ...] = ()
        case "", (_, width, outputs):
            rest = (width,)
        case "_blocks", (_, outputs, blocks, 16):
            rest = (blocks * _BLOCK,)
        case _:
            raise ModelFileError(
                f"tensor {name!r:.100} has shape {list(tensor.shape)}, as no stack of experts"
            )
    allowed = ("U8",) if form == "_blocks" else DENSE
    if tensor.dtype not in allowed:
        raise UnsupportedModel(
            f"{tensor.shard.name}: {name:.100} is {tensor.dtype}; supported: {', '.join(allowed)}"
        )
    return outputs, rest
