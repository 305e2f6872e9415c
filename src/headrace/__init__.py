"""Headrace: runs, serves, measures, plans and ships generative-AI inference.

The public Python API. Names load on first use: `import headrace` takes milliseconds, and a process
that never computes never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base.version import VERSION

if TYPE_CHECKING:
    from .base.config import EngineOptions
    from .base.request import CompletionOutput, RequestOutput
    from .base.sampling import SamplingParams
    from .engine.clients.async_engine import AsyncEngine
    from .engine.clients.llm import LLM

__version__ = VERSION
__all__ = [
    "LLM", "AsyncEngine", "CompletionOutput", "EngineOptions", "RequestOutput", "SamplingParams",
    "__version__",
]  # fmt: skip

_HOMES = {
    "LLM": "engine.clients.llm",
    "AsyncEngine": "engine.clients.async_engine",
    "CompletionOutput": "base.request",
    "EngineOptions": "base.config",
    "RequestOutput": "base.request",
    "SamplingParams": "base.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
