"""Events of an answer stream, as the OpenAI interfaces send them."""

from __future__ import annotations

from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class Event(msgspec.Struct):
    """One `data:` line."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    def text(self) -> str:
        """What it adds to the answer, reasoning included."""
        parts = []
        for choice in self.choices:
            if choice.text:
                parts.append(choice.text)
            if choice.delta is not None:
                delta = choice.delta
                parts += [
                    part for part in (delta.content, delta.reasoning_content, delta.reasoning)
                    if part
                ]  # fmt: skip
        return "".join(parts)

    def carries(self) -> bool:
        """Does it carry any of the answer: text, or a tool call?"""
        return any(
            choice.text or (
                choice.delta is not None
                and (choice.delta.content or choice.delta.reasoning_content
                     or choice.delta.reasoning or choice.delta.tool_calls)
            )
            for choice in self.choices
        )  # fmt: skip


_decoder = msgspec.json.Decoder(Event)


class Lines:
    """Bytes of a body → the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [
            line[5:].strip() for line in lines if line.startswith(b"data:")
        ]  # fmt: skip


def decode(payload: bytes) -> Event:
    """Raises `msgspec.MsgspecError` (a ValueError) for what is no event."""
    return _decoder.decode(payload)
