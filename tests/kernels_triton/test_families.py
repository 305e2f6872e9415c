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
FAMILIES = (
    "deepseek_v2",
    pytest.param("deepseek_v2-groups", marks=SLOW),
    pytest.param("deepseek_v3", marks=SLOW),
    pytest.param("glm4", marks=SLOW),
    pytest.param("glm4_moe", marks=SLOW),
    pytest.param("olmo2", marks=SLOW),
    pytest.param("smollm3", marks=SLOW),
    pytest.param("cohere2", marks=SLOW),
    pytest.param("phi3", marks=SLOW),
    pytest.param("ernie4_5", marks=SLOW),
    pytest.param("granitemoe", marks=SLOW),
    pytest.param("gemma2", marks=SLOW),
    pytest.param("lfm2", marks=SLOW),
    pytest.param("qwen3_next", marks=SLOW),
    pytest.param("qwen3_5", marks=SLOW),
    pytest.param("granitemoehybrid", marks=SLOW),
    pytest.param("nemotron_h", marks=SLOW),
)


@pytest.mark.parametrize("family", FAMILIES)
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
