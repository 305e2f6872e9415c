"""Answers of the Triton backend; triton and torch are imported where an answer needs them."""

from __future__ import annotations

from importlib.util import find_spec

from ...base.environment import triton_interpreted
from ..backend import Question
from ..program import Provider
from .toolchain import toolchain_obstacle

DTYPES = ("bfloat16", "float16", "float32")


class TritonBackend:
    """Backend for every operator on an NVIDIA GPU of compute capability 8.0 or later.

    Under Triton's interpreter (`TRITON_INTERPRET=1`) it serves on the CPU too, but only when named:
    so the whole path is proven without a GPU.
    """

    name = "triton"

    def supports(self, kind: str, question: Question) -> str | None:
        if find_spec("triton") is None:
            return "triton is not installed"
        interpreted = triton_interpreted()
        if question.device != "cuda":
            if not (interpreted and question.asked):
                return "needs an NVIDIA GPU"
        elif (obstacle := toolchain_obstacle()) is not None:
            return obstacle
        elif _capability() < (8, 0):
            return "needs compute capability 8.0 or later"
        elif kind in ("linear", "write", "attend") and not _has_fp8(question):
            return "needs compute capability 8.9 for fp8"
        if question.kv_dtype == "k8v4" and kind in ("write", "attend"):
            for size in question.head_sizes():
                if size < 32 or size & (size - 1):
                    return f"k8v4 takes heads of a power of two from 32 on, not of {size}"
        if question.quantise not in ("auto", "fp8") and kind in ("linear", "experts"):
            return f"does not quantise weights to {question.quantise}"
        if question.dtype not in DTYPES:
            return f"no kernels for {question.dtype}"
        if kind == "attend" and any(
            each.latent and (each.rotated or 0) > 64 for each in question.attentions
        ):
            return "no kernel for keys over latents with more than 64 rotated numbers"
        if kind in ("write", "attend") and question.bidirectional:
            return "no kernel for attention to both sides"
        if kind == "write" and any(size % 2 for size in question.head_sizes()):
            return "no kernel for heads of an odd size"
        if kind in ("attend", "write"):
            for size in question.head_sizes():
                if size > (576 if any(each.latent for each in question.attentions) else 512):
                    return f"head size {size} is over 512"
        return None

    def build(self, question: Question) -> Provider:
        # Local: only users of Triton import it.
        import torch

        from .operators import TritonOperators

        return TritonOperators(
            getattr(torch, question.dtype),
            deterministic=question.deterministic,
            quantise=question.quantise,
        )


def _has_fp8(question: Question) -> bool:
    """Return whether the GPU has fp8, or none is asked for."""
    wanted = "fp8" in (question.kv_dtype, question.quantise)
    return not wanted or _capability() >= (8, 9)


def _capability() -> tuple[int, int]:
    """Return the compute capability of the GPU."""
    import torch  # Local: called only with a GPU.

    return torch.cuda.get_device_capability()
