"""Signs of life between processes of several hosts: who is gone, stopped or cut off is noticed.

A closed connection is seen at once. A host without power, a process that is stopped and a network
that swallows packets close nothing: they are known by their silence.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

BEAT = 0.25
"""Seconds between two signs of life."""
SILENT = 3.0
"""Seconds of silence after which the other end counts as gone."""


class Pulse:
    """Signs of life to other processes and from them, in a thread of its own."""

    def __init__(
        self,
        ends: Mapping[str, socket.socket],
        on_lost: Callable[[str, str], None],
        *,
        silent: float = SILENT,
        begins: float = 0.0,
    ) -> None:
        """`ends`: a connection to each other process, by its name, from now on the pulse's;
        `on_lost` is called once for each that is lost, in the pulse's thread, with its name and
        how, as the end of a sentence. `begins`: what may pass before the first sign of life (its
        end imports before it can speak), beside `silent`. The first is given at once: whoever is
        stopped right after it was ready has given one."""
        self._ends, self._on_lost, self._silent = dict(ends), on_lost, silent
        self._begins = begins
        self._closed = threading.Event()
        for end in self._ends.values():
            end.setblocking(False)
            with suppress(OSError):  # A lost one is told by the thread.
                end.send(b".")
        self._thread = threading.Thread(target=self._run, name="headrace-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        looked = beaten = time.monotonic()
        heard = dict.fromkeys(self._ends, looked + self._begins)
        while self._ends and not self._closed.is_set():
            ready, _, _ = select.select(list(self._ends.values()), [], [], BEAT / 2)
            now = time.monotonic()
            if now - looked > self._silent / 2:
                # It was this process that slept: what others said meanwhile is still to be read.
                heard = {name: max(at, now) for name, at in heard.items()}
            looked = now
            beats, beaten = now - beaten >= BEAT, now if now - beaten >= BEAT else beaten
            for name, end in list(self._ends.items()):
                why = ""
                if end in ready:
                    try:
                        heard[name], why = now, "" if end.recv(4096) else "closed its connection"
                    except BlockingIOError:
                        pass
                    except OSError as error:
                        why = f"lost its connection: {error.strerror}"
                if not why and now - heard[name] > self._silent:
                    why = f"has been silent for {self._silent:g} s"
                if not why and beats:
                    try:
                        end.send(b".")
                    except BlockingIOError:
                        pass
                    except OSError as error:
                        why = f"lost its connection: {error.strerror}"
                if why:
                    del self._ends[name]
                    end.close()
                    if not self._closed.is_set():
                        self._on_lost(name, why)

    def close(self) -> None:
        """Say nothing more; the other ends see it at once."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)
        for end in self._ends.values():
            with suppress(OSError):
                end.close()
