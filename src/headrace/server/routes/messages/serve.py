"""Answers to messages requests, whole or as Anthropic's events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import HeadraceError
from ....base.foreign import Undecodable, any_json
from ...connection import EventStream, while_connected
from ...errors import error_headers
from ...generation import deltas
from ...wire import json_response, named_frame
from ..chat.request import Chat, begin
from .convert import to_chat
from .retention import retain
from .schema import MessagesBody, MessageUsage

if TYPE_CHECKING:
    from ....engine.clients.face import OutputStream
    from ...service import Service
    from ..chat.parts import Parts

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_value(error: HeadraceError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else _TYPES[400])
    # Anthropic's errors have no field of their own for the path of the wrong one.
    named = not error.param or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    detail: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":
        # Anthropic's clients then continue without threads: they send the whole conversation each
        # time.
        detail["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
    return {"type": "error", "error": detail}


def error_reply(error: HeadraceError) -> Response:
    """Return the error in Anthropic's format."""
    return json_response(error_value(error), status=error.status, headers=error_headers(error))


def _error_frame(error: HeadraceError) -> bytes:
    return named_frame("error", error_value(error))


async def serve(service: Service, request: Request, body: MessagesBody) -> Response:
    counts, sees = service.speech.counts_reasoning, service.pictures is not None
    given = await service.hands.beside(lambda: to_chat(body, counts_reasoning=counts, sees=sees))
    name = request.scope["headrace.request_id"]
    chat, stream = await begin(
        service,
        given,
        name,
        whole=not body.stream,
        tokenised=lambda chat: retain(service, body, chat),
    )
    # Reports in the protocol's own way that none of the requested context edits were made.
    edits: dict[str, Any] = (
        {} if body.context_management is None else {"context_management": {"applied_edits": []}}
    )
    chat.id = "msg_" + chat.id.removeprefix("chatcmpl-")
    request.scope["headrace.usage"] = chat.usage
    if body.stream:
        return EventStream(
            _events(chat, stream, edits),
            keep_alive=service.keep_alive,
            error_frame=_error_frame,
            error_reply=error_reply,
        )
    return await while_connected(request.receive, _whole(chat, stream, edits))


def _usage(chat: Chat) -> MessageUsage:
    """Return the usage: marked tokens that were not cached count as created, unmarked ones as
    input."""
    cached = chat.usage.cached
    created, upto = {300.0: 0, 3600.0: 0}, cached
    for tokens, seconds, _ in sorted(chat.retained):
        created[seconds] += max(0, tokens - upto)
        upto = max(upto, tokens)
    return {
        "input_tokens": chat.usage.prompt - upto,
        "output_tokens": chat.usage.completion,
        "cache_creation_input_tokens": upto - cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[300.0],
            "ephemeral_1h_input_tokens": created[3600.0],
        },
        "cache_read_input_tokens": cached,
    }


def _end(parts: Parts) -> dict[str, Any]:
    by_text = parts.finish == "stop" and isinstance(parts.stop, str)
    return {
        "stop_reason": "stop_sequence" if by_text else _REASONS.get(parts.finish or "", "end_turn"),
        "stop_sequence": parts.stop if by_text else None,
    }


def _message(chat: Chat, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": chat.id,
        "type": "message",
        "role": "assistant",
        "model": chat.model,
        "content": content,
        **end,
        "usage": _usage(chat),
    }


async def _whole(chat: Chat, stream: OutputStream, edits: dict[str, Any]) -> Response:
    parts = chat.part()
    async for _, delta in deltas([stream]):
        chat.usage.count(0, delta)
        if delta.void is not None:
            parts = chat.part()
        parts.take(delta)
    content: list[dict[str, Any]] = []
    message = parts.message()
    if message.get("reasoning_content"):
        thinking = message["reasoning_content"]
        content.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for call in parts.calls:
        function = call["function"]
        content.append(
            {
                "type": "tool_use",
                "id": _tool_id(call["id"]),
                "name": function["name"],
                "input": _object(function["arguments"]),
            }
        )
    return json_response(_message(chat, content, _end(parts)) | edits)


def _tool_id(call_id: str) -> str:
    """Return an id with Anthropic's prefix, if the model's dialect leaves the choice."""
    own = call_id.removeprefix("call_")
    return call_id if own == call_id else "toolu_" + own


def _object(arguments: str) -> dict[str, Any]:
    """Parse arguments as an object; incomplete ones become empty, as the stop reason shows."""
    try:
        value = any_json(arguments)
    except Undecodable:
        return {}
    return value if isinstance(value, dict) else {}


class _Blocks:
    """Numbered content blocks of a stream; only one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""

    def frames(self, fields: dict[str, Any]) -> list[bytes]:
        """Return the events for one `delta` of a chat answer."""
        out: list[bytes] = []
        if "reasoning_content" in fields:
            self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}, out)
            thinking = fields["reasoning_content"]
            out.append(self._delta({"type": "thinking_delta", "thinking": thinking}))
        if "content" in fields:
            self._enter("text", {"type": "text", "text": ""}, out)
            out.append(self._delta({"type": "text_delta", "text": fields["content"]}))
        for call in fields.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                call_id = _tool_id(call["id"])
                block = {"type": "tool_use", "id": call_id, "name": function["name"]}
                self._enter(f"tool {call['index']}", block | {"input": {}}, out)
            if function["arguments"]:
                partial = function["arguments"]
                out.append(self._delta({"type": "input_json_delta", "partial_json": partial}))
        return out

    def close(self) -> list[bytes]:
        if not self._kind:
            return []
        frames = []
        if self._kind == "thinking":
            frames.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._kind = ""
        stop = {"type": "content_block_stop", "index": self._index}
        return [*frames, named_frame("content_block_stop", stop)]

    def _enter(self, kind: str, block: dict[str, Any], out: list[bytes]) -> None:
        if kind == self._kind:
            return
        out += self.close()
        self._index += 1
        self._kind = kind
        start = {"type": "content_block_start", "index": self._index, "content_block": block}
        out.append(named_frame("content_block_start", start))

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_frame("content_block_delta", event)


async def _events(chat: Chat, stream: OutputStream, edits: dict[str, Any]) -> AsyncIterator[bytes]:
    (parts,) = chat.parts()
    blocks = _Blocks()
    started = False
    async for _, delta in deltas([stream]):
        chat.usage.count(0, delta)
        if not started:
            started = True
            message = _message(chat, [], {"stop_reason": None, "stop_sequence": None})
            yield named_frame("message_start", {"type": "message_start", "message": message})
        frames = [frame for fields in parts.take(delta) for frame in blocks.frames(fields)]
        if frames:
            yield b"".join(frames)
    ending = {"type": "message_delta", "delta": _end(parts), "usage": _usage(chat), **edits}
    yield b"".join(
        [
            *blocks.close(),
            named_frame("message_delta", ending),
            named_frame("message_stop", {"type": "message_stop"}),
        ]
    )
