"""Ranks and stages whose nodes run one by one give the bits of one worker that runs so: over the
reference and over the CPU's operators, met by the library or without one."""

from __future__ import annotations

from typing import Any

import pytest
from test_ranks_of_workers import (
    DENSE,
    LATENT,
    MIXTURES,
    NORMS_OF_ALL_HEADS,
    STATES,
    answers,
    deals,
    dealt_often,
    sharing,
    worker_of,
)
from test_stages_of_workers import staged

from headrace.base.errors import EngineFault
from headrace.base.step import StepPlan
from headrace.dist.commons import Commons
from headrace.kernels.cpu.library import LibraryAbsent
from headrace.kernels.cpu.program import compile_program
from headrace.kernels.program import CallByCall
from headrace.loader.open import open_model
from oracle.asks import prompt, sampling
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept

FEW = ("qwen3", "qwen3_moe-sparse", "deepseek_v2")
EVERY = [*FEW, *sorted({*DENSE, *NORMS_OF_ALL_HEADS, *MIXTURES, *STATES, *LATENT} - {*FEW})]


@pytest.fixture(params=["library", "memory"])
def meeting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks meet: by the library, or by the shared memory alone."""
    if request.param == "memory":

        def absent(memory: Any) -> None:
            raise LibraryAbsent("not built")

        monkeypatch.setattr("headrace.kernels.cpu.meeting.LibraryMeeting", absent)
    return str(request.param)


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of the CPU's operators has records."""
    monkeypatch.setattr("headrace.kernels.cpu.operators.compile_program", lambda *given: None)


@pytest.mark.parametrize("name", EVERY)
def test_the_reference_over_ranks(kept: Kept, name: str, meeting: str) -> None:
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files, kernels="ref"))
    for ranks in (2, 3):
        with sharing(files, ranks, kernels="ref") as together:
            assert answers(together) == alone, ranks
            assert isinstance(together.workers[1].text.program, CallByCall)


@pytest.mark.parametrize("name", EVERY)
def test_the_cpu_operators_over_ranks(kept: Kept, name: str, unrecorded: None) -> None:
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files))
    for wired in (False, True):
        with sharing(files, 2, wired=wired) as together:
            assert answers(together) == alone, wired
            assert isinstance(together.workers[1].text.program, CallByCall)


@pytest.mark.parametrize("kernels", ["ref", "cpu"])
@pytest.mark.parametrize("name", MIXTURES)
def test_whole_experts_of_ranks(
    kept: Kept, name: str, kernels: str, unrecorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt_often(monkeypatch)
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files, kernels=kernels))
    with sharing(files, 2, kernels=kernels, dealt=True) as together:
        assert answers(together) == alone
        one, other = deals(together)
        assert all(went.any() for went in one.went)
        assert list(map(list, one.owners)) == list(map(list, other.owners))
        assert all((mine == its).all() for mine, its in zip(one.went, other.went, strict=True))


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_the_reference_in_stages(kept: Kept, name: str, each: int, meeting: str) -> None:
    if name == "gemma4":
        return  # Its layers read more than one value of those before: it has no stages.
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files, kernels="ref"))
    with staged(files, 2, each=each, kernels="ref") as together:
        assert answers(together) == alone


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("lowered", [0, 1])
def test_a_lowered_stage_beside_one_that_interprets(
    worker_files: Any, lowered: int, wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(operators: Any, plain: Any, *given: Any) -> Any:
        # Probabilities are the last stage's, or those of a worker alone.
        stage = plain.model.commons.stage if plain.model.commons else 1
        return compile_program(operators, plain, *given) if stage == lowered else None

    monkeypatch.setattr("headrace.kernels.cpu.operators.compile_program", compiled)
    alone = answers(worker_of(worker_files))
    with staged(worker_files, 2, wired=wired) as together:
        assert answers(together) == alone
        assert [worker.text.program.lowered for worker in together.workers] == [
            stage == lowered for stage in (0, 1)
        ]


def test_a_step_beyond_the_limits_of_stages_goes_in_parts(worker_files: Any) -> None:
    alone = answers(worker_of(worker_files, kernels="ref"))
    with staged(worker_files, 2, kernels="ref") as together:
        for worker in together.workers:
            worker.text.model.ranks._most = 7
        assert answers(together) == alone


def test_a_value_larger_than_the_room_goes_in_parts(
    worker_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kernels.ranks.ROOM", 4096)
    alone = answers(worker_of(worker_files, kernels="ref"))
    with sharing(worker_files, 2, kernels="ref") as together:
        assert answers(together) == alone


def test_ranks_end_alike(worker_files: Any, meeting: str) -> None:
    """A rank that is gone, or elsewhere in its program, ends the step of the others."""
    with sharing(worker_files, 2, kernels="ref") as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        driver.add("b", prompt(5), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        one = {"rows": plan.rows[:1], "starts": plan.starts[:1], "counts": plan.counts[:1]}
        given = {"samples": plan.samples[:1], "blocks": plan.blocks, "admitted": plan.admitted}
        coming = [
            together.threads[rank].submit(together.workers[rank].execute, each)
            for rank, each in enumerate((plan, StepPlan(plan.number, **one, **given)))
        ]
        for result in coming:
            assert "not in one place" in (result.result(10).error or "")
    with sharing(worker_files, 2, kernels="ref") as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        waiting = together.threads[0].submit(together.workers[0].execute, plan)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        Commons(together.commons[1], 2, 1).tear()
        assert "another rank of the group is gone" in (waiting.result(10).error or "")
        with pytest.raises(EngineFault, match="is gone"):
            Commons(together.commons[1], 2, 1).meet(0)
