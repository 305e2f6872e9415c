"""The Triton path in the interpreter end to end: the same greedy tokens as the reference path.

Prefill in chunks, decode in mixed batches, a prefix hit and a preemption, driven by the real
scheduler on small random models of the families that use different kernels.
"""

from __future__ import annotations

import random

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.kernels.backend import Question
from headrace.kernels.select import choose
from headrace.kernels.triton.backend import TritonBackend
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle import graphs, sampled_rows
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept

SLOW = pytest.mark.slow
SHALLOW = {
    "qwen2": {"num_hidden_layers": 1},
    "gemma3-capped": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_moe": {"num_hidden_layers": 1},
    "gpt_oss": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Every program of every kernel costs a millisecond in the interpreter: one layer of each kind."""


@pytest.fixture(
    scope="module",
    params=[
        "qwen2",
        "gemma3-capped",
        pytest.param("qwen3_moe", marks=SLOW),
        pytest.param("gpt_oss", marks=SLOW),
    ],
)
def workers(request, kept: Kept):
    folder = kept(families.make, request.param, **SHALLOW[request.param])
    files = open_model(str(folder))

    def worker(kernels: str) -> Worker:
        options = WorkerOptions(
            kernels=kernels,
            threads=1,
            rows=8,
            step_tokens=64,
            max_context=256,
            dtype="float32",
            kv_dtype="float32",
        )
        return Worker(files, options)

    return worker("triton"), worker("ref")


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(families.VOCAB) for _ in range(length)]


def answers(worker: Worker, blocks: int) -> dict[tuple[str, int], list[int]]:
    driver = Driver(worker, blocks=blocks, step_tokens=24, rows=4)
    shared = prompt(33, 1)
    tokens = SamplingParams(temperature=0, max_tokens=3)
    driver.add("first", shared + prompt(3, 2), tokens)
    driver.add("single", prompt(1, 3), tokens)
    driver.step()
    driver.add("hit", shared + prompt(7, 4), tokens)
    driver.run()
    assert driver.answers["hit", 0].cached >= 32
    driver.add("seeded", prompt(3, 5), SamplingParams(seed=4, temperature=0.8, max_tokens=2))
    driver.run()
    return {name: answer.tokens for name, answer in driver.answers.items()}


def test_the_last_layer_for_the_rows_that_sample(workers) -> None:
    """Near what it is for all rows: these products are of other shapes, and none is required to
    sum in the same order."""
    triton, _ = workers
    sampled_rows.allocate(triton)
    with torch.inference_mode():
        for batch in sampled_rows.batches(triton, sampled_rows.STEPS):
            hidden, logits = sampled_rows.of_every_token(triton, batch)
            few, same = triton.text.model.forward(triton.text.operators, batch, triton.cache)
            torch.testing.assert_close(few, hidden[batch.sample_rows], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(same, logits, atol=1e-4, rtol=1e-4)


def test_the_head_writes_where_a_step_says(workers) -> None:
    triton, _ = workers
    sampled_rows.allocate(triton)
    written = 0
    with torch.inference_mode():
        for batch in sampled_rows.batches(triton, sampled_rows.STEPS[:2]):
            _, logits = triton.text.model.forward(triton.text.operators, batch, triton.cache)
            batch.logits = torch.full_like(logits, torch.nan)
            _, same = triton.text.model.forward(triton.text.operators, batch, triton.cache)
            assert torch.equal(same, logits)
            assert same.data_ptr() == batch.logits.data_ptr()
            written += len(logits)
    assert written


def test_greedy_equals_the_reference_path(workers) -> None:
    triton, reference = workers
    kernels = {d.name: d.value for d in triton.facts.kernels if d.name.startswith("kernels.")}
    assert set(kernels.values()) == {"triton"}
    assert answers(triton, blocks=40) == answers(reference, blocks=40)


@SLOW
def test_preempted_sequences_come_back_the_same(workers) -> None:
    triton, _ = workers
    tokens = SamplingParams(temperature=0, max_tokens=20)

    def run(blocks: int) -> tuple[list[list[int]], int]:
        driver = Driver(triton, blocks=blocks, step_tokens=64, rows=4, prefix_cache=False)
        for name in range(3):
            driver.add(str(name), prompt(20 + name, name), tokens)
        driver.run()
        found = driver.answers.values()
        return [a.tokens for a in found], sum(a.preemptions for a in found)

    roomy, never = run(60)
    tight, often = run(8)
    assert never == 0
    assert often > 0
    assert tight == roomy


def test_backend_refuses_where_it_cannot_serve() -> None:
    question = Question(
        "cpu", "float64", "float32", graphs.decoder(), frozenset({"float32"}), asked=True
    )
    assert "float64" in (TritonBackend().supports("linear", question) or "")
    wide = Question(
        "cpu", "bfloat16", "bfloat16", graphs.decoder(1024), frozenset({"bfloat16"}), asked=True
    )
    assert "1024" in (TritonBackend().supports("attend", wide) or "")
    plain = Question(
        "cpu", "float32", "float32", graphs.decoder(), frozenset({"float32"}), asked=True
    )
    assert TritonBackend().supports("linear", plain) is None


def test_of_an_encoder_the_reference_serves_the_attention() -> None:
    question = Question("cpu", "float32", "float32", graphs.encoder(), frozenset({"float32"}))
    _, decisions = choose(question, "triton")
    served = {decision.name: decision.value for decision in decisions}
    assert served.pop("kernels.attend") == "ref"
    assert served.pop("reference") == "PyTorch"
    assert set(served.values()) == {"triton"}


def test_on_a_cpu_only_who_asks_gets_the_interpreter() -> None:
    question = Question("cpu", "float32", "float32", graphs.decoder(), frozenset({"float32"}))
    _, decisions = choose(question)
    assert "triton" not in {decision.value for decision in decisions}
    _, decisions = choose(question, "triton")
    assert {decision.value for decision in decisions} == {"triton"}
