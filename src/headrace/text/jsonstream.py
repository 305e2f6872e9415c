"""Reads JSON character by character while it is being written.

Readers are generators: `char = yield` takes the next character, `return` ends the reading, and
`Malformed` says that the text is not what was expected. So every reader works for any cut of the
text, and they combine with `yield from`. Most return the character after what they read, because
only it shows where a number or a run of spaces ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

Reader = Generator[None, str, str]
"""Yields for each character; returns the one that follows what it read."""

MAX_DEPTH = 128
SPACES = " \t\r\n"
_ENDS = SPACES + ",]}"
_SCALAR_STARTS = "-0123456789tfn"


class Malformed(Exception):
    """The text is not in the expected form."""


def ignore(text: str) -> None:
    """A sink that drops what it is given."""


def skip_space(char: str = " ") -> Reader:
    """Skip spaces from `char` on; returns the first character that is none."""
    while char in SPACES:
        char = yield
    return char


def read_literal(text: str, char: str | None = None) -> Generator[None, str, None]:
    """Exactly this text; `char` is its first character where that was read already."""
    for expected in text:
        if char is None:
            char = yield
        if char != expected:
            raise Malformed(f"expected {text!r}")
        char = None


def read_string(sink: Callable[[str], None]) -> Generator[None, str, None]:
    """A string, after its opening quote, to its closing quote; each character goes to `sink`."""
    while True:
        char = yield
        if char < " ":
            raise Malformed("a control character in a string")
        sink(char)
        if char == '"':
            return
        if char == "\\":
            char = yield
            if char == "u":
                sink(char)
                for _ in range(4):
                    char = yield
                    if char not in "0123456789abcdefABCDEF":
                        raise Malformed("a bad \\u escape")
                    sink(char)
            elif char in '"\\/bfnrt':
                sink(char)
            else:
                raise Malformed("a bad escape")


def read_value(char: str, sink: Callable[[str], None], depth: int = 0) -> Reader:
    """Any value that starts with `char`; every character of it goes to `sink`.

    Takes the character after it and returns it.
    """
    if char == '"':
        sink(char)
        yield from read_string(sink)
        return (yield)
    if char in "{[":
        yield from read_object(char, sink, depth)
        return (yield)
    if char not in _SCALAR_STARTS:
        raise Malformed("expected a JSON value")
    scalar = char
    while True:
        char = yield
        if char in _ENDS:
            break
        scalar += char
        if len(scalar) > 400:
            raise Malformed("a number is too long")
    if not _is_scalar(scalar):
        raise Malformed(f"{scalar:.40} is no JSON value")
    sink(scalar)
    return char


def _is_scalar(text: str) -> bool:
    try:
        json.loads(text, parse_int=_keep, parse_float=_keep, parse_constant=refuse_constant)
    except ValueError:
        return False
    return True


def _keep(text: str) -> str:
    return text


def refuse_constant(text: str) -> Any:
    """For `json.loads`: NaN and Infinity are no JSON."""
    raise ValueError(text)


def read_object(
    char: str, sink: Callable[[str], None], depth: int = 0
) -> Generator[None, str, None]:
    """An object or a list, from its opening bracket `char` to its closing one."""
    if depth > MAX_DEPTH:
        raise Malformed("nested too deeply")
    keyed = char == "{"
    closing = "}" if keyed else "]"
    sink(char)
    char = yield from _space_to(sink)
    if char == closing:
        sink(char)
        return
    while True:
        if keyed:
            if char != '"':
                raise Malformed("expected a key")
            sink(char)
            yield from read_string(sink)
            char = yield from _space_to(sink)
            if char != ":":
                raise Malformed("expected a colon")
            sink(char)
            char = yield from _space_to(sink)
        char = yield from read_value(char, sink, depth + 1)
        while char in SPACES:
            sink(char)
            char = yield
        sink(char)
        if char == closing:
            return
        if char != ",":
            raise Malformed("expected a comma")
        char = yield from _space_to(sink)


def _space_to(sink: Callable[[str], None]) -> Reader:
    """Spaces, which go to the sink, and the first character that is none, which does not."""
    char = yield
    while char in SPACES:
        sink(char)
        char = yield
    return char
