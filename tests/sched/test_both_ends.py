"""A prompt that is computed from the front while it is loaded from the back."""

from __future__ import annotations

import pytest
from control_plane_harness import Driver, pool_of, request_of

from headrace.sched import Limits

PROMPT = [at % 40 + 1 for at in range(200)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("comes", [True, False])
def test_they_meet(monkeypatch: pytest.MonkeyPatch, depth: int, comes: bool) -> None:
    """Blocks of 4: as long to load as to compute. What does not come is computed."""
    monkeypatch.setattr("headrace.kv.tiers.LATENCY", 1.0)
    kept: dict[tuple[int, bytes], list[int]] = {}
    first = driver_over(kept, depth)
    first.add(request_of("a", PROMPT, max_tokens=2))
    first.run()
    assert first.tier is not None
    while first.tier.orders:
        first.tier.work()
    assert len(kept) == 50
    second = driver_over(kept, depth)
    assert second.tier is not None
    tiers = second.kv.tiers
    tiers._computing = lambda start, tokens: 1.0  # type: ignore[union-attr]
    second.add(request_of("b", PROMPT, max_tokens=2))
    assert second.submit()
    assert tiers.stats.met == 1  # type: ignore[union-attr]
    orders = [pieces for _, _, pieces in second.tier.orders]
    assert orders[0][-1].depth == 49, "the last first"
    assert min(piece.depth for pieces in orders for piece in pieces) == 25
    if comes:
        while second.tier.orders:
            second.tier.work()
    else:
        second.tier.orders, waiting = [], second.tier.orders
    second.run() if comes else [second.step() for _ in range(60)]
    computed = sum(sum(plan.counts) for plan in second.plans)
    assert computed == pytest.approx(100 if comes else 200, abs=20)
    if not comes:
        second.tier.orders = waiting
        while second.tier.orders:
            second.tier.work()
        second.step()
    second.check()
    second.check_answers()


def driver_over(kept: dict[tuple[int, bytes], list[int]], depth: int) -> Driver:
    limits = Limits(2, 16, 400, 8, depth=depth)
    return Driver(limits, pool_of((None, 120)), kept=kept)
