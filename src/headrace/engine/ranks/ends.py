"""The engine's ends of connections to workers in other processes: a channel to each, and a way to
notice its end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ...dist.channel import Channel, PeerGone, PrivateFolder, address
from ...dist.wake import Wake
from .. import messages
from ..spawn import STACKS, Child


class WorkerEnd(Protocol):
    """The engine's end of a connection to a worker."""

    name: str
    channel: Channel
    wakes: bool
    """Whether the end of the worker wakes a wait on the channel."""

    @property
    def ended(self) -> bool:
        """Whether the worker is gone."""

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` from a thread of its own as soon as the worker is gone."""

    def how(self) -> str:
        """Return how the worker ended, as the rest of a sentence after its name."""

    def close(self) -> None:
        """Stop the worker and release it."""


class SpawnedEnd:
    """A worker in a process that this one has started."""

    def __init__(
        self, name: str, worker: str, keep: Sequence[int] = (), silent: float | None = None
    ) -> None:
        """`worker`: `module:function` that loads one, as in `engine.loop.real`; `keep`: descriptors
        it inherits; `silent`: seconds without a sign of life after which it is killed."""
        self.name = name
        self._private = PrivateFolder()
        where = address(self._private.path, "worker")
        self.channel = Channel(where, messages.FromWorker, bind=True)
        self._child = Child(
            "headrace.engine.ranks.worker_process",
            [where, str(self._private.path), "--worker", worker],
            keep,
            silent,
        )
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._child.pid)
            self.channel.watch(self._pidfd)
        self.wakes = self._pidfd is not None

    @property
    def pid(self) -> int:
        return self._child.pid

    def on_end(self, call: Callable[[], None]) -> None:
        self._child.watch(lambda code: call())

    @property
    def killed(self) -> bool:
        """Whether a signal ended it, so that it could not send a reason."""
        return (self._child.exit_code or 0) < 0

    @property
    def ended(self) -> bool:
        return self._child.exit_code is not None

    def how(self) -> str:
        code = self._child.wait(1.0)
        how = "does not answer" if code is None else self._child.how(code)
        with contextlib.suppress(OSError):
            stacks = (self._private.path / STACKS).read_text()
            if stacks:
                how += "\n" + stacks[-4000:]
        return how

    def close(self) -> None:
        with contextlib.suppress(PeerGone):
            self.channel.send(messages.Stop())
        if self._child.wait(2.0) is None:
            self._child.kill()
            self._child.wait(5.0)
        self._child.release()
        self.channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._private.close()


class JoinedEnd:
    """A worker in a process that a launcher has started, perhaps on another host."""

    wakes = True

    def __init__(self, name: str, channel: Channel) -> None:
        self.name, self.channel = name, channel
        self._wake, self._over = Wake(), threading.Event()
        self._why = ""
        self._calls: list[Callable[[], None]] = []
        channel.watch(self._wake.fileno())

    def lost(self, why: str) -> None:
        """Note that it is gone; from any thread, once."""
        self._why = why
        self._over.set()
        self._wake.ring()
        for call in self._calls:
            call()

    def on_end(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        if self._over.is_set():
            call()

    @property
    def ended(self) -> bool:
        return self._over.is_set() or self.channel.lost

    def how(self) -> str:
        self._over.wait(1.0)
        said = [one for one in self.channel.receive(0.05) if isinstance(one, messages.Failed)]
        return f"ended: {said[-1].error.message}" if said else self._why or "does not answer"

    def close(self) -> None:
        with contextlib.suppress(PeerGone):
            self.channel.send(messages.Stop())
        self.channel.close()
        self._wake.close()
