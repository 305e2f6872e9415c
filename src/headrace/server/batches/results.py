"""Results of a batch, line by line: two append-only files.

After a restart they show which lines are done. A line that a crash or a full disk left incomplete
is removed.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec

from ...base.foreign import json_reader

ROOM = 256 * 1024
"""Bytes that must be free on disk before requests are computed."""


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = _Details()
    # Same counts under the names of /v1/responses.
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details = _Details()


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    """Fields that are read back from a line."""

    id: str
    response: _Response | None = None


_line = json_reader(_Line)


class Results:
    """One results file."""

    def __init__(self, path: Path) -> None:
        """Open the file and recover its lines.

        `done` holds the numbers of its lines; the token counters are those found at opening. Raises
        `OSError`.
        """
        self.path = path
        self.done: set[int] = set()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion = 0
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._file = os.fdopen(handle, "r+b", buffering=0)
        try:
            self._end = self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> int:
        end = 0
        with self.path.open("rb") as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    break
                try:
                    line = _line(raw)
                    self.done.add(number_of(line.id))
                except ValueError:
                    break
                self._count(line)
                end += len(raw)
        self._file.truncate(end)
        self._file.seek(end)
        return end

    def _count(self, line: _Line) -> None:
        usage = line.response.body.usage if line.response is not None else None
        if usage is not None:
            self.prompt_tokens += usage.prompt_tokens + usage.input_tokens
            self.completion += usage.completion_tokens + usage.output_tokens
            self.cached_tokens += usage.prompt_tokens_details.cached_tokens
            self.cached_tokens += usage.input_tokens_details.cached_tokens

    def check_room(self) -> None:
        """Raise `OSError` if the disk lacks room for further lines."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), self._end, ROOM)
            self._file.truncate(self._end)

    def append(self, number: int, line: dict[str, Any]) -> None:
        """Append a line completely or not at all. Raises `OSError` on a full or broken disk."""
        data = msgspec.json.encode(line) + b"\n"
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.seek(self._end)
            self._file.truncate(self._end)
            raise
        self._end += len(data)
        self.done.add(number)

    @property
    def size(self) -> int:
        return self._end

    def close(self, *, sync: bool = False) -> None:
        """Close the file. Raises `OSError` if `sync` is requested and fails."""
        try:
            if sync:
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


async def opened(*paths: Path) -> list[Results]:
    """Open results in a thread, since hundreds of megabytes may have to be read.

    On `OSError` or cancellation none stays open.
    """
    work = asyncio.ensure_future(asyncio.to_thread(_open_all, paths))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})  # A thread cannot be interrupted.
        if not work.cancelled() and work.exception() is None:
            for results in work.result():
                results.close()
        raise


def _open_all(paths: tuple[Path, ...]) -> list[Results]:
    found: list[Results] = []
    try:
        for path in paths:
            found.append(Results(path))
    except BaseException:
        for results in found:
            results.close()
        raise
    return found


def line_id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"


def number_of(identity: str) -> int:
    """Return the line's number in its id."""
    return int(identity.rpartition("_")[2])
