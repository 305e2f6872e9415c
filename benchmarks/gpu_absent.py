"""The checks of `gpu_checks.py` on tensors without memory: what a device would be asked to compile.

Each check is run as it is, on torch's "meta" device inside `gpu_aot.compiling`: it launches what it
would launch on a GPU, shape by shape, and every launch is compiled for the architecture asked for.
What a check asks of a number that is not there (a sum, a largest block, are these equal?) is
answered with one, or yes; so its verdict means nothing, and its kernels are the ones that matter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[1] / "tests/gpu"))

import torch
from gpu_aot import Compiled, compiling
from gpu_checks import all_checks
from gpu_models import build, make_batch, make_cache, windows_of
from gpu_paths import SMALL, STEPS
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode

from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.operators import TritonOperators

WORKERS = ("two steps in flight", "greedy tokens", "memory")
"""Checks that drive a whole worker, which asks torch for a GPU: the model of which they are stands
in for them, deterministic and not."""
CODED = ("fp8", "rows", "blocks")
"""Words of checks that need numbers which sm_80 does not have."""


class Unknown(TorchFunctionMode):
    """Answers what nobody knows of a tensor without memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, tensor = args[0] if args else None, torch.Tensor
        if isinstance(given, tensor) and given.is_meta:
            if func is tensor.__float__:
                return 1.0
            if func in (tensor.__int__, tensor.__index__):
                return 1
            if func is tensor.item:
                return 1.0 if given.is_floating_point() else 1
            if func is tensor.__bool__ or func is torch.equal:
                return True
            if func is tensor.tolist:
                return torch.ones(given.shape, dtype=given.dtype).tolist()
        return func(*args, **(kwargs or {}))


def names(architecture: str) -> list[str]:
    """Checks that this architecture can be compiled for, in their order."""
    coded = architecture != "sm_80"
    return [
        name
        for name in all_checks()
        if name not in WORKERS and (coded or not any(word in name for word in CODED))
    ]


def compiled(architecture: str, wanted: list[str]) -> Iterator[tuple[str, list[Compiled]]]:
    """(check, what it launches), and the model of `WORKERS` where one of them is wanted."""
    known: dict[int, Compiled] = {}
    for name in wanted:
        with ExitStack() as stack:
            enter = stack.enter_context
            enter(torch.inference_mode())
            enter(Unknown())
            # Its values are not there, and how many rows an expert has depends on them.
            enter(patch.object(ReferenceOperators, "experts", lambda _, x, *given: x))
            enter(patch.object(fx_config, "meta_nonzero_assume_all_nonzero", True))
            found = enter(compiling(architecture, known))
            if name in WORKERS:
                forward(architecture)
            else:
                all_checks()[name]("meta", torch.bfloat16)
        yield name, found


def forward(architecture: str) -> None:
    """What the steps of a small model launch, deterministic and not, and how tokens are drawn."""
    for deterministic in (False, True):
        operators = TritonOperators(
            torch.bfloat16, deterministic=deterministic, architecture=architecture
        )
        model = build(SMALL, operators, device="meta", max_context=512)
        cache = make_cache(SMALL, 64, "meta")
        for step in STEPS:
            model.forward(operators, make_batch(step, windows_of(SMALL), "meta"), cache)
        operators.warm_draws(torch.empty(8, SMALL.vocab_size, device="meta"))
