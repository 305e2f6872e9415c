"""The check of graphs that a device runs (`tests/gpu/gpu_paths.py`): it sees what it is for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))

import gpu_paths
from gpu_models import Step

from headrace.kernels.operators import StepLimits
from headrace.kernels.triton import norm

ARCH = replace(
    gpu_paths.SMALL,
    hidden=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=64,
    vocab_size=80,
)


def check(monkeypatch: pytest.MonkeyPatch, steps: tuple[Step, ...], *, late: bool) -> float:
    """The check with these steps; `late`: in a replay each norm reads what the one before left."""
    left: dict[int, torch.Tensor] = {}
    calls: list[torch.Tensor] | None = None
    launch = norm._launch

    class Replays(gpu_paths.Rerun):
        def capture(self, run: Callable[[], None]) -> Callable[[], None]:
            def replay() -> None:
                nonlocal calls
                calls = []
                run()
                left.update(enumerate(calls))
                calls = None

            run()
            return replay

    def stale(x: torch.Tensor, *given: Any) -> Any:
        if calls is not None:
            calls.append(x.clone())
            before = left.get(len(calls) - 1, x)
            if before.shape == x.shape:
                x = before
        return launch(x, *given)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(gpu_paths, "STEPS", steps)
        patch.setattr(gpu_paths, "Rerun", Replays)
        patch.setattr(gpu_paths, "LIMITS", StepLimits(tokens=2, entries=2, max_context=32))
        if late:
            patch.setattr(norm, "_launch", stale)
        torch.manual_seed(0)
        found: float = gpu_paths.graphs(ARCH, "bfloat16", "float32")("cpu", torch.float32)
    return found


@pytest.mark.slow
def test_a_kernel_that_reads_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = (Step("", ((at, 1), (at + 2, 1))) for at in (5, 8))
    assert check(monkeypatch, (first, last), late=False) <= 1
    assert check(monkeypatch, (first, last), late=True) > 1
    # Why they alternate: where one step comes again, what is left is what would have been written.
    assert check(monkeypatch, (first,), late=True) <= 1
