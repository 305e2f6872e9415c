"""Tool calls while they are being written: what dialects report to, and the object many share."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from functools import cache

from .automaton import Automaton
from .events import ToolCallArguments, ToolCallEnd, ToolCallStart
from .jsonstream import (
    Malformed,
    ignore,
    read_object,
    read_string,
    read_value,
    refuse_constant,
    skip_space,
)
from .tools import Tool

SectionReader = Generator[None, str, str | None]
"""Reads a stretch of calls; returns a character that it took but that is not of the stretch."""

MAX_NAME = 256
NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
EARLY_KEYS = ("id", "type", "index")
"""What may stand before the name in an object that no marker says to be a call."""


class Calls:
    """Collects the events of the calls in one message.

    Its rule: once `start` was called, what was read so far is a call and can no longer become
    content; a reader therefore calls it only when it is certain.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        known: Mapping[str, Tool] | None = None,
        *,
        held: bool = False,
    ) -> None:
        """`known`: the tools on offer by name, where a text is a call only if it names one.
        `held`: a grammar holds the answer, so that calls have the one form that it knows.
        """
        self._new_id = new_id
        self.known = known
        self.held = held
        self.events: list[ToolCallStart | ToolCallArguments | ToolCallEnd] = []
        self.count = 0
        """Calls that have ended."""
        self.open = False
        """Is a call begun and not ended?"""
        self.begun = False
        """Is what is being read a further call, though maybe not certain yet?"""
        self.committed = False
        """Has something been reported since the router looked last?"""

    def begin(self) -> None:
        self.begun = True

    def start(self, name: str, call_id: str | None = None) -> None:
        assert not self.open
        if not name or len(name) > MAX_NAME:
            raise Malformed("a call without a name")
        self.events.append(ToolCallStart(self.count, call_id or self._new_id(), name))
        self.open = self.begun = self.committed = True

    def arguments(self, text: str) -> None:
        assert self.open
        self.events.append(ToolCallArguments(self.count, text))
        self.committed = True

    def settle(self) -> None:
        """What was read up to here belongs to the calls that have ended."""
        self.committed = True

    def end(self, *, complete: bool = True) -> None:
        assert self.open
        self.events.append(ToolCallEnd(self.count, complete))
        self.open = self.begun = False
        self.committed = True
        self.count += 1


def read_call(calls: Calls, *, certain: bool, key: str | None = None) -> Generator[None, str, None]:
    """A call as an object, after its opening brace: `{"name": …, "arguments": {…}}`.

    Keys in any order; others (`id`, `type`) are read over. Arguments stream as soon as the name is
    known. Arguments given as a string of JSON are unpacked. `certain`: the dialect's markers say
    that this is a call, so that it may name any tool and lack arguments; else it names a tool on
    offer early and has arguments. `key`: the first key, where it was read already.
    """
    calls.begin()
    name: str | None = None
    early: list[str] = []
    """Arguments that came before the name."""
    seen = False
    while True:
        if key is None:
            char = yield from skip_space()
            if char != '"':
                raise Malformed("expected a key")
            key = yield from read_text()
        if not certain and name is None and not _may_come_early(key, calls):
            raise Malformed("not the key of a call")
        char = yield from skip_space()
        if char != ":":
            raise Malformed("expected a colon")
        char = yield from skip_space()
        if key == "function" and char == "{" and name is None and not seen:
            # As OpenAI's interface has calls: name and arguments one level further in.
            yield from read_call(calls, certain=certain)
            name, seen = key, True
            char = yield
        elif key in NAME_KEYS and name is None:
            if char != '"':
                raise Malformed("a name that is no string")
            name = yield from read_text()
            if not certain and calls.known is not None and name not in calls.known:
                raise Malformed("not the name of a tool")
            if seen:
                calls.start(name)
                calls.arguments("".join(early))
                calls.end()
            char = yield
        elif key in ARGUMENT_KEYS and not seen:
            seen = True
            if name is None:
                yield from read_arguments(char, early.append)
            else:
                if char == "{":
                    calls.start(name)
                    yield from read_arguments(char, calls.arguments)
                else:
                    # Packed in a string: no call before it is unpacked.
                    yield from read_arguments(char, early.append)
                    calls.start(name)
                    calls.arguments("".join(early))
                calls.end()
            char = yield
        else:
            char = yield from read_value(char, ignore)
        char = yield from skip_space(char)
        if char == "}":
            break
        if char != ",":
            raise Malformed("expected a comma")
        key = None
    if name is None or not (seen or certain):
        raise Malformed("no call")
    if not seen:
        calls.start(name)
        calls.arguments("{}")
        calls.end()


def _may_come_early(key: str, calls: Calls) -> bool:
    if calls.held:
        return key == "name"
    return key in NAME_KEYS or key in ARGUMENT_KEYS or key in EARLY_KEYS


def read_list(calls: Calls, *, certain: bool) -> Generator[None, str, None]:
    """Calls as a list of objects, after its opening bracket."""
    while True:
        char = yield from skip_space()
        if char != "{":
            raise Malformed("expected a call")
        yield from read_call(calls, certain=certain)
        char = yield from skip_space()
        if char == "]":
            return
        if char != ",":
            raise Malformed("expected a comma")


def read_named(calls: Calls, name: str, call_id: str | None = None) -> Generator[None, str, None]:
    """The arguments of a call whose name came before them."""
    calls.begin()
    char = yield from skip_space()
    if char != "{":
        raise Malformed("arguments that are no object")
    calls.start(name.strip(), call_id)
    yield from read_object(char, calls.arguments)
    calls.end()


def read_arguments(char: str, sink: Callable[[str], None]) -> Generator[None, str, None]:
    """An object, or one packed in a string, which then comes to the sink as a whole."""
    if char == "{":
        yield from read_object(char, sink)
        return
    if char != '"':
        raise Malformed("arguments that are no object")
    packed = (yield from read_text()).strip() or "{}"
    try:
        value = json.loads(packed, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise Malformed("arguments that are no JSON") from None
    if not isinstance(value, dict):
        raise Malformed("arguments that are no object")
    sink(packed)


def read_text() -> Generator[None, str, str]:
    """A string's value, after its opening quote."""
    parts: list[str] = []
    yield from read_string(parts.append)
    text = str(json.loads('"' + "".join(parts)))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Malformed("a lone surrogate") from None
    return text


def read_until(stop: str, limit: int) -> Generator[None, str, str]:
    """The text before `stop`, which is read too."""
    text = ""
    while not text.endswith(stop):
        char = yield
        text += char
        if len(text) > limit + len(stop):
            raise Malformed(f"no {stop!r} within {limit} characters")
    return text[: -len(stop)]


def read_either(one: str, other: str, char: str) -> Generator[None, str, bool]:
    """One of two texts that `char` begins, neither a beginning of the other; returns whether it is
    the former."""
    text = char
    while text not in (one, other):
        if not (one.startswith(text) or other.startswith(text)):
            raise Malformed(f"expected {one!r} or {other!r}")
        text += yield
    return text == one


def read_to(
    stops: tuple[str, ...], sink: Callable[[str], None], char: str | None = None
) -> Generator[None, str, None]:
    """A text of any length to the first of `stops`, which is read and left out; the text goes to
    the sink while it comes, but for what may be the beginning of a stop. `char`: its first
    character where that was read already."""
    automaton, state, held = _automaton(stops), 0, ""
    while True:
        if char is None:
            char = yield
        held += char
        state, _, found = automaton.scan(state, char)
        keep = len(found) if found else automaton.held(state)
        if len(held) > keep:
            sink(held[: len(held) - keep])
            held = held[len(held) - keep :]
        if found:
            return
        char = None


@cache
def _automaton(patterns: tuple[str, ...]) -> Automaton:
    return Automaton(patterns)
