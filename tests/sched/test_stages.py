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
    """What is known needs no token: the next chunk follows while the last one is in flight."""
    run = driver(stages=2, step_tokens=8)
    run.add(request_of("long", list(range(1, 41)), max_tokens=2))
    assert run.submit()
    assert run.submit()
    assert [plan.starts for plan in run.plans] == [[0], [8]]
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
