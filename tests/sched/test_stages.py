"""Steps of a model whose layers are dealt out: several in flight, each of other sequences."""

from __future__ import annotations

import pytest
from control_plane_harness import driver, request_of


@pytest.mark.parametrize("stages", [2, 3])
def test_decodes_are_shared_by_the_steps_in_flight(stages: int) -> None:
    run = driver(stages=stages, rows=6)
    for number in range(6):
        run.add(request_of(f"r{number}", [number + 1, 2, 3], max_tokens=20))
    run.run()
    run.check_answers()
    steady = run.plans[2 * stages : -2 * stages]
    assert len(steady) > 10
    assert {len(plan.rows) for plan in steady} == {6 // stages}
    for at, plan in enumerate(steady[: 1 - stages]):
        rows = [row for later in steady[at : at + stages] for row in later.rows]
        assert sorted(rows) == sorted(set(rows)), plan


def test_a_long_prompt_has_a_chunk_in_every_stage() -> None:
    """Known tokens need no sampled one: the next chunk follows while the last one is in flight."""
    run = driver(stages=2, step_tokens=8)
    run.add(request_of("long", list(range(1, 41)), max_tokens=2))
    assert run.submit()
    assert run.submit()
    assert [plan.starts for plan in run.plans] == [[0], [8]]
    run.run()
    run.check_answers()


@pytest.mark.parametrize(
    ("stages", "prompts", "chunks"),
    [
        (2, [512], [64] * 8),
        (3, [512], [47] * 10 + [42]),
        (2, [20], [20]),
        (2, [16] * 8, [32] * 4),
        (2, [3000], [158] * 18 + [156]),
        (1, [512], [512]),
    ],
)
def test_a_prompt_is_cut_so_that_all_stages_are_busy(
    stages: int, prompts: list[int], chunks: list[int]
) -> None:
    """Equal chunks, more of them the more there is: the sum and the longest are what they take."""
    run = driver((None, 1000), stages=stages, step_tokens=512, max_context=4000)
    for number, length in enumerate(prompts):
        run.add(request_of(f"r{number}", [1 + number] * length, max_tokens=1))
    run.run()
    run.check_answers()
    assert [plan.tokens for plan in run.plans] == chunks


def test_chunks_grow_with_what_waits_and_begin_anew_behind_it() -> None:
    run = driver((None, 1000), stages=2, step_tokens=512, max_context=4000)
    run.add(request_of("a", [1] * 512, max_tokens=1))
    assert run.submit()
    run.add(request_of("b", [2] * 2000, max_tokens=1))
    assert run.submit()
    assert [plan.tokens for plan in run.plans] == [64, 144]
    run.run()
    run.add(request_of("c", [3] * 512, max_tokens=1))
    assert run.submit()
    assert run.plans[-1].tokens == 64


def test_a_prompt_makes_no_lane_of_decodes_longer() -> None:
    """Decoding sequences are dealt out among themselves, whoever else runs."""
    run = driver((None, 1000), stages=2, rows=9, step_tokens=512, max_context=4000)
    for number in range(8):
        run.add(request_of(f"r{number}", [1 + number], max_tokens=60))
    while len(run.plans) < 6:
        run.step()
    run.add(request_of("long", [1] * 2000, max_tokens=1))
    before = len(run.plans)
    while len(run.plans) < before + 12:
        run.step()
    lanes = [sum(count == 1 for count in plan.counts) for plan in run.plans[before:]]
    assert lanes == [4] * len(lanes)
    run.run()
    run.check_answers()


def test_nobody_is_left_behind() -> None:
    """More decode than a step has a share for, and some come and go."""
    run = driver(stages=2, rows=5)
    for number in range(12):
        run.add(request_of(f"r{number}", [number + 1], max_tokens=3 + number % 7))
    run.run()
    run.check_answers()
    latest: dict[int, int] = {}
    for at, plan in enumerate(run.plans):
        for row in plan.released:
            latest.pop(row, None)
        for row in plan.rows:
            assert at - latest.get(row, at) <= 4, f"row {row} waited"
            latest[row] = at
