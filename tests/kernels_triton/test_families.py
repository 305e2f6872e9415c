"""Whole models of the families whose operators differ, in the interpreter: greedy tokens of the
reference path, of prompts in chunks beside decoding, and every operator served by a kernel."""

from __future__ import annotations

import pytest

from headrace.base.sampling import SamplingParams
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle.driving import Driver
from tiny import families
from tiny.kept import Kept

from .test_whole_models import prompt

SLOW = pytest.mark.slow
FAMILIES = {
    "deepseek_v2": (),
    "deepseek_v2-groups": SLOW,
    "deepseek_v3": SLOW,
    "glm4": SLOW,
    "glm4_moe": SLOW,
    "olmo2": SLOW,
    "olmo3": SLOW,
    "olmoe": SLOW,
    "smollm3": SLOW,
    "cohere": SLOW,
    "cohere2": SLOW,
    "phi3": SLOW,
    "ernie4_5": SLOW,
    "exaone4": SLOW,
    "granite": SLOW,
    "granitemoe": SLOW,
    "gemma": SLOW,
    "gemma2": SLOW,
    "glm": SLOW,
    "llama": SLOW,
    "minimax_m2": SLOW,
    "mistral": SLOW,
    "mixtral": SLOW,
    "qwen2_moe": SLOW,
    "qwen3": SLOW,
    "seed_oss": SLOW,
    "arcee": SLOW,
    "starcoder2": SLOW,
    "lfm2": SLOW,
    "qwen3_next": SLOW,
    "qwen3_5": SLOW,
    "qwen3_5_moe": SLOW,
    "granitemoehybrid": SLOW,
    "nemotron_h": SLOW,
    "llama4": (),
    "gemma4": SLOW,
    "gemma4-mixture": SLOW,
}
"""Tiny models, and the marks of their tests."""


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=marks) for name, marks in FAMILIES.items()]
)
def test_greedy_tokens_are_the_references(family: str, kept: Kept) -> None:
    files = open_model(str(kept(families.make, family)))
    options = {"threads": 1, "rows": 4, "step_tokens": 32, "max_context": 128}
    answers = []
    for kernels in ("triton", "ref"):
        types = {"dtype": "float32", "kv_dtype": "float32"}
        worker = Worker(files, WorkerOptions(kernels=kernels, **options, **types))
        served = {each.value for each in worker.facts.kernels if each.name.startswith("kernels.")}
        assert served == {kernels}
        driver = Driver(worker, blocks=24, step_tokens=16, rows=4)
        tokens = SamplingParams(temperature=0, max_tokens=3)
        driver.add("one", prompt(19, 1), tokens)
        driver.step()
        driver.add("two", prompt(5, 2), tokens)
        driver.run()
        answers.append({name: answer.tokens for name, answer in driver.answers.items()})
    assert answers[0] == answers[1]
