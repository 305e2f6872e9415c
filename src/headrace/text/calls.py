"""Tool calls while they are being written: the collector that dialects report to, and the readers
of the JSON object that many share."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence

from .automaton import automaton_of
from .events import ToolCallArguments, ToolCallEnd, ToolCallStart
from .jsonstream import (
    Malformed,
    Writer,
    ignore,
    read_object,
    read_string,
    read_value,
    refuse_constant,
    skip_space,
)
from .tools import Tool

SectionReader = Generator[None, str, str | None]
"""Reader of a section of calls; returns a character that it read but that is not of the section."""

MAX_NAME = 256
NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")
EARLY_KEYS = ("id", "type", "index")
"""Keys that may come before the name in an object without a marker."""


class Calls:
    """Collector of the events of the calls in one message.

    A call is reported with the first part of its arguments. From then on it is a call and can no
    longer become content. If it breaks off, its reported arguments are closed, so that they are
    JSON.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        known: Mapping[str, Tool] | None = None,
        *,
        held: bool = False,
        ends: tuple[str, ...] = (),
    ) -> None:
        """Start without calls. `known`: the offered tools by name, if a text is a call only if it
        names one. `held`: a grammar constrains the answer, so that calls have the one form that it
        knows. `ends`: the dialect's marks that end calls."""
        self._new_id = new_id
        self.known = known
        self.held = held
        self.ends = ends
        self.events: list[ToolCallStart | ToolCallArguments | ToolCallEnd] = []
        self.count = 0
        """Number of calls that have ended."""
        self.open = False
        """Flag: a call has begun and not ended."""
        self.begun = False
        """Flag: a further call is being read, though it may not be certain yet."""
        self.committed = False
        """Flag: an event was reported since the router last looked."""
        self.writer = Writer(ignore)
        """Writer of the open call's arguments."""
        self._start: ToolCallStart | None = None
        """Start event of the open call, until it is reported."""

    def begin(self) -> None:
        self.begun = True

    def start(self, name: str, call_id: str | None = None) -> None:
        assert not self.open
        if not name or len(name) > MAX_NAME:
            raise Malformed("a call without a name")
        self._start = ToolCallStart(self.count, call_id or self._new_id(), name)
        self.writer = Writer(self._arguments)
        self.open = self.begun = True

    def _arguments(self, text: str) -> None:
        if self._start is not None:
            self.events.append(self._start)
            self._start = None
        self.events.append(ToolCallArguments(self.count, text))
        self.committed = True

    def settle(self) -> None:
        """Count the text read up to here as part of the calls that have ended."""
        self.committed = True

    def end(self, *, complete: bool = True) -> None:
        assert self.open
        self.events.append(ToolCallEnd(self.count, complete))
        self.open = self.begun = False
        self.committed = True
        self.count += 1

    def break_off(self, *, close: bool) -> bool:
        """End an incomplete call; return whether it was reported. `close`: complete the JSON of its
        arguments; else report them as far as they go."""
        if self.open:
            self.writer.break_off(close=close)
            self.open = self._start is None
        reported, self._start = self.open, None
        if reported:
            self.end(complete=False)
        self.begun = False
        return reported


def read_call(calls: Calls, *, certain: bool, key: str | None = None) -> Generator[None, str, None]:
    """Read a call as an object, after its opening brace: `{"name": …, "arguments": {…}}`.

    Keys come in any order; others (`id`, `type`) are skipped. Arguments stream as soon as the name
    is known. Arguments in a string of JSON are unpacked. `certain`: the dialect's markers prove a
    call, so it may name any tool and lack arguments; otherwise it must name an offered tool early
    and have arguments. `key`: the first key, if it was read already.
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
            # OpenAI's form of calls: name and arguments one level deeper.
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
                _add(calls, name, early)
            char = yield
        elif key in ARGUMENT_KEYS and not seen:
            seen = True
            if name is None:
                yield from read_arguments(char, early.append)
            elif char == "{":
                calls.start(name)
                yield from read_object(char, calls.writer, ends=calls.ends)
                calls.end()
            else:
                # Packed in a string: no call before it is unpacked.
                yield from read_arguments(char, early.append)
                _add(calls, name, early)
            char = yield
        else:
            char = yield from read_value(char, Writer(ignore))
        char = yield from skip_space(char)
        if char == "}":
            break
        if char != ",":
            raise Malformed("expected a comma")
        key = None
    if name is None or not (seen or certain):
        raise Malformed("no call")
    if not seen:
        _add(calls, name, ["{}"])


def _add(calls: Calls, name: str, arguments: Sequence[str]) -> None:
    """Report a complete call."""
    calls.start(name)
    calls.writer.write("".join(arguments))
    calls.end()


def _may_come_early(key: str, calls: Calls) -> bool:
    if calls.held:
        return key == "name"
    return key in NAME_KEYS or key in ARGUMENT_KEYS or key in EARLY_KEYS


def read_list(calls: Calls, *, certain: bool) -> Generator[None, str, None]:
    """Read calls as a list of objects, after its opening bracket."""
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
    """Read the arguments of a call whose name came before them."""
    calls.begin()
    char = yield from skip_space()
    if char != "{":
        raise Malformed("arguments that are no object")
    calls.start(name.strip(), call_id)
    yield from read_object(char, calls.writer, ends=calls.ends)
    calls.end()


def read_arguments(char: str, sink: Callable[[str], None]) -> Generator[None, str, None]:
    """Read an object, or one packed in a string, which then goes to the sink as a whole."""
    if char == "{":
        yield from read_object(char, Writer(sink))
        return
    if char != '"':
        raise Malformed("arguments that are no object")
    packed = (yield from read_text()).strip() or "{}"
    try:
        value = json.loads(packed, parse_constant=refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # Fails for an escaped half of a character.
    except (ValueError, RecursionError):
        raise Malformed("arguments that are no JSON") from None
    if not isinstance(value, dict):
        raise Malformed("arguments that are no object")
    sink(packed)


def read_text() -> Generator[None, str, str]:
    """Read a string, after its opening quote; return its value."""
    parts: list[str] = []
    yield from read_string(parts.append)
    return str(json.loads(f'"{"".join(parts)}"'))


def read_until(stop: str, limit: int) -> Generator[None, str, str]:
    """Read the text before `stop`, and `stop` too; return the text."""
    text = ""
    while not text.endswith(stop):
        char = yield
        text += char
        if len(text) > limit + len(stop):
            raise Malformed(f"no {stop!r} within {limit} characters")
    return text[: -len(stop)]


def read_either(one: str, other: str, char: str) -> Generator[None, str, bool]:
    """Read one of two texts that `char` begins, neither a prefix of the other; return whether it is
    the first."""
    text = char
    while text not in (one, other):
        if not (one.startswith(text) or other.startswith(text)):
            raise Malformed(f"expected {one!r} or {other!r}")
        text += yield
    return text == one


def read_to(
    stops: tuple[str, ...], sink: Callable[[str], None], char: str | None = None
) -> Generator[None, str, str]:
    """Read a text of any length up to the first of `stops`; return that stop.

    The text goes to the sink while it comes, except for a possible beginning of a stop. `char`: its
    first character if that was read already.
    """
    automaton, state, held = automaton_of(stops), 0, ""
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
            return found
        char = None
