"""Serving of a responses request: stored conversation, one stream, events, storage of the
result."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import HeadraceError, InvalidRequest, NotFound
from ....base.request import OutputDelta
from ...access import log_exchange
from ...connection import EventStream, while_connected
from ...generation import Usage, deltas
from ...logprobs import chat_logprobs
from ...store import ResponseStore, Stored
from ...wire import json_response, named_frame
from ..chat.request import SHORT, Chat, begin
from .build import ResponseBuilder
from .convert import items_of, to_chat
from .schema import ResponseBody

if TYPE_CHECKING:
    from ....engine.clients.face import OutputStream
    from ...accounts import Account
    from ...service import Service
    from ..chat.schema import ChatBody


class Trail:
    """Tokens that have arrived and whose text has not been shown yet.

    Text is held back (the beginning of a marker) and divided (reasoning, content, calls), so a
    delta's tokens do not match its text. Shown text is located in the text of the waiting tokens.
    Tokens before it formed a marker; tokens after it are still held.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._waiting: list[dict[str, Any]] = []
        """Entries of `logprobs`."""

    def take(self, delta: OutputDelta) -> None:
        if self._chat.top_logprobs is not None and delta.logprobs is not None:
            self._waiting += chat_logprobs(
                self._chat.service.engine.tokenizer,
                delta.token_ids,
                delta.logprobs,
                self._chat.top_logprobs,
            )

    def of(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tokens of the content in these fields; drop those of other text."""
        text = fields.get("content") or fields.get("reasoning_content")
        if not text or not self._waiting:
            return []
        pieces = [bytes(entry["bytes"]) for entry in self._waiting]
        first = b"".join(pieces).find(text.encode())
        last = first + len(text.encode())
        if first < 0:  # No token holds the whole character, or it is a hidden special token.
            first, last = 0, sum(map(len, pieces))
        found, place, used = [], 0, 0
        for entry, piece in zip(self._waiting, pieces, strict=True):
            if place >= last:
                break
            if place + len(piece) > first:
                found.append(entry)
            place, used = place + len(piece), used + 1
        del self._waiting[:used]
        return found if "content" in fields else []


MAX_TURNS = 1000
"""Maximum earlier responses in one conversation."""


class Responses:
    """Responses of one application: its store, and its background work."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self.service = service
        self.store = store
        self.running: dict[str, asyncio.Task[None]] = {}
        """Background work by response id."""
        self.turns: dict[str, _Turn] = {}
        """Background turns by response id."""

    async def find(self, response_id: str, owner: str) -> Stored:
        in_work = response_id in self.running
        stored = await self.store.get(response_id, owner)
        if stored is None:
            raise NotFound(f"there is no response {response_id[:128]!r}", param="response_id")
        if stored.response["status"] == "in_progress" and not in_work:
            # Its process has ended, or its end could not be stored.
            message = "the server that made it has ended: ask again"
            stored.response["status"] = "failed"
            stored.response["error"] = {"code": "server_error", "message": message}
        return stored

    async def history(self, response_id: str | None, owner: str) -> list[dict[str, Any]]:
        """List the items of all earlier turns, oldest first."""
        turns: list[list[dict[str, Any]]] = []
        while response_id is not None:
            if len(turns) >= MAX_TURNS:
                raise InvalidRequest(
                    f"the conversation has more than {MAX_TURNS} turns",
                    param="previous_response_id",
                )
            stored = await self.store.get(response_id, owner)
            if stored is None:
                raise NotFound(
                    f"there is no response {response_id[:128]!r}", param="previous_response_id"
                )
            turns.append([*stored.input, *map(dict, stored.response["output"])])
            response_id = stored.previous
        return [item for turn in reversed(turns) for item in turn]

    async def serve(self, request: Request, body: ResponseBody) -> Response:
        owner = request.scope.get("headrace.owner", "")
        if body.background and body.store is False:
            raise InvalidRequest("background needs store: true", param="background")
        items = await self.service.hands.beside(items_of, body)
        past = await self.history(body.previous_response_id, owner)
        chat_body = await self._to_chat(body, [*past, *items])
        name = request.scope["headrace.request_id"]
        # No client sees a background answer until a client watches it (`_Turn.events_after`).
        whole = bool(body.background) or not body.stream
        service = self.service.choose(body.model)
        chat, stream = await begin(service, chat_body, name, whole=whole, where="input")
        builder = ResponseBuilder(body, chat.model, f"resp_{secrets.token_hex(16)}", chat.usage)
        turn = _Turn(self, chat, stream, builder, items if body.store is not False else None, owner)
        if body.background:
            reply = await self._background(turn, request, chat.usage)
            if body.stream:
                return EventStream(turn.events_after(-1), keep_alive=self.service.keep_alive)
            return reply
        request.scope["headrace.usage"] = chat.usage
        if body.stream:
            return EventStream(
                turn.frames(), keep_alive=self.service.keep_alive, error_frame=turn.error_frame
            )
        return await while_connected(request.receive, turn.whole())

    async def _background(self, turn: _Turn, request: Request, usage: Usage) -> Response:
        response = turn.builder.response
        reply = json_response({**response, "status": "queued"})
        await turn.save()
        task = self.service.tasks.errand("response", turn.run())
        self.running[response["id"]] = task
        self.turns[response["id"]] = turn
        # The task outlives its exchange and takes over the exchange's place in work. So a drain
        # waits for it, and its key is charged at its end.
        work: dict[str, Any] = {
            "headrace.entered": request.scope.pop("headrace.entered"),
            "headrace.account": request.scope.get("headrace.account"),
            "headrace.usage": usage,
        }
        name = request.scope["headrace.request_id"]

        account: Account | None = work["headrace.account"]
        removed = None
        if account is not None:
            removed = self.service.tasks.errand("removed key", account.removed.wait())
        if removed is not None:
            removed.add_done_callback(lambda _: task.cancel())

        def ended(_: object) -> None:
            if removed is not None:
                removed.cancel()
            self.running.pop(response["id"], None)
            self.turns.pop(response["id"], None)
            fields = {"request_id": name, "path": request.scope["path"], "background": True}
            log_exchange(logging.INFO, fields, work)
            self.service.leave(work)

        task.add_done_callback(ended)
        return reply

    async def watch(self, response_id: str, owner: str, after: int) -> Response:
        """Stream a background response's events after the number `after`; if complete, only the
        last."""
        stored = await self.find(response_id, owner)
        turn = self.turns.get(response_id)
        if turn is None:
            kind = f"response.{stored.response['status']}"
            last = {"type": kind, "sequence_number": after + 1, "response": stored.response}
            return EventStream(_just(named_frame(kind, last)), keep_alive=self.service.keep_alive)
        return EventStream(turn.events_after(after), keep_alive=self.service.keep_alive)

    async def _to_chat(self, body: ResponseBody, items: list[dict[str, Any]]) -> ChatBody:
        """Convert a conversation, in a thread if it has thousands of items, as even a short body
        may."""
        hands, sees = self.service.hands, self.service.choose(body.model).pictures is not None
        if len(items) > SHORT:
            return await hands.run(to_chat, body, items, sees)
        return await hands.beside(to_chat, body, items, sees)

    async def count(self, body: ResponseBody, owner: str) -> int:
        """Count the conversation's tokens without answering it."""
        service = self.service.choose(body.model)
        service.check_model(body.model, adapters=True)
        past = await self.history(body.previous_response_id, owner)
        items = await self.service.hands.beside(items_of, body)
        chat = Chat(service, await self._to_chat(body, [*past, *items]), "")
        await chat.tokenise(counts=True)
        return len(chat.prompt)

    async def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancel background work; a completed response is unchanged."""
        stored = await self.find(response_id, owner)
        if not stored.response["background"]:
            raise InvalidRequest("only background responses can be cancelled", param="response_id")
        task = self.running.get(response_id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return (await self.find(response_id, owner)).response


@dataclass(slots=True, eq=False)
class _Turn:
    """One response in work."""

    responses: Responses
    chat: Chat
    stream: OutputStream
    builder: ResponseBuilder
    items: list[dict[str, Any]] | None
    owner: str
    _log: list[bytes] = field(default_factory=list)
    """Events so far, by number; kept only for background work."""
    _opening: int = 0
    """Number of initial events without content of the answer."""
    _ended: bool = False
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    async def events_after(self, after: int) -> AsyncIterator[bytes]:
        """Yield the events after the number `after`, including future ones."""
        place = after + 1
        while True:
            grown, news = self._grown, self._log[place:]
            if news and place + len(news) > self._opening and not self.stream.show():
                news = news[: max(self._opening - place, 0)]  # The rest is regenerated.
            place += len(news)
            if news:
                yield b"".join(news)
            elif self._ended:
                return
            else:
                await grown.wait()

    def _tell(self, events: list[dict[str, Any]], *, last: bool = False) -> None:
        self._log += [named_frame(event["type"], event) for event in events]
        self._ended = last
        self._grown.set()
        self._grown = asyncio.Event()

    async def save(self) -> None:
        if self.items is None:
            return
        response = self.builder.response
        previous = response["previous_response_id"]
        stored = Stored(response["id"], previous, self.items, response)
        if not await self.responses.store.put(stored, self.owner, response["created_at"]):
            response["store"] = False  # the client gets the answer, marked as not stored

    async def _events(self) -> AsyncIterator[list[dict[str, Any]]]:
        parts = self.chat.part()
        trail = Trail(self.chat)
        opening = self.builder.begin()
        self._opening = len(opening)
        yield opening
        async for _, delta in deltas([self.stream]):
            self.chat.usage.count(0, delta)
            if delta.void is not None:
                parts, trail = self.chat.part(), Trail(self.chat)
                self.builder.again()
                del self._log[self._opening :]
            trail.take(delta)
            events = [
                event
                for fields in parts.take(delta)
                for event in self.builder.take(fields, trail.of(fields))
            ]
            if events:
                yield events
        self.chat.usage.reasoning = parts.reasoning_tokens
        ending = self.builder.end(parts)
        await self.save()
        yield ending

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the event frames. The first ones wait for the first token, so that an early error
        keeps its HTTP status."""
        head: list[dict[str, Any]] = []
        async for events in self._events():
            if not head and events[0]["type"] == "response.created":
                head = events
                continue
            frames = [named_frame(e["type"], e) for e in (*head, *events)]
            head = []
            yield b"".join(frames)

    def error_frame(self, error: HeadraceError) -> bytes:
        return b"".join(named_frame(e["type"], e) for e in self.builder.fail(error))

    async def whole(self) -> Response:
        async for _ in self._events():
            pass
        return json_response(self.builder.response)

    async def run(self) -> None:
        """Run in the background; the outcome is stored in any case."""
        try:
            async for events in self._events():
                self._tell(events)
        except HeadraceError as error:
            self._tell(self.builder.fail(error))
            await self.save()
        except asyncio.CancelledError:
            self.builder.cancel()
            await self.save()
            raise
        finally:
            self._tell([], last=True)


async def _just(frame: bytes) -> AsyncIterator[bytes]:
    yield frame
