"""The executor with a worker in a process of its own.

No thread waits: a caller that needs a result pumps the channel, and a pidfd wakes it when the
worker dies.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...base.errors import EngineDead
from ...base.facts import WorkerFacts
from ...base.modelfiles import ModelFiles
from ...base.step import PoolShape, StepPlan, StepResult
from ...base.workeroptions import WorkerOptions
from ...dist.channel import Channel, PeerGone
from ...dist.wake import AnyBell, Bell, Wake
from .. import messages
from ..loop.executor import StepFuture
from ..messages import WireFiles
from .ends import SpawnedEnd, WorkerEnd

if TYPE_CHECKING:
    from ...worker.elsewhere import PoolElsewhere  # Imports arrays.

_PREPARED = 32
"""Most grammars assumed to be in the worker; fewer than it keeps."""
_POLL = 0.25
"""Seconds between checks of the worker on a system without pidfd."""
_ASK_AGAIN = 0.5
"""Seconds after which the worker is asked again for a grammar that is still wanted."""


class MultiprocExecutor:
    """The executor that talks to `engine.ranks.worker_process`."""

    def __init__(
        self,
        files: ModelFiles,
        settings: WorkerOptions,
        worker: str | WorkerEnd,
        *,
        share_pool: bool = False,
    ) -> None:
        """`worker`: `module:function` that loads one, as in `engine.loop.real`, or the end of a
        running one; `share_pool`: put its pool where this process can read and write it."""
        self._files = files
        self._settings = settings
        self.pool: PoolElsewhere | None = None
        """The pool as this process sees it, once it is needed."""
        self.pool_file = -1
        keep = []
        if share_pool:
            self.pool_file = os.memfd_create("headrace pool")
            self._settings = replace(settings, pool_file=self.pool_file)
            keep = [self.pool_file]
        if isinstance(worker, str):
            worker = SpawnedEnd("the worker process", worker, keep)
        self.end = worker
        self._channel = self.end.channel
        self._waiting: deque[_Coming] = deque()
        self._asked: deque[int] = deque()
        """Hashes of the grammars asked of the worker and not answered yet."""
        self._prepared: OrderedDict[int, None] = OrderedDict()
        self._compiling: dict[int, float] = {}
        """Hash of each grammar that it has not compiled yet → the time of the request."""
        self._closed = False
        self._rung = Wake()
        self._any: AnyBell | None = None

    @property
    def wake(self) -> Bell:
        return self._any or _Bell(self._channel, self.listen)

    def ring(self) -> None:
        """Ring `wake`, from any thread."""
        self._rung.ring()

    def load(self) -> WorkerFacts:
        self.begin_load()
        return self.loaded()

    def begin_load(self) -> None:
        self._expect(messages.Hello)
        self._channel.send(messages.Load(WireFiles.of(self._files), self._settings))

    def loaded(self) -> WorkerFacts:
        facts: WorkerFacts = self._expect(messages.Loaded).facts
        if self.pool_file >= 0:
            self._any = AnyBell([self._rung, self.wake])
        return facts

    def allocate(self, pool: PoolShape) -> None:
        self.ask(messages.Allocate(pool))
        self.answered()
        if self.pool is not None:
            self.pool.allocate(pool)

    def warm_up(self) -> None:
        self.ask(messages.WarmUp())
        self.answered()

    def ask(self, message: messages.ToWorker) -> None:
        self._channel.send(message)

    def answered(self) -> None:
        """Wait until the worker has done its task."""
        self._expect(messages.Done)

    def submit(self, plan: StepPlan) -> StepFuture:
        if self.pool is not None:
            self.pool.gaps.step_begins()
        try:
            self._channel.send(messages.Execute(plan))
        except PeerGone:
            raise self.death() from None
        coming = _Coming(self)
        self._waiting.append(coming)
        return coming

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        """Ask the worker, and again when it reports a finished one; never wait for an answer."""
        self.listen()
        name, now = hash(source), time.monotonic()
        if name in self._prepared:
            self._prepared.move_to_end(name)
            return True
        if name not in self._asked and now - self._compiling.get(name, -_ASK_AGAIN) >= _ASK_AGAIN:
            try:
                self._channel.send(messages.Prepare(source, owner))
            except PeerGone:
                raise self.death() from None
            self._asked.append(name)
        return False

    def listen(self) -> bool:
        """Take the worker's messages between steps; return whether there were any. Raises as
        results do."""
        if self._waiting:
            return False  # A result is first in line; its taker also takes the messages before it.
        said = self._channel.receive(0.0)
        for message in said:
            if not self._heard(message):
                assert isinstance(message, messages.Failed), f"not expected: {message!r:.200}"
                raise message.error.error()
        if self._channel.lost:
            raise self.death()
        return bool(said)

    def load_adapter(self, name: str, path: str) -> None:
        self._about_adapter(messages.LoadAdapter(name, path))

    def unload_adapter(self, name: str) -> None:
        self._about_adapter(messages.UnloadAdapter(name))

    def _about_adapter(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        while self._waiting:
            self.pump()  # Results come in order, and the answer after them.
        try:
            self._channel.send(message)
        except PeerGone:
            raise self.death() from None
        done = self._expect(messages.AdapterDone)
        if done.error is not None:
            raise done.error.error()

    def _heard(self, message: Any) -> bool:
        """Take a message about grammars; return whether it was one."""
        match message:
            case messages.Prepared(done):
                name = self._asked.popleft()
                self._compiling.pop(name, None)
                if done:
                    self._prepared[name] = None
                    if len(self._prepared) > _PREPARED:
                        self._prepared.popitem(last=False)
                else:
                    self._compiling[name] = time.monotonic()
                    if len(self._compiling) > _PREPARED:
                        del self._compiling[next(iter(self._compiling))]
            case messages.Compiled():
                self._compiling.clear()
            case _:
                return False
        return True

    def pump(self) -> None:
        """Take one result, which belongs to the oldest step in flight."""
        executed = self._expect(messages.Executed)
        self._waiting.popleft().value = executed.result
        if self.pool is not None:
            self.pool.gaps.step_ended()

    def _expect(self, kind: type[Any]) -> Any:
        while True:
            message = self._channel.receive_one(None if self.end.wakes else _POLL)
            if message is None:
                if not self.end.ended:
                    continue
                message = self._channel.receive_one(0.05)  # Its last message, if any.
                if message is None:
                    raise self.death()
            if isinstance(message, messages.Failed):
                raise message.error.error()
            if self._heard(message):
                continue
            assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r:.200}"
            return message

    def death(self) -> EngineDead:
        """Return the end of the worker's process as an error."""
        if self.pool is not None:
            self.pool.gaps.step_ended()  # Nothing waits for the end of that step any more.
        return EngineDead(f"{self.end.name} {self.end.how()}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.end.close()
        if self._any is not None:
            self._any.close()
        self._rung.close()
        if self.pool_file >= 0:
            os.close(self.pool_file)


@dataclass(frozen=True, slots=True)
class _Bell:
    """Unrequested messages of the worker."""

    _channel: Channel
    _listen: Callable[[], bool]

    def fileno(self) -> int:
        return self._channel.fileno()

    def clear(self) -> bool:
        return self._listen()


class _Coming:
    """A result that is read from the channel on demand."""

    __slots__ = ("_executor", "value")

    def __init__(self, executor: MultiprocExecutor) -> None:
        self._executor = executor
        self.value: StepResult | None = None

    def result(self) -> StepResult:
        while self.value is None:
            self._executor.pump()
        return self.value
