"""Recognition of transcription models by name, and their folders."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import HeadraceError, ModelNotFound
from ..base.names import nearest
from ..loader import Progress
from ..loader.catalog import CATALOG
from ..loader.jsonfile import read_json

DEFAULT_MODEL = "whisper-base"
KINDS = ("whisper", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt", "moonshine")
"""Supported `model_type` of folders in Hugging Face's layout."""


def hears(name: str) -> bool:
    """Tell whether a name or a folder is a transcription model. Downloads nothing."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return name in CATALOG and CATALOG[name].speech
    if (folder / "model.bin").exists() and any(folder.glob("vocabulary.*")):
        return True
    try:
        return read_json(folder / "config.json").get("model_type") in KINDS
    except (HeadraceError, OSError):
        return False


def listens(path: Path) -> bool:
    """Tell whether a folder is a language model that takes sounds in its prompt."""
    try:
        return read_json(path / "config.json").get("model_type") == "qwen2_audio"
    except (HeadraceError, OSError):
        return False


def find(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a transcription model; download it if it is the catalog's and not on
    disk.

    Raises `ModelNotFound`, `DownloadError`.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    known = CATALOG.get(name)
    if known is not None and known.speech:
        # Local: 60 ms of imports, useless if the files are here.
        from ..loader.download import fetch_catalog

        return fetch_catalog(known, cache_dir=cache_dir, offline=offline, progress=progress)
    speech = [model.name for model in CATALOG.values() if model.speech]
    raise ModelNotFound(
        f"no speech model {name!r:.200}; it is a catalog name ({', '.join(speech)}) or a folder"
        f"{nearest(name, speech)}",
        param="model",
    )
