"""The shares of several models in one device's time: within the bound, and nothing starves."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import OptionError
from headrace.sched.arbiter import Arbiter

WEIGHTS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4)
SECONDS = st.floats(min_value=0.001, max_value=0.3)


def arbiter_of(weights: list[float]) -> Arbiter:
    arbiter = Arbiter()
    for model, weight in enumerate(weights):
        arbiter.join(model, weight)
    return arbiter


def serve(arbiter: Arbiter, working: list[int], expected: float, taken: float) -> int:
    """Run the next step; return whose it was."""
    model = arbiter.order(working)[0]
    arbiter.begin(model, expected)
    arbiter.correct(model, taken - expected)
    return model


@settings(max_examples=200, deadline=None)
@given(WEIGHTS, st.lists(st.tuples(SECONDS, SECONDS), min_size=20, max_size=60))
def test_shares_are_within_a_step_of_each(
    weights: list[float], steps: list[tuple[float, float]]
) -> None:
    """Over every interval in which two models have work, whatever was expected of their steps."""
    arbiter = arbiter_of(weights)
    models = range(len(weights))
    served = [[0.0] * len(weights)]
    longest = [0.0] * len(weights)
    for expected, taken in steps:
        model = serve(arbiter, list(models), expected, taken)
        longest[model] = max(longest[model], taken)
        served.append([time + taken * (place == model) for place, time in enumerate(served[-1])])
    for one, other in combinations(models, 2):
        bound = longest[one] / weights[one] + longest[other] / weights[other]
        # The differences of a walk over intervals: its highest point less its lowest.
        walk = [at[one] / weights[one] - at[other] / weights[other] for at in served]
        assert max(walk) - min(walk) <= bound + 1e-9


@settings(max_examples=200, deadline=None)
@given(
    WEIGHTS,
    st.lists(st.tuples(st.sets(st.integers(0, 3)), SECONDS), min_size=5, max_size=60),
    st.data(),
)
def test_work_that_comes_waits_for_one_step_of_each_other(
    weights: list[float], steps: list[tuple[set[int], float]], data: st.DataObject
) -> None:
    """Whatever went before: nothing is saved up by having no work, and nothing starves."""
    arbiter = arbiter_of(weights)
    for working, seconds in steps:
        there = [model for model in range(len(weights)) if model in working]
        if there:
            serve(arbiter, there, seconds, seconds)
    idle = data.draw(st.integers(0, len(weights) - 1))
    others = [model for model in range(len(weights)) if model != idle]
    for _ in range(3 * len(others)):  # By now its last steps are paid for, however long they were.
        serve(arbiter, others, 1000.0, 1000.0)
    owed = arbiter.order([idle, *others]).index(idle)
    before = []
    while (model := serve(arbiter, [idle, *others], 0.05, 0.05)) != idle:
        before.append(model)
    assert owed == len(before)
    assert len(set(before)) == len(before), "one had two steps before it"


def test_idle_time_earns_nothing() -> None:
    arbiter = arbiter_of([1.0, 1.0])
    for _ in range(100):
        serve(arbiter, [0], 1.0, 1.0)
    turns = [serve(arbiter, [0, 1], 1.0, 1.0) for _ in range(10)]
    assert abs(turns.count(0) - turns.count(1)) <= 2


def test_models_come_and_go() -> None:
    arbiter = arbiter_of([1.0, 1.0])
    for _ in range(5):
        serve(arbiter, [0, 1], 1.0, 1.0)
    arbiter.leave(0)
    arbiter.join(7, 3.0)
    turns = [serve(arbiter, [1, 7], 1.0, 1.0) for _ in range(40)]
    assert abs(turns.count(7) - 30) <= 2
    with pytest.raises(OptionError, match="above 0"):
        arbiter.join(8, 0.0)
