"""Launches of a step are frozen: names, grids and order of its kernels and library calls.

One layer of each kind of real configurations on tensors without memory, for the table of sm_90.
Nothing is computed. A change of the path that should change no launch leaves the frozen file as it
is. A change that should rewrites it, and the difference of the file shows the effect:

    TRITON_INTERPRET=1 python tests/kernels_triton/test_launches.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu_models import ARCHS, Step, batch_for, decode, make_cache, random_weights, thin

from headrace.kernels.adapted import adding
from headrace.kernels.operators import HostStep
from headrace.kernels.triton.operators import TritonOperators
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import WeightSource
from headrace.models.registry import describe
from headrace.worker.adapters import Adapters

FROZEN = Path(__file__).with_name("launches.json")
ARCHITECTURE = "sm_90"
MODELS = {
    "qwen2.5-0.5b bfloat16": ("qwen2.5-0.5b", "bfloat16", torch.bfloat16),
    "qwen2.5-0.5b q4_k": ("qwen2.5-0.5b", "q4_k", torch.bfloat16),
    "llama-3.1-8b fp8": ("llama-3.1-8b", "fp8", torch.float8_e4m3fn),
    "llama-3.1-8b fp8 blocks": ("llama-3.1-8b", "fp8 blocks", torch.bfloat16),
    "llama-3.1-8b int4": ("llama-3.1-8b", "int4", torch.int8),
    "gemma-3-1b bfloat16": ("gemma-3-1b", "bfloat16", torch.bfloat16),
    "qwen3-30b-a3b bfloat16": ("qwen3-30b-a3b", "bfloat16", torch.bfloat16),
    "deepseek-v2-lite bfloat16": ("deepseek-v2-lite", "bfloat16", torch.bfloat16),
    "granite-4.0-h-tiny bfloat16": ("granite-4.0-h-tiny", "bfloat16", torch.bfloat16),
    "gemma-4-26b-a4b bfloat16": ("gemma-4-26b-a4b", "bfloat16", torch.bfloat16),
}
STEPS = (
    decode(1, 700),
    decode(4, 700),
    decode(8, 700),
    decode(24, 700),
    decode(64, 700),
    decode(256, 3000),
    Step("mixed 64", ((700, 1), (10, 1), (0, 62))),
    Step("mixed 512", ((700, 1), (10, 1), (100, 510))),
    Step("mixed 2048", ((20, 48), (0, 2000))),
)
VARIANTS = ("plain", "every_hidden", "adapted")
SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "view",
    "_unsafe_view",
    "reshape",
    "t",
    "transpose",
    "slice",
    "select",
    "as_strided",
    "detach",
    "unsqueeze",
    "expand",
    "alias",
    "split",
    "permute",
    "lift_fresh",
}
"""Operators of torch that launch nothing."""


class Launches(TorchDispatchMode):
    """Notes what would be launched, and launches nothing of Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in SILENT and isinstance(result, torch.Tensor) and result.is_meta:
            self.found.append(f"{name} {'x'.join(map(str, result.shape))}")
        return result

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not callable(grid)
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        self.found.append(f"{name} [{','.join(map(str, grid))}]")

    def __enter__(self) -> Launches:
        noted = self

        def run(kernel: Any, *args: Any, **options: Any) -> None:
            noted.run(kernel, *args, **options)

        self._patch = patch.object(InterpretedFunction, "run", run)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self._patch.stop()


def launched(model: str) -> Iterator[tuple[str, list[str]]]:
    """(variant and step, launches) of every bucket."""
    name, weights, kv = MODELS[model]
    arch, dtype = thin(ARCHS[name]), torch.bfloat16
    quantise = "fp8" if weights == "fp8" else "auto"
    operators = TritonOperators(dtype, architecture=ARCHITECTURE, quantise=quantise)
    # Not `inference_mode`: there composed operators are not dispatched as what they are made of.
    with torch.no_grad():
        source = WeightSource(random_weights(arch, device="meta", weights=weights, dtype=dtype))
        built = prepare(
            describe(arch), source, operators, device="meta", dtype="bfloat16", max_context=4096
        )
        adapters = Adapters(built.products(), slots=2, rank=8, device="meta", dtype=dtype)
        for weight in adapters.additions.values():
            weight.ranks[0] = 8
        operators._ticket(torch.device("meta"))  # As a warm-up does: it is filled once.
        for step in STEPS:
            counts = [count for _, count in step.entries]
            # The adapter of every other entry's tokens.
            slots = np.repeat(np.arange(len(counts), dtype=np.int32) % 2 - 1, counts)
            ends = np.cumsum(counts) - 1
            for variant in VARIANTS:
                cache = make_cache(arch, 64, "meta", kv)
                batch = batch_for(step, cache, "meta")
                step_adding = None
                if variant == "adapted":
                    batch.adapters = slots
                    batch.host = HostStep(np.array(counts), np.array(counts), ends)
                    step_adding = adding(adapters.additions, batch)
                with Launches() as noted:
                    every = variant == "every_hidden"
                    built.forward(operators, batch, cache, step_adding, every=every)
                yield f"{variant} {step.name}", noted.found


@pytest.mark.parametrize("model", MODELS)
def test_a_step_launches_what_it_did(model: str) -> None:
    frozen = json.loads(FROZEN.read_text())[model]
    found = dict(launched(model))
    assert set(found) == set(frozen)
    for name, launches in found.items():
        assert launches == frozen[name].split("; "), f"{model}, {name}"


if __name__ == "__main__":
    everything = {
        model: {name: "; ".join(launches) for name, launches in launched(model)} for model in MODELS
    }
    FROZEN.write_text(json.dumps(everything, indent=1) + "\n")
