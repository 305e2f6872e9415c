"""Where repacked weights are kept between starts, and when a kept file may be used.

One file per model file, in `<cache>/panels/`. It is used if it was made of this very model file
(size, time of change, and a hash of samples from all of it), by this layout of panels, and is
whole. One that a signed profile brought is of a content, wherever that lies (`portable`). It is
made at the first start that finds none, by one process at a time, while weights are packed: each
lies in memory until it is written. Whatever goes wrong with it (no space, no right to write,
damage) costs a repacking in memory and one line. Torch-free.
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
"""Weights whose files are smaller are repacked sooner than a file is looked after."""


class PanelShelf:
    """The repacked weights of one model: found on the disk, or to be put there.

    `find` what is kept; `keep` what had to be packed; `finish` once, when all weights were asked
    for. `outcome` and `reason` then say for `headrace explain` where the weights are.
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
        """`layout` names how the kernels lay panels out; files of another layout are not used.
        `progress` is told of packing and of writing, in the bytes of each."""
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
        """The kind of what is kept under a name, None where nothing is."""
        entry = self._file.entries.get(name) if self._file else None
        return None if entry is None else entry.kind

    def find(
        self, name: str, kind: str, shape: tuple[int, int], size: int
    ) -> npt.NDArray[Any] | None:
        """uint8[size], read-only, or None where it is not kept."""
        if self._file is None:
            return None
        entry = self._file.entries.get(name)
        if entry is None or (entry.kind, entry.shape, entry.size) != (kind, shape, size):
            return None
        data = self._file.view(name)
        self._found[name] = Part(name, kind, shape, data)
        return data

    def refuse(self, why: str) -> None:
        """What was found cannot be right: nothing more of it is handed out."""
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
        """Write what was packed. True: it is in the file, and `data` may be given up; `replace`
        gets the same bytes once they can be read again, by the end of `finish`."""
        if not self._packed:
            label = f"repacking {self._files.path.name} for this CPU, once"
            self._progress.start(self._size(), label)
            self._begin()
        self._progress.advance(data.nbytes)
        part = Part(name, kind, shape, data)
        self._packed.append((part, replace))
        if self._writer is None or name in self._writer.entries:
            return False
        return self._add(part)

    def finish(self) -> bool:
        """Complete the file where something was packed, and go over to it; was it of any use?

        Without a file, what was packed is in memory. Raises `ModelFileError` where even what was
        written cannot be read again.
        """
        packed = self._packed
        if not packed:
            if self._file is not None:
                self._tell(self._file)
            return self._file is not None
        for part in self._found.values():
            # What was found before a weight was missed belongs into the new file too.
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
        """Bytes of the files that are repacked."""
        return sum(size for _, size, *_ in self._identity.get("weights", ()))

    def _begin(self) -> None:
        """Begin a file, if one is to be."""
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
        """There will be no file: what is in it comes back into memory."""
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
    """Where panels are kept for this cache."""
    return root(cache_dir) / FOLDER


def panel_path(files: WeightFiles, folder: Path) -> Path:
    """Readable, and one for each path: a changed model file's panels replace the old ones."""
    path = str(files.path.resolve())
    digest = hashlib.sha256(path.encode()).hexdigest()[:12]
    return folder / f"{files.path.stem[:80]}-{digest}{SUFFIX}"


def kept_path(files: WeightFiles, folder: Path) -> Path | None:
    """The file that a start will look into first, if there is one. Raises `OSError`."""
    paths = panel_path(files, folder), _portable(files, "", folder)[0]
    return next((path for path in paths if path.exists()), None)


def portable(files: WeightFiles, folder: Path, layout: str) -> Path | None:
    """Write the kept panels once more, bound to the weights' content instead of their place; → the
    file, beside them. None where none are kept. Of equal panels every machine makes equal bytes.

    Raises `OSError`.
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
    """Where panels of a content are, and what they depend on."""
    content = content_digest(files)
    return folder / f"{content}{SUFFIX}", {"layout": layout, "content": content}


def _identity(files: WeightFiles, layout: str) -> dict[str, Any]:
    """What the panels depend on: which bytes, and how they are laid out."""
    return {
        "layout": layout,
        "source": str(files.path.resolve()),
        "weights": [[path.name, *sampled(path)] for path in files.weights],
    }


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """The right to write a file: False where another process has it. The kernel drops the lock
    with the process that held it; what a dead one left half written is swept away."""
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
