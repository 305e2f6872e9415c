"""Kernels of one decoder layer: what a step's graph has as nodes, counted without a GPU.

A model of two layers and one of one run on tensors without memory; Triton's launches are counted
where they would compile, and torch's operators but for views and allocations where they are
dispatched. A library product counts as one, though the library may split it into two. Dense and
packed weights: what the library does with fp8 cannot be counted on tensors without memory.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from gpu_aot import compiling
from gpu_models import ARCHS, decode, make_batch, windows_of, without_memory
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels.triton.product_packed_skinny import PackedSkinnyConfig
from headrace.kernels.triton.product_skinny import SkinnyConfig
from headrace.kernels.triton.table import Table

ARCHITECTURE = "sm_90"
CASES = (
    ("llama-3.1-8b", "bfloat16", "bfloat16"),
    ("llama-3.1-8b", "int4", "int8"),
    ("qwen3-30b-a3b", "bfloat16", "bfloat16"),
    ("qwen3-30b-a3b", "int4", "bfloat16"),
)
"""(model, weights, KV)."""
BATCHES = (1, 8, 32)
VIEWS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "view",
    "_unsafe_view",
    "reshape",
    "t",
    "view_as",
    "transpose",
    "slice",
    "select",
    "as_strided",
    "detach",
    "unsqueeze",
    "expand",
    "alias",
}
"""Operators of torch that launch nothing."""
MADE_OF_OTHERS = {"linear", "matmul"}
"""These are dispatched first as themselves, then as the one that launches."""


class _Dispatched(TorchDispatchMode):
    """Counts torch's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS | MADE_OF_OTHERS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launches(name: str, layers: int, weights: str, kv: str, batch: int) -> Counter[str]:
    """Launches of a whole step, by kernel."""
    arch = replace(ARCHS[name], layers=layers)
    with torch.inference_mode():
        model, operators, cache = without_memory(arch, ARCHITECTURE, weights, kv)
        step = make_batch(decode(batch, 1024), windows_of(arch), "meta")
        with compiling(ARCHITECTURE) as found, _Dispatched() as torch_s:
            model.forward(operators, step, cache)
    return (
        torch_s.counts
        + Counter({k.kernel: 0 for k in found})
        + Counter([kernel.kernel for kernel in found for _ in kernel.grids])
    )


def nodes() -> list[dict[str, Any]]:
    """Kernels of a layer by weights and batch: with the library for dense products, and as is."""
    rows: list[dict[str, Any]] = []
    library = patch.multiple(
        Table,
        skinny=lambda *_, **__: SkinnyConfig(library=True),
        packed_skinny=lambda *_: PackedSkinnyConfig(serves=False),
    )
    for name, weights, kv in CASES:
        for batch in BATCHES:
            counts = []
            for way in (library, nullcontext()):
                with way:
                    two, one = (launches(name, n, weights, kv, batch) for n in (2, 1))
                    layer = two - one
                counts.append(layer)
            row = {"model": name, "weights": weights, "kv": kv, "batch": batch}
            row |= {"library": counts[0].total(), "ours": counts[1].total()}
            rows.append(row | {"kernels": dict(counts[1])})
    return rows


def node_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"| kernels of a layer, {ARCHITECTURE} | batch | without skinny products | with |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['model']} {row['weights']}, {row['kv']} KV | {row['batch']} | {row['library']} "
        f"| {row['ours']} |"
        for row in rows
    ]
    return "\n".join(lines)
