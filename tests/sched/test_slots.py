"""Slots of a part that drafts: who gets one, how long it stays, and what it says of its text."""

from __future__ import annotations

import pytest
from control_plane_harness import Driver, driver, request_of

from headrace.base.step import SlotWrite


def writes(d: Driver) -> list[SlotWrite]:
    return [write for plan in d.plans for write in plan.slots]


def test_a_slot_that_is_left_goes_to_one_who_runs() -> None:
    d = driver(slots=1)
    d.add(request_of("first", [1, 2, 3], max_tokens=4))
    d.add(request_of("second", [4, 5, 6], max_tokens=20))
    d.run()
    assert writes(d) == [SlotWrite(0, 0, 0), SlotWrite(1, 0, 0)]
    given = next(at for at, plan in enumerate(d.plans) if plan.slots and at)
    assert any(0 in plan.released for plan in d.plans[: given + 1])
    assert given < len(d.plans) - 1, "while it runs"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_gets_the_slot_with_its_text(depth: int) -> None:
    d = driver(slots=3, depth=depth)
    for name, start in (("a", 1), ("b", 20)):
        d.add(request_of(name, list(range(start, start + 10)), max_tokens=6))
    d.run()
    texts = {name: [*d.requests[name].prompt, *d.out[name, 0]] for name in "ab"}
    d.add(request_of("next", [*texts["b"], 3, 4], max_tokens=2))
    d.run()
    d.add(request_of("other", [*texts["a"][:7], 49], max_tokens=2))
    d.run()
    _, b, turn, other = writes(d)
    assert (turn.slot, turn.tokens) == (b.slot, len(texts["b"]))
    assert (other.slot, other.tokens) == (0, 7)


def test_a_preempted_sequence_goes_on_in_its_slot() -> None:
    d = driver((None, 8), rows=3, max_context=32, slots=3)
    for name, start in (("a", 1), ("b", 20)):
        d.add(request_of(name, list(range(start, start + 6)), max_tokens=16))
    d.run()
    assert d.scheduler.stats().preemptions
    first, again = (one for one in writes(d) if one.slot == 1)
    assert first.tokens == 0
    assert again.tokens >= 6


def test_no_text_is_known_of_another_tenant_or_without_an_index() -> None:
    d = driver(slots=1)
    for number, salt in enumerate(("x", "y", "y")):
        d.add(request_of(str(number), list(range(12)), max_tokens=1, cache_salt=salt))
        d.run()
    assert [write.tokens for write in writes(d)] == [0, 0, 12]
    d.kv.reset()
    d.add(request_of("later", list(range(12)), max_tokens=1, cache_salt="y"))
    d.run()
    assert writes(d)[-1].tokens == 0


def test_nothing_is_known_of_a_text_whose_step_failed() -> None:
    d = driver(slots=1)
    d.add(request_of("a", list(range(12)), max_tokens=9))
    d.step(fails=True)
    d.add(request_of("b", list(range(12)), max_tokens=2))
    d.run()
    assert [write.tokens for write in writes(d)] == [0, 0]


def test_vectors_take_no_slot() -> None:
    d = driver(slots=1)
    d.add(request_of("v", [1, 2, 3], max_tokens=1, task="vector"))
    d.run()
    assert not writes(d)
