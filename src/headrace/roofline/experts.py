"""Work of routed experts."""

from __future__ import annotations

from .counts import Case, Count
from .formats import dtype_bytes
from .routing import busiest


def moe(
    case: Case, tokens: int, calls: int, weight_bytes: float, inner: int, mark: str = ""
) -> Count:
    """Count 6 · D · I FLOPs for each (token, expert) pair of the rank; the experts hit are read.

    Without expert parallelism each rank has 1 / tp of every expert and of all N · k pairs. With it
    a rank has X / R whole experts and tokens of all `dp` groups. It is charged the pairs of the
    busiest rank, for which the others wait (`routing.busiest`). Experts hit: Σ 1 - (1 - p) ** N
    over their popularities p, k / X each if routing is even. Gathering each expert's rows and
    adding up the results is in the kernel's curve: the tables that it is fitted to measure the
    whole call. `weight_bytes`: of all experts of a layer, and `inner` columns of each, as far as a
    rank has them.
    """
    arch, layout = case.arch, case.layout
    assert arch.moe is not None
    experts, active = arch.moe.experts, arch.moe.active
    everyone = tokens * layout.dp
    ranks = layout.ranks if layout.ep else 1
    load = busiest(experts, active, everyone, ranks, case.skew)
    one = weight_bytes / experts
    b = dtype_bytes(case.dtype)
    # With slices every rank has all tokens of its group; with whole experts only its own.
    arriving = load.tokens if layout.ep else tokens
    return Count(
        "experts",
        f"experts{mark}",
        calls,
        "experts",
        flops=6.0 * load.pairs * arch.hidden * inner,
        weight_bytes=load.hit * one,
        read_bytes=arriving * (arch.hidden * b + experts * b),
        write_bytes=arriving * arch.hidden * b,
        rows=max(1, round(load.pairs / load.hit)) if tokens else 0,
        depth=arch.hidden + arch.moe.intermediate,
        everyone=everyone,
    )
