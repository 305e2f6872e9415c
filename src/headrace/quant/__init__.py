"""Owns: number formats: scheme = parameters, load, apply.
Takes → gives: bytes of a foreign format → layouts of `kernels.weights`.
Does not know: models, files.
Invariant: no loss beyond the format's own.
Where does my change go: a new weight format.

`ggml_types` is torch-free; the functions load on first use so that it can be read without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ggml import dequantise
    from .rows import unpack, weights_of

__all__ = ["dequantise", "unpack", "weights_of"]

_HOMES = {"dequantise": "ggml", "unpack": "rows", "weights_of": "rows"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
