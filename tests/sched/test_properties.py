"""Random workloads against the checking worker: what must hold whatever happens."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
from control_plane_harness import DRAFTERS, EOS, VOCAB, Driver, pool_of, request_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.base.errors import ContextOverflow, Overloaded
from headrace.base.spec import InputSpan
from headrace.base.step import PoolShape
from headrace.sched import ALL, Limits

EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "150"))

pools = st.one_of(
    st.builds(
        lambda blocks, size, slots: pool_of((None, blocks), block_size=size, slots=slots),
        st.integers(3, 40),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([0, 1, 3]),
    ),
    st.builds(
        lambda full, window, blocks: pool_of((None, full), (window, blocks)),
        st.integers(4, 40),
        st.integers(1, 13),
        st.integers(4, 40),
    ),
    st.builds(
        lambda a, b, blocks: pool_of((a, blocks), (b, blocks + 2), block_size=2),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(6, 30),
    ),
)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    drafts = draw(st.sampled_from([0, 0, 1, 2, 7]))
    stages = draw(st.sampled_from([1, 1, 2, 3])) if drafts == 0 else 1
    return Limits(
        rows=draw(st.integers(1, 8)),
        step_tokens=draw(st.integers(1, 40)),
        max_context=draw(st.integers(8, 60)),
        max_waiting=draw(st.sampled_from([2, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        depth=draw(st.sampled_from([1, 2])) if stages == 1 else stages,
        drafts=drafts,
        stages=stages,
    )


@given(data=st.data(), bounds=limits(), pool=pools, seed=st.integers(0, 2**32))
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_request_gets_its_answer(
    data: st.DataObject, bounds: Limits, pool: PoolShape, seed: int
) -> None:
    """With a tier below the pool there are three engines, one after the other, that share it."""
    kept: dict[tuple[int, bytes], list[int]] | None = data.draw(st.sampled_from([None, {}]))
    for life in range(1 if kept is None else 3):
        one_life(data, bounds, pool, seed + life, kept)


def one_life(
    data: st.DataObject,
    bounds: Limits,
    pool: PoolShape,
    seed: int,
    kept: dict[tuple[int, bytes], list[int]] | None,
) -> None:
    driver = Driver(
        bounds,
        pool,
        seed=seed,
        prefix_cache=data.draw(st.booleans()),
        drafter=data.draw(st.sampled_from(sorted(DRAFTERS))),
        kept=kept,
    )
    rng, tier = driver.rng, driver.tier
    if tier is not None:
        tier.fails = data.draw(st.sampled_from([0.0, 0.3]))
    shared = random.Random(7) if kept is not None else rng
    roots = [[shared.randrange(VOCAB) for _ in range(shared.randint(1, 30))] for _ in range(2)]
    failures = data.draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))
    aborts = data.draw(st.sampled_from([0.0, 0.2]))
    encodes = data.draw(st.booleans())
    number = 0
    for _ in range(data.draw(st.integers(1, 60))):
        action = rng.random()
        if action < 0.4:
            prompt = rng.choice(roots)[: rng.randint(1, 30)]
            if driver.out and rng.random() < 0.3:
                # A conversation goes on.
                name, choice = rng.choice(list(driver.out))
                prompt = driver.requests[name].prompt + driver.out[(name, choice)]
            prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 5, 20]))]
            inputs = ()
            if rng.random() < 0.3:
                length = rng.randint(1, len(prompt))
                first = rng.randint(0, len(prompt) - length)
                inputs = (InputSpan(first, length, "image", rng.choice([b"a", b"b"])),)
            request = request_of(
                f"r{number}",
                prompt,
                max_tokens=rng.choice([None, 1, 2, 5, 20]),
                stop_ids=rng.choice([(), (EOS,), (EOS, 1, 2, 3)]),
                n=rng.choice([1, 1, 1, 3]),
                min_tokens=rng.choice([0, 0, 1]),
                prompt_logprobs=rng.choice([None, None, None, 1]),
                priority=rng.choice([0, 0, 1, 5]),
                cache_salt=rng.choice(["", "", "other"]),
                adapter=rng.choice([None, None, "a"]),
                inputs=inputs,
                task="vector" if rng.random() < (0.5 if encodes else 0.1) else "tokens",
            )
            if not request.spec.generates:
                sampling = replace(request.spec.sampling, n=1, prompt_logprobs=None)
                request.spec = replace(request.spec, sampling=sampling)
            number += 1
            before = driver.scheduler.waiting
            length, budget = len(request.prompt), bounds.step_tokens
            atom = rng.choice([1, 3, rng.randint(1, 30), ALL])
            once = encodes and not request.spec.generates and min(atom, length) <= budget
            try:
                if once:
                    driver.add_once(request, atom)
                else:
                    driver.add(request)
            except (Overloaded, ContextOverflow):
                assert driver.scheduler.waiting == before
        elif action < 0.4 + aborts and driver.requests:
            driver.abort(rng.choice(list(driver.requests)))
        elif action < 0.7:
            driver.submit(fails=rng.random() < failures)
        elif driver.flying:
            driver.receive()
        if tier is not None and tier.orders and rng.random() < 0.5:
            tier.work()
        if rng.random() < 0.02:
            driver.kv.reset()
            if tier is not None and rng.random() < 0.5:
                tier.forget()
    driver.run()
    driver.check_answers()
    if tier is not None:
        tiers = driver.kv.tiers
        assert tiers is not None
        while tier.orders:
            tier.work()
        tiers.turn()
        assert not tiers.held
        assert not tiers.stats.wrong
        driver.check()
        assert driver.kv.usage == 0.0


def test_a_window_waits_for_the_oldest_of_three_chunks() -> None:
    """A block is not given back while a step in flight, in whichever stage, looks into it."""
    limits = Limits(rows=1, step_tokens=1, max_context=8, max_waiting=2, depth=3, stages=3)
    driver = Driver(limits, pool_of((None, 4), (1, 4)), prefix_cache=False)
    driver.add(request_of("r", [1, 2, 3, 4, 5, 6], max_tokens=1))
    driver.run()
    driver.check_answers()


class Drawn:
    """Replay of values that hypothesis once drew."""

    def __init__(self, *values: object) -> None:
        self.values = list(values)

    def draw(self, _: object) -> object:
        return self.values.pop(0)


def test_deltas_of_a_plan_that_came_to_nothing_go_with_their_row() -> None:
    """A request with such deltas may be preempted for a more urgent one while the next plan is
    made."""
    limits = Limits(
        rows=4, step_tokens=13, max_context=28, max_waiting=2, policy="priority", depth=2, drafts=1
    )
    first = False, "right for one", 0.3, 0.0, 0.0, False, 55
    second = True, "right", 0.0, 0.0, 0.2, False, 37
    data, kept = Drawn(*first, *second), {}
    for life in range(2):
        one_life(data, limits, pool_of((None, 11), (1, 4)), 568226 + life, kept)


def test_what_is_copied_is_held_when_a_step_before_fails() -> None:
    """The step that copies it is in flight, if only for nothing."""
    limits = Limits(rows=5, step_tokens=34, max_context=30, max_waiting=2, depth=2, drafts=1)
    first = False, "random", 0.0, 0.0, 0.0, False, 1
    second = True, "random", 0.0, 0.0, 0.0, False, 20
    third = True, "random", 0.0, 0.3, 0.0, False, 29
    data, kept = Drawn(*first, *second, *third), {}
    for life in range(3):
        one_life(data, limits, pool_of((None, 13), block_size=4), 7495835 + life, kept)


@pytest.mark.parametrize("depth", [1, 2])
def test_same_input_gives_the_same_plans(depth: int) -> None:
    def plans() -> list[object]:
        driver = Driver(
            Limits(rows=4, step_tokens=16, max_context=64, max_waiting=100, depth=depth),
            pool_of((None, 24), (6, 12)),
        )
        for i in range(12):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][: 3 + i % 7] + [i] * (i * 5 % 17)
            driver.add(request_of(f"r{i}", prompt, max_tokens=9, n=1 + i % 2))
            driver.step()
        driver.run()
        driver.check_answers()
        return driver.plans

    assert plans() == plans()
