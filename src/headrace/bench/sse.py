"""Events of an answer stream, as the OpenAI interfaces send them."""

from __future__ import annotations

from typing import Any

import msgspec

from ..base.foreign import json_reader


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    image_tokens: int | None = None


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
        """Return the text that it adds to the answer, including reasoning."""
        parts = []
        for choice in self.choices:
            if choice.text:
                parts.append(choice.text)
            if choice.delta is not None:
                delta = choice.delta
                parts += [
                    part
                    for part in (delta.content, delta.reasoning_content, delta.reasoning)
                    if part
                ]
        return "".join(parts)

    def called(self) -> int:
        """Count the bytes of tool-call names and arguments that it adds."""
        return sum(
            len(str(call.get("function", {}).get(part) or "").encode(errors="replace"))
            for choice in self.choices
            if choice.delta is not None and choice.delta.tool_calls
            for call in choice.delta.tool_calls
            if isinstance(call, dict) and isinstance(call.get("function", {}), dict)
            for part in ("name", "arguments")
        )

    def carries(self) -> bool:
        """Return whether it has a part of the answer: text, or a tool call."""
        deltas = [choice.delta for choice in self.choices if choice.delta is not None]
        return bool(self.text()) or any(delta.tool_calls for delta in deltas)


_event = json_reader(Event)


class Lines:
    """Parser of a body's bytes into the data of its events (WHATWG HTML, 9.2.6).

    A line ends with LF, CR or CR LF; an event ends with an empty line, and its `data:` lines are
    joined. Other fields and comments are ignored.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Parse bytes; return the events that have ended."""
        data = self._rest + data
        if b"\r" in data:
            # A CR at the end may be half of a CR LF.
            whole = len(data) - data.endswith(b"\r")
            data = data[:whole].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + data[whole:]
        lines = data.split(b"\n")
        self._rest = lines.pop()
        return [event for line in lines if (event := self._line(line)) is not None]

    def end(self) -> list[bytes]:
        """End the stream; return its last event, complete or not."""
        line, self._rest = self._rest.rstrip(b"\r"), b""
        return [event for last in (line, b"") if (event := self._line(last)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].strip())
        elif not line and self._data:
            event = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data = []
            return event
        return None


def decode(payload: bytes) -> Event:
    """Decode the data of an event. Raises `Undecodable`, a `ValueError`."""
    return _event(payload)
