"""Owns: catalog, download, GGUF and safetensors, names of weights.
Takes → gives: a model's name → files on disk → named weights.
Does not know: what a model does with them.
Invariant: files are hostile: bounded, checked, never pickle.
Where does my change go: where bytes come from.
"""

from __future__ import annotations

from .open import open_model

__all__ = ["open_model"]
