"""`HearingEngine`: one served transcription model, for an event loop.

Everything here belongs to one event loop and nothing imports torch or kernels. Sounds go to the
engine process in files of the private folder. If it dies with a sound, segments already sent are
not lost. The next process transcribes the sound again, once, and skips those segments.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from ...base.config import Decision, EngineOptions
from ...base.errors import EngineDead, HeadraceError, InvalidRequest, Overloaded
from ...base.identity import Identity
from ...base.request import StepStats
from ...base.several import own_name
from ...base.shares import Shares
from ...obs.tasks import TaskWatch
from .. import messages
from ..clients.operations import Operations
from ..clients.supervised import SupervisedEngine
from ..clients.supervisor import Supervisor
from ..messages import Hear, HeardSoFar
from .metrics import HearingMetrics
from .records import HearOptions

RATE = 16_000
MOST_SECONDS = 2 * (4 * 3600 + 1)
"""Most seconds of audio in files: twice the longest sound, each with a second that a resampler may
add. That is 1.8 GB on the disk of temporary files. One key may use half of it."""
HANG_SECONDS = 20.0
"""Silence after which a process that only transcribes counts as hung: a step is a slice of a
window, and a live speaker waits for it."""


class Payload:
    """A file for a sound's samples, read by the engine process; closed exactly once."""

    def __init__(self, path: Path, owner: str, count: int) -> None:
        self.path, self.owner = path, owner
        self.count = count
        """Samples counted for it."""
        self.file: BinaryIO = os.fdopen(
            os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), "w+b"
        )

    def close(self) -> None:
        """Remove the file. Slow for a large one, so never call it in an event loop."""
        self.file.close()
        self.path.unlink(missing_ok=True)


class Hearing:
    """One sound while it is transcribed: an asynchronous iterator of its reports (`HeardSoFar`).

    Ends after the report that has an `end`. Raises the typed error that ended it. A reader that
    leaves earlier calls `cancel`.
    """

    def __init__(self, engine: HearingEngine, payload: Payload, wanted: Hear) -> None:
        self.wanted = wanted
        self.payload = payload
        self.begun = time.monotonic()
        self.upto = 0.0
        """Seconds of it reported so far."""
        self.tries = 1
        self.over = False
        self._engine = engine
        self._news: deque[HeardSoFar | HeadraceError] = deque()
        self._bell = asyncio.Event()

    @property
    def seconds(self) -> float:
        return self.wanted.count / RATE

    def __aiter__(self) -> Hearing:
        return self

    async def __anext__(self) -> HeardSoFar:
        while not self._news:
            if self.over:
                raise StopAsyncIteration
            self._bell.clear()
            await self._bell.wait()
        news = self._news.popleft()
        if isinstance(news, HeadraceError):
            raise news
        return news

    def tell(self, news: HeardSoFar | HeadraceError) -> None:
        """Add a report or an error; called by the engine."""
        self._news.append(news)
        self._bell.set()

    def cancel(self) -> None:
        """Stop the work, if it still goes on."""
        self._engine._cancel(self)


def samples_held() -> Shares:
    """Return the bound of a server's samples in files."""
    full = "the sounds in work have as many seconds as are taken at a time"
    return Shares(MOST_SECONDS * RATE, full, retry_after=5.0)


class HearingEngine(SupervisedEngine):
    """The transcription engine; `face.ServingEngine` documents the shared names."""

    def __init__(
        self,
        options: EngineOptions,
        supervisor: Supervisor,
        tasks: TaskWatch,
        *,
        number: int = 0,
        name: str | None = None,
        operations: Operations | None = None,
        samples: Shares | None = None,
    ) -> None:
        """Serve a model of an `EngineGroup`. `number`, `name`: its own in messages and in metrics;
        `operations`, `samples`: the server's."""
        self.options = options
        super().__init__(supervisor, tasks, number)
        self.model_name = name or own_name(options.model)
        self.languages: frozenset[str] = frozenset()
        """Language codes; empty: it transcribes English only."""
        self.decisions: list[Decision] = []
        self.identity: Identity | None = None
        self.memory: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.stats = StepStats()
        """Statistics of the latest step."""
        self.metrics = HearingMetrics(self.model_name)
        self.registry = self.metrics.registry
        self.operations = operations or Operations(supervisor, self, self.end_all, tasks)
        self._sounds: dict[str, Hearing] = {}
        self._held: list[Hearing] = []
        """Sounds whose process died, waiting for the next one."""
        self._samples = samples or samples_held()
        self._payloads = 0
        """Files of samples that exist."""
        self.sessions = 0
        """Live sessions, which may be silent for a while."""
        self._removing: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._audio = 0.0

    # Sounds

    def check_open(self) -> None:
        """Raise `ShuttingDown`, `EngineDead` or `Overloaded` if no sound would be accepted now."""
        self._check_ready()
        if len(self._sounds) > self.options.max_waiting:
            raise Overloaded(
                f"{len(self._sounds)} sounds are heard or wait, which is the limit (max_waiting)",
                retry_after=1.0,
            )

    def check(self, options: HearOptions) -> None:
        """Raise `InvalidRequest` for options that this model does not support."""
        if options.language is None:
            return
        if options.language not in (self.languages or ("en",)):
            known = ", ".join(sorted(self.languages)) or "en"
            raise InvalidRequest(
                f"language {options.language!r:.20} is not known; one of {known}", param="language"
            )

    def payload(self, owner: str = "", count: int = 0) -> Payload:
        """Reserve a file for a sound's samples, fp32 at 16 kHz; pass it to `hear` or `drop`.

        `count`: expected samples, which count until the file is gone. Raises `Overloaded` if all
        sounds, or those of this owner, have too many.
        """
        self._samples.take(owner, count)
        try:
            path = self._supervisor.folder / f"sound-{uuid.uuid4().hex}"
            payload = Payload(path, owner, count)
        except OSError as error:
            self._samples.give(owner, count)
            raise Overloaded(f"no room for samples: {error.strerror}", retry_after=5.0) from error
        self._payloads += 1
        return payload

    def drop(self, payload: Payload) -> None:
        """Remove a payload in a thread; until then its samples count."""
        task = self.tasks.errand("payload", self._removed(payload))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def _removed(self, payload: Payload) -> None:
        await asyncio.to_thread(payload.close)
        self._samples.give(payload.owner, payload.count)
        self._payloads -= 1

    def hear(
        self, payload: Payload, count: int, options: HearOptions, request_id: str = ""
    ) -> Hearing:
        """Transcribe `count` samples. The payload is dropped when the sound ends, or at once if
        this raises `InvalidRequest` or `Overloaded`."""
        wanted = Hear(request_id or uuid.uuid4().hex, str(payload.path), count, options)
        try:
            payload.file.flush()
            self.check_open()
            self.check(options)
            if wanted.request_id in self._sounds:
                raise InvalidRequest("a sound with this id is in work", param="request_id")
            if count > payload.count:
                self._samples.take(payload.owner, count - payload.count)
            else:
                self._samples.give(payload.owner, payload.count - count)
            payload.count = count
            self._send(wanted)
        except BaseException:
            self.drop(payload)
            raise
        hearing = self._sounds[wanted.request_id] = Hearing(self, payload, wanted)
        self._idle.clear()
        self._count()
        return hearing

    def abort(self, request_id: str) -> int:
        """Abort a request's sound; return the number aborted."""
        hearing = self._sounds.get(request_id)
        if hearing is None:
            return 0
        hearing.tell(Overloaded("the request was aborted"))
        hearing.cancel()
        return 1

    def in_work(self) -> list[tuple[str, Hearing]]:
        """Return (id, sound) of all unfinished sounds, oldest first."""
        return list(self._sounds.items())

    @property
    def wanted(self) -> bool:
        """Whether a sound is in work or still being decoded, or a session is open."""
        return bool(self._sounds or self._payloads or self.sessions)

    def _cancel(self, hearing: Hearing) -> None:
        if hearing.over:
            return
        with contextlib.suppress(EngineDead):
            self._send(messages.Abort(hearing.wanted.request_id))
        self._end(hearing, "cancelled")

    def _end(self, hearing: Hearing, outcome: str) -> None:
        hearing.over = True
        hearing._bell.set()
        self.drop(hearing.payload)
        self._sounds.pop(hearing.wanted.request_id, None)
        if hearing in self._held:
            self._held.remove(hearing)
        if not self._sounds:
            self._idle.set()
        self.metrics.ended(outcome)
        self._count()

    def _count(self) -> None:
        self.metrics.running.set(len(self._sounds))

    # Messages of the engine process

    def receive(self, message: Any) -> None:
        """Take a message of the engine process."""
        match message:
            case HeardSoFar():
                self._heard(message)
            case messages.News(_, stats):
                self.stats = stats
                self.metrics.stepped(stats)
            case messages.Refused(request_id, error):
                hearing = self._sounds.get(request_id)
                if hearing is not None:
                    fault = error.error()
                    hearing.tell(fault)
                    self._end(hearing, fault.code or fault.type)
            case messages.HearingLoad(running, waiting, seconds):
                self.metrics.running.set(running)
                self.metrics.waiting.set(waiting)
                self.metrics.busy.set(seconds)
                if seconds:
                    self.metrics.rtfx.set(self._audio / seconds)
            case messages.ThreadNews(failed, down):
                self._threads_down = down
                for _ in failed:
                    self.metrics.failed("thread")
            case messages.Operated():
                self.operations.done(message)
            case messages.Ready():
                self._ready(message)

    def _ready(self, ready: messages.Ready) -> None:
        self.languages, self.decisions = frozenset(ready.languages), ready.decisions
        self.memory, self.identity = ready.facts, ready.identity
        self.metrics.up.set(1)
        self._audio = 0.0
        if self._supervisor.restarts > self._restarts:
            self.metrics.restarts.inc()
        self._restarts = self._supervisor.restarts
        if not self._number:  # What is common to all models follows the first.
            self.operations.ready()
        self.phases = dict(self._supervisor.phases)
        held, self._held = self._held, []
        for hearing in held:
            hearing.tries += 1
            try:
                self._send(hearing.wanted)
            except EngineDead as error:
                hearing.tell(error)
                self._end(hearing, error.code or error.type)

    def _heard(self, news: HeardSoFar) -> None:
        hearing = self._sounds.get(news.request_id)
        if hearing is None:
            return  # It was cancelled meanwhile.
        if not hearing.upto and (news.pieces or news.end):
            self.metrics.first.observe(time.monotonic() - hearing.begun)
        if news.end is None and news.upto <= hearing.upto:
            return  # A process that died sent it earlier.
        hearing.upto = news.upto
        hearing.tell(news)
        if news.end is not None:
            self.metrics.audio.inc(news.end.seconds)
            self._audio += news.end.seconds
            self.metrics.whole.observe(time.monotonic() - hearing.begun)
            self._end(hearing, "heard")

    def down(self, kind: str, error: EngineDead) -> None:
        """Handle the end of the engine process: sounds wait once for the next, however long its
        start takes. Segments already sent are not sent again: a window's text depends on its
        samples alone."""
        self.metrics.failed(kind)
        coming = self._supervisor.alive
        for hearing in list(self._sounds.values()):
            if hearing in self._held:
                continue
            if coming and hearing.tries == 1 and not self._draining and kind != "start":
                self._held.append(hearing)
            else:
                hearing.tell(error)
                self._end(hearing, error.code or error.type)
        self._forget_process(error)
        if not coming:
            self.end_all(error)

    def end_all(self, error: HeadraceError) -> None:
        """End all sounds: the engine process is gone."""
        for hearing in list(self._sounds.values()):
            hearing.tell(error)
            self._end(hearing, error.code or error.type)
        self._forget_process(error)

    def _forget_process(self, error: HeadraceError) -> None:
        self.metrics.up.set(0)
        self._threads_down = {}
        self.stats = StepStats()
        if not self._number:
            self.operations.fail(error)

    # Its sounds, with the interface of `operations.Work`

    @property
    def work(self) -> HearingEngine:
        """The unfinished sounds."""
        return self

    def __len__(self) -> int:
        return len(self._sounds)

    async def until_idle(self) -> None:
        """Wait until no sound is in work."""
        await self._idle.wait()

    def abort_all(self) -> None:
        """Abort all sounds."""
        for name in list(self._sounds):
            self.abort(name)

    def note_total(self, seconds: float) -> None:
        """Note how long the whole start took."""
        self.phases = {**self._supervisor.phases, "total": seconds}

    async def finish(self, drain_seconds: float, why: str = "the server is shutting down") -> None:
        """Refuse new sounds, wait for those in work, end the rest."""
        self._draining = why
        if drain_seconds > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        error = EngineDead(f"the sound was ended: {why}", retry_after=2.0)
        for hearing in list(self._sounds.values()):
            hearing.tell(error)
            hearing.cancel()  # The process of an unloaded model goes on; the job must not.
        self.end_all(error)
        if self._removing:
            await asyncio.wait(self._removing)

    def closed(self) -> None:
        """Note that the engine process has ended, or no longer has the model."""
        self.metrics.up.set(0)
