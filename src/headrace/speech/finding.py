"""Recognition of transcription models by name, and their folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ..base.errors import HeadraceError, ModelNotFound
from ..base.names import nearest
from ..loader import Progress
from ..loader.cache import hub_folder, is_hub_id
from ..loader.catalog import CATALOG
from ..loader.gguf_model import candidates
from ..loader.jsonfile import read_json
from ..loader.open import fetched
from ..models.pictures import KINDS as PICTURES

DEFAULT_MODEL = "whisper-base"
KINDS = ("whisper", "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt", "moonshine")
"""Supported `model_type` of folders in Hugging Face's layout."""


def hears(name: str, *, cache_dir: str | Path | None = None, offline: bool = True) -> bool:
    """Return whether a name or a folder is a transcription model.

    Downloads nothing except, unless `offline`, the config of a hub model not in the cache.
    """
    folder = _folder(name)
    if folder is None:
        if name in CATALOG or not is_hub_id(name):
            return name in CATALOG and CATALOG[name].speech
        folder = hub_folder(name, cache_dir)
        if not folder.is_dir() and not offline:
            with suppress(HeadraceError):  # The user of the model will report it.
                fetched(f"{name}:config.json", cache_dir=cache_dir)
    if (folder / "model.bin").exists() and any(folder.glob("vocabulary.*")):
        return True
    try:
        return read_json(folder / "config.json").get("model_type") in KINDS
    except (HeadraceError, OSError):
        return False


def _folder(name: str) -> Path | None:
    """Return the folder of this name, if there is one."""
    try:
        path = Path(name).expanduser()
        return path if name and path.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # Too long, a home without a user, NUL.
        return None


def listens(path: Path) -> bool:
    """Return whether a folder is a language model that takes sounds in its prompt."""
    return _model_type(path) == "qwen2_audio"


def sees(path: Path) -> bool:
    """Return whether a folder, or a GGUF file with an encoder next to it, may be a language model
    that takes pictures in its prompt."""
    return bool(candidates(path)) or _model_type(path) in PICTURES


def _model_type(path: Path) -> object:
    try:
        return read_json(path / "config.json").get("model_type")
    except (HeadraceError, OSError):
        return None


def find(
    name: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder of a transcription model: a folder, a catalog name or a hub id; download
    it if needed.

    Raises `ModelNotFound`, `DownloadError`.
    """
    folder = _folder(name)
    if folder is not None:
        return folder
    speech = [model.name for model in CATALOG.values() if model.speech]
    if name in speech or (name not in CATALOG and is_hub_id(name)):
        return fetched(name, cache_dir=cache_dir, offline=offline, progress=progress)
    raise ModelNotFound(
        f"no speech model {name!r:.200}; it is a catalog name ({', '.join(speech)}), a folder, or "
        f"a hub id such as openai/whisper-small{nearest(name, speech)}",
        param="model",
    )
