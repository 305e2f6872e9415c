"""The Triton backend's answers. Imports triton only when it is asked whether it is there."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ..backend import Question
from ..operators import Operators

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend:
    """Serves every operator on an NVIDIA GPU of compute capability 8.0 or later.

    Under Triton's interpreter (`TRITON_INTERPRET=1`) it serves on the CPU too, but only who asks
    for it by name: that is how the whole path is proven where no GPU is.
    """

    name = "triton"

    def supports(self, operator: str, question: Question) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if question.encoder:
            return "no kernels for encoders"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if question.device != "cuda":
            if not (interpreted and question.asked):
                return "needs an NVIDIA GPU"
        elif torch.cuda.get_device_capability() < (8, 0):
            return "needs compute capability 8.0 or later"
        elif operator in ("linear", "rope_and_cache", "attention") and not _has_fp8(question):
            return "needs compute capability 8.9 for fp8"
        if question.dtype not in DTYPES:
            return f"no kernels for {question.dtype}"
        if operator in ("attention", "rope_and_cache") and question.head_dim > 256:
            return f"head size {question.head_dim} is over 256"
        return None

    def build(self, question: Question) -> Operators:
        # Deferred: importing triton is for those who use it.
        from .operators import TritonOperators

        return TritonOperators(
            question.dtype, deterministic=question.deterministic, quantise=question.quantise
        )


def _has_fp8(question: Question) -> bool:
    """Is fp8 asked of a GPU that has it, or not asked?"""
    wanted = "fp8" in (question.kv_dtype, question.quantise)
    return not wanted or torch.cuda.get_device_capability() >= (8, 9)
