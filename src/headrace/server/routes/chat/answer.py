"""The answer to a chat request, whole or as events, from the deltas of its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ....base.request import OutputDelta
from ...generation import deltas
from ...logprobs import chat_logprobs, prompt_logprobs
from ...wire import DONE, encode, frame, json_response

if TYPE_CHECKING:
    from ....engine.face import OutputStream
    from .serve import Chat


def _logprobs(chat: Chat, delta: OutputDelta) -> dict[str, Any] | None:
    if chat.top_logprobs is None or delta.logprobs is None:
        return None
    content = chat_logprobs(
        chat.service.engine.tokenizer, delta.token_ids, delta.logprobs, chat.top_logprobs
    )
    return {"content": content, "refusal": None}


class _Choice:
    """What one choice has come to so far."""

    __slots__ = ("finish", "logprobs", "stop", "texts", "tokens")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None
        self.stop: str | int | None = None


async def whole(chat: Chat, stream: OutputStream) -> Response:
    """The complete answer as one JSON object."""
    choices = [_Choice() for _ in range(chat.n)]
    reply = chat.head("chat.completion")
    async for _, delta in deltas([stream]):
        chat.usage.count(0, delta)
        choice = choices[delta.index]
        choice.texts.append(delta.text)
        choice.tokens += delta.token_ids
        logprobs = _logprobs(chat, delta)
        if logprobs is not None:
            choice.logprobs += logprobs["content"]
        if delta.prompt_logprobs and chat.body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                chat.service.engine.tokenizer, chat.prompt, delta.prompt_logprobs
            )
        if delta.finish_reason is not None:
            choice.finish, choice.stop = delta.finish_reason, delta.stop_reason
    reply["choices"] = [_finished(chat, index, choice) for index, choice in enumerate(choices)]
    reply["usage"] = chat.usage.as_openai()
    if chat.body.return_token_ids:
        reply["prompt_token_ids"] = chat.prompt
    return json_response(reply)


def _finished(chat: Chat, index: int, choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(choice.texts),
        "refusal": None,
    }
    fields: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None
        if chat.top_logprobs is None
        else {"content": choice.logprobs, "refusal": None},
        "finish_reason": choice.finish,
        "stop_reason": choice.stop,
    }
    if chat.body.return_token_ids:
        fields["token_ids"] = choice.tokens
    return fields


async def events(chat: Chat, stream: OutputStream) -> AsyncIterator[bytes]:
    """The answer as it comes: role, text, finish reason, usage where asked, end mark."""
    head = chat.head("chat.completion.chunk")
    continuous, body = chat.body.continuous_usage, chat.body
    plain = chat.top_logprobs is None and not continuous and not body.return_token_ids
    opening = encode(head)[:-1]
    starts = [
        b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (opening, index)
        for index in range(chat.n)
    ]
    end = b'},"logprobs":null,"finish_reason":null}]}\n\n'
    greeted: set[int] = set()
    async for _, delta in deltas([stream]):
        chat.usage.count(0, delta)
        index = delta.index
        if index not in greeted:
            greeted.add(index)
            yield frame(_chunk(chat, head, delta, {"role": "assistant", "content": ""}, first=True))
        if plain and delta.finish_reason is None:
            # The hot path: one of these per token. Everything but the text is made beforehand.
            if delta.text:
                yield b"%b%b%b" % (starts[index], encode(delta.text), end)
            continue
        fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if fields or delta.token_ids or delta.finish_reason is not None:
            yield frame(_chunk(chat, head, delta, fields))
    if body.usage_wanted:
        yield frame({**head, "choices": [], "usage": chat.usage.as_openai()})
    yield DONE


def _chunk(
    chat: Chat,
    head: dict[str, Any],
    delta: OutputDelta,
    fields: dict[str, Any],
    *,
    first: bool = False,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": delta.index,
        "delta": fields,
        "logprobs": None if first else _logprobs(chat, delta),
        "finish_reason": None if first else delta.finish_reason,
    }
    chunk = {**head, "choices": [choice]}
    if first:
        if chat.body.prompt_logprobs is not None and delta.prompt_logprobs:
            chunk["prompt_logprobs"] = prompt_logprobs(
                chat.service.engine.tokenizer, chat.prompt, delta.prompt_logprobs
            )
        if chat.body.return_token_ids:
            chunk["prompt_token_ids"] = chat.prompt
    else:
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if chat.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
    if chat.body.continuous_usage:
        chunk["usage"] = chat.usage.as_openai()
    return chunk
