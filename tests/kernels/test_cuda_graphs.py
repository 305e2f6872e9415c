"""Steps by bucket: with a maker that replays by running again, the answers are the same.

What a graph adds is the padding, the shared buffers and the choice of bucket; all of it is tested
here. That CUDA replays what it captured is left to the GPU tests.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.kernels import cuda_graphs
from headrace.kernels.cuda_graphs import Bucket, GraphProgram, null_step
from headrace.kernels.operators import KvCache, KvLayer, StepLimits
from headrace.kernels.program import want
from headrace.kernels.reference import ReferenceOperators
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions, step
from headrace.worker.batch import make_batch
from oracle import sampled_rows
from oracle.driving import Driver
from oracle.steps import Forwards, plain
from tiny import families
from tiny.kept import Kept


class Rerun:
    """A maker whose replay runs the function again, on the same buffers."""

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, run):
        run()
        self.captured += 1
        return run

    def memory(self) -> int:
        return 1000 * self.captured


@pytest.fixture(scope="module", params=["qwen2", pytest.param("gemma3", marks=pytest.mark.slow)])
def worker(request, kept: Kept):
    files = open_model(str(kept(families.make, request.param)))
    return Worker(
        files,
        WorkerOptions(
            kernels="ref", threads=1, rows=12, step_tokens=300, max_context=256, dtype="float32"
        ),
    )


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(families.VOCAB) for _ in range(length)]


def answers(worker: Worker, graphs: bool) -> tuple[dict, GraphProgram | None]:
    driver = Driver(worker, blocks=120, step_tokens=120, rows=12)
    program = None
    if graphs:
        with torch.inference_mode():
            program = GraphProgram(sampled_rows.plain_of(worker), StepLimits(300, 12, 256), Rerun())
            program.capture()
        worker._steps.program = program
    tokens = SamplingParams(temperature=0, max_tokens=12)
    for name, length in enumerate((40, 1, 100, 7, 130)):
        driver.add(str(name), prompt(length, name), tokens)
        driver.step()
    for name in range(5, 10):
        driver.add(str(name), prompt(5 * name, name), tokens)
    driver.run()
    return {name: answer.tokens for name, answer in driver.answers.items()}, program


def test_padded_steps_give_the_same_answers(worker) -> None:
    plain, _ = answers(worker, graphs=False)
    padded, program = answers(worker, graphs=True)
    assert program is not None
    assert padded == plain
    assert program.facts.replayed > 10
    assert program.facts.padded_tokens > 20
    assert program.facts.graphs == len(list(program.buckets()))
    assert program.facts.bytes == 1000 * program.facts.graphs


PARAMETERS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9},
    "shifting": {"temperature": 1.3, "min_p": 0.02},
    "filtered": {"temperature": 0.8, "top_k": 8},
    "nucleus": {"temperature": 0.8, "top_p": 0.7},
    "asking": {"temperature": 0.8, "logprobs": 1},
    "penalised": {"temperature": 0, "repetition_penalty": 1.3},
}


def tokens_of(worker: Worker, names: list[str], graphs: bool) -> tuple[dict, GraphProgram | None]:
    """Return the answers to requests with `PARAMETERS` of these names, in device-like batches.

    Runs with graphs that choose tokens, or call by call.
    """
    driver = Driver(worker, blocks=120, step_tokens=120, rows=12)
    steps, program = worker._steps, None
    steps.host = None
    # As the worker has it on a device.
    steps.batch = partial(
        make_batch, rows=worker._rows, tables=worker._tables, pool=worker._pool, draws=True
    )
    if graphs:
        with torch.inference_mode():
            program = GraphProgram(sampled_rows.plain_of(worker), StepLimits(300, 12, 256), Rerun())
            program.capture()
        steps.program = program
    for number, name in enumerate(names):
        params = SamplingParams(seed=number, max_tokens=7, **PARAMETERS[name])
        driver.add(f"{number} {name}", prompt(9 + 20 * number, number), params)
        driver.step()
    driver.run()
    return {name: answer.tokens for name, answer in driver.answers.items()}, program


@pytest.mark.parametrize(
    ("names", "whole"),
    [
        (["greedy", "greedy"], True),
        (["drawn", "greedy", "shifting"], True),
        (["filtered", "greedy"], False),
        (["nucleus", "drawn"], False),
        (["asking", "penalised", "drawn"], False),
    ],
)
def test_graphs_choose_tokens(worker, names: list[str], whole: bool) -> None:
    """Greedy or drawn, alone or beside rows whose filters are not part of a graph; a step after
    another kind of step; and then no kernel is launched behind the graph."""
    plain, _ = tokens_of(worker, names, graphs=False)
    launched = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (cuda_graphs, step):
            own = module.choose
            patch.setattr(
                module, "choose", lambda *given, own=own: launched.append(1) or own(*given)
            )
        mine, program = tokens_of(worker, names, graphs=True)
    assert program is not None
    assert mine == plain
    assert program.facts.replayed >= 8
    assert bool(launched) is not whole


def test_graphs_forget_how_others_were_drawn(worker) -> None:
    """Greedy ones end first or come alone."""
    alone, program = tokens_of(worker, ["drawn", "greedy", "greedy"], graphs=True)
    assert program is not None
    assert program.facts.replayed >= 8
    assert alone == tokens_of(worker, ["drawn", "greedy", "greedy"], graphs=False)[0]


def test_a_step_has_the_hidden_states_that_it_wants(worker) -> None:
    _, program = answers(worker, graphs=True)
    assert program is not None
    steps = [
        ([0, 9, 3], [7, 1, 50], [True, True, False]),
        ([0, 9], [40, 30], [False, False]),
        ([5, 9, 3], [1, 1, 1], [True, False, True]),
        ([5, 9, 3], [1, 1, 1], [True, True, True]),
    ]
    with torch.inference_mode():
        for batch in sampled_rows.batches(worker, steps):
            replayed = program.facts.replayed
            want_hidden, want_logits = sampled_rows.of_every_token(worker, batch)
            for every in ("every", "sampled"):
                found = program.step(batch, want(logits=True, hidden=every))
                wanted = want_hidden if every == "every" else want_hidden[batch.sample_rows]
                assert torch.equal(found.hidden, wanted)
                assert torch.equal(found.logits, want_logits)
            assert program.facts.replayed == replayed + 2


def make_program(weights: int = 10**12, **limits: int) -> GraphProgram:
    """`weights`: of its layer."""
    layer = KvLayer(torch.zeros(4, 1, 16, 8), torch.zeros(4, 1, 16, 8))
    cache = KvCache([layer], [0], [None])
    ops, model = ReferenceOperators(torch.float32), Forwards(lambda *_: None, weights)
    return GraphProgram(plain(ops, model, cache), StepLimits(**limits), Rerun())


def test_buckets_cover_the_limits_and_no_more() -> None:
    program = make_program(tokens=2048, entries=100, max_context=6000)
    buckets = list(program.buckets())
    assert len(buckets) == len(set(buckets))
    assert max(b.entries for b in buckets if b.decode) == 100
    assert {b.tokens for b in buckets if not b.decode} == {*cuda_graphs.MIXED}
    # Largest first: what comes later fits into the same memory.
    first = [b.tokens for b in buckets if b.decode]
    assert first == sorted(first, reverse=True)


@pytest.mark.parametrize(
    ("weights", "tokens", "largest"),
    [
        (14_909_440, 8192, 4096),
        (26_836_992, 8192, 2048),
        (218_103_808, 8192, 1024),
        (1, 1600, 1536),
    ],
    ids=["qwen2.5-0.5b", "gemma-3-1b", "llama-3.1-8b", "a step's limit"],
)
def test_prompts_are_graphs_while_launches_take_longer(
    weights: int, tokens: int, largest: int
) -> None:
    program = make_program(weights, tokens=tokens, entries=100, max_context=9000)
    assert max(bucket.tokens for bucket in program.buckets()) == largest
    for count in (1025, largest, largest + 1):
        batch = null_step(count, program._plain.cache, 9000)
        found = program.find(batch)
        assert (found is not None) == (count <= largest)


def test_weights_of_a_models_products(worker) -> None:
    """Matrices of the layers: no embedding, no head, no vectors."""
    model = worker.text.model
    names = {name: shape for name, shape in model.graph.tensors().items() if ".layers." in name}
    expected = sum(shape[0] * shape[1] for shape in names.values() if len(shape) == 2)
    assert model.multiplied() == expected > 0


def test_the_largest_steps_of_a_saturated_device_are_graphs() -> None:
    """872 sequences of 1,000 + 1,000 tokens of the 8B in fp8 fit beside its weights on an H200."""
    program = make_program(tokens=8192, entries=900, max_context=2048)
    batch = null_step(872, program._plain.cache, 2048)
    batch.lengths = torch.ones(872, dtype=torch.int32)
    batch.max_count, batch.max_length = 1, 2000
    assert program.find(batch) == Bucket(896, 896)
    sizes = [b.entries for b in program.buckets() if b.decode]
    assert max(sizes) == 900
    assert all(low - high <= 64 for low, high in pairwise(sizes))


def test_the_smallest_bucket_that_fits() -> None:
    program = make_program(tokens=2048, entries=100, max_context=6000)
    cache = program._plain.cache

    def step(tokens: int, entries: int, length: int):
        batch = null_step(tokens, cache, 6000)
        batch.lengths = torch.ones(entries, dtype=torch.int32)
        batch.sample_rows = batch.sample_rows[:1]
        batch.max_count = 1 if tokens == entries else 2
        batch.max_length = length
        return program.find(batch)

    assert step(1, 1, 10) == Bucket(1, 1)
    assert step(5, 5, 1025) == Bucket(8, 8)
    assert step(97, 97, 6000) == Bucket(100, 100)
    # Three drafts of one sequence.
    assert step(4, 1, 10) == Bucket(4, 3)
    assert step(60, 3, 10) == Bucket(64, 33)
    # No entry is free to take the padding: the next bucket.
    assert step(60, 33, 10) == Bucket(128, 65)
    assert step(512, 101, 10) == Bucket(512, 101)
    assert step(1025, 2, 10) is None
    assert step(1000, 101, 10) is None
    assert step(5, 5, 6001) is None
    batch = null_step(2, cache, 6000)
    batch.adapters = torch.zeros(2, dtype=torch.int32)
    assert program.find(batch) is None


def test_a_null_step_is_cut_at_the_context() -> None:
    batch = null_step(70, make_program(tokens=100, entries=4, max_context=32)._plain.cache, 32)
    assert batch.lengths.tolist() == [32, 32, 6]
    assert batch.query_starts.tolist() == [0, 32, 64, 70]
    assert batch.positions.tolist() == [*range(32), *range(32), *range(6)]
    assert not batch.groups[0].slots.any()
