"""Signs of life between processes, to notice a process that is gone, stopped or cut off.

A closed connection is noticed at once. A host without power, a stopped process and a network that
drops packets close nothing: they are noticed by their silence.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from ..obs.threads import THREADS

BEAT = 0.25
"""Seconds between two signs of life."""
SILENT = 3.0
"""Seconds of silence after which the other end counts as gone."""
_MOST = 1 << 16
"""Bytes read at once: a word and the beats around it."""


class Pulse:
    """Signs of life to and from other processes, in its own thread."""

    def __init__(
        self,
        ends: Mapping[str, socket.socket],
        on_lost: Callable[[str, str], None],
        *,
        silent: float = SILENT,
        begins: float = 0.0,
        on_word: Callable[[str, str], None] = lambda name, word: None,
    ) -> None:
        """`ends`: a connection to each other process, by name; the pulse owns them from now on.
        `on_lost` is called once for each lost one, in the pulse's thread, with its name and the
        cause, as the end of a sentence. `begins`: seconds, in addition to `silent`, allowed before
        the first sign of life (the other end imports first). The first sign is sent at once, so
        that even a process stopped right after its start has sent one. `on_word` is called like
        `on_lost` for each word that the other end sends by `say`."""
        self._ends, self._on_lost, self._silent = dict(ends), on_lost, silent
        self._begins, self._on_word = begins, on_word
        self._closed = threading.Event()
        for end in self._ends.values():
            end.setblocking(False)
            with suppress(OSError):  # The thread reports a lost one.
                end.send(b".")
        THREADS.keep("pulse", self._run)

    def say(self, word: str) -> None:
        """Send a word to the other ends, from any thread. It must fit into one packet, and neither
        begin nor end with a dot."""
        for end in list(self._ends.values()):
            with suppress(OSError):
                end.send(word.encode())

    def _run(self) -> None:
        looked = beaten = time.monotonic()
        heard = dict.fromkeys(self._ends, looked + self._begins)
        while self._ends and not self._closed.is_set():
            ready = _ready(self._ends.values(), BEAT / 2)
            now = time.monotonic()
            if now - looked > self._silent / 2:
                # This process itself slept: signs of that time are still unread.
                heard = {name: max(at, now) for name, at in heard.items()}
            looked = now
            beats, beaten = now - beaten >= BEAT, now if now - beaten >= BEAT else beaten
            for name, end in list(self._ends.items()):
                why = ""
                if end.fileno() in ready:
                    try:
                        said = end.recv(_MOST)
                        heard[name], why = now, "" if said else "closed its connection"
                        word = said.strip(b".").decode(errors="replace")
                        if word and not self._closed.is_set():
                            self._on_word(name, word)
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
        for end in self._ends.values():
            end.close()

    def close(self) -> None:
        """Send no more signs of life; the other ends notice at once. Never waits: the woken thread
        may be in `on_lost`, and closes its connections itself."""
        self._closed.set()
        for end in list(self._ends.values()):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _ready(ends: Iterable[socket.socket], seconds: float) -> set[int]:
    """Return the descriptors that can be read. `select` takes none above 1,023, which a server
    exceeds."""
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * seconds)}
