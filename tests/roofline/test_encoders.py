"""Encoders in the roofline: counted from their files, and predicted by a step's plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.base.arch import Encoder, ModelArch
from headrace.base.modelfiles import ModelFiles
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, StepPlan
from headrace.engine.loop.prediction import StepPredictor, case_of
from headrace.models.registry import describe
from headrace.roofline.composition import prefill_step
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.operators import count_step
from headrace.roofline.step import StepModel, step_time
from headrace.roofline.weights import parameters, total_bytes

from .archs import QWEN_05B

BGE_SMALL = ModelArch(
    family="bert",
    vocab_size=30_522,
    hidden=384,
    layers=12,
    heads=12,
    kv_heads=12,
    head_dim=32,
    intermediate=1536,
    max_context=512,
    norm_eps=1e-12,
    activation="gelu",
    encoder=Encoder(types=2),
)


def files_of(arch: ModelArch, folder: Path) -> ModelFiles:
    path = folder / "model.safetensors"
    save_file(
        {name: np.zeros(shape, np.float16) for name, shape in describe(arch).tensors().items()},
        path,
    )
    return ModelFiles("tiny", "safetensors", folder, (path,), arch, folder, None)


@pytest.mark.parametrize("labels", [0, 3])
def test_the_case_of_an_encoders_file(labels: int, tmp_path: Path) -> None:
    arch = replace(
        BGE_SMALL,
        vocab_size=101,
        hidden=32,
        layers=3,
        heads=4,
        kv_heads=4,
        head_dim=8,
        intermediate=64,
        encoder=Encoder(2, labels),
    )
    case = case_of(files_of(arch, tmp_path), dtype="float32", kv_dtype="float32")
    assert case.weights.by_role == {
        role: 2 * count for role, count in parameters(arch).items() if count
    }
    assert case.weights.format == "float16"
    time = step_time(case, DEVICES["H100"], prefill_step(arch, [7, 30]))
    assert 0 < time.limit_seconds < time.seconds
    labels_seen = {item.count.label for item in time.operators}
    assert ("head" in labels_seen) == bool(labels)


def test_the_published_size_of_an_encoder() -> None:
    # BAAI/bge-small-en-v1.5: 33.4 million parameters; norms and biases are not counted.
    assert sum(parameters(BGE_SMALL).values()) / 1e6 == pytest.approx(33.4, rel=0.01)


def test_attention_of_an_encoder_is_not_causal() -> None:

    step = prefill_step(BGE_SMALL, [100, 60])
    (attention,) = (c for c in count_step(Case(BGE_SMALL), step) if c.kind == "attention")
    assert attention.flops == (100**2 + 60**2) * 12 * (4 * 32 + 5)
    assert attention.kv_bytes == 0
    assert total_bytes(BGE_SMALL, Case(BGE_SMALL).weights) == 2 * sum(
        parameters(BGE_SMALL).values()
    )


def test_pooling_rows_need_no_logits() -> None:

    predict = StepPredictor(StepModel(Case(QWEN_05B), DEVICES["H100"]))

    def plan(pooling: bool) -> StepPlan:
        spec = RequestSpec(SamplingParams(), 0, task="vector" if pooling else "tokens")
        admission = Admission(0, 1, [5] * 20, 20, 0, spec)
        return StepPlan(0, [0], [0], [20], [True], [admission])

    vector, token = predict(plan(True)), predict(plan(False))
    head = 896 * 151_936
    assert token.flops - vector.flops >= 2 * head
    # The row is used again, now by a sequence that samples.
    assert predict(StepPlan(1, [0], [20], [1], [True])).flops >= 2 * head
