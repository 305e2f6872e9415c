"""One operator's work as numbers, and its inputs: the terms of all counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..base.arch import ModelArch
from ..base.graph import WeightRef
from ..base.layout import ONE, Layout
from .formats import dtype_bytes
from .weights import WeightBytes, parameters, total_bytes

Kind = Literal["product", "experts", "attention", "vector", "network"]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of the counts other than the step: model, number formats, layout."""

    arch: ModelArch
    weights: WeightBytes = field(default_factory=WeightBytes)
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    layout: Layout = ONE
    skew: float = 0.0
    """Unevenness of routing to experts (`routing`); 0: exactly even."""
    gathered: bool = False
    """Whether every token goes to all ranks of the experts and all their results back (an
    all-gather and a reduce-scatter), not only to those that have its experts (an all-to-all)."""
    dispatch_dtype: str | None = None
    """Type in which tokens go to their experts; None: `dtype`, in which results come back."""


def device_bytes(case: Case) -> int:
    """Return the bytes of weights on one device: experts spread over all ranks of a stage, the rest
    over tp."""
    experts = case.weights.by_role.get(
        "experts", parameters(case.arch).get("experts", 0.0) * case.weights.bits("experts") / 8
    )
    rest = total_bytes(case.arch, case.weights) - experts
    layout = case.layout
    share = layout.ranks if layout.ep else layout.tp
    return int((rest / layout.tp + experts / share) / layout.pp)


def kv_share(case: Case) -> int:
    """Return how many ranks each keep a part of every token's KV; a latent is not split."""
    return 1 if case.arch.mla is not None else min(case.layout.tp, case.arch.kv_heads)


@dataclass(slots=True, unsafe_hash=True)
class Count:
    """One operator of a step, for one call on one device. Nothing changes one; it is not frozen
    because a step makes dozens, and freezing would take longer than the rest."""

    operator: str
    """The kind of the model's node; also "sample", "pool" and the collectives ("all_reduce",
    "all_gather", "all_to_all", "send")."""
    label: str
    """Role of the call: qkv, gate_up, head …"""
    calls: int
    """Equal calls in the step."""
    kind: Kind
    """Kind of efficiency that applies."""
    flops: float
    weight_bytes: float = 0.0
    spared_bytes: float = 0.0
    """The part of `weight_bytes` that a greedy step need not read: see `formats.BOUND_BITS`."""
    kv_bytes: float = 0.0
    read_bytes: float = 0.0
    """Activations read; of a collective: the bytes that one rank holds before it."""
    write_bytes: float = 0.0
    rows: int = 0
    """Rows of a product, from which tiles are cut."""
    everyone: int = 0
    """Tokens that the experts of all ranks share out among them."""
    shape: tuple[int, int] | None = None
    """(out, in) of the weight, before it is shared among ranks."""
    depth: float = 0.0
    """Numbers that one result is summed over: sequential work of a unit."""
    entries: int = 0
    """Sequences of an attention."""
    pieces: float = 0.0
    """Independent parts of an attention: (sequence, KV head)."""
    ranks: int = 1
    """Ranks that take part in a collective."""
    parts: tuple[Count, ...] = ()
    """The two parts that make up an attention with decoding and other entries."""

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.read_bytes + self.write_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def linear(
    case: Case,
    label: str,
    weight: WeightRef,
    model: WeightRef,
    rows: int,
    calls: int,
    weight_bytes: float,
    *,
    out_bytes: int | None = None,
) -> Count:
    """Count 2 · N · in · out FLOPs; `weight_bytes` of weights, N · in · b read, N · out · b
    written. `weight`: a rank's part of that of the model."""
    b, out, inner = dtype_bytes(case.dtype), weight.out, weight.width
    return Count(
        "linear",
        label,
        calls,
        "product",
        flops=2.0 * rows * inner * out,
        weight_bytes=weight_bytes if rows else 0.0,
        read_bytes=rows * inner * b,
        write_bytes=rows * out * (out_bytes or b),
        rows=rows,
        shape=(model.out, model.width),
        depth=inner,
    )


def vector(
    case: Case,
    operator: str,
    label: str,
    calls: int,
    size: float,
    flops: float,
    reads: int,
    writes: int,
) -> Count:
    """Count `flops` per number of `size`; each is read `reads` and written `writes` times."""
    b = dtype_bytes(case.dtype)
    return Count(
        operator,
        label,
        calls,
        "vector",
        flops=size * flops,
        read_bytes=size * reads * b,
        write_bytes=size * writes * b,
    )
