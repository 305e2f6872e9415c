"""The source of a model before anything is fetched: its files with their digests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeVar

from ..base.config import EngineOptions
from ..base.errors import ModelFileError
from ..loader import CATALOG, Progress, open_model
from ..loader.partial import file_sha256

Folder = TypeVar("Folder", bound=PurePath)
WEIGHTS = (".gguf", ".safetensors")
"""Endings of files that contain numbers and no code."""
MOST_FILES = 2000
"""Most files of a model's folder."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One expected file."""

    path: str
    """Path inside the model's folder."""
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Source:
    """A model named by a user."""

    name: str
    files: tuple[SourceFile, ...]
    pinned: bool
    """Whether the catalog pins the digests."""
    licence: str | None

    def parameters(self) -> dict[str, Any]:
        """Return the key parameters of the fetching stage, without the files' paths."""
        return {
            "name": self.name,
            "files": [[one.path, f"sha256:{one.sha256}", one.size] for one in self.files],
            "pinned": self.pinned,
        }


def model_folder(engine: EngineOptions, progress: Progress | None = None) -> Path:
    """Return the folder of the model's files, after downloading missing ones.

    Raises the errors of `loader.open_model`.
    """
    found = open_model(
        engine.model, cache_dir=engine.cache_dir, offline=engine.offline, progress=progress
    ).path
    return found if found.is_dir() else found.parent


def find_source(engine: EngineOptions, progress: Progress | None = None) -> Source:
    """Find the model of the options: from the catalog by its pinned digests, from a folder or a hub
    by its current bytes.

    Raises the errors of `loader.open_model`; `ModelFileError` for a folder without a model.
    """
    model = engine.model
    if model in CATALOG and not Path(model).exists():
        known = CATALOG[model]
        pinned = tuple(SourceFile(one.path, one.sha256, one.size) for one in known.files)
        return Source(model, pinned, pinned=True, licence=known.licence)
    opened = open_model(
        model, cache_dir=engine.cache_dir, offline=engine.offline, progress=progress
    )
    folder = opened.path if opened.path.is_dir() else opened.path.parent
    files = tuple(
        SourceFile(path.relative_to(folder).as_posix(), file_sha256(path), path.stat().st_size)
        for path in ([opened.path] if opened.path.is_file() else _files(folder))
    )
    name = Path(model).name if Path(model).exists() else model
    return Source(name, files, pinned=False, licence=opened.licence)


def model_path(folder: Folder, names: list[str]) -> Folder:
    """Return the path that the loader opens in a folder with these files."""
    return folder / names[0] if len(names) == 1 and names[0].endswith(".gguf") else folder


def _files(folder: Path) -> list[Path]:
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.name != "record.json"
    )
    if len(found) > MOST_FILES:
        raise ModelFileError(f"{folder}: {len(found):,} files; a model has {MOST_FILES:,} at most")
    return found
