"""Resolution of a user's model name to a `ModelFiles`: a local path, a catalog name or a hub id."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ModelFileError, ModelNotFound, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..base.names import nearest
from .catalog import CATALOG
from .diffusers_folder import INDEX, open_pipeline
from .download import fetch_catalog
from .folder import open_folder
from .gguf_model import open_gguf
from .progress import Progress

MAX_NAME = 4096


def open_model(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> ModelFiles:
    """Find a model, download it if needed, read its small files; imports no torch.

    `name`: a folder in Hugging Face layout, a `.gguf` file, a catalog name, or a hub id
    (`org/name`, for GGUF repositories `org/name:file.gguf` or `org/name:q4_k_m`); an existing path
    comes first. Raises `ModelNotFound`, `DownloadError`, `ModelFileError` or `UnsupportedModel`.
    """
    if not name or len(name) > MAX_NAME or "\0" in name:
        raise _unknown(name)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError):  # too long for a file, a home without a user
        raise _unknown(name) from None
    if exists:
        return open_local(path, name)
    known = CATALOG.get(name)
    if known is not None and known.speech:
        raise UnsupportedModel(
            f"{name} is for speech to text: headrace transcribe and headrace serve take it, "
            "headrace roofline shows its memory and its limits"
        )
    if known is not None and known.task == "program":
        raise UnsupportedModel(
            f"{name} is a program: headrace programs inspect and headrace programs run take it"
        )
    local = fetched(name, cache_dir=cache_dir, offline=offline, progress=progress)
    return open_local(local, name, None if known is None else known.licence)


def fetched(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder or `.gguf` file of a catalog name or a hub id; download it if needed.

    Raises `ModelNotFound` or `DownloadError`.
    """
    if name in CATALOG:
        model = CATALOG[name]
        return fetch_catalog(model, cache_dir=cache_dir, offline=offline, progress=progress)
    # Local: 40 ms of imports, useless at a start whose files are here.
    from .hub_model import fetch_hub, split_hub_name

    hub = split_hub_name(name)
    # `folder/file.gguf` is a path with a typing error, not a repository.
    if hub is not None and (":" in name or not name.endswith(".gguf")):
        return fetch_hub(*hub, cache_dir=cache_dir, offline=offline, progress=progress)
    raise _unknown(name)


def open_local(path: Path, name: str, licence: str | None = None) -> ModelFiles:
    """Open a folder or file on the disk under the name that the user gave it."""
    if (path / INDEX).is_file():
        return open_pipeline(path, name, licence)
    if path.is_dir():
        return open_folder(path, name, licence)
    if path.suffix == ".gguf":
        return open_gguf(path, name, licence)
    if path.suffix == ".safetensors":
        raise ModelFileError(f"{path}: name the folder that holds it and its config.json")
    raise ModelFileError(f"{path}: neither a .gguf file nor a folder in Hugging Face layout")


def _unknown(name: str) -> ModelNotFound:
    return ModelNotFound(
        f"no model {name!r:.200}; a model is a catalog name (headrace models lists them), a folder "
        "in Hugging Face layout, a .gguf file, or a hub id such as org/name or org/name:q4_k_m"
        f"{nearest(name.lower().replace(':', '-'), CATALOG)}",
        param="model",
    )
