"""Work with deadlines: no admitted stream misses on a clock of the test's own, and the queue is a
sorted list."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import Overloaded
from headrace.sched.deadlines import (
    BATCH,
    INTERACTIVE,
    REALTIME,
    AdmittedStream,
    DeadlineQueue,
    Lanes,
    PeriodicStream,
    TimedWork,
    blocking_allowed,
)

whole = st.integers
ROUNDED = 1e-9


@dataclass
class Machine:
    """Lanes with a clock in whole ticks: releases and ends are events."""

    lanes: Lanes
    queue: DeadlineQueue = field(default_factory=DeadlineQueue)
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    orders: Any = field(default_factory=lambda: count(1))
    missed: list[TimedWork] = field(default_factory=list)
    ended: list[tuple[TimedWork, float, float]] = field(default_factory=list)
    """Work, when it began, and when it ended."""
    cut: list[TimedWork] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.busy = [False] * self.lanes.count
        self.lengths: dict[int, float] = {}

    def at(self, time: float, action: Callable[[float], None]) -> None:
        heappush(self.events, (time, next(self.orders), action))

    def release(self, now: float, length: float, **more: Any) -> None:
        work = TimedWork(next(self.orders), now, **more)
        self.lengths[work.order] = length
        self.queue.push(work)

    def run(self) -> None:
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                heappop(self.events)[2](now)
            self.queue.ripen(now)
            self.missed += self.queue.hopeless(now - ROUNDED)
            for lane in range(self.lanes.count):
                if not self.busy[lane] and (taken := self.queue.take(lane, self.lanes)):
                    self.begin(lane, *taken, now)

    def begin(self, lane: int, work: TimedWork, room: float, now: float) -> None:
        length = min(self.lengths[work.order], room)
        if length < self.lengths[work.order]:
            self.cut.append(work)
        self.busy[lane] = True

        def end(later: float) -> None:
            self.busy[lane] = False
            self.ended.append((work, now, later))
            if later > work.deadline + ROUNDED:
                self.missed.append(work)

        self.at(now + length, end)


periodic = st.builds(
    lambda seconds, slack, more: PeriodicStream(seconds, seconds + slack + more, seconds + slack),
    whole(1, 20),
    whole(1, 300),
    whole(0, 200),
)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=whole(1, 3), blocking=whole(0, 40))
def test_no_admitted_stream_misses(data: st.DataObject, count: int, blocking: int) -> None:
    """Streams that were admitted, whose senders are punctual, late or in a hurry, beside runs of
    other classes whose length is known or not."""
    machine = Machine(Lanes(count))
    for stream in data.draw(st.lists(periodic, min_size=1, max_size=8)):
        try:
            admitted = machine.lanes.admit(stream, blocking)
        except Overloaded:
            continue
        time = 0.0
        for gap in data.draw(st.lists(whole(0, 60), max_size=12)):
            time += max(0.0, stream.period - 20 + gap)
            length = data.draw(whole(1, int(stream.seconds)))
            machine.at(time, _releasing(machine, admitted, float(length)))
    lower = st.tuples(whole(0, 2000), whole(1, max(1, blocking)), whole(1, 2), st.booleans())
    for time, length, urgency, known in data.draw(st.lists(lower, max_size=30)):
        machine.at(float(time), _other(machine, float(length), urgency, known))
    machine.run()
    assert not [work for work in machine.missed if work.urgency == REALTIME]
    stuck = machine.queue.waiting()
    assert all(work.seconds is not None for work in stuck)
    assert all(work.seconds > max(machine.lanes.allowed) for work in stuck if work.seconds)


def _releasing(
    machine: Machine, admitted: AdmittedStream, length: float
) -> Callable[[float], None]:
    def release(now: float) -> None:
        due, deadline = admitted.released(now)
        early = due > now
        if early:
            machine.at(due, lambda later: None)
        machine.release(
            now,
            length,
            urgency=BATCH if early else REALTIME,
            deadline=deadline,
            release=due if early else -math.inf,
            seconds=admitted.stream.seconds,
            lane=admitted.lane,
        )

    return release


def _other(machine: Machine, length: float, urgency: int, known: bool) -> Callable[[float], None]:
    def release(now: float) -> None:
        machine.release(now, length, urgency=urgency, seconds=length if known else None)

    return release


def punctual(streams: list[PeriodicStream], blocking: float) -> Machine:
    """One lane with streams that were not tested, all released after another run began."""
    machine = Machine(Lanes(1))
    machine.at(0.0, _other(machine, blocking, BATCH, True))
    for place, stream in enumerate(reversed(streams), start=1):
        admitted = AdmittedStream(stream, 0)
        for number in range(40):
            time = place / 2 + number * stream.period
            machine.at(time, _releasing(machine, admitted, stream.seconds))
    machine.run()
    return machine


@settings(max_examples=100, deadline=None)
@given(st.lists(periodic, min_size=1, max_size=5), whole(1, 100))
def test_what_is_missed_was_not_admissible(streams: list[PeriodicStream], blocking: int) -> None:
    """The other side: the machine does miss, and only what the test refuses."""
    if punctual(streams, float(blocking)).missed:
        assert blocking > blocking_allowed(streams)


@pytest.mark.parametrize(
    ("streams", "blocking"),
    [
        ([PeriodicStream(60, 100, 100), PeriodicStream(50, 100, 100)], 1),
        ([PeriodicStream(30, 100, 40), PeriodicStream(30, 100, 40)], 1),
        ([PeriodicStream(10, 100, 20)], 30),
        ([PeriodicStream(10, 100, 20), PeriodicStream(30, 200, 200)], 1),
    ],
)
def test_the_machine_misses_what_the_test_refuses(
    streams: list[PeriodicStream], blocking: int
) -> None:
    assert punctual(streams, float(blocking)).missed
    lanes = Lanes(1, most=2.0)
    *first, last = streams
    for stream in first:
        lanes.admit(stream, blocking)
    with pytest.raises(Overloaded, match=r"is not admitted: lane 0 would be in time beside runs"):
        lanes.admit(last, blocking)


@settings(deadline=None)
@given(st.lists(periodic, max_size=20), whole(1, 3), whole(0, 40))
def test_a_lane_is_never_used_beyond_its_share(
    streams: list[PeriodicStream], count: int, blocking: int
) -> None:
    lanes = Lanes(count)
    admitted, refused = [], []
    for stream in streams:
        try:
            admitted.append(lanes.admit(stream, blocking))
        except Overloaded:
            refused.append(stream)
    on = [[one.stream for one in admitted if one.lane == lane] for lane in range(count)]
    for lane, held in enumerate(on):
        assert lanes.utilisation(lane) <= 0.8
        assert lanes.allowed[lane] == blocking_allowed(held) >= (blocking if held else 0)
    if count == 1:  # Streams only come, so who was refused would be refused now.
        for stream in refused:
            with pytest.raises(Overloaded):
                lanes.admit(stream, blocking)
    for one in admitted:
        lanes.leave(one)
    assert lanes.allowed == [math.inf] * count


def test_a_refusal_says_why() -> None:
    lanes = Lanes(1)
    lanes.admit(PeriodicStream(0.05, 0.1, 0.1), 0.0)
    with pytest.raises(Overloaded, match=r"40\.0 ms each 100\.0 ms .* used to 90% of 80%"):
        lanes.admit(PeriodicStream(0.04, 0.1, 0.1), 0.0)
    with pytest.raises(Overloaded, match=r"beside runs of 45\.0 ms, of 40\.0 at most"):
        lanes.admit(PeriodicStream(0.01, 0.1, 0.1), 0.045)


def test_the_blocking_term_by_hand() -> None:
    assert blocking_allowed([]) == math.inf
    assert blocking_allowed([PeriodicStream(10, 100, 50)]) == 40
    assert blocking_allowed([PeriodicStream(10, 40, 80)]) == 30, (
        "a late deadline is that of the period"
    )
    # The short one leaves 40 and is blocked by 20 of the long one; both leave 200 · 0.7.
    assert blocking_allowed([PeriodicStream(20, 200, 200), PeriodicStream(10, 100, 50)]) == 40
    assert blocking_allowed([PeriodicStream(60, 200, 200), PeriodicStream(10, 100, 50)]) == -20


def test_other_work_goes_where_it_may() -> None:
    lanes = Lanes(2)
    admitted = lanes.admit(PeriodicStream(10, 100, 50), 30)
    assert admitted.lane == 0

    def work(seconds: float | None, lane: int | None = None) -> TimedWork:
        urgency = INTERACTIVE if lane is None else REALTIME
        return TimedWork(1, 0.0, urgency, seconds=seconds, lane=lane)

    assert [lanes.room(work(40), lane) for lane in (0, 1)] == [40, math.inf]
    assert [lanes.room(work(41), lane) for lane in (0, 1)] == [0, math.inf]
    assert [lanes.room(work(None), lane) for lane in (0, 1)] == [0, math.inf]
    assert [lanes.room(work(99, lane=0), lane) for lane in (0, 1)] == [math.inf, 0]
    lanes.admit(PeriodicStream(50, 100, 100), 45)
    assert lanes.allowed == [40, 50]
    assert [lanes.room(work(None), lane) for lane in (0, 1)] == [0, 50]


def test_a_sender_in_a_hurry_gets_later_deadlines() -> None:
    admitted = AdmittedStream(PeriodicStream(1, 10, 5), 0)
    assert [admitted.released(now) for now in (0.0, 1.0, 2.0, 50.0, 59.0, 70.0)] == [
        (0, 5), (10, 15), (20, 25), (50, 55), (60, 65), (70, 75),
    ]  # fmt: skip


def test_a_sender_in_a_hurry_delays_no_other_work() -> None:
    """Runs that come before their period is over have no real time before it is."""
    machine = Machine(Lanes(1))
    admitted = machine.lanes.admit(PeriodicStream(2, 10, 10), 3)
    for _ in range(5):
        machine.at(0.0, _releasing(machine, admitted, 2.0))
    machine.at(3.0, _other(machine, 3.0, INTERACTIVE, known=True))
    machine.run()
    begun = [(work.lane is None, begin) for work, begin, _ in machine.ended]
    assert begun == [(False, 0), (False, 2), (True, 4), (False, 7), (False, 9), (False, 11)]
    assert not machine.missed


def test_an_early_run_waits_for_its_release_if_it_is_too_long() -> None:
    machine = Machine(Lanes(1))
    slow = machine.lanes.admit(PeriodicStream(4, 40, 5), 0)
    assert machine.lanes.allowed == [pytest.approx(1)]
    for _ in range(2):
        machine.at(0.0, _releasing(machine, slow, 4.0))
    machine.run()
    assert [begin for _, begin, _ in machine.ended] == [0, 40]


works = st.builds(
    lambda order, arrival, urgency, deadline, seconds: TimedWork(
        order, float(arrival), urgency, deadline, seconds
    ),
    whole(0, 10**6),
    whole(0, 100),
    st.sampled_from([REALTIME, INTERACTIVE, BATCH]),
    st.one_of(st.just(math.inf), whole(0, 200).map(float)),
    st.one_of(st.none(), whole(0, 50).map(float)),
)


@given(
    st.lists(works, unique_by=lambda one: one.order, max_size=200),
    st.lists(st.one_of(whole(0, 250), st.tuples(whole(0, 250))), max_size=100),
)
def test_the_queue_is_a_sorted_list(some: list[TimedWork], actions: list[Any]) -> None:
    queue, lanes, model = DeadlineQueue(), Lanes(1), set[TimedWork]()
    for work in some:
        queue.push(work)
        model.add(work)
    for action in actions:
        if isinstance(action, tuple):
            late = queue.hopeless(float(action[0]))
            assert set(late) == {one for one in model if one.latest < action[0]}
            model -= set(late)
        elif action % 3 == 0 and some:
            work = some[action % len(some)]
            assert queue.discard(work) == (work in model)
            model.discard(work)
        elif (taken := queue.take(0, lanes)) is not None:
            assert taken[0] is min(model, key=lambda one: one.rank)
            model.remove(taken[0])
        else:
            assert not model
        assert queue.waiting() == sorted(model, key=lambda one: one.rank)
        assert len(queue) == len(model)
        assert queue.next_latest() == min((one.latest for one in model), default=math.inf)


def test_a_queue_keeps_nothing_of_work_that_has_left() -> None:
    queue = DeadlineQueue()
    for order in range(10_000):
        work = TimedWork(order, 0.0, deadline=1e9)
        queue.push(work)
        assert queue.discard(work)
    assert len(queue._latest) < 100
