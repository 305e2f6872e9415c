"""A mixture of experts: router, the routed experts, the shared one."""

from __future__ import annotations

from collections.abc import Iterator

from .counts import Case, Count, linear, vector
from .formats import dtype_bytes
from .routing import busiest


def sparse_layers(
    case: Case, tokens: int, calls: int, layers: int, mark: str = ""
) -> Iterator[Count]:
    """The feed-forward of `calls` of the `layers` sparse layers, their labels with this mark."""
    arch, tp = case.arch, case.layout.tp
    assert arch.moe is not None
    yield linear(
        case, f"router{mark}", "linear", arch.moe.experts, arch.hidden, tokens, calls, layers
    )
    yield moe(case, tokens, calls, layers, mark)
    shared = arch.moe.shared_intermediate
    if not shared:
        return
    size = 3 * shared * arch.hidden
    weight = case.weights.of("shared", size, layers) / size
    yield linear(
        case, f"shared_gate_up{mark}", "linear", 2 * shared, arch.hidden, tokens, calls, layers, tp,
        weight_bytes=2 * shared * arch.hidden * weight,
    )  # fmt: skip
    yield linear(
        case, f"shared_down{mark}", "linear", arch.hidden, shared, tokens, calls, layers, tp,
        weight_bytes=arch.hidden * shared * weight, split="in",
    )  # fmt: skip
    yield vector(case, "gated", f"shared_gated{mark}", calls, tokens * shared / tp, 6, 2, 1)
    yield vector(case, "add", f"shared{mark}", calls, tokens * arch.hidden, 1, 2, 1)


def moe(case: Case, tokens: int, calls: int, layers: int, mark: str = "") -> Count:
    """6 · D · I FLOPs for each (token, expert) pair of the rank; the experts that are hit are read.

    Without expert parallelism each rank has 1 / tp of every expert and of all N · k pairs. With it
    X / R whole experts, tokens of all `dp` groups, and as many pairs as the busiest rank gets, on
    which the others wait (`routing.busiest`). Experts hit: Σ 1 - (1 - p) ** N over their
    popularities p, k / X each where routing is even. Gathering each expert's rows and adding up the
    results is in the kernel's curve: the tables that it is fitted to measure the whole call.
    """
    arch, layout = case.arch, case.layout
    assert arch.moe is not None
    experts, active, inner = arch.moe.experts, arch.moe.active, arch.moe.intermediate
    everyone = tokens * layout.dp
    ranks = layout.ranks if layout.ep else 1
    load = busiest(experts, active, everyone, ranks, case.skew)
    slices = 1 if layout.ep else layout.tp
    one = case.weights.of("experts", experts * 3 * arch.hidden * inner, layers) / experts
    b = dtype_bytes(case.dtype)
    # With slices every rank has all tokens of its group, with whole experts those that come to it.
    arriving = load.tokens if layout.ep else tokens
    return Count(
        "moe", f"experts{mark}", calls, "experts",
        flops=6.0 * load.pairs * arch.hidden * inner / slices,
        weight_bytes=load.hit * one / slices,
        read_bytes=arriving * (arch.hidden * b + experts * b),
        write_bytes=arriving * arch.hidden * b,
        rows=max(1, round(load.pairs / load.hit)) if tokens else 0, depth=arch.hidden + inner,
        everyone=everyone,
    )  # fmt: skip
