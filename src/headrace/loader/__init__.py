"""Owns: catalog, download, GGUF and safetensors, names of weights.
Takes → gives: a model's name → files on disk → named weights.
Does not know: the use of weights in a model.
Invariant: files are hostile: bounded, checked, never pickle.
Where does my change go: where bytes come from.

Everything here works without torch.
"""

from __future__ import annotations

from .cache import CachedModel, cached_models, remove
from .catalog import CATALOG, CatalogModel
from .open import open_model
from .progress import Progress

__all__ = [
    "CATALOG", "CachedModel", "CatalogModel", "Progress", "cached_models", "open_model", "remove",
]  # fmt: skip
