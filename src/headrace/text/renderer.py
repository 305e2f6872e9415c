"""Large renderings, each in a process that is killed when its time is over.

jinja's filters do their work in C, where no step is counted and no clock is checked: rounding to
10^8 places takes minutes and holds the interpreter lock. A thread cannot be stopped in that; a
process can. One is started for the first large conversation. It keeps the compiled template, and
takes one rendering after another over its standard streams (`rendering`, ADR 0055).

    parent → child: length (4 bytes), MessagePack: a source, then the variables of each; another
    source replaces it
    child → parent: length, MessagePack: [kind, text], kind being ok, raised, exhausted or failed
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec

from ..base.errors import InvalidRequest, Overloaded
from ..base.foreign import msgpack_reader

HARD_SECONDS = 6.0
"""Seconds of one rendering without its process's start; `sandbox.MAX_SECONDS` comes first while
Python code runs."""
START_SECONDS = 30.0
MOST = 2
"""Largest number of processes of one template."""
MEMORY = 2 * 2**30
"""Bytes of address space of such a process."""
LENGTH = struct.Struct("<I")
encode = msgspec.msgpack.encode
_answered = msgpack_reader(tuple[str, str])


class Renderers:
    """Processes of one template. May be used from several threads."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._free: list[_Renderer] = []
        self._places = threading.BoundedSemaphore(MOST)

    def render(self, variables: dict[str, Any]) -> tuple[str, str]:
        """Render in a process; return (kind, text) as the child reports it. Raises `Overloaded` if
        no process can be started and `InvalidRequest` for variables that are not JSON."""
        try:
            asked = encode(variables)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"the chat template cannot be given this: {error}"[:500], param="messages"
            ) from None
        with self._places:
            try:
                renderer = self._one()
                kind, text = renderer.render(asked)
            except OSError as error:
                raise Overloaded(
                    f"no process for the chat template: {error}", retry_after=2.0
                ) from None
            if renderer.alive:
                self._free.append(renderer)
        return kind, text

    def _one(self) -> _Renderer:
        while self._free:
            renderer = self._free.pop()
            if renderer.running:
                return renderer
        return _Renderer(self._source)


class _Renderer:
    """One process, as seen by its parent. It ends with its owner, which holds its standard
    input."""

    def __init__(self, source: str) -> None:
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LC_ALL": "C.UTF-8"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.rendering"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._into, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._into, False)
        self.alive = True
        self.take(source)

    def take(self, source: str) -> None:
        """Render this template from now on."""
        if self._exchange(encode(source), START_SECONDS) is None:
            raise OSError("it did not start")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def render(self, asked: bytes) -> tuple[str, str]:
        answer = self._exchange(asked, HARD_SECONDS)
        if answer is None:
            return "exhausted", f"takes longer than {HARD_SECONDS:g} seconds, or too much memory"
        kind, text = _answered(answer)
        return kind, text

    def _exchange(self, asked: bytes, seconds: float) -> bytes | None:
        """Return the answer; None if none came in time, and the process is killed."""
        end = time.monotonic() + seconds
        try:
            self._send(memoryview(LENGTH.pack(len(asked)) + asked), end)
            (length,) = LENGTH.unpack(self._read(LENGTH.size, end))
            return self._read(length, end)
        except (OSError, EOFError):
            self.kill()
            return None

    def _send(self, data: memoryview, end: float) -> None:
        while data:
            self._wait([], [self._into], end)
            data = data[os.write(self._into, data[:65536]) :]

    def _read(self, size: int, end: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._wait([self._out], [], end)
            part = os.read(self._out, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def _wait(self, readable: list[int], writable: list[int], end: float) -> None:
        poll = select.poll()
        for handle in readable:
            poll.register(handle, select.POLLIN)
        for handle in writable:
            poll.register(handle, select.POLLOUT)
        if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError

    def kill(self) -> None:
        self.alive = False
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def __del__(self) -> None:
        if getattr(self, "alive", False):
            self.kill()
