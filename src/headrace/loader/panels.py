"""Storage of repacked weights between starts, and the rules for using a stored file.

One file per model file, in `<cache>/panels/`. It is used if it is complete, has this layout of
panels, and was made from this very model file. The file is recognised by its size, its time of
change, and a hash of samples from all of it. A file from a signed profile belongs to a content,
wherever that lies (`portable`).

The first start without a file makes it, one process at a time, while weights are packed: each
weight stays in memory until it is written. Any failure (no space, no right to write, damage) costs
a repacking in memory and one line in the log. Torch-free.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cache import root
from .content import WeightFiles, content_digest, sampled
from .kept import FOLDER, SUFFIX
from .panelfile import STAGE, TEMPORARY, PanelFile, PanelFileWrong, PanelWriter, Part, write
from .partial import MARGIN
from .progress import Progress, Silent

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger("headrace.loader")

LEAST_BYTES = 64 << 20
"""Smallest total of weight files for which a file is kept; repacking smaller ones is faster."""


class PanelShelf:
    """Packed-weight cache of one model: weights found on the disk, or to be written there.

    `find` stored weights; `keep` newly packed ones; `finish` once, after all weights were
    requested. `outcome` and `reason` then give `headrace explain` the place of the weights.
    """

    def __init__(
        self,
        files: WeightFiles,
        folder: Path,
        layout: str,
        *,
        least: int = LEAST_BYTES,
        progress: Progress | None = None,
    ) -> None:
        """Open the stored file, if there is one. `layout` names the kernels' layout of panels;
        files of another layout are not used. `progress` is called for packing and for writing, in
        bytes."""
        self._progress = progress or Silent()
        self.path = panel_path(files, folder)
        self.outcome, self.reason = "memory", "repacked at this start"
        self._least = least
        self._files, self._layout = files, layout
        self._packed: list[tuple[Part, Callable[[npt.NDArray[Any]], None]]] = []
        self._writer: PanelWriter | None = None
        self._lock = ExitStack()
        self._found: dict[str, Part] = {}
        self._file: PanelFile | None = None
        try:
            self._identity: dict[str, Any] = _identity(files, layout)
        except OSError as error:
            self._identity = {}
            self.reason = f"{files.path.name} cannot be read: {error.strerror}"
            return
        self._file = self._open()

    def kind(self, name: str) -> str | None:
        """Return the kind of the weight stored under a name; None if it is not stored."""
        entry = self._file.entries.get(name) if self._file else None
        return None if entry is None else entry.kind

    def find(
        self, name: str, kind: str, shape: tuple[int, int], size: int
    ) -> npt.NDArray[Any] | None:
        """Return uint8[size], read-only, or None if it is not stored."""
        if self._file is None:
            return None
        entry = self._file.entries.get(name)
        if entry is None or (entry.kind, entry.shape, entry.size) != (kind, shape, size):
            return None
        data = self._file.view(name)
        self._found[name] = Part(name, kind, shape, data)
        return data

    def refuse(self, why: str) -> None:
        """Log that the stored file must be wrong, and use nothing more of it."""
        log.warning("%s is not used: %s", self._file.path if self._file else self.path, why)
        self._file = None

    def keep(
        self,
        name: str,
        kind: str,
        shape: tuple[int, int],
        data: npt.NDArray[Any],
        replace: Callable[[npt.NDArray[Any]], None],
    ) -> bool:
        """Write a packed weight. True: it is in the file, and `data` may be given up; `replace`
        gets the same bytes once they can be read again, by the end of `finish`."""
        if not self._packed:
            label = f"repacking {self._files.path.name} for this CPU, once"
            self._progress.start(self._size(), label, share=True)
            self._begin()
        self._progress.advance(data.nbytes)
        part = Part(name, kind, shape, data)
        self._packed.append((part, replace))
        if self._writer is None or name in self._writer.entries:
            return False
        return self._add(part)

    def finish(self) -> bool:
        """Complete the file if a weight was packed, and switch to it; return whether it was of any
        use.

        Without a file, packed weights stay in memory. Raises `ModelFileError` if even written ones
        cannot be read again.
        """
        packed = self._packed
        if not packed:
            if self._file is not None:
                self._tell(self._file)
            return self._file is not None
        for part in self._found.values():
            # Weights found before one was missed belong in the new file too.
            if self._writer is not None and part.name not in self._writer.entries:
                self._add(part)
        if self._file is not None:
            self.refuse("weights are missing in it")
        try:
            if self._writer is not None:
                self._writer.finish()
        except OSError as error:
            self._give_up(error)
        if self._identity:
            self._file = self._open()  # Perhaps another process has just written it.
        kept = [
            (replace, found)
            for part, replace in packed
            if (found := self.find(part.name, part.kind, part.shape, part.data.nbytes)) is not None
        ]
        if self._file is not None and len(kept) == len(packed):
            for replace, data in kept:
                replace(data)
            self._tell(self._file)
        elif self._writer is not None:
            self._give_up(OSError(0, "what was written cannot be mapped"))
        self._packed, self._writer = [], None
        self._lock.close()
        self._progress.done()
        return True

    def _size(self) -> int:
        """Return the bytes of the files that are repacked."""
        return sum(size for _, size, *_ in self._identity.get("weights", ()))

    def _begin(self) -> None:
        """Start a file, if one is to be written."""
        if not self._identity:
            return
        if self._size() < self._least:
            self.reason = "small enough to be repacked at each start"
            return
        try:
            if self._lock.enter_context(_locked(self.path)):
                self._writer = PanelWriter(self.path, self._identity)
            else:
                self.reason = "another process is writing the file for the next start"
        except (OSError, MemoryError) as error:
            self._give_up(error)

    def _add(self, part: Part) -> bool:
        assert self._writer is not None
        try:
            self._check_space(part.data.nbytes + STAGE)
            self._writer.add(part)
        except (OSError, MemoryError) as error:
            self._give_up(error)
        return self._writer is not None

    def _give_up(self, error: Exception) -> None:
        """Give up the file: bring its content back into memory."""
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self.reason = f"no file for the next start in {self.path.parent}: {what}"
        log.warning("repacked weights are in memory only; %s", self.reason)
        writer, self._writer = self._writer, None
        if writer is not None:
            own = writer.take_back()
            for part, replace in self._packed:
                if part.name in own:
                    replace(own.pop(part.name))
        self._lock.close()

    def _open(self) -> PanelFile | None:
        brought, identity = _portable(self._files, self._layout, self.path.parent)
        own = self._opened(self.path, self._identity)
        return own or self._opened(brought, identity)

    def _opened(self, path: Path, identity: dict[str, Any]) -> PanelFile | None:
        try:
            file = PanelFile(path, identity)
            file.check()
            if not file.on_huge_pages():
                file.copy_to_huge_pages()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PanelFileWrong as wrong:
            log.info("%s is made anew: %s", path, wrong)
            return None
        except (OSError, MemoryError, ValueError) as error:
            log.warning("%s is not used: %s", path, error)
            return None
        return file

    def _tell(self, file: PanelFile) -> None:
        self.outcome = "copied" if file.copied else "mapped"
        self.reason = (
            f"{file.path} is not on huge pages here" if file.copied else f"from {file.path}"
        )

    def _check_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if free < needed + MARGIN:
            raise OSError(0, f"{needed + MARGIN:,} bytes are needed, {free:,} are free")


def panel_folder(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of the panels in this cache."""
    return root(cache_dir) / FOLDER


def panel_path(files: WeightFiles, folder: Path) -> Path:
    """Return a readable path, one for each model path: a changed model file's panels replace the
    old ones."""
    path = str(files.path.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:12]
    return folder / f"{files.path.stem[:80]}-{digest}{SUFFIX}"


def kept_path(files: WeightFiles, folder: Path) -> Path | None:
    """Return the file that a start will look into first, if there is one. Raises `OSError`."""
    paths = panel_path(files, folder), _portable(files, "", folder)[0]
    return next((path for path in paths if path.exists()), None)


def portable(files: WeightFiles, folder: Path, layout: str) -> Path | None:
    """Write the stored panels again, bound to the weights' content instead of their place.

    Returns the file, in the same folder; None if no panels are stored. Equal panels give equal
    bytes on every machine. Raises `OSError`.
    """
    try:
        kept = PanelFile(panel_path(files, folder), _identity(files, layout))
        kept.check()
    except (FileNotFoundError, PanelFileWrong):
        return None
    found = sorted(kept.entries.items())
    parts = [Part(name, one.kind, one.shape, kept.view(name)) for name, one in found]
    path, identity = _portable(files, layout, folder)
    write(path, identity, parts)
    return path


def _portable(files: WeightFiles, layout: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path of a content's panels, and their identity."""
    content = content_digest(files)
    return folder / f"{content}{SUFFIX}", {"layout": layout, "content": content}


def _identity(files: WeightFiles, layout: str) -> dict[str, Any]:
    """Return the identity of the panels: the bytes they were made from, and their layout."""
    return {
        "layout": layout,
        "source": str(files.path.resolve()),
        "weights": [[path.name, *sampled(path)] for path in files.weights],
    }


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Try to lock a file for writing; yield False if another process holds the lock.

    The kernel drops the lock with the process that held it. Unfinished files of dead writers are
    removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        for left in path.parent.iterdir():
            if left.name.startswith(f"{path.name}.") and left.suffix == TEMPORARY:
                with suppress(OSError):
                    left.unlink()
        yield True
    finally:
        os.close(handle)
