"""Workers that share a model give the bits of one: in threads of this process, on a commons."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest

from headrace.base.absorb import absorbed
from headrace.base.cut import cut, mixtures
from headrace.base.errors import OptionError
from headrace.base.step import PoolShape, StepPlan, StepResult
from headrace.dist.commons import Commons, make_commons
from headrace.kernels.cpu.wire import Wire
from headrace.kernels.dealing import Dealing
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.worker import Worker, WorkerOptions
from oracle.asks import prompt, sampling
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept

DENSE = (
    "qwen2",
    "qwen3",
    "llama",
    "mistral-window",
    "gemma3",
    "gemma4",
    "phi3",
    "cohere2",
    "starcoder2",
)
NORMS_OF_ALL_HEADS = ("olmo2", "olmo3", "olmoe", "minimax_m2")
MIXTURES = (
    "qwen2_moe",
    "qwen3_moe-sparse",
    "mixtral",
    "glm4_moe",
    "granitemoe",
    "gpt_oss",
    "gemma4-mixture",
    "llama4",
)
STATES = ("lfm2", "granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe")
LATENT = ("deepseek_v2", "deepseek_v2-groups", "deepseek_v3")


class Ranks:
    """Several workers in one place of a `Driver`."""

    def __init__(
        self, make: Callable[..., Worker], ranks: int, wired: bool, stages: int = 1
    ) -> None:
        """`wired`: they share no memory, and exchange over sockets."""
        self.commons = [make_commons()] * ranks
        self.wires: list[Wire] = []
        if wired:
            self.commons = [make_commons() for _ in range(ranks)]
            self.fences = [Commons(c, ranks, rank, stages) for rank, c in enumerate(self.commons)]
            self.sockets: dict[tuple[int, int], socket.socket] = {}
            for low, high in combinations(range(ranks), 2):
                ends = socket.socketpair()
                self.sockets[low, high], self.sockets[high, low] = ends
            for rank, commons in enumerate(self.fences):
                to = [-1 if at == rank else self.sockets[rank, at].fileno() for at in range(ranks)]
                self.wires.append(Wire(commons, to))
        self.threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(ranks)]
        self.workers = self._each(lambda at: make(rank=at, ranks=ranks, commons=self.commons[at]))
        self.arch, self.options = self.workers[0].arch, self.workers[0].options
        self._resolved = self.workers[0]._resolved

    def _each(self, call: Callable[[int], Any]) -> list[Any]:
        coming = [thread.submit(call, rank) for rank, thread in enumerate(self.threads)]
        return [one.result(60) for one in coming]

    def allocate(self, pool: PoolShape) -> None:
        self._each(lambda rank: self.workers[rank].allocate(pool))
        self._each(lambda rank: self.workers[rank].warm_up())

    def execute(self, plan: StepPlan) -> StepResult:
        results = self._each(lambda rank: self.workers[rank].execute(plan))
        for result in results:
            assert result.error is None, result.error
            assert result.tokens == results[0].tokens
            assert result.logprobs == results[0].logprobs
        return results[0]

    def close(self) -> None:
        for commons in self.commons:
            Commons(commons, 1, 0).tear()
        for thread in self.threads:
            thread.shutdown()
        for worker in self.workers:
            worker.close()
        for wire in self.wires:
            wire.close()
        for end in self.sockets.values() if self.wires else ():
            end.close()
        for commons in set(self.commons):
            os.close(commons)


@contextmanager
def sharing(files: Any, ranks: int, *, wired: bool = False, **options: Any) -> Iterator[Ranks]:
    made = Ranks(lambda **more: worker_of(files, **options, **more), ranks, wired)
    try:
        yield made
    finally:
        made.close()


def worker_of(files: Any, **options: Any) -> Worker:
    defaults = {"kernels": "cpu", "threads": 1, "rows": 8, "step_tokens": 64, "max_context": 512}
    return Worker(files, WorkerOptions(**{**defaults, **options}))


def answers(worker: Any) -> dict[Any, Any]:
    """Prompts in chunks, decoding side by side, greedy and drawn, masks, log-probabilities."""
    driver = Driver(worker, blocks=80, step_tokens=64)
    driver.add("greedy", prompt(100), sampling(max_tokens=12))
    driver.add("drawn", prompt(7, 1), sampling(temperature=1.0, top_p=0.9, seed=5, max_tokens=12))
    driver.add("biased", prompt(30, 2), sampling(logit_bias={7: 2.0}, max_tokens=8, logprobs=3))
    driver.add("penal", prompt(9, 3), sampling(repetition_penalty=1.3, max_tokens=8))
    driver.add("scored", prompt(40, 4), sampling(max_tokens=3, prompt_logprobs=2, logprobs=1))
    for index in range(3):
        driver.add(f"other {index}", prompt(20 + index, 5 + index), sampling(max_tokens=10))
    return driver.run()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bits_of_one_worker(worker_files: Any, ranks: int) -> None:
    alone = answers(worker_of(worker_files))
    with sharing(worker_files, ranks) as together:
        assert answers(together) == alone


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bits_of_one_worker_over_sockets(worker_files: Any, ranks: int) -> None:
    alone = answers(worker_of(worker_files))
    with sharing(worker_files, ranks, wired=True) as together:
        assert answers(together) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, *NORMS_OF_ALL_HEADS, *MIXTURES, *STATES, *LATENT])
def test_every_kind_of_layer_over_sockets(kept: Kept, name: str) -> None:
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files))
    for ranks in (2, 3):
        with sharing(files, ranks, wired=True, threads=2 if ranks == 2 else 1) as together:
            assert answers(together) == alone, ranks


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "k8v4"])
@pytest.mark.parametrize("name", DENSE)
def test_every_family_and_kv_type(kept: Kept, name: str, kv_dtype: str) -> None:
    files = open_model(str(kept(families.make, name)))
    alone = answers(worker_of(files, kv_dtype=kv_dtype))
    for ranks in (2, 3):
        with sharing(files, ranks, kv_dtype=kv_dtype, threads=2 if ranks == 2 else 1) as together:
            assert answers(together) == alone, ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NORMS_OF_ALL_HEADS, *MIXTURES, *STATES, *LATENT])
def test_every_kind_of_layer(kept: Kept, name: str) -> None:
    equal_over_ranks(open_model(str(kept(families.make, name))))


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT)
def test_latent_heads_of_whole_panels(kept: Kept, name: str) -> None:
    """Published models have such: ranks share them."""
    equal_over_ranks(open_model(str(kept(families.make, name, qk_nope_head_dim=32))))


def equal_over_ranks(files: Any) -> None:
    alone = answers(worker_of(files))
    for ranks in (2, 3):
        with sharing(files, ranks, threads=2 if ranks == 2 else 1) as together:
            assert answers(together) == alone, ranks


@pytest.mark.slow
@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("name", [*MIXTURES, "olmoe", "minimax_m2", *STATES[1:], *LATENT])
def test_whole_experts_of_ranks(
    kept: Kept, name: str, wired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are the same when all of them change hands between two steps, too."""
    dealt_often(monkeypatch)
    files = open_model(str(kept(families.make, name)))
    graph = absorbed(describe(files.arch))
    if not mixtures(graph):
        with pytest.raises(OptionError, match="no experts to deal out"):
            cut(graph, 2, 0, dealt=True)
        return
    alone = answers(worker_of(files))
    for ranks in (2, 3):
        with sharing(files, ranks, wired=wired, dealt=True, threads=4 - ranks) as together:
            assert answers(together) == alone, ranks
            dealing, *others = deals(together)
            assert all(went.any() for went in dealing.went)
            for each in others:
                assert list(map(list, each.owners)) == list(map(list, dealing.owners))
            other = [[(owner + 1) % ranks for owner in owners] for owners in dealing.owners]
            for each in deals(together):
                each.set(other)
            assert answers(together) == alone, ranks


def dealt_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step, whether that evens anything out or not."""
    monkeypatch.setattr("headrace.kernels.dealing.STEPS", 3)
    monkeypatch.setattr("headrace.kernels.dealing.GAIN", 2.0)


def deals(together: Ranks) -> list[Dealing]:
    """Return the expert placement of each worker that has mixtures."""
    found = (worker.text.model.dealing for worker in together.workers)
    return [one for one in found if one is not None]


def test_a_rank_that_is_gone_ends_the_step_of_the_others(worker_files: Any) -> None:
    with sharing(worker_files, 2) as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        coming = together.threads[0].submit(together.workers[0].execute, plan)
        with pytest.raises(TimeoutError):
            coming.result(0.2)  # It waits for rank 1, which never comes.
        Commons(together.commons[1], 2, 1).tear()
        result = coming.result(10)
        assert result.error is not None
        assert "another rank of the group is gone" in result.error


class Failing:
    """Steps of a rank that has no memory left."""

    def launch(self, *_: Any) -> None:
        raise MemoryError("none left")


def test_a_rank_whose_socket_is_closed_is_named(worker_files: Any) -> None:
    with sharing(worker_files, 3, wired=True) as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        coming = [
            together.threads[rank].submit(together.workers[rank].execute, plan) for rank in (0, 1)
        ]
        for other in (0, 1):
            together.sockets[2, other].close()
        for rank, one in enumerate(coming):
            assert "another rank of the group is gone" in (one.result(10).error or "")
            assert together.wires[rank].culprit == 2


@pytest.mark.parametrize("wired", [False, True])
@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_step_that_fails_ends_in_all_ranks(
    worker_files: Any, failing: tuple[int, ...], wired: bool
) -> None:
    """A rank that fails alone would be waited for at an exchange; where all do, a step is lost."""
    with sharing(worker_files, 2, wired=wired) as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        for rank in failing:
            together.workers[rank]._steps = Failing()
        coming = [
            thread.submit(worker.execute, plan)
            for thread, worker in zip(together.threads, together.workers, strict=True)
        ]
        errors = [one.result(10).error or "" for one in coming]
        assert all(("none left" if len(failing) == 2 else "not in one") in each for each in errors)
        if len(failing) == 2:
            # Allocated anew, in the same memory.
            assert answers(together) == answers(worker_of(worker_files))


@pytest.mark.parametrize("wired", [False, True])
def test_ranks_in_different_places_notice(worker_files: Any, wired: bool) -> None:
    with sharing(worker_files, 2, wired=wired) as together:
        driver = Driver(together, blocks=40)
        driver.add("a", prompt(9), sampling(max_tokens=4))
        driver.add("b", prompt(5), sampling(max_tokens=4))
        plan = driver.scheduler.schedule()
        assert plan is not None
        other = StepPlan(
            plan.number,
            rows=plan.rows[:1],
            starts=plan.starts[:1],
            counts=plan.counts[:1],
            samples=plan.samples[:1],
            blocks=plan.blocks,
            admitted=plan.admitted,
        )
        coming = [
            together.threads[rank].submit(together.workers[rank].execute, each)
            for rank, each in enumerate((plan, other))
        ]
        for one in coming:
            assert "not in one place" in (one.result(10).error or "")
