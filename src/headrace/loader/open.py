"""From what the user typed to a `ModelFiles`: a local path, a catalog name or a hub id."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ModelFileError, ModelNotFound
from ..base.modelfiles import ModelFiles
from .folder import open_folder
from .gguf_model import open_gguf


def open_model(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: object = None,
) -> ModelFiles:
    path = Path(name).expanduser()
    if path.is_dir():
        return open_folder(path, name)
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf(path, name)
        raise ModelFileError(f"{name}: not a .gguf file, nor a folder in Hugging Face layout")
    raise ModelNotFound(name)
