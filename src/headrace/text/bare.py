"""Calls at the beginning of a message as plain JSON, in any dialect.

Many models were taught markers and yet write a call without them, bare or in a fence: code models
nearly always. So some answers without markers are calls, as in llama.cpp: an object, or a list of
objects, with the name of an offered tool and arguments. Everything else is content. The decision
falls at the object's first keys: an answer that is some other JSON is not held back.
"""

from __future__ import annotations

from collections.abc import Generator

from .calls import Calls, SectionReader, read_call, read_list, read_text
from .jsonstream import SPACES, Malformed, Reader, read_literal, skip_space

FIRST = "{[`"
"""Characters with which such a message begins."""
FENCE = "```"
LABELS = ("", "json", "JSON", "tool_call", "tool_calls")
"""Words that may follow the opening fence."""


def read_bare(opener: str, calls: Calls) -> SectionReader:
    """Read on from the message's first character, which is `opener`."""
    char = opener
    while True:
        if char == "`":
            yield from read_literal(FENCE[1:])
            char = yield from _read_label()
            char = yield from _read_calls((yield from skip_space(char)), calls)
            yield from read_literal(FENCE, char)
            calls.settle()
            char = yield from skip_space()
        else:
            char = yield from _read_calls(char, calls)
        if char not in "{`":
            return char


def _read_label() -> Reader:
    """Read the word after a fence; return the character that ends it."""
    label = ""
    while True:
        char = yield
        if char in SPACES or char in "{[":
            if label not in LABELS:
                raise Malformed("a fence around something else")
            return char
        label += char
        if not any(known.startswith(label) for known in LABELS):
            raise Malformed("a fence around something else")


def _read_calls(char: str, calls: Calls) -> Reader:
    """Read one value, or several with `;` or `,` between; return the character after the spaces."""
    while True:
        if char == "[":
            yield from read_list(calls, certain=False)
        elif char == "{":
            yield from _read_object(calls)
        else:
            raise Malformed("expected a call")
        calls.settle()
        char = yield from skip_space()
        if char not in ";,":
            return char
        char = yield from skip_space()


def _read_object(calls: Calls) -> Generator[None, str, None]:
    """Read a call, or a list of them under `tool_calls`."""
    char = yield from skip_space()
    if char != '"':
        raise Malformed("expected a key")
    key = yield from read_text()
    if key != "tool_calls" or calls.held:
        yield from read_call(calls, certain=False, key=key)
        return
    for expected in ":[":
        char = yield from skip_space()
        if char != expected:
            raise Malformed("expected a list of calls")
    yield from read_list(calls, certain=False)
    char = yield from skip_space()
    if char != "}":
        raise Malformed("expected the end")
