"""Every family's GGUF on the CPU kernels says what transformers says of the model it was made of:
64 of 64 greedy tokens, after prompts that decide."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from oracle.driving import Driver
from oracle.reference import Oracle
from tiny.checkpoints import hf_model
from tiny.gguf_files import save_gguf

from .test_gguf_families import FAMILIES
from .test_gguf_llamacpp import ELSEWHERE

pytestmark = pytest.mark.slow
NAMES = {**FAMILIES, **ELSEWHERE}
LENGTHS = (1, 7, 40, 133)
GREEDY = SamplingParams(temperature=0, max_tokens=64)
NEAR = 2e-4
"""A distance of the two best logits that rounding may turn around."""


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, 317) for _ in range(length)]


@pytest.mark.parametrize("name", NAMES)
def test_64_of_64_tokens(name: str, tmp_path: Path) -> None:
    kind, arch, values = NAMES[name]
    model = hf_model(kind, **values)
    for key, buffer in model.named_buffers():
        if "e_score_correction_bias" in key:
            buffer.copy_(torch.randn(buffer.shape))
    path = save_gguf(model, tmp_path / "m.gguf", arch)
    settings = {"threads": 1, "rows": 8, "step_tokens": 256, "max_context": 256}
    worker = Worker(
        open_model(str(path)), WorkerOptions(kernels="cpu", kv_dtype="float32", **settings)
    )
    driver, oracle = Driver(worker, prefix_cache=False), Oracle(model)
    for length in LENGTHS:
        asked, expected = oracle.decided(lambda seed, of=length: prompt(of, seed), 64, NEAR)
        assert driver.ask(asked, GREEDY).tokens == expected, f"{length} tokens"
