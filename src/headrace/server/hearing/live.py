"""Live transcription over a websocket: samples in, words out while the user speaks.

One task reads the client's events; one transcribes committed turns in order. During speech a third
transcribes the unfinished turn again and again. A client that does not read its events is not read
from either, so nothing piles up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Send

from ...base.errors import HeadraceError, InvalidRequest
from ...base.foreign import Undecodable, any_json
from ...engine.hearing.engine import Hearing, HearingEngine
from ...engine.hearing.records import HeardSegment, HearOptions
from ...media import RATE
from ...obs.tasks import TaskWatch
from ..access import log_exchange
from ..caller import CALLER
from ..errors import internal_error
from ..session import read_messages
from ..socket import Socket
from . import answers
from .pcm import LATE, Intake, decoded, floats
from .session_fields import LOGPROBS, SessionFields, of_beta
from .spoken import SpokenTurn, write_floats
from .telling import SESSION_SECONDS, SessionEvents
from .turns import FRAME, TurnChange, TurnFollower

if TYPE_CHECKING:
    from ..accounts import Account
    from ..service import Service

UTTERANCE_SECONDS = 28.0
"""Seconds after which speech without a pause is cut: a window has 30."""
BUFFER_SECONDS = 600.0
"""Seconds of samples that may wait for the client's commit."""
MOST_PENDING = 4
"""Committed utterances that may wait; with more, the client is not read from."""
FIRST_PARTIAL, PARTIAL_STEP = 0.7, 0.2
"""Seconds of new speech that justify a pass: the first one, and each further one."""
PIECE = 1 << 15
"""Bytes of a message processed before other tasks get a turn of the event loop."""
FRAME_BYTES = 2 * FRAME


class LiveSession:
    """One client and its stream of samples."""

    def __init__(
        self,
        service: Service,
        engine: HearingEngine,
        account: Account | None,
        send: Send,
        scope: MutableMapping[str, Any],
        *,
        beta: bool,
    ) -> None:
        """Create a session. Its samples are charged to the `scope` of its exchange
        (`BodiesInFlight`)."""
        self._service, self._engine, self._account = service, engine, account
        self._events = SessionEvents(send, beta=beta)
        self.fields = SessionFields()
        self._samples = 0
        """Samples of the session so far."""
        self._turns_made = 0
        self._before: str | None = None
        """Id of the previous item."""
        self._scope = scope
        self._counted = 0
        """Bytes of samples charged to the scope."""
        self._coming = 0
        """Maximum bytes that the current message may become."""
        self._queued = 0
        """Bytes of turns that are committed and not yet transcribed."""
        self._rest = bytearray()
        """Samples that do not fill a frame yet."""
        self._lead = bytearray()
        """Frames kept from before speech began."""
        self._turn: SpokenTurn | None = None
        self._partial: asyncio.Task[None] | None = None
        self._pending: asyncio.Queue[SpokenTurn | None] = asyncio.Queue(MOST_PENDING)
        self._tasks = TaskWatch()
        self._configure(self.fields)

    # Whole session

    async def run(self, receive: Receive, socket: Socket) -> bool:
        """Run until the client leaves (return False), or the server has a reason to end the
        session."""
        finishing = asyncio.ensure_future(self._finish(socket))
        try:
            await self._events.session("created", self.fields.shown())
            there = await read_messages(
                receive, socket, self._service, self._take, self._events.error, SESSION_SECONDS
            )
            if there:
                await self._commit_turn()
                await self._pending.put(None)
                await finishing
            return there
        finally:
            for task in (finishing, self._partial):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})

    async def _take(self, message: Message) -> None:
        """Process one event; report any error in it and go on."""
        event: Any = None
        try:
            if message.get("text") is None:
                raise InvalidRequest("an event is a text message", code="invalid_event")
            event = _decoded(message.pop("text"))
            if not isinstance(event, dict) or not isinstance(event.get("type"), str):
                raise InvalidRequest("an event is an object with a type", param="type")
            await self._obey(event["type"], event)
        except HeadraceError as error:
            name = event.get("event_id") if isinstance(event, dict) else None
            await self._events.error(error, name if isinstance(name, str) else None)

    async def _obey(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "session.update" | "transcription_session.update":
                change = event.get("session")
                if not isinstance(change, dict):
                    raise InvalidRequest("session must be an object", param="session")
                if kind.startswith("transcription"):
                    self._events.beta, change = True, of_beta(change)
                await self._update(change)
                await self._events.session("updated", self.fields.shown())
            case "input_audio_buffer.append":
                await self._append(decoded(event.pop("audio", None)))
            case "input_audio_buffer.commit":
                if self._turn is not None:
                    self._feed(self._intake.rest(), last=True)
                if not self._turn or self._turn.count < RATE // 10:
                    raise InvalidRequest(
                        "the buffer has less than 100 ms of audio",
                        code="input_audio_buffer_commit_empty",
                    )
                await self._commit()
            case "input_audio_buffer.clear":
                self._drop()
                self._intake.clear()
                self._count()
                await self._events.tell("input_audio_buffer.cleared")
            case _:
                raise InvalidRequest(
                    f"{kind[:100]!r} is not an event of a transcription session", param="type"
                )

    # Settings

    async def _update(self, change: dict[str, Any]) -> None:
        changed = self.fields.updated(change)
        transcription = changed.audio.input.transcription
        if transcription is not None:
            self._service.check_model(transcription.model)
        self._engine.check(HearOptions(language=changed.language))
        before, now = self.fields.audio.input, changed.audio.input
        self.fields = changed
        if (now.format, now.turn_detection) != (before.format, before.turn_detection):
            if self._turn is not None:
                self._feed(self._intake.rest(), last=True)
            self._configure(changed)
            if before.turn_detection is None:
                await self._look_back()

    def _configure(self, fields: SessionFields) -> None:
        self._intake = Intake(fields.audio.input.format.type, fields.rate)
        vad = fields.audio.input.turn_detection
        self._turns = None if vad is None else TurnFollower(vad.pauses)
        padding = 0.0 if vad is None else vad.pauses.padding
        self._lead_bytes = (round(padding * RATE / FRAME) + 4) * FRAME_BYTES
        if vad is None:
            self._lead.clear()

    async def _look_back(self) -> None:
        """Find the turns in the samples appended while turn detection was off."""
        turn = self._turn
        if turn is None or self._turns is None:
            return
        self._turn, self._samples = None, turn.first
        self._coming = len(turn.data)
        try:
            await self._in_pieces(turn.data, self._follow)
        finally:
            self._coming = 0
            self._count()

    # Samples

    async def _append(self, data: bytes) -> None:
        coming = self._intake.most(len(data))
        held = self._turn.count if self._turn else 0
        if self._turns is None and held + coming > BUFFER_SECONDS * RATE + 2 * LATE:
            raise InvalidRequest(
                f"the buffer takes {BUFFER_SECONDS:.0f} seconds until it is committed",
                code="input_audio_buffer_full",
            )
        self._coming = 2 * coming
        try:
            self._count()
            await self._in_pieces(data, self._take_in)
        finally:
            self._coming = 0
            self._count()
        self._ask()

    async def _in_pieces(
        self, data: bytes | bytearray, take: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Process samples in pieces; after each one other tasks get a turn of the event loop."""
        for at in range(0, len(data), PIECE):
            if at:
                await asyncio.sleep(0)
            await take(bytes(data[at : at + PIECE]))

    async def _take_in(self, data: bytes) -> None:
        samples = self._intake.take(data)
        if self._turns is None:
            self._feed(samples, last=True)
        else:
            await self._follow(samples)

    def _count(self) -> None:
        """Charge the bytes that the session holds. Raises `Overloaded` during a message."""
        turn = len(self._turn.data) if self._turn is not None else 0
        held = turn + len(self._rest) + len(self._lead) + self._queued + self._coming
        change, bodies = held - self._counted, self._service.bodies
        if change > 0 and self._coming:
            bodies.take(self._scope, change)
        elif change < 0:
            bodies.give(self._scope, -change)
        else:
            return
        self._counted = held

    def _feed(self, samples: bytes, *, last: bool) -> None:
        """Add samples to the current turn; begin a turn if there is none."""
        if self._turn is None:
            self._turn = self._new_turn(self._samples)
        before = len(self._turn.data)
        if last:
            self._turn.data += self._rest
            self._rest.clear()
        self._turn.data += samples
        self._samples += (len(self._turn.data) - before) // 2

    async def _follow(self, samples: bytes) -> None:
        """Detect frame by frame where speech begins and ends."""
        assert self._turns is not None
        self._rest += samples
        whole = len(self._rest) // FRAME_BYTES * FRAME_BYTES
        data = bytes(self._rest[:whole])
        del self._rest[:whole]
        heard = floats(data)
        for at in range(0, whole, FRAME_BYTES):
            frame = data[at : at + FRAME_BYTES]
            change = self._turns.frame(heard[at // 2 : at // 2 + FRAME])
            if self._turn is None:
                self._lead += frame
                self._samples += FRAME
                del self._lead[: -self._lead_bytes]
                if change is TurnChange.BEGAN:
                    await self._begin()
                continue
            self._feed(frame, last=False)
            if change is TurnChange.ENDED or self._turn.count >= UTTERANCE_SECONDS * RATE:
                await self._events.tell(
                    "input_audio_buffer.speech_stopped",
                    audio_end_ms=self._samples * 1000 // RATE,
                    item_id=self._turn.id,
                )
                await self._commit()

    async def _begin(self) -> None:
        self._turn = self._new_turn(self._samples - len(self._lead) // 2)
        self._turn.data += self._lead
        self._lead.clear()
        await self._events.tell(
            "input_audio_buffer.speech_started",
            audio_start_ms=self._turn.first * 1000 // RATE,
            item_id=self._turn.id,
        )

    def _new_turn(self, first: int) -> SpokenTurn:
        self._turns_made += 1
        return SpokenTurn(first, self._turns_made)

    def _drop(self) -> None:
        self._end_turn()
        self._rest.clear()

    def _end_turn(self) -> SpokenTurn | None:
        """End the current turn and return it."""
        turn, self._turn = self._turn, None
        self._lead.clear()
        if self._turns is not None:
            self._turns.end()
        return turn

    async def _commit_turn(self) -> None:
        turn = self._end_turn()
        if turn is not None:
            self._queued += len(turn.data)
            await self._pending.put(turn)

    async def _commit(self) -> None:
        """Commit the current turn as an item of the conversation and queue it for transcription."""
        turn = self._end_turn()
        assert turn is not None
        self._queued += len(turn.data)
        before, self._before = self._before, turn.id
        await self._events.committed(turn, before)
        await self._pending.put(turn)

    # Words

    def _ask(self) -> None:
        """Start another pass over the unfinished turn if it has enough new speech and no pass is
        running."""
        turn = self._turn
        if turn is None or (self._partial is not None and not self._partial.done()):
            return
        fresh = (turn.count - turn.heard) / RATE
        if fresh < (PARTIAL_STEP if turn.heard else FIRST_PARTIAL):
            return
        if turn.count > UTTERANCE_SECONDS * RATE:
            return  # A client may commit more than a window holds; the final pass transcribes it.
        self._partial = self._tasks.errand("partial", self._guess(turn))

    async def _guess(self, turn: SpokenTurn) -> None:
        turn.heard = turn.count
        try:
            pieces = await self._heard(bytes(turn.data), live=True)
        except HeadraceError:
            return  # The final pass reports the error.
        text = answers.text_of(pieces)
        if turn is not self._turn or not text:
            return
        fresh, guess = turn.agreed.more(text)
        if len(turn.agreed.shown) + len(guess) and turn.begun:
            self._engine.metrics.partial.observe(time.monotonic() - turn.begun)
            turn.begun = 0.0
        await self._events.item("delta", turn, delta=fresh, unstable=guess)
        self._ask()

    async def _finish(self, socket: Socket) -> None:
        """Transcribe committed turns in order, while the client is connected."""
        while (turn := await self._pending.get()) is not None:
            try:
                if not socket.lost:
                    await self._transcribe(turn)
            except HeadraceError as error:
                await self._events.failed(turn, error)
            except (asyncio.CancelledError, OSError):
                raise
            except Exception:  # noqa: BLE001 - the border of one item
                await self._events.failed(turn, internal_error())
            self._queued -= len(turn.data)
            self._count()

    async def _transcribe(self, turn: SpokenTurn) -> None:
        if self._account is not None:
            self._account.check_tokens()
        begin = time.perf_counter()
        pieces = await self._heard(turn.data, live=False)
        seconds = turn.count / RATE
        used = answers.used(seconds, pieces, self._service.name)
        if self._account is not None:
            self._account.charge(used)
        log_exchange(
            logging.INFO,
            {"path": "/v1/realtime", "seconds": round(time.perf_counter() - begin, 6)},
            {"headrace.account": self._account, "headrace.usage": used},
        )
        text = answers.text_of(pieces)
        fresh, wrong = turn.agreed.end(text)
        self._engine.metrics.rewritten.inc(wrong)
        shares = {"logprobs": answers.logprobs(pieces)} if self._logprobs else {}
        if fresh:
            await self._events.item("delta", turn, delta=fresh, unstable="")
        await self._events.item(
            "completed", turn, transcript=text, usage=answers.usage(seconds), **shares
        )

    @property
    def _logprobs(self) -> bool:
        return LOGPROBS in (self.fields.include or ())

    async def _heard(self, data: bytes | bytearray, *, live: bool) -> list[HeardSegment]:
        count = len(data) // 2
        payload = self._engine.payload(CALLER.get().owner, count)
        try:
            # It cannot be stopped, and is awaited because it writes to the file.
            writing = partial(write_floats, payload.file, data)
            await self._service.hands.stoppable(writing, lambda: None, large=False)
        except BaseException:
            self._engine.drop(payload)
            raise
        options = HearOptions(
            language=self.fields.language,
            prompt=self.fields.prompt,
            logprobs=self._logprobs and not live,
            live=live,
        )
        hearing: Hearing = self._engine.hear(payload, count, options)
        pieces: list[HeardSegment] = []
        try:
            async for news in hearing:
                pieces += news.pieces
        finally:
            hearing.cancel()
        return pieces


def _decoded(text: str) -> Any:
    """Decode an event. Raises `InvalidRequest`, also for a lone surrogate, which cannot be
    echoed."""
    try:
        return any_json(text)
    except Undecodable:
        raise InvalidRequest("the event is not valid JSON", code="invalid_json") from None
