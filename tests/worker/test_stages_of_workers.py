"""Workers that have some layers each give the bits of one that has all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    dealt_often,
    sharing,
    worker_of,
)

from headrace.base.absorb import absorbed
from headrace.base.cut import mixtures
from headrace.base.errors import OptionError
from headrace.base.stages import stages
from headrace.base.step import StepPlan, StepResult
from headrace.loader.open import open_model
from headrace.models.registry import describe
from oracle import lora
from oracle.asks import prompt, sampling
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept

ADAPTED = ("llama", "qwen3", "gemma3", "starcoder2")


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


@pytest.mark.slow
@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("name", [*MIXTURES, "olmoe", "minimax_m2", *STATES[1:], *LATENT])
def test_whole_experts_of_the_ranks_of_a_stage(
    kept: Kept, name: str, wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage deals out its own, and one without a mixture has none to deal."""
    dealt_often(monkeypatch)
    files = open_model(str(kept(families.make, name)))
    graph = absorbed(describe(files.arch))
    if not mixtures(graph) or name.startswith("gemma4"):
        return
    alone = answers(worker_of(files))
    for each in (2, 3):
        with staged(files, 2, each=each, wired=wired, dealt=True) as together:
            assert answers(together) == alone, each
            for stage, part in enumerate(stages(graph, 2)):
                for worker in together.workers[stage * each : (stage + 1) * each]:
                    dealing = worker.text.model.dealing
                    assert len(dealing.owners if dealing else ()) == len(mixtures(part))


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(one, marks=pytest.mark.slow) for one in ADAPTED)]
)
def test_adapters_of_ranks_and_stages(kept: Kept, tmp_path: Path, family: str) -> None:
    """Rows with one, with another, and with none, in one batch; more adapters than slots."""
    path = kept(families.make, family)
    places = [
        (f"a{seed}", str(lora.make(path, tmp_path / f"a{seed}", seed=seed, **config)))
        for seed, config in enumerate([{}, {"target_modules": "all-linear", "r": 8}, {"r": 3}])
    ]
    files = open_model(str(path))

    def told(worker: Any, workers: list[Any]) -> Any:
        for each in workers:
            for name, folder in places:
                each.load_adapter(name, folder)
        driver = Driver(worker, blocks=80, step_tokens=64, rows=2)
        for number, name in enumerate([None, "a0", "a1", "a0", "a2", "a1", None]):
            drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
            wish = sampling(max_tokens=10, logprobs=1, prompt_logprobs=1, **drawn)
            driver.add(f"{name} {number}", prompt(30 + number, number), wish, adapter=name)
        return driver.run()

    options: dict[str, Any] = {"adapters": 2, "adapter_rank": 8}
    alone = worker_of(files, **options)
    expected = told(alone, [alone])
    assert len({str(answer.tokens) for answer in expected.values()}) == 7
    for wired in (False, True):
        with sharing(files, 3 - wired, wired=wired, **options) as together:
            assert told(together, together.workers) == expected, wired
        with staged(files, 2, each=1 + wired, wired=wired, **options) as together:
            assert told(together, together.workers) == expected, wired


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
