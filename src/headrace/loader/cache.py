"""The cache of downloaded models: its layout, its record of verified files, its lock.

`<root>/models/<catalog name>/…` and `<root>/hub/<org>--<name>/<commit>/…`; each model folder holds
a `record.json` with hash, size and time of change of every verified file. A file is hashed once,
and trusted as long as its size and time match the record. Torch-free.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.config import DEFAULT_MODEL
from ..base.environment import cache_root
from ..base.errors import DownloadError, ModelFileError, ModelNotFound
from .catalog import CATALOG
from .jsonfile import read_json
from .kept import KeptPanels, kept_panels, panels_of, remove_panels
from .partial import file_sha256
from .progress import Progress

RECORD = "record.json"
LOCK = ".lock"
LOCK_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One model of the catalog or the cache, for `headrace models`."""

    name: str
    what: str
    licence: str
    size: int
    """Bytes of the whole model; for a hub model, of its cached part."""
    cached: int
    """Bytes on the disk, with unfinished files, without `packed`."""
    complete: bool
    path: Path
    default: bool = False
    packed: int = 0
    """Bytes of its repacked weights, kept for the next start."""
    task: str = ""
    """Key of `catalog.TASKS`; "": it is not in the catalog."""
    memory: int = 0
    """Bytes to serve it with, estimated; 0: unknown."""


def root(cache_dir: str | Path | None) -> Path:
    return cache_root() if cache_dir is None else Path(cache_dir).expanduser()


def catalog_folder(name: str, cache_dir: str | Path | None = None) -> Path:
    return root(cache_dir) / "models" / name


def hub_folder(repo: str, cache_dir: str | Path | None = None) -> Path:
    return root(cache_dir) / "hub" / repo.replace("/", "--")


class Record:
    """Record of a model folder's verified files. Written only under the folder's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / RECORD
        self.data: dict[str, Any] = {"files": {}}
        if self._path.is_file():
            try:
                found = read_json(self._path)
            except ModelFileError:
                return  # a damaged record costs hashing once more, nothing else
            if isinstance(found.get("files"), dict):
                self.data = found

    def knows(self, path: str, size: int, sha256: str | None) -> bool:
        """Return whether this file was verified and is unchanged since."""
        entry = self.data["files"].get(path)
        if not isinstance(entry, dict) or (sha256 is not None and entry.get("sha256") != sha256):
            return False
        try:
            stat = (self.folder / path).stat()
        except OSError:
            return False
        return stat.st_size == size and entry.get("mtime_ns") == stat.st_mtime_ns

    def add(self, path: str, sha256: str) -> None:
        """Record a file that was just verified."""
        stat = (self.folder / path).stat()
        self.data["files"][path] = {
            "sha256": sha256,
            "size": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
        }
        self.save()

    def verify(self, path: str, size: int, sha256: str) -> bool:
        """Return whether the file is there and right; hash it unless the record has it."""
        if self.knows(path, size, sha256):
            return True
        target = self.folder / path
        if not target.is_file() or target.stat().st_size != size or file_sha256(target) != sha256:
            return False
        self.add(path, sha256)
        return True

    def save(self) -> None:
        """Write the record atomically: a reader sees the old record or the new one."""
        fresh = self._path.with_suffix(".tmp")
        try:
            fresh.write_text(json.dumps(self.data, indent=1))
            fresh.replace(self._path)
        except OSError:
            # A cache that cannot be written (a read-only image) is verified at every start.
            with suppress(OSError):
                fresh.unlink()


@contextmanager
def locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; waits for another process that downloads into it.

    The kernel drops the lock with the process that held it, so none is ever stale.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DownloadError(
            f"{folder}: cannot be written: {error.strerror}; choose another with --cache-dir",
            param="cache_dir",
        ) from None
    try:
        waiting = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    progress.start(0, f"waiting for another process that downloads {folder.name}")
                    waiting = True
                progress.advance(0)  # Shows the wait, and lets the user end it.
                time.sleep(LOCK_POLL_SECONDS)
        if waiting:
            progress.done()
        yield
    finally:
        os.close(handle)


def cached_models(cache_dir: str | Path | None = None) -> list[CachedModel]:
    """List every catalog model, cached or not, and every cached hub model."""
    found = []
    place = root(cache_dir)
    for model in CATALOG.values():
        folder = catalog_folder(model.name, cache_dir)
        record = Record(folder)
        complete = all(record.knows(each.path, each.size, each.sha256) for each in model.files)
        found.append(
            CachedModel(
                model.name,
                model.what,
                model.licence,
                model.size,
                _disk_use(folder),
                complete,
                folder,
                default=model.name == DEFAULT_MODEL,
                packed=_packed(folder, place),
                task=model.task,
                memory=model.memory,
            )
        )
    hub = place / "hub"
    for folder in sorted(hub.iterdir()) if hub.is_dir() else []:
        if folder.is_dir():
            data, size = Record(folder).data, _disk_use(folder)
            found.append(
                CachedModel(
                    str(data.get("repo") or folder.name.replace("--", "/", 1)),
                    "from the hub",
                    str(data.get("licence") or "unknown"),
                    size,
                    size,
                    bool(data.get("complete")),
                    folder,
                    packed=_packed(folder, place),
                )
            )
    return found + _of_local_files(place)


def _of_local_files(place: Path) -> list[CachedModel]:
    """List repacked weights of models that lie outside the cache, or are gone."""
    inside = [(place / each).resolve() for each in ("models", "hub")]
    found = []
    for kept in kept_panels(place):
        source = kept.source
        if source is not None and source.exists():
            if not any(source.is_relative_to(each) for each in inside):
                found.append(_local(kept, "repacked weights of a file outside of the cache"))
        else:
            found.append(_local(kept, "repacked weights of a model that is gone"))
    return found


def _local(kept: KeptPanels, what: str) -> CachedModel:
    name = str(kept.source or kept.path)
    return CachedModel(name, what, "", 0, 0, False, kept.path, packed=kept.nbytes)


def _packed(folder: Path, place: Path) -> int:
    return sum(kept.nbytes for kept in panels_of(folder, place))


def remove(name: str, cache_dir: str | Path | None = None) -> int:
    """Delete a cached model with its repacked weights; return the bytes freed.

    `name` may be a local file's path, as `cached_models` names it: then only its repacked weights
    go, since the cache has nothing else of it. Raises `ModelNotFound` for an unknown name.
    """
    place = root(cache_dir)
    local = [kept for kept in kept_panels(place) if name in (str(kept.source), str(kept.path))]
    if local:
        return remove_panels(local)
    if name not in CATALOG and not is_hub_id(name):
        raise ModelNotFound(f"no cached model is called {name!r:.100}", param="model")
    is_catalog = name in CATALOG
    folder = catalog_folder(name, cache_dir) if is_catalog else hub_folder(name, cache_dir)
    freed = _disk_use(folder)
    panels = panels_of(folder, place)
    if not folder.is_dir():
        raise ModelNotFound(f"{name} is not in the cache ({folder})", param="model")
    shutil.rmtree(folder)
    return freed + remove_panels(panels)


def is_hub_id(name: str) -> bool:
    """Return whether a name is `org/name`, in the characters that a hub allows."""
    parts = name.split("/")
    return len(parts) == 2 and all(
        0 < len(part) <= 96
        and part[0].isalnum()
        and all(c.isascii() and (c.isalnum() or c in "-_.") for c in part)
        and ".." not in part
        for part in parts
    )


def _disk_use(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
