"""The requests that have not ended; passes the engine's deltas to their readers and lives.

Belongs to one event loop; imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from ...base.errors import (
    ContextOverflow,
    EngineDead,
    EngineFault,
    HeadraceError,
    InvalidRequest,
    Overloaded,
)
from ...base.outputs import PictureOutput
from ...base.request import Request, SequenceDelta
from ...obs.life import RequestLife
from ...obs.metrics import EngineMetrics
from ...obs.trace import CURRENT
from ...text import Tokenizer
from .. import messages
from .output import RequestOutputs
from .records import Recorder
from .stream import Stream

log = logging.getLogger("headrace.engine")


class InWork:
    """A request that has not ended: its reader, its text, its times."""

    __slots__ = ("latest", "life", "outputs", "retried", "stream")

    def __init__(self, stream: Stream, outputs: RequestOutputs, life: RequestLife) -> None:
        self.retried = False
        """Whether an engine died while it had this request."""
        self.stream = stream
        self.outputs = outputs
        self.life = life
        self.latest = [0.0] * life.choices
        """Per choice: when its latest tokens came."""

    def again(self, tokenizer: Tokenizer) -> None:
        """Start it again from the beginning."""
        self.outputs = RequestOutputs(self.outputs.request, tokenizer)
        self.latest = [0.0] * self.life.choices
        self.life.generated, self.life.scheduled, self.life.first_token = 0, 0.0, 0.0
        self.stream.again()


class RequestsInWork:
    """All requests of one engine. Every request that was opened ends exactly once: by its last
    delta, an error, its reader's leaving or the engine's death."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        send: Callable[[Any], None],
        *,
        recorder: Recorder | None = None,
    ) -> None:
        """`send`: sends to the engine process; raises `EngineDead` without one. `recorder`: records
        every request and its answer, unless None."""
        self._recorder = recorder
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._send = send
        self._by_id: dict[str, InWork] = {}
        self.sequences = 0
        """Choices of all requests in work."""
        self.idle = asyncio.Event()
        """Set while no request is in work."""
        self.idle.set()
        self.on_end: Callable[[str, RequestLife], None] | None = None
        self._held: dict[str, InWork] = {}
        """Requests whose engine died, waiting for the next one."""
        self._patience: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def request(self, request_id: str) -> Request:
        """Return the request that was sent. Raises `KeyError` if it has ended."""
        return self._by_id[request_id].outputs.request

    def lives(self) -> list[tuple[str, RequestLife]]:
        """Return (id, life so far), oldest first."""
        return [(name, work.life) for name, work in self._by_id.items()]

    def open(self, request: Request, adapter: str | None, *, whole: bool = False) -> Stream:
        """Open a request that the engine has: from here on its reader gets all its deltas.

        `whole`: the reader shows nothing before the answer is complete.
        """
        sampling = request.spec.sampling
        stream = Stream(request.id, request.prompt, sampling.n, self._left, whole=whole)
        life = RequestLife(
            request.arrival,
            len(request.prompt),
            choices=sampling.n,
            max_tokens=sampling.max_tokens or 0,
            adapter=adapter,
            trace=CURRENT.get(),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        outputs = RequestOutputs(request, self._tokenizer)
        self._by_id[request.id] = InWork(stream, outputs, life)
        self.sequences += sampling.n
        self.idle.clear()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ask the engine to end it. False: the id is unknown."""
        if request_id not in self._by_id:
            return False
        if request_id in self._held:
            work = self._held.pop(request_id)
            self._end(work, "abort")
            work.stream.fail(EngineDead("ended while it waited for the next engine"))
            return True
        self._tell(messages.Abort(request_id))
        return True

    async def until_idle(self) -> None:
        """Wait until no request is in work."""
        await self.idle.wait()

    def abort_all(self) -> None:
        for request_id in list(self._by_id):
            self.abort(request_id)

    def deliver(self, deltas: list[SequenceDelta], now: float) -> None:
        """Deliver a step's deltas, at `now` of the monotonic clock."""
        gaps: dict[tuple[float, int], int] = {}
        """(time of the latest tokens, tokens that came now) → number of choices. Nearly all
        decoding choices agree in both, so they are counted together."""
        for delta in deltas:
            self._deliver(delta, now, gaps)
        for (latest, count), choices in gaps.items():
            self._metrics.between_tokens(now - latest, count, choices)

    def _deliver(
        self, delta: SequenceDelta, now: float, gaps: dict[tuple[float, int], int]
    ) -> None:
        work = self._by_id.get(delta.request_id)
        if work is None:
            return  # Its reader has left.
        life = work.life
        if delta.tokens:
            if not life.generated:
                life.scheduled, life.cached = delta.scheduled, delta.cached
                life.loaded = delta.loaded
            latest = work.latest[delta.choice]
            if latest:
                gap = latest, len(delta.tokens)
                gaps[gap] = gaps.get(gap, 0) + 1
            work.latest[delta.choice] = now
            self._metrics.tokens(life, len(delta.tokens), now)
        elif delta.output is not None:
            life.scheduled = delta.scheduled
            if isinstance(delta.output, PictureOutput) and delta.finish is not None:
                self._metrics.drew(delta.output.step)
        life.preemptions = max(life.preemptions, delta.preemptions)
        if delta.verified is not None:
            self._metrics.drafted.verified(delta.verified)
        if delta.finish == "error":
            self._fail(work, delta)
            return
        out = work.outputs.feed(delta)
        if out is None:
            return
        if out.finish_reason is not None and delta.finish is None:
            self._tell(messages.AbortChoice(delta.request_id, delta.choice))
        if self._recorder is not None:
            self._recorder.take(out)
        work.stream.push(out)
        if work.outputs.finished:
            self._end(work, out.finish_reason or "stop")

    def refuse(self, request_id: str, error: HeadraceError) -> None:
        """End a request that the engine process refused."""
        work = self._by_id.get(request_id)
        if work is not None:
            self._metrics.refused(refusal(error))
            self._forget(work)
            work.stream.fail(error)

    def end_all(self, error: HeadraceError) -> None:
        """End all requests, also those that wait for the next engine: the engine is gone."""
        self._stop_waiting()
        self._held.clear()
        for work in list(self._by_id.values()):
            self._end(work, "error")
            work.stream.fail(error)

    def hold(self, error: EngineDead, seconds: float) -> None:
        """Hold the requests of an engine that died. Those without visible output wait once for the
        next engine, at most `seconds`; the others end."""
        for work in list(self._by_id.values()):
            if work.retried or not work.stream.repeatable:
                self._end(work, "error")
                work.stream.fail(error)
            else:
                work.retried = True
                self._held[work.stream.request_id] = work
        if self._held:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(seconds, self._give_up, error)

    def send_held(self) -> None:
        """Send the waiting requests to a new engine that serves, in their order."""
        self._stop_waiting()
        held, self._held = self._held, {}
        for work in held.values():
            work.again(self._tokenizer)
            self._metrics.retried()
            try:
                self._send(messages.Submit(work.outputs.request))
            except EngineDead as error:
                self._end(work, "error")
                work.stream.fail(error)

    def _give_up(self, error: HeadraceError) -> None:
        self._patience = None
        held, self._held = self._held, {}
        for work in held.values():
            self._end(work, "error")
            work.stream.fail(error)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _left(self, request_id: str) -> None:
        """Stop the work of a reader that has left, and forget it at once."""
        work = self._by_id.get(request_id)
        if work is not None:
            self._held.pop(request_id, None)
            self.abort(request_id)
            self._end(work, "abort")

    def _fail(self, work: InWork, delta: SequenceDelta) -> None:
        """End a request because one of its choices ended with an error."""
        self._metrics.failed("step")
        if self._recorder is not None:
            self._recorder.cut("step", delta.request_id)
        if not work.outputs.finished:
            self._tell(messages.Abort(delta.request_id))
        message = delta.error or "the step failed"
        kind = InvalidRequest if delta.error_status == 400 else EngineFault
        self._end(work, "error")
        work.stream.fail(kind(message))

    def _end(self, work: InWork, reason: str) -> None:
        work.life.longest, work.life.drafted = work.outputs.longest, work.outputs.drafted
        work.life.ended = time.monotonic()
        self._metrics.ended(work.life, reason, work.life.ended)
        self._forget(work)
        if self.on_end is not None:
            try:
                self.on_end(work.stream.request_id, work.life)
            except Exception:  # observing must not disturb: a named boundary
                self._metrics.failed("observer")
                log.exception("the observer of ended requests failed")

    def _forget(self, work: InWork) -> None:
        if self._by_id.pop(work.stream.request_id, None) is not None:
            self.sequences -= work.life.choices
            if self._recorder is not None:
                self._recorder.forget(work.stream.request_id)
            if not self._by_id:
                self.idle.set()

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(EngineDead):
            self._send(message)


def refusal(error: HeadraceError) -> str:
    """Return the label under which a refusal is counted."""
    if isinstance(error, EngineDead):
        return "unavailable"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "context" if isinstance(error, ContextOverflow) else "invalid"
