"""Workers that have some layers each give the bits of one that has all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from test_ranks_of_workers import (
    DENSE,
    LATENT,
    MIXTURES,
    NORMS_OF_ALL_HEADS,
    STATES,
    Ranks,
    answers,
    worker_of,
)

from headrace.base.absorb import absorbed
from headrace.base.errors import OptionError
from headrace.base.stages import stages
from headrace.base.step import StepPlan, StepResult
from headrace.loader.open import open_model
from headrace.models.registry import describe
from oracle.asks import prompt, sampling
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept


class Stages(Ranks):
    """Several workers in one place of a `Driver`, one step in flight."""

    each: int
    """Ranks of a stage."""

    def execute(self, plan: StepPlan) -> StepResult:
        results = self._each(lambda rank: self.workers[rank].execute(plan))
        for result in results:
            assert result.error is None, result.error
        last = results[-self.each :]
        for result in last:
            assert (result.tokens, result.logprobs) == (last[0].tokens, last[0].logprobs)
        places = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
        for worker in self.workers[: self.each]:
            worker.learn(plan.rows, places, last[0].tokens)
        return last[0]


@contextmanager
def staged(
    files: Any, count: int, *, each: int = 1, wired: bool = False, **options: Any
) -> Iterator[Stages]:
    """`each`: ranks of a stage."""
    given = {"stages": count, **options}
    made = Stages(lambda **more: worker_of(files, **given, **more), count * each, wired, count)
    made.each = each
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_the_bits_of_one_worker(worker_files: Any, each: int, wired: bool) -> None:
    alone = answers(worker_of(worker_files))
    with staged(worker_files, 2, each=each, wired=wired) as together:
        assert answers(together) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*sorted({*DENSE} - {"gemma4"}), *NORMS_OF_ALL_HEADS, *MIXTURES, *STATES, *LATENT]
)
def test_every_kind_of_layer(kept: Kept, name: str) -> None:
    files = open_model(str(kept(families.make, name)))
    graph = absorbed(describe(files.arch))
    alone = answers(worker_of(files))
    for count, each in ((2, 1), (3, 1), (2, 2), (2, 3)):
        if count > 2 and len(graph.attentions()) + len(graph.recurrent()) < 3:
            continue
        assert len(stages(graph, count)) == count
        for wired in (False, True):
            with staged(files, count, each=each, wired=wired) as together:
                assert answers(together) == alone, (count, each, wired)


def test_stages_are_graphs_of_all_layers(worker_files: Any) -> None:
    graph = absorbed(describe(worker_files.arch))
    first, last = stages(graph, 2)
    layers = [[spec.layer for spec in part.attentions()] for part in (first, last)]
    assert [*layers[0], *layers[1]] == [spec.layer for spec in graph.attentions()]
    assert min(map(len, layers)) > 0
    assert set(first.outputs) == {"hidden"}
    assert set(last.outputs) == set(graph.outputs)
    assert last.nodes[0].kind == "receive"


def test_more_stages_than_parts_are_refused(worker_files: Any) -> None:
    """Attention and what follows it can be apart, before the last layer's."""
    graph = absorbed(describe(worker_files.arch))
    parts = 2 * worker_files.arch.layers - 1
    assert len(stages(graph, parts)) == parts
    with pytest.raises(OptionError, match=f"PP{parts + 1}: the model has {parts} parts"):
        stages(graph, parts + 1)


@pytest.mark.slow
def test_what_every_layer_reads_cannot_be_handed_on(kept: Kept) -> None:
    """Gemma 4 has an input of its own for each layer, made at the beginning."""
    graph = absorbed(describe(open_model(str(kept(families.make, "gemma4"))).arch))
    with pytest.raises(OptionError, match="cannot be dealt out to stages"):
        stages(graph, 2)


def test_a_stage_that_fails_ends_the_others(worker_files: Any) -> None:
    with staged(worker_files, 2) as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None

        class Failing:
            def launch(self, *_: Any) -> None:
                raise MemoryError("none left")

        together.workers[0]._steps = Failing()  # type: ignore[assignment]
        first, last = together._each(lambda rank: together.workers[rank].execute(plan))
        assert "none left" in (first.error or "")
        assert "another rank of the group is gone" in (last.error or "")
