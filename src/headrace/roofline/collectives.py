"""Collectives of a step: the bytes that ranks exchange, and the time that this takes."""

from __future__ import annotations

from collections.abc import Iterator

from .counts import Case, Count
from .efficiency import Curve
from .formats import dtype_bytes
from .hardware import Hardware
from .routing import EVEN, busiest


def collectives(case: Case, tokens: int) -> Iterator[Count]:
    """Yield what is no node of a rank's graph: the experts' exchange, sends between stages.

    With data-parallel attention a token goes to the ranks of its experts and back. Of k
    active experts on R ranks it is expected on R · (1 - (1 - 1 / R) ** k) of them, each time D · b.
    Uneven routing takes longer by the factor by which the busiest rank's tokens exceed the mean;
    `Case.gathered` sends each token to all R. A stage sends N · D · b.
    """
    arch, layout = case.arch, case.layout
    size = tokens * arch.hidden * dtype_bytes(case.dtype)
    sparse = 0 if arch.moe is None else sum(map(arch.moe.mixes, range(arch.layers)))
    exchanged = layout.dp > 1 and sparse
    if exchanged:
        assert arch.moe is not None
        ranks = layout.ranks
        places: float = ranks
        if not case.gathered:
            places *= 1 - (1 - 1 / ranks) ** arch.moe.active
        if tokens and not case.gathered:
            sizes = arch.moe.experts, arch.moe.active, tokens * layout.dp, ranks
            places *= busiest(*sizes, case.skew).tokens / busiest(*sizes, EVEN).tokens
        there = dtype_bytes(case.dispatch_dtype or case.dtype, "dispatch_dtype")
        places *= (there / dtype_bytes(case.dtype) + 1) / 2  # The mean of both calls.
        # The tp ranks of a group hold the same tokens: each sends its share of them.
        yield Count(
            "all_to_all",
            "exchange",
            2 * sparse,
            "network",
            flops=0,
            read_bytes=size * places / layout.tp,
            ranks=ranks,
        )
    if layout.pp > 1:
        yield Count(
            "send",
            "stages",
            layout.pp - 1,
            "network",
            flops=0,
            read_bytes=size / layout.tp,
            ranks=layout.devices,
        )


def moved_bytes(count: Count) -> float:
    """Return bytes over each link of a rank; a ring's all-reduce moves its data 2 · (R - 1) / R
    times."""
    away = (count.ranks - 1) / count.ranks
    times = {"all_reduce": 2 * away, "send": 1.0}.get(count.operator, away)
    return times * count.read_bytes


def collective_seconds(hardware: Hardware, count: Count, curve: Curve | None = None) -> float:
    """Return the time of one collective; without a curve its least time.

    Beyond a node's devices, the fabric's bandwidth applies.
    """
    link = hardware.link_bandwidth or hardware.bandwidth
    if count.ranks > hardware.node_devices and hardware.fabric_bandwidth:
        link = hardware.fabric_bandwidth
    work = moved_bytes(count) / link
    if curve is None:
        return work
    return work / curve.memory + (curve.floor_seconds or hardware.link_latency)
