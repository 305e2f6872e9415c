"""Configuration and tensors of a language model's encoder in the model's folder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from ..base.errors import HeadraceError, ModelFileError
from ..base.modelfiles import ModelFiles
from .jsonfile import read_json


class Shaped(Protocol):
    """A stored tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def encoder_config(files: ModelFiles, kinds: Collection[str]) -> dict[str, Any] | None:
    """Return a folder's configuration if its `model_type` is one of `kinds`; else None."""
    if files.format == "gguf":
        return None
    try:
        config = read_json(files.path / "config.json")
    except (HeadraceError, OSError):
        return None
    return config if config.get("model_type") in kinds else None


def check_shapes(
    there: Mapping[str, Shaped], wanted: Iterable[tuple[str, tuple[int, ...]]]
) -> None:
    """Raise `ModelFileError` unless each wanted tensor is there and has its shape."""
    for name, shape in wanted:
        found = there.get(name)
        if found is None or tuple(found.shape) != shape:
            raise ModelFileError(f"{name} is missing, or is not of shape {list(shape)}")
