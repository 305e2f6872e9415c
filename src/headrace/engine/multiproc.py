"""The executor whose worker runs in a process of its own.

Nothing waits in a thread: who needs a result pumps the channel, and a pidfd wakes it at once when
the worker dies.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict, deque
from typing import Any

from ..base.errors import EngineDead
from ..base.facts import WorkerFacts
from ..base.modelfiles import ModelFiles
from ..base.step import PoolShape, StepPlan, StepResult
from ..dist.channel import Channel, PeerGone, PrivateFolder, address
from . import messages
from .executor import StepFuture
from .messages import WireFiles
from .spawn import STACKS, Child, explain_exit

_PREPARED = 32
"""Grammars of which the engine remembers that the worker has them; fewer than the worker keeps."""
_POLL = 0.25
"""Seconds between looks at the worker where the system has no pidfd."""


class MultiprocExecutor:
    """Speaks to `engine.worker_process`."""

    wake = None

    def __init__(self, files: ModelFiles, settings: dict[str, Any], worker: str) -> None:
        """`worker`: `module:function` that loads one, as in `engine.real`."""
        self._files = files
        self._settings = settings
        self._private = PrivateFolder()
        self._folder = self._private.path
        where = address(self._folder, "worker")
        self._channel = Channel(where, messages.FromWorker, bind=True)
        self._child = Child(
            "headrace.engine.worker_process", [where, str(self._folder), "--worker", worker]
        )
        self._pidfd: int | None = None
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._child.pid)
            self._channel.watch(self._pidfd)
        self._waiting: deque[_Coming] = deque()
        self._asked: deque[int] = deque()
        """Hashes of the grammars about which the worker was asked and has not answered."""
        self._prepared: OrderedDict[int, None] = OrderedDict()
        self._closed = False

    @property
    def pid(self) -> int:
        return self._child.pid

    def load(self) -> WorkerFacts:
        self._expect(messages.Hello)
        self._channel.send(messages.Load(WireFiles.of(self._files), self._settings))
        facts: WorkerFacts = self._expect(messages.Loaded).facts
        return facts

    def allocate(self, pool: PoolShape) -> None:
        self._channel.send(messages.Allocate(pool))
        self._expect(messages.Done)

    def warm_up(self) -> None:
        self._channel.send(messages.WarmUp())
        self._expect(messages.Done)

    def submit(self, plan: StepPlan) -> StepFuture:
        try:
            self._channel.send(messages.Execute(plan))
        except PeerGone:
            raise self._death() from None
        coming = _Coming(self)
        self._waiting.append(coming)
        return coming

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        """Asks the worker, and asks again until it says yes; never waits for an answer."""
        name = hash(source)
        if name in self._prepared:
            self._prepared.move_to_end(name)
            return True
        try:
            if name not in self._asked:
                self._channel.send(messages.Prepare(source, owner))
                self._asked.append(name)
            # With a step in flight its result may come first: then `pump` hears the answer.
            elif not self._waiting:
                message = self._channel.receive_one(0.0)
                if isinstance(message, messages.Prepared):
                    self._hear(message)
                elif isinstance(message, messages.Failed):
                    raise message.error.error()
        except PeerGone:
            raise self._death() from None
        if self._child.exit_code is not None:
            raise self._death()
        return name in self._prepared

    def load_adapter(self, name: str, path: str) -> None:
        self._about_adapter(messages.LoadAdapter(name, path))

    def unload_adapter(self, name: str) -> None:
        self._about_adapter(messages.UnloadAdapter(name))

    def _about_adapter(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        while self._waiting:
            self.pump()  # Results come in order, and so does the answer.
        try:
            self._channel.send(message)
        except PeerGone:
            raise self._death() from None
        done = self._expect(messages.AdapterDone)
        if done.error is not None:
            raise done.error.error()

    def _hear(self, answer: messages.Prepared) -> None:
        name = self._asked.popleft()
        if answer.done:
            self._prepared[name] = None
            if len(self._prepared) > _PREPARED:
                self._prepared.popitem(last=False)

    def pump(self) -> None:
        """Take one result, which is that of the oldest step in flight."""
        executed = self._expect(messages.Executed)
        self._waiting.popleft().value = executed.result

    def _expect(self, kind: type[Any]) -> Any:
        while True:
            message = self._channel.receive_one(None if self._pidfd is not None else _POLL)
            if message is None:
                if self._child.wait(0.0) is None:
                    continue
                message = self._channel.receive_one(0.05)  # Its last words, if any.
                if message is None:
                    raise self._death()
            if isinstance(message, messages.Failed):
                raise message.error.error()
            if isinstance(message, messages.Prepared):
                self._hear(message)
                continue
            assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r:.200}"
            return message

    def _death(self) -> EngineDead:
        code = self._child.wait(1.0)
        how = "does not answer" if code is None else explain_exit(code)
        with contextlib.suppress(OSError):
            stacks = (self._folder / STACKS).read_text()
            if stacks:
                how += "\n" + stacks[-4000:]
        return EngineDead(f"the worker process {how}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(PeerGone):
            self._channel.send(messages.Stop())
        deadline = time.monotonic() + 2.0
        self._child.wait(max(0.0, deadline - time.monotonic()))
        if self._child.exit_code is None:
            self._child.kill()
            self._child.wait(5.0)
        self._child.release()
        self._channel.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._private.close()


class _Coming:
    """A result that is taken from the channel when somebody asks for it."""

    __slots__ = ("_executor", "value")

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self.value: StepResult | None = None

    def result(self) -> StepResult:
        while self.value is None:
            self._executor.pump()
        return self.value
