"""Answers to chat requests, whole or as events, built from the deltas of a stream."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ....base.request import OutputDelta
from ...frames import Frames
from ...generation import deltas
from ...logprobs import chat_logprobs, prompt_logprobs
from ...wire import DONE, Large, encode, frame, json_response, large_response

if TYPE_CHECKING:
    from ....engine.clients.face import OutputStream
    from .parts import Parts
    from .request import Chat


_END = b'},"logprobs":null,"finish_reason":null}]}\n\n'


def _logprobs(chat: Chat, delta: OutputDelta) -> dict[str, Any] | None:
    if chat.top_logprobs is None or delta.logprobs is None:
        return None
    content = chat_logprobs(
        chat.service.engine.tokenizer,
        delta.token_ids,
        delta.logprobs,
        chat.top_logprobs,
        as_ids=bool(chat.body.return_tokens_as_token_ids),
    )
    return {"content": content, "refusal": None}


async def whole(chat: Chat, stream: OutputStream) -> Response:
    """Return the complete answer as one JSON object."""
    choices = chat.parts()
    reply = chat.head("chat.completion")
    async for _, delta in deltas([stream]):
        chat.usage.count(0, delta)
        if delta.void is not None:
            choices[delta.index] = chat.part()
        parts = choices[delta.index]
        parts.take(delta)
        parts.tokens += delta.token_ids
        logprobs = _logprobs(chat, delta)
        if logprobs is not None:
            parts.logprobs += [msgspec.Raw(encode(entry)) for entry in logprobs["content"]]
            await asyncio.sleep(0)  # All choices may arrive at once.
        if delta.prompt_logprobs and chat.body.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(
                chat.service.engine.tokenizer, chat.prompt, delta.prompt_logprobs
            )
    reply["choices"] = [_finished(chat, index, parts) for index, parts in enumerate(choices)]
    chat.usage.reasoning = sum(parts.reasoning_tokens for parts in choices)
    reply |= chat.usage.told()
    if chat.body.return_token_ids:
        reply["prompt_token_ids"] = chat.prompt
    if chat.body.prompt_logprobs is not None or chat.top_logprobs is not None:
        return await large_response(reply)
    return json_response(reply)


def _finished(chat: Chat, index: int, parts: Parts) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "index": index,
        "message": parts.message(),
        "logprobs": None
        if chat.top_logprobs is None
        else {"content": parts.logprobs, "refusal": None},
        "finish_reason": parts.finish,
        "stop_reason": parts.stop,
    }
    if chat.body.return_token_ids:
        fields["token_ids"] = parts.tokens
    return fields


def events(chat: Chat, stream: OutputStream) -> Frames:
    """Return the answer as events: role, text, finish reason, usage if requested, end mark."""
    encoder = _EventEncoder(chat)
    if chat.body.prompt_logprobs is not None:
        return Frames([stream], encoder.scores, encoder.end, straight=False)
    return Frames([stream], encoder.news, encoder.end)


class _EventEncoder:
    """Encoder of one answer as events."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._head = chat.head("chat.completion.chunk")
        self._choices = chat.parts()
        body = chat.body
        self._plain = (
            chat.top_logprobs is None
            and self._choices[0].plain
            and not body.continuous_usage
            and not body.return_token_ids
        )
        opening = encode(self._head)[:-1]
        self._starts = [
            b'data: %b,"choices":[{"index":%d,"delta":{"content":' % (opening, index)
            for index in range(chat.n)
        ]
        self._greeted: set[int] = set()

    def scores(self, _: int, delta: OutputDelta) -> bytes | Large:
        """Make the events of one delta, for an answer that begins with its prompt's logprobs."""
        if delta.index in self._greeted:
            return self.news(_, delta)
        self._greeted.add(delta.index)
        return Large(_opening(self._chat, self._head, delta), self.news(_, delta))

    def news(self, _: int, delta: OutputDelta) -> bytes:
        """Make the events of one delta; empty if it has no text."""
        chat, index = self._chat, delta.index
        chat.usage.count(0, delta)
        opening = b""
        if index not in self._greeted:
            self._greeted.add(index)
            opening = frame(_opening(chat, self._head, delta))
        if self._plain and delta.finish_reason is None:
            # Hot path, once per token. Everything but the text is prepared beforehand.
            if not delta.text:
                return opening
            return b"%b%b%b%b" % (opening, self._starts[index], encode(delta.text), _END)
        parts = self._choices[index]
        chunks = parts.take(delta)
        chat.usage.reasoning = sum(parts.reasoning_tokens for parts in self._choices)
        # Per-token data goes with the first chunk; the end has its own chunk, as clients expect.
        last = delta.finish_reason is not None
        if last or not (chunks or self._plain):
            chunks = [*chunks, {}]
        return opening + b"".join(
            frame(
                _chunk(
                    chat,
                    self._head,
                    delta,
                    fields,
                    place == 0,
                    parts.finish if last and place == len(chunks) - 1 else None,
                )
            )
            for place, fields in enumerate(chunks)
        )

    def end(self) -> bytes:
        chat = self._chat
        if chat.body.usage_wanted:
            return frame({**self._head, "choices": [], **chat.usage.told()}) + DONE
        return DONE


def _opening(chat: Chat, head: dict[str, Any], delta: OutputDelta) -> dict[str, Any]:
    """Build the first chunk of a choice: the role, and the data about the prompt."""
    choice: dict[str, Any] = {
        "index": delta.index,
        "delta": {"role": "assistant", "content": chat.echoed},
        "logprobs": None,
        "finish_reason": None,
    }
    chunk = {**head, "choices": [choice]}
    if chat.body.prompt_logprobs is not None and delta.prompt_logprobs:
        chunk["prompt_logprobs"] = prompt_logprobs(
            chat.service.engine.tokenizer, chat.prompt, delta.prompt_logprobs
        )
    if chat.body.return_token_ids:
        chunk["prompt_token_ids"] = chat.prompt
    if chat.body.continuous_usage:
        chunk["usage"] = chat.usage.as_openai()
    return chunk


def _chunk(
    chat: Chat,
    head: dict[str, Any],
    delta: OutputDelta,
    fields: dict[str, Any],
    first: bool,
    finish: str | None,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": delta.index,
        "delta": fields,
        "logprobs": _logprobs(chat, delta) if first else None,
        "finish_reason": finish,
    }
    if finish is not None:
        choice["stop_reason"] = delta.stop_reason
    if chat.body.return_token_ids:
        choice["token_ids"] = delta.token_ids if first else []
    chunk = {**head, "choices": [choice]}
    if chat.body.continuous_usage:
        chunk["usage"] = chat.usage.as_openai()
    return chunk
