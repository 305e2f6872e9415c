"""The work that is counted in known models' steps is what was frozen, to the last digit: each
operator's exactly, sums of seconds to nine digits, since the order of a sum may change.

A change that is meant to change it writes it anew (`python -m tests.roofline.test_frozen_estimates`
from the project's folder) and says why; every other leaves this test as it is.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from headrace.base.arch import Encoder, ModelArch, Moe
from headrace.base.layout import Layout
from headrace.roofline.composition import Composition, compose
from headrace.roofline.counts import Case, Count, device_bytes
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN, known
from headrace.roofline.operators import count_step
from headrace.roofline.step import StepModel, step_time
from headrace.roofline.weights import WIDE_ENDS, WeightBytes, parameters, total_bytes

from .archs import GEMMA_270M, MISTRAL_WINDOWED

FROZEN = Path(__file__).with_name("frozen_estimates.json")
ENCODER = ModelArch(
    family="bert",
    vocab_size=30_522,
    hidden=384,
    layers=6,
    heads=12,
    kv_heads=12,
    head_dim=32,
    intermediate=1536,
    max_context=512,
    norm_eps=1e-12,
    activation="gelu",
    encoder=Encoder(types=2),
)
ARCHS = {
    **{name: known(name)[0] for name in json.loads(FROZEN.read_text()) if name in KNOWN},
    "gemma-270m": GEMMA_270M,
    "mistral-windowed": MISTRAL_WINDOWED,
    "minilm": ENCODER,
    "reranker": replace(ENCODER, encoder=Encoder(types=2, labels=1)),
    "shared": replace(
        known("qwen3-30b-a3b")[0],
        moe=Moe(experts=16, active=2, intermediate=768, shared_intermediate=512, dense_layers=2),
    ),
}
LAYOUTS = (Layout(), Layout(tp=2), Layout(tp=2, pp=2), Layout(tp=2, ep=True, dp=2))
WEIGHTS = (
    WeightBytes(),
    WeightBytes("fp8", formats=WIDE_ENDS),
    WeightBytes("Q4_K", {"qkv": 1e8, "head": 3e8, "gate_up": 2.5e8}),
)


def steps(arch: ModelArch) -> dict[str, Composition]:
    if arch.encoder is not None:
        return {"inputs": compose(arch, [0, 0, 0], [7, 128, 31])}
    return {
        "decode": compose(arch, [900, 17, 5000], [1, 1, 1]),
        "prefill": compose(arch, [0, 0], [700, 30]),
        "mixed": compose(arch, [900, 17, 64], [1, 1, 300], 2),
        "nothing": compose(arch, [0, 1024], [512, 512], 0),
    }


def of_model(weights: WeightBytes, arch: ModelArch) -> WeightBytes:
    """Known sizes of roles that the model has."""
    there = {role for role, count in parameters(arch).items() if count}
    known = {role: size for role, size in weights.by_role.items() if role in there}
    return replace(weights, by_role=known)


def digits(count: Count) -> str:
    """A count's numbers, those of its parts too, all as fractions."""
    values = [getattr(count, field.name) for field in fields(count) if field.name != "parts"]
    numbers = [float(each) if isinstance(each, int) else each for each in values]
    return repr([*numbers, *map(digits, count.parts)])


def found(name: str) -> dict[str, Any]:
    """A digest of every count in order of its name, and of the totals; some of it to be read."""
    arch, hardware = ARCHS[name], DEVICES["H100"]
    texts, shown = [], {}
    for layout in LAYOUTS:
        if layout.refusal(arch) is not None:
            continue
        for each in WEIGHTS:
            weights = of_model(each, arch)
            case = Case(
                arch, weights, layout=layout, kv_dtype="fp8" if layout.tp > 1 else "bfloat16"
            )
            model = StepModel(case, hardware)
            texts.append(f"{device_bytes(case)} {total_bytes(arch, weights)!r}")
            for kind, step in steps(arch).items():
                counts = sorted(map(digits, count_step(case, step)))
                time, estimate = step_time(case, hardware, step), model.estimate(step)
                texts += [f"{layout} {kind}", *counts]
                texts.append(f"{time.seconds:.9g} {time.limit_seconds:.9g} {time.bound}")
                texts.append(" ".join(f"{number:.9g}" for number in estimate))
                if layout == Layout() and each is WEIGHTS[0]:
                    shown[kind] = (
                        f"{len(counts)} counts, {time.flops:.6g} FLOPs, {time.bytes:.6g} bytes"
                    )
    sizes = {role: count for role, count in sorted(parameters(arch).items()) if count}
    texts.append(repr(sizes))
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return {**shown, "parameters": sum(sizes.values()), "digest": digest}


@pytest.mark.parametrize("name", list(ARCHS))
def test_estimates_are_the_frozen_ones(name: str) -> None:
    assert found(name) == json.loads(FROZEN.read_text())[name]


def test_an_estimate_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen2.5-0.5b"
    arch = replace(ARCHS[name], intermediate=ARCHS[name].intermediate + 64)
    monkeypatch.setitem(ARCHS, name, arch)
    assert found(name)["digest"] != json.loads(FROZEN.read_text())[name]["digest"]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({name: found(name) for name in ARCHS}, indent=1) + "\n")
