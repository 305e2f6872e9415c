"""Readers of JSON, character by character while it is being written.

Readers are generators: `char = yield` takes the next character, `return` ends the reading, and
`Malformed` reports an unexpected text. So every reader works for any cut of the text, and they
combine with `yield from`. Most return the character after their text, because only it shows where a
number or a run of spaces ends. `Ended` is thrown into a reader where the text ends: a reader with a
value that may be complete passes it on.

Some text that models often write and JSON forbids is accepted: a comma before a closing bracket,
control characters in strings, backslashes that escape nothing, Python's three words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

Reader = Generator[None, str, str]
"""Generator that yields for each character; it returns the one after its text."""

MAX_DEPTH = 128
SPACES = " \t\r\n"
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Python's words → JSON's."""
_ENDS = SPACES + ",]}"
_SCALAR_STARTS = "-0123456789tfnTFN"
_UNKNOWN = "\\ufffd"
"""Escape of U+FFFD, in place of half a character."""
_HEX = "0123456789abcdefABCDEF"
_CLOSING = {"{": "}", "[": "]", '"': '"'}


class Malformed(Exception):
    """Error for a text that is not in the expected form."""


class Ended(Exception):
    """Signal that the text has ended before the reader's part is complete."""


class Writer:
    """Filter that passes JSON on only so far that it can still be closed.

    An opening bracket, a comma and a key wait for the value after them.
    """

    __slots__ = ("_closers", "_held", "_sent", "_sink")

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._sink = sink
        self._held = ""
        self._closers: list[str] = []
        """Closing brackets and quotes of everything that is open."""
        self._sent = 0
        """Number of closers whose opening was passed on."""

    def hold(self, text: str) -> None:
        """Keep a text, and pass it on before the next value."""
        self._held += text

    def drop(self) -> None:
        """Forget the held text."""
        self._held = ""

    def open(self, bracket: str) -> None:
        """Hold an opening bracket or quote, which `close` is to match."""
        self._held += bracket
        self._closers.append(_CLOSING[bracket])

    def close(self) -> None:
        self.write(self._closers.pop())

    def write(self, text: str) -> None:
        """Pass on a value or a part of a string, after the held text."""
        self._sink(self._held + text)
        self._held = ""
        self._sent = len(self._closers)

    def text(self, text: str) -> None:
        """Pass on a part of a string's value, which the first part opens."""
        if self._closers[-1] != '"':
            self.open('"')
        self.write(escaped(text))

    def break_off(self, *, close: bool) -> None:
        """End incomplete JSON. `close`: close all that was passed on, without the held text; else
        pass the held text on and close nothing."""
        if not close:
            self.write("")
        elif self._sent:
            self._sink("".join(reversed(self._closers[: self._sent])))


def ignore(text: str) -> None:
    """Drop a text, as a sink."""


def escaped(text: str) -> str:
    """Escape a text for use between JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def skip_space(char: str = " ") -> Reader:
    """Skip spaces from `char` on; return the first other character."""
    while char in SPACES:
        char = yield
    return char


def read_literal(text: str, char: str | None = None) -> Generator[None, str, None]:
    """Read exactly this text; `char` is its first character if that was read already."""
    for expected in text:
        if char is None:
            char = yield
        if char != expected:
            raise Malformed(f"expected {text!r}")
        char = None


def read_string(
    sink: Callable[[str], None], ends: tuple[str, ...] = ()
) -> Generator[None, str, None]:
    """Read a string from after its opening quote to its closing quote, which is left out.

    The sink gets characters and whole escapes. `ends`: marks before which a closing quote is
    missing, if a new line that is not escaped stands before them.
    """
    held = high = ""
    char = yield
    while True:
        if high and char != "\\":
            sink(_UNKNOWN)
            high = ""
        if held or (ends and char == "\n"):
            mark = (held + char).lstrip(SPACES)
            if any(end.startswith(mark) for end in ends):
                if mark in ends:
                    raise Malformed("a string that does not end")
                held += char
                char = yield
                continue
            sink(escaped(held))
            held = ""
        elif char == '"':
            return
        elif char == "\\":
            escape, char = yield from _read_escape()
            text, high = _joined(high, escape)
            sink(text)
        else:
            sink(char if char >= " " else escaped(char))
            char = yield


def _read_escape() -> Generator[None, str, tuple[str, str]]:
    """Read an escape, after its backslash; return it and the character that follows it."""
    char = yield
    if char in '"\\/bfnrt':
        return "\\" + char, (yield)
    if char != "u":
        return "\\\\", char
    digits = ""
    while len(digits) < 4:
        char = yield
        if char not in _HEX:
            return "\\\\u" + digits, char
        digits += char
    return "\\u" + digits, (yield)


def _joined(high: str, escape: str) -> tuple[str, str]:
    """Join the halves of a character; return the text to pass on and a first half to keep. `high`:
    a first half before the escape."""
    half = escape[2:4].lower() if len(escape) == 6 else ""
    if "d8" <= half < "dc":
        return (_UNKNOWN if high else ""), escape
    if "dc" <= half < "e0":
        return (high + escape if high else _UNKNOWN), ""
    return (_UNKNOWN if high else "") + escape, ""


def read_value(char: str, writer: Writer, depth: int = 0, ends: tuple[str, ...] = ()) -> Reader:
    """Read any value that starts with `char`; return the character after it."""
    if char == '"':
        writer.open(char)
        writer.write("")
        yield from read_string(writer.write, ends)
        writer.close()
        return (yield)
    if char in "{[":
        yield from read_object(char, writer, depth, ends)
        return (yield)
    if char not in _SCALAR_STARTS:
        raise Malformed("expected a JSON value")
    scalar = char
    try:
        while (char := (yield)) not in _ENDS:
            scalar += char
            if len(scalar) > 400:
                raise Malformed("a number is too long")
    except Ended:
        if _is_scalar(scalar):
            writer.write(PYTHON.get(scalar, scalar))
        raise
    if not _is_scalar(scalar):
        raise Malformed(f"{scalar:.40} is no JSON value")
    writer.write(PYTHON.get(scalar, scalar))
    return char


def _is_scalar(text: str) -> bool:
    if text in PYTHON:
        return True
    try:
        json.loads(text, parse_int=_keep, parse_float=_keep, parse_constant=refuse_constant)
    except ValueError:
        return False
    return True


def _keep(text: str) -> str:
    return text


def refuse_constant(text: str) -> Any:
    """Refuse NaN and Infinity for `json.loads`: they are not JSON."""
    raise ValueError(text)


def read_object(
    char: str, writer: Writer, depth: int = 0, ends: tuple[str, ...] = ()
) -> Generator[None, str, None]:
    """Read an object or a list, from its opening bracket `char` to its closing one. `ends`: see
    `read_string`."""
    if depth > MAX_DEPTH:
        raise Malformed("nested too deeply")
    keyed = char == "{"
    closing = _CLOSING[char]
    writer.open(char)
    char = yield from _space_to(writer.hold)
    while char != closing:
        if keyed:
            if char != '"':
                raise Malformed("expected a key")
            writer.hold(char)
            yield from read_string(writer.hold)
            writer.hold(char)
            char = yield from _space_to(writer.hold)
            if char != ":":
                raise Malformed("expected a colon")
            writer.hold(char)
            char = yield from _space_to(writer.hold)
        char = yield from read_value(char, writer, depth + 1, ends)
        while char in SPACES:
            writer.hold(char)
            char = yield
        if char == ",":
            writer.hold(char)
            char = yield from _space_to(writer.hold)
            if char == closing:
                writer.drop()
        elif char != closing:
            raise Malformed("expected a comma")
    writer.close()


def _space_to(sink: Callable[[str], None]) -> Reader:
    """Pass spaces to the sink; return the first other character."""
    char = yield
    while char in SPACES:
        sink(char)
        char = yield
    return char
