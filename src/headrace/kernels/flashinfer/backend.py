"""When FlashInfer serves: what it can, and whether it was measured to be the better choice."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..backend import Question
from ..program import Provider

MEASURED = Path(__file__).with_name("measured.json")
"""Architecture → head size → time of Triton's prefill attention over FlashInfer's; written by
`benchmarks/gpu_bench.py --write` on a GPU. What is not there was not measured."""
HEAD_DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16")
BETTER = 1.05
"""Below this ratio our own kernel serves: it also serves the graphs."""


@cache
def load_measured(path: Path = MEASURED) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    return found


class FlashInferBackend:
    """Attention only; what else a model needs is asked of those `beside` it."""

    name = "flashinfer"
    beside = ("triton",)
    """Backends of the other operators where this one is asked for by name."""

    def supports(self, kind: str, question: Question) -> str | None:
        if kind != "attend" or question.bidirectional:
            return "has attention of decoders only"
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        if question.device != "cuda":
            return "needs an NVIDIA GPU"
        if question.deterministic:
            return "its sums depend on the batch"
        if question.dtype not in DTYPES:
            return f"no kernels for {question.dtype}"
        if question.kv_dtype not in ("bfloat16", "float16"):
            return "its 8-bit caches have one scale for all tokens, ours one for each"
        for size in question.head_sizes():
            if size not in HEAD_DIMS:
                return f"no kernels for head size {size}"
        return None if question.asked else self._preferred(question)

    def _preferred(self, question: Question) -> str | None:
        import torch  # Local: asked only where there is a GPU.

        major, minor = torch.cuda.get_device_capability()
        measured = load_measured().get(f"sm_{major}{minor}", {})
        for size in question.head_sizes():
            ratio = measured.get(str(size))
            if ratio is None:
                return "not measured against triton on this device (gpu_bench.py --write does)"
            if ratio < BETTER:
                return f"measured at {ratio:.2f} times the speed of triton"
        return None

    def build(self, question: Question) -> Provider:
        # Deferred: importing flashinfer is for those who use it.
        import torch

        from .attention import FlashInferOperators

        return FlashInferOperators(getattr(torch, question.dtype), torch.device(question.device))
