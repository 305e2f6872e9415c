"""Pictures as the scheduler plans them: one step of each at a time, and none that starves."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from headrace.base.denoising import Denoiser, NoiseSolver, PictureWish
from headrace.base.outputs import PictureOutput
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import PoolShape, StepPlan, StepResult
from headrace.kv import KvManager
from headrace.sched import Limits, Scheduler

TOKENS = 16
DENOISER = Denoiser(1, 8, 2, 10, 1, NoiseSolver("ddim"))


def scheduler(*, rows: int = 8, units: int = 4 * TOKENS, depth: int = 1) -> Scheduler:
    limits = Limits(rows, units, 64, 100, depth=depth, denoiser=DENOISER)
    return Scheduler(limits, KvManager(PoolShape(4, ())))


def request(name: str, steps: int, guidance: float = 2.0) -> Request:
    wish = PictureWish(1, steps, guidance)
    return Request(name, [1], RequestSpec(SamplingParams(), 0, task="picture", picture=wish))


def landed(of: Scheduler, plan: StepPlan) -> list[str]:
    """Book a step; return the pictures that it ended."""
    outputs = {entry: PictureOutput(b"", 1) for entry, last in enumerate(plan.samples) if last}
    result = StepResult(plan.number, [[] for _ in plan.rows], outputs=outputs or None)
    return [delta.request_id for delta in of.update(plan, result) if delta.finish == "stop"]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_is_an_atom_of_each_picture(depth: int) -> None:
    of, draws = scheduler(depth=depth), random.Random(3)
    wishes = {f"p{at}": (draws.randint(1, 9), draws.choice((1.0, 3.0))) for at in range(20)}
    for name, wish in wishes.items():
        of.add(request(name, *wish))
    ended, counts, flying = list[str](), Counter[int](), list[StepPlan]()
    while of.has_work:
        while (plan := of.schedule()) is not None:
            assert plan.tokens <= 4 * TOKENS
            assert set(plan.counts) <= {TOKENS, 2 * TOKENS}
            counts.update(plan.counts)
            flying.append(plan)
        ended += landed(of, flying.pop(0))
        of.check_integrity()
    assert sorted(ended) == sorted(wishes)
    for size in (1, 2):
        steps = sum(many for many, factor in wishes.values() if (factor > 1) == (size == 2))
        assert counts[size * TOKENS] == steps


def test_a_share_that_is_smaller_than_a_step_has_one_all_the_same() -> None:
    """Other models wait for the device: a step has one picture, and nothing stands still."""
    of = scheduler()
    of.room.shared = 5
    for name in ("a", "b"):
        of.add(request(name, 3))
    ended, plans = list[str](), 0
    while (plan := of.schedule()) is not None:
        assert plan.counts == [2 * TOKENS]
        ended += landed(of, plan)
        plans += 1
    assert ended == ["a", "b"]
    assert plans == 6


def test_an_abort_between_two_steps_frees_the_row() -> None:
    of = scheduler(rows=1)
    of.add(request("gone", 500))
    of.add(request("next", 1))
    for _ in range(3):
        plan = of.schedule()
        assert plan is not None
        assert not landed(of, plan)
    assert [delta.finish for delta in of.abort("gone")] == ["abort"]
    plan = of.schedule()
    assert plan is not None
    assert landed(of, plan) == ["next"]
    assert not of.has_work
    of.check_integrity()
