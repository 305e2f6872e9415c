"""Preemption where blocks run out, and priorities."""

from __future__ import annotations

import pytest
from control_plane_harness import Driver, driver, pool_of, request_of

from headrace.base.request import Request
from headrace.sched import Limits
from headrace.sched.work import Work


def test_the_latest_gives_way_and_loses_no_token() -> None:
    d = driver((None, 8), rows=3, max_context=32)
    for i in range(3):
        d.add(request_of(f"r{i}", [i + 1] * 6, max_tokens=18))
    d.run()
    assert d.finish[("r0", 0)].preemptions == 0
    assert d.finish[("r2", 0)].preemptions > 0
    again = [a for plan in d.plans for a in plan.admitted if len(a.tokens) > a.prompt_length]
    assert again, "admitted with what was generated since"
    d.check_answers()


def test_one_gives_way_at_a_time_while_steps_are_in_flight() -> None:
    d = driver((None, 9), rows=3, depth=2, max_context=32)
    for i in range(3):
        d.add(request_of(f"r{i}", [i + 1] * 11, max_tokens=4))
    while d.scheduler.has_work:
        before = d.scheduler.stats().preemptions
        if not d.submit():
            d.receive()
        assert d.scheduler.stats().preemptions <= before + 1
    assert d.finish[("r1", 0)].preemptions == 0, "the last one's blocks were enough"
    assert d.finish[("r2", 0)].preemptions == 1
    d.check_answers()


def test_a_pool_for_one_serves_all() -> None:
    d = driver((None, 4), rows=8, max_context=16)
    for i in range(6):
        d.add(request_of(f"r{i}", [i + 1] * 8, max_tokens=8))
    d.run()
    d.check_answers()


def test_the_urgent_go_first_and_take_the_row() -> None:
    d = driver(rows=1, policy="priority")
    d.add(request_of("low", [1], max_tokens=9, priority=5))
    d.step()
    d.add(request_of("high", [2], max_tokens=3, priority=0))
    d.run()
    order = [key[0] for key in d.finish]
    assert order == ["high", "low"]
    assert d.finish[("low", 0)].preemptions == 1
    d.check_answers()


class Slots:
    """A resource that only work with a name in `wants` needs: as many as `free` at a time."""

    def __init__(self, free: int, *wants: str) -> None:
        self.left, self.wants = free, wants

    def verify(self, request: Request) -> None:
        pass

    def prepare(self, work: Work) -> bool:
        if work.request.id in self.wants:
            self.left -= 1
        if self.left < 0:
            self.left += 1
            return False
        return True

    def free(self, work: Work) -> None:
        self.left += work.request.id in self.wants


@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_gives_way_again_and_again_to_who_lacks_a_resource(depth: int) -> None:
    """A grammar that is being compiled, or an adapter's slot: once it is there, the row is."""
    slots = Slots(0, "urgent")
    limits = Limits(2, 64, 64, 100, "priority", depth)
    d = Driver(limits, pool_of((None, 64)), resources=(slots,))
    for name in ("a", "b"):
        d.add(request_of(name, [len(name)] * 4, max_tokens=40, priority=5))
    d.step()
    d.add(request_of("urgent", [1] * 6, max_tokens=2, priority=0))
    for _ in range(10):
        d.step()
    assert d.scheduler.stats().preemptions == 1
    slots.left = 1
    d.run()
    assert d.scheduler.stats().preemptions == 2
    assert next(iter(d.finish))[0] == "urgent"
    d.check_answers()


def test_who_gives_way_gives_its_resource_too() -> None:
    slots = Slots(1, "low", "urgent")
    d = Driver(Limits(1, 64, 64, 100, "priority"), pool_of((None, 64)), resources=(slots,))
    d.add(request_of("low", [3] * 4, max_tokens=20, priority=5))
    d.step()
    d.add(request_of("urgent", [1] * 6, max_tokens=2, priority=0))
    d.run()
    assert [key[0] for key in d.finish] == ["urgent", "low"]
    assert d.scheduler.stats().preemptions == 1
    d.check_answers()


def test_equals_do_not_preempt_each_other() -> None:
    d = driver(rows=1, policy="priority")
    d.add(request_of("a", [1], max_tokens=9, priority=1))
    d.step()
    d.add(request_of("b", [2], max_tokens=3, priority=1))
    d.run()
    assert [key[0] for key in d.finish] == ["a", "b"]


def test_who_waits_long_enough_is_served_among_the_urgent() -> None:
    d = driver(rows=1, policy="priority")
    d.add(request_of("low", [1], max_tokens=1, priority=1))
    for i in range(400):
        d.add(request_of(f"high{i}", [2], max_tokens=1, priority=0))
        d.now += 1.0
        d.step()
        if ("low", 0) in d.finish:
            break
    assert 55 < i < 130
    d.run()
