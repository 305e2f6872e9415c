"""The load generator: one event loop that starts due sessions and timestamps answers.

Latency counts from the planned time of a request. In an open loop that is its arrival. In a closed
loop it is when its user is ready: the start of the run, or the end of the previous answer plus the
think time. A late client makes the request look slow, never fast.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..base.foreign import any_json
from ..obs.tasks import TaskWatch
from .drawings import is_right
from .http import Connection, ConnectionLost, Pool, Reply, parse_url, request_bytes
from .job import Job, More, Target
from .record import ClientAudit, RequestRecord
from .sse import Lines, decode
from .workload import EMBEDDING, ROLE_SYSTEM, Session, Turn

LAG_PERIOD = 0.01
GONE = 50
"""Consecutive failed connections after which the server counts as gone; nothing more is sent."""
MAX_BODY = 16 * 2**20

Recount = Callable[[str], int]
Emit = Callable[[RequestRecord], None]


@dataclass(slots=True, eq=False)
class Stream:
    """One answer while it arrives."""

    record: RequestRecord
    cancel_after: int | None
    text: list[str]
    lines: Lines
    raw: bytearray
    last_ns: int
    keep: int = 4096
    """First bytes of the body that are kept raw: enough for an error message."""
    give_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to hang up."""
    done: bool = False
    broken: str | None = None
    ids: list[int] = field(default_factory=list)
    """Ids of the answer's tokens, if the server reports them (`return_token_ids`)."""

    def on_body(self, now: int, data: bytes) -> None:
        self.last_ns = now
        self._events(now, self.lines.feed(data))
        if len(self.raw) < self.keep:
            self.raw += data
        if self.cancel_after is not None and len(self.record.chunk_ns) >= self.cancel_after:
            self.give_up.set()

    def on_end(self) -> None:
        """Handle the end of the body: the last event may lack its empty line."""
        self._events(self.last_ns, self.lines.end())

    def _events(self, now: int, payloads: list[bytes]) -> None:
        for payload in payloads:
            if payload == b"[DONE]":
                self.done = True
                continue
            try:
                event = decode(payload)
            except ValueError as error:
                self.broken = f"an event is not as expected: {error}"
                continue
            record = self.record
            if event.error is not None:
                self.broken = f"error in the stream: {json.dumps(event.error)[:300]}"
            if event.carries():
                record.chunk_ns.append(now)
                self.text.append(event.text())
                record.call_bytes += event.called()
            for choice in event.choices:
                record.finish_reason = choice.finish_reason or record.finish_reason
                if choice.token_ids:
                    self.ids += choice.token_ids
            if event.usage is not None:
                usage = event.usage
                record.prompt_tokens = usage.prompt_tokens
                record.output_tokens = usage.completion_tokens
                if usage.prompt_tokens_details is not None:
                    record.cached_tokens = usage.prompt_tokens_details.cached_tokens
                    record.picture_tokens = usage.prompt_tokens_details.image_tokens


class Client:
    """Runner of one job."""

    def __init__(
        self,
        job: Job,
        emit: Emit,
        recount: Recount | None = None,
        ask: Callable[[], None] = lambda: None,
        heard: Callable[[RequestRecord, str], None] = lambda _record, _text: None,
    ) -> None:
        """Prepare a job; `ask` requests more sessions of an endless one, which `add` receives.

        `heard` gets each ended record with its answer's text.
        """
        self.job = job
        self._ask = ask
        self._asked = False
        self._queue = deque(zip(job.sessions, job.numbers, strict=True))
        self._more = asyncio.Event()
        self._lost = 0
        """Consecutive requests without a connection."""
        self.audit = ClientAudit(job.process)
        self._emit = emit
        self._recount = recount
        self._heard = heard
        self._pool = Pool(parse_url(job.target.url))
        self._lags: list[int] = []
        self._watch = TaskWatch()
        self._requests = 0
        self._stopped = False
        self.hang_up = False
        """Whether the grace is over."""
        self._streams: set[Stream] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing new may be started."""
        return self._stopped or self.hang_up or self.audit.gave_up

    @property
    def begun(self) -> int:
        """Number of unfinished answers with at least one piece."""
        return sum(bool(stream.record.chunk_ns) for stream in self._streams)

    async def run(self, start_ns: int) -> None:
        """Run all sessions; return when the last answer is in."""
        job = self.job
        lag = self._watch.errand("lag", watch_lag(self._lags))
        cpu, wall = time.process_time(), time.monotonic()
        end_ns = None if job.duration is None else start_ns + int(job.duration * 1e9)
        try:
            if job.concurrency is None:
                await self._open_loop(start_ns, end_ns)
            else:
                await self._closed_loop(start_ns, end_ns)
        finally:
            lag.cancel()
            self._pool.close()
            self.audit.cpu_seconds = time.process_time() - cpu
            self.audit.wall_seconds = time.monotonic() - wall
            self.audit.lag_ns = sorted(self._lags)[:: max(1, len(self._lags) // 2000)]
            if self._lags:
                self.audit.lag_ns.append(max(self._lags))
            self.audit.connections = self._pool.opened
            self.audit.requests = self._requests

    async def _open_loop(self, start_ns: int, end_ns: int | None) -> None:
        job = self.job
        assert job.offsets is not None
        tasks = set()
        room, freed = asyncio.Semaphore(job.most) if job.most else None, 0
        for session, number, offset in zip(job.sessions, job.numbers, job.offsets, strict=True):
            planned = start_ns + int(offset * 1e9)
            await _sleep_until(planned)
            if room is not None:
                waits = room.locked()
                await room.acquire()
                freed = time.monotonic_ns() if waits else freed
                # The cap is part of the load: a request held back by it is due when it may start.
                planned = max(planned, freed)
            if self.ended or (end_ns is not None and planned >= end_ns):
                break
            work = self._session(session, number, planned, end_ns)
            task = self._watch.errand("conversation", work)
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if room is not None:
                task.add_done_callback(lambda _task: room.release())
        await self._last(tasks, end_ns)

    async def _last(self, tasks: Iterable[asyncio.Future[Any]], end_ns: int | None) -> None:
        """Wait for the requests in flight; cancel them after the grace period."""
        if end_ns is None or self.job.grace is None:
            await asyncio.gather(*tasks)
            return
        left = end_ns / 1e9 + self.job.grace - time.monotonic()
        if waiting := list(tasks):
            _, late = await asyncio.wait(waiting, timeout=max(0.0, left))
            self.hang_up = True
            for stream in self._streams:
                stream.give_up.set()
            await asyncio.gather(*late)

    async def _closed_loop(self, start_ns: int, end_ns: int | None) -> None:
        job = self.job
        users = job.concurrency
        assert users is not None

        async def user(place: int) -> None:
            ready = start_ns + int(place / users * job.ramp * 1e9)
            await _sleep_until(ready)
            while end_ns is None or ready < end_ns:
                following = await self._next()
                if following is None:
                    return
                ready = await self._session(*following, ready, end_ns)

        await _sleep_until(start_ns)
        await self._last([asyncio.ensure_future(user(n)) for n in range(users)], end_ns)

    async def _next(self) -> tuple[Session, int] | None:
        """Return the next session of the closed loop, or None at its end."""
        while not self._queue and self.job.endless and not self.ended:
            self._more.clear()
            self._want_more()
            await self._more.wait()
        if not self._queue or self.ended:
            return None
        following = self._queue.popleft()
        if self.job.endless and len(self._queue) < 2 * (self.job.concurrency or 1):
            self._want_more()
        return following

    def _want_more(self) -> None:
        if not self._asked:
            self._asked = True
            self._ask()

    def add(self, more: More) -> None:
        """Add the requested sessions, or stop starting new ones."""
        self._asked, self._stopped = False, self._stopped or more.stop
        self._queue.extend(zip(more.sessions, more.numbers, strict=True))
        self._more.set()

    async def _session(self, session: Session, number: int, ready: int, end_ns: int | None) -> int:
        """Run all turns of a user; return the time when the user was done."""
        history: list[dict[str, Any]] = []
        if session.system:
            history.append({"role": ROLE_SYSTEM, "content": session.system})
        for index, turn in enumerate(session.turns):
            planned = ready + int(turn.think_seconds * 1e9)
            if end_ns is not None and planned >= end_ns:
                break
            await _sleep_until(planned)
            record = RequestRecord(
                number * 1000 + index,
                number,
                index,
                session.group,
                planned,
                asked_tokens=turn.output_tokens,
                process=self.job.process,
            )
            if turn.text:
                history.append({"role": turn.role, "content": content_of(turn)})
            text = await self._request(record, turn, history)
            self._emit(record)
            self._heard(record, text)
            self._lost = self._lost + 1 if record.error_kind == "connection" else 0
            if self._lost >= GONE:
                self.audit.gave_up = True
            ready = record.end_ns
            if record.error is not None or self.hang_up:
                break  # A user whose question failed asks no further ones.
            history.append({"role": "assistant", "content": turn.answer or text or "…"})
        return ready

    async def _request(
        self, record: RequestRecord, turn: Turn, history: list[dict[str, Any]]
    ) -> str:
        target = self.job.target
        path, body = make_body(target, turn, history, record)
        headers = {"Accept": "text/event-stream"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        data = request_bytes(self._pool.address, "POST", path, body, headers)
        stream = Stream(record, turn.cancel_after, [], Lines(), bytearray(), 0)
        if not target.stream:
            stream.keep = MAX_BODY
        self._requests += 1
        self._streams.add(stream)
        try:
            async with asyncio.timeout(target.timeout):
                reply = await self._exchange(data, stream)
            if reply is not None:
                judge(target, stream, reply)
        except TimeoutError:
            record.error_kind, record.error = "timeout", f"no end after {target.timeout:g} s"
        except _Stalled:
            record.error_kind = "stalled"
            record.error = f"no byte for {target.stall:g} s"
        except ConnectionLost as error:
            record.error_kind, record.error = "connection", str(error)
        finally:
            self._streams.discard(stream)
        if record.end_ns == 0:
            record.end_ns = time.monotonic_ns()
        if record.sent_ns == 0:
            record.sent_ns = record.end_ns
        text = "".join(stream.text)
        record.characters, record.text_bytes = len(text), len(text.encode(errors="replace"))
        if turn.right and record.ok:
            record.right = is_right(text, turn.right)
        if self._recount is not None and record.ok:
            record.recount_tokens = self._recount(text)
        return text

    async def _exchange(self, data: bytes, stream: Stream) -> Reply | None:
        """Send and wait for the end, a stall, or the order to hang up (returns None)."""
        try:
            return await self._send(await self._pool.take(), data, stream)
        except ConnectionLost as error:
            if not error.stale:
                raise
        stream.record.reconnected = True
        return await self._send(await self._pool.fresh(), data, stream)

    async def _send(self, connection: Connection, data: bytes, stream: Stream) -> Reply | None:
        target, record = self.job.target, stream.record
        stream.last_ns = time.monotonic_ns()
        record.sent_ns = record.sent_ns or stream.last_ns
        reply = connection.send(data, stream.on_body)
        hang_up: asyncio.Future[Any] | None = None
        waiting: set[asyncio.Future[Any]] = {reply}
        if stream.cancel_after is not None or self.job.grace is not None:
            hang_up = asyncio.ensure_future(stream.give_up.wait())
            waiting.add(hang_up)
        try:
            while True:
                quiet = (time.monotonic_ns() - stream.last_ns) / 1e9
                done, _ = await asyncio.wait(
                    waiting,
                    timeout=max(0.001, target.stall - quiet),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if reply in done:
                    answer = reply.result()
                    record.end_ns = answer.end_ns
                    self._pool.give(connection)
                    return answer
                if hang_up is not None and hang_up in done:
                    record.cancelled = True
                    record.end_ns = stream.last_ns
                    return None
                if (time.monotonic_ns() - stream.last_ns) / 1e9 >= target.stall:
                    raise _Stalled
        finally:
            if hang_up is not None:
                hang_up.cancel()
            if not reply.done():
                reply.cancel()
                connection.close()


async def watch_lag(lags: list[int]) -> None:
    """Sample how late timers fire. Timestamps and sends are delayed alike."""
    while True:
        due = time.monotonic_ns() + int(LAG_PERIOD * 1e9)
        await asyncio.sleep(LAG_PERIOD)
        lags.append(max(0, time.monotonic_ns() - due))


class _Stalled(Exception):
    """Error: no byte came for too long."""


def content_of(turn: Turn) -> str | list[dict[str, Any]]:
    """Return the content of a turn's message: its text, after its picture if it has one."""
    if not turn.picture:
        return turn.text
    picture = {"type": "image_url", "image_url": {"url": turn.picture}}
    return [picture, {"type": "text", "text": turn.text}]


def make_body(
    target: Target, turn: Turn, history: list[dict[str, Any]], record: RequestRecord
) -> tuple[str, bytes]:
    """Return (path, JSON body) of a turn; note in the record the known length of its prompt."""
    if target.endpoint == EMBEDDING:
        return _embedding_body(target, turn, record)
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": turn.output_tokens,
        "temperature": target.temperature,
        "stream": target.stream,
        **target.extra,
        **turn.extra,
    }
    if target.stream:
        body["stream_options"] = {"include_usage": True}
    if target.ignore_eos and "response_format" not in turn.extra:
        body["ignore_eos"] = True
    if target.endpoint == "chat":
        body["messages"] = history
        # Without the template's own tokens, so never exact.
        record.known_prompt_tokens = turn.prompt_tokens if len(history) == 1 else 0
        return "/v1/chat/completions", json.dumps(body).encode()
    if turn.ids is not None:
        body["prompt"] = turn.ids
        record.known_prompt_tokens, record.exact_prompt = len(turn.ids), True
    else:
        body["prompt"] = "\n".join(part["content"] for part in history)
        record.known_prompt_tokens = turn.prompt_tokens if len(history) == 1 else 0
    return "/v1/completions", json.dumps(body).encode()


def _embedding_body(target: Target, turn: Turn, record: RequestRecord) -> tuple[str, bytes]:
    record.known_prompt_tokens = turn.prompt_tokens
    # Ids are sent unchanged: nothing is added around them.
    record.exact_prompt = turn.ids is not None
    body = {
        "model": target.model,
        "input": turn.text if turn.ids is None else turn.ids,
        **target.extra,
        **turn.extra,
    }
    return "/v1/embeddings", json.dumps(body).encode()


def judge(target: Target, stream: Stream, reply: Reply) -> None:
    """Turn status, error events and missing ends into the record's error."""
    record = stream.record
    record.status = reply.status
    if reply.status != 200:
        kind = "server" if reply.status >= 500 else "refused"
        record.error_kind = "overload" if reply.status in (429, 503) else kind
        record.error = f"HTTP {reply.status}: {stream.raw.decode(errors='replace')[:300]}"
        return
    if target.endpoint == EMBEDDING:
        _vector(stream)
        return
    if not target.stream:
        _whole_answer(stream)
        return
    stream.on_end()
    if stream.broken is not None:
        record.error_kind, record.error = "protocol", stream.broken
    elif not stream.done and record.finish_reason is None:
        record.error_kind = "protocol"
        record.error = "the stream ended without [DONE] and without a finish reason"
    elif not record.chunk_ns and not record.output_tokens:
        record.error_kind, record.error = "protocol", "the answer is empty"


def _whole_answer(stream: Stream) -> None:
    """Record an answer without streaming: only the end of its tokens is visible to the client."""
    record = stream.record
    try:
        data = any_json(stream.raw)
        usage = data.get("usage")
        if usage is not None:
            record.prompt_tokens = int(usage["prompt_tokens"])
            record.output_tokens = int(usage["completion_tokens"])
        choice = data["choices"][0]
        record.finish_reason = choice["finish_reason"]
        message = choice.get("message", {})
        stream.text.append(choice.get("text") or message.get("content") or "")
        for call in message.get("tool_calls") or []:
            record.call_bytes += len(json.dumps(call["function"]))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        record.error_kind, record.error = "protocol", f"the answer is not as expected: {error}"


def _vector(stream: Stream) -> None:
    """Check an embedding: one vector of finite numbers, not all zero."""
    record = stream.record
    try:
        data = any_json(stream.raw)
        (item,) = data["data"]
        length = math.fsum(float(value) ** 2 for value in item["embedding"])
        if not (math.isfinite(length) and length > 0):
            raise ValueError(f"the vector's squared length is {length}")
        record.output_tokens = 0
        record.prompt_tokens = int(data["usage"]["prompt_tokens"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        record.error_kind, record.error = "protocol", f"the answer is not as expected: {error!r}"


async def _sleep_until(when_ns: int) -> None:
    delay = (when_ns - time.monotonic_ns()) / 1e9
    if delay > 0:
        await asyncio.sleep(delay)
