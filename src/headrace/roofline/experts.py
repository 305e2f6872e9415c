"""A mixture of experts: router, the routed experts, the shared one."""

from __future__ import annotations

from collections.abc import Iterator

from .counts import Case, Count, linear, vector
from .formats import dtype_bytes


def sparse_layers(case: Case, tokens: int, layers: int) -> Iterator[Count]:
    """The feed-forward of `layers` sparse layers."""
    arch, tp = case.arch, case.layout.tp
    assert arch.moe is not None
    yield linear(case, "router", "linear", arch.moe.experts, arch.hidden, tokens, layers, layers)
    yield moe(case, tokens, layers)
    shared = arch.moe.shared_intermediate
    if not shared:
        return
    size = 3 * shared * arch.hidden
    weight = case.weights.of("shared", size, layers) / size
    yield linear(
        case, "shared_gate_up", "linear", 2 * shared, arch.hidden, tokens, layers, layers, tp,
        weight_bytes=2 * shared * arch.hidden * weight,
    )  # fmt: skip
    yield linear(
        case, "shared_down", "linear", arch.hidden, shared, tokens, layers, layers, tp,
        weight_bytes=arch.hidden * shared * weight, split="in",
    )  # fmt: skip
    yield vector(case, "gated", "shared_gated", layers, tokens * shared / tp, 6, 2, 1)
    yield vector(case, "add", "shared", layers, tokens * arch.hidden, 1, 2, 1)


def moe(case: Case, tokens: int, calls: int) -> Count:
    """6 · N · k · D · I FLOPs for k active experts; the experts that are hit are read.

    Expected number of experts hit under even routing: X · (1 - (1 - k / X) ** N). With expert
    parallelism over R ranks each has X / R of them, and the tokens of all `dp` groups; without it
    each has 1 / tp of every expert. Routing is taken as even: the busiest rank has more.
    """
    arch, layout = case.arch, case.layout
    assert arch.moe is not None
    experts, active, inner = arch.moe.experts, arch.moe.active, arch.moe.intermediate
    everyone = tokens * layout.dp
    hit = experts * (1 - (1 - active / experts) ** everyone)
    one = case.weights.of("experts", experts * 3 * arch.hidden * inner, calls) / experts
    b = dtype_bytes(case.dtype)
    share = layout.ranks if layout.ep else layout.tp
    arriving = everyone if layout.ep else tokens
    if layout.ep:
        # Tokens with at least one expert here.
        arriving = round(everyone * (1 - (1 - 1 / layout.ranks) ** active))
    return Count(
        "moe", "experts", calls, "experts",
        flops=6.0 * everyone * active * arch.hidden * inner / share, weight_bytes=hit * one / share,
        read_bytes=arriving * (arch.hidden * b + experts * b),
        write_bytes=arriving * arch.hidden * b,
        rows=max(1, round(everyone * active / hit)) if tokens else 0, depth=arch.hidden + inner,
    )  # fmt: skip
