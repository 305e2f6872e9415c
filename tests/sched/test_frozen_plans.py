"""Recorded workloads give the same plans, column by column, as when they were recorded.

A plan is a function of what arrived and of what came back: whoever changes how the control plane is
written, and not what it does, changes none of these digests. Whoever means to change what it does
records anew (`HEADRACE_RECORD=1`) and says in the commit which workloads moved and why.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import control_plane_harness
import pytest
from control_plane_harness import EOS, VOCAB, Driver, driver, request_of

from headrace.base.errors import ContextOverflow, Overloaded
from headrace.base.request import Request
from headrace.base.step import StepPlan
from headrace.sched import Work

RECORD = Path(__file__).parent / "frozen_plans.json"


def columns_of(plan: StepPlan) -> dict[str, object]:
    """Return the plan as sent to a worker, with an admission's row, sequence, tokens and choice."""
    return {
        "rows": plan.rows,
        "starts": plan.starts,
        "counts": plan.counts,
        "samples": plan.samples,
        "admitted": [
            (a.row, a.sequence_id, a.tokens, a.prompt_length, a.choice) for a in plan.admitted
        ],
        "blocks": [tuple(write) for write in plan.blocks],
        "copies": [tuple(copy) for copy in plan.copies],
        "released": plan.released,
    }


def digest(value: object, size: int = 8) -> str:
    return blake2b(repr(value).encode(), digest_size=size).hexdigest()


def record(finished: Driver) -> dict[str, object]:
    steps = [columns_of(plan) for plan in finished.plans]
    return {
        "steps": len(steps),
        "tokens": sum(plan.tokens for plan in finished.plans),
        "preemptions": finished.scheduler.stats().preemptions,
        "prefix_hits": finished.kv.prefix_hits,
        "columns": {name: digest([step[name] for step in steps]) for name in steps[0]},
        "ends": digest(sorted((key, delta.finish) for key, delta in finished.finish.items())),
        "plans": "".join(digest(step, 2) for step in steps),
    }


def played(d: Driver, seed: int, turns: int, **habits: object) -> Driver:
    """Random arrivals over `turns`, each followed by what the engine's loop does."""
    rng = random.Random(seed)
    roots = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    failing = float(habits.get("failing", 0.0))  # type: ignore[arg-type]
    for number in range(turns):
        if rng.random() < 0.45:
            prompt = rng.choice(roots)[: rng.randint(1, 24)]
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 5, 18]))]
            fields: dict[str, object] = {}
            if habits.get("priorities"):
                fields["priority"] = rng.choice([0, 0, 1, 3])
            if habits.get("gated"):
                fields["adapter"] = rng.choice([None, "a", "b"])
            if habits.get("tenants"):
                fields["cache_salt"] = rng.choice(["", "one"])
            request = request_of(
                f"r{number}",
                prompt,
                max_tokens=rng.choice([1, 3, 9, 20, None]),
                stop_ids=rng.choice([(), (EOS,), (EOS, 3)]),
                n=rng.choice([1, 1, 1, 3]),
                min_tokens=rng.choice([0, 1]),
                prompt_logprobs=rng.choice([None, None, None, 0]),
                **fields,  # type: ignore[arg-type]
            )
            with contextlib.suppress(Overloaded, ContextOverflow):
                d.add(request)
        if rng.random() < 0.06 and d.requests:
            d.abort(rng.choice(list(d.requests)))
        if rng.random() < 0.01:
            d.kv.reset()
        d.step(fails=rng.random() < failing)
        if rng.random() < 0.3:
            d.step()
    d.run()
    d.check_answers()
    return d


class Gate:
    """Lets adapter "b" in only at every third moment, and of "a" two at the same time."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = lambda: 0.0
        self.held: set[int] = set()

    def verify(self, request: Request) -> None: ...

    def prepare(self, work: Work) -> bool:
        adapter = work.request.spec.adapter
        if adapter == "b":
            return round(self.now() * 100) % 3 == 0
        if adapter == "a":
            if len(self.held) == 2:
                return False
            self.held.add(work.id)
        return True

    def free(self, work: Work) -> None:
        self.held.discard(work.id)


def gated() -> Driver:
    gate = Gate()
    d = driver((None, 60), rows=6, step_tokens=30, depth=2, resources=(gate,))
    gate.now = lambda: d.now
    return played(d, 11, 120, gated=True)


def several_waves() -> Driver:
    """Equal prefixes that arrive together, conversations that go on, whole hits."""
    d = driver((None, 64), rows=8, step_tokens=48, depth=2, max_context=64)
    prefix = list(range(1, 25))
    for wave in range(3):
        for i in range(6):
            d.add(request_of(f"w{wave}-{i}", [*prefix, 30 + i], max_tokens=3 + i, n=1 + i % 2))
        d.run()
        for i in range(6):
            answer = d.out[(f"w{wave}-{i}", 0)]
            d.add(request_of(f"t{wave}-{i}", [*prefix, 30 + i, *answer, wave], max_tokens=4))
        d.run()
    d.check_answers()
    return d


def vectors() -> Driver:
    """Texts and inputs of which a vector is wanted, in one batch."""
    d = driver((None, 40), rows=6, step_tokens=24, depth=2)
    for i in range(24):
        prompt = [1 + i % 5] * (1 + i * 7 % 23)
        if i % 3:
            d.add(request_of(f"r{i}", prompt, max_tokens=6))
        else:
            d.add(request_of(f"r{i}", prompt, task="vector"))
        d.step()
    d.run()
    d.check_answers()
    return d


WORKLOADS: dict[str, Callable[[], Driver]] = {
    "plain": lambda: played(driver(rows=8, step_tokens=64), 1, 120),
    "plain at depth 2": lambda: played(driver(rows=8, step_tokens=64, depth=2), 2, 120),
    "small budget": lambda: played(driver(rows=4, step_tokens=7, depth=2), 3, 120),
    "preemption": lambda: played(driver((None, 17), rows=8, depth=1), 4, 120),
    "preemption at depth 2": lambda: played(driver((None, 17), rows=8, depth=2), 5, 120),
    "windows": lambda: played(driver((None, 40), (9, 30), (3, 24), depth=2), 6, 120),
    "priorities": lambda: played(
        driver((None, 24), rows=3, depth=2, policy="priority"), 7, 120, priorities=True
    ),
    "tenants": lambda: played(driver((None, 40), rows=6), 8, 120, tenants=True),
    "failing steps": lambda: played(driver((None, 40), depth=2), 9, 120, failing=0.1),
    "drafts": lambda: played(driver(drafts=2, depth=2, step_tokens=40), 10, 120),
    "gated": gated,
    "waves": several_waves,
    "vectors": vectors,
}


@pytest.fixture(scope="module")
def played_all() -> dict[str, Driver]:
    """All workloads in the order in which they were recorded: the fake's tokens follow from the
    numbers of positions, which are given in the order in which positions are first seen."""
    control_plane_harness._identities.clear()
    return {name: play() for name, play in WORKLOADS.items()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_plans_are_those_of_the_record(name: str, played_all: dict[str, Driver]) -> None:
    finished = played_all[name]
    now = record(finished)
    if os.environ.get("HEADRACE_RECORD"):
        known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known[name] = now
        RECORD.write_text(json.dumps(known, indent=1) + "\n")
    then = json.loads(RECORD.read_text())[name]
    if now != then:
        first = next(
            (
                at // 4
                for at in range(0, max(len(now["plans"]), len(then["plans"])), 4)  # type: ignore[arg-type]
                if now["plans"][at : at + 4] != then["plans"][at : at + 4]  # type: ignore[index]
            ),
            None,
        )
        differ = [key for key in then if key != "plans" and now[key] != then[key]]
        plan = None if first is None or first >= len(finished.plans) else finished.plans[first]
        pytest.fail(
            f"{name}: {differ} differ, and the first plan is {first}; recorded are digests, so "
            f"compare it with that of the commit before: {plan}"
        )
