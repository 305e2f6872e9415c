"""Continuation of a stream whose replica died, from the position its client has reached.

Sampling is a function of (seed, choice, position), and the result's bits do not depend on the
batch. Another replica therefore generates the same text for the same request and seed. It is asked
from the beginning. The part that the client already has is compared and left out. The first
difference ends the stream with an error, so that no client gets a text that does not fit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..base.errors import HeadraceError
from ..base.foreign import Undecodable, json_reader

MOST_KEPT = 8 * 2**20
"""Bytes of a stream's events kept for a migration; a longer stream is not migrated."""
MOST_EVENT = 1 << 20
"""Bytes of one event: a stream with a longer one is not migrated."""
MOST_DEPTH = 64
"""Nesting depth of an event, which is walked by recursion."""
END = b"data: [DONE]"
_APPENDED = frozenset(
    {"content", "reasoning_content", "reasoning", "refusal", "text", "arguments", "token_ids"}
)
"""Fields of a choice whose values in successive events are parts of one value."""
_HEAD = ("id", "created", "system_fingerprint")
"""Fields of an event that identify the exchange: the client always sees the first replica's."""
_ADDRESS = ("index", "type")
"""Fields that say which part a delta belongs to; always kept."""

Path = tuple[str | int, ...]
_object = json_reader(dict[str, Any])


class Diverged(HeadraceError):
    """Failure: the other replica's text differs from the client's, or is not a stream."""

    status = 502
    type = "overloaded_error"
    code = "migration_diverged"


class Resume:
    """Filter that removes from a repeated stream the part that the client already has."""

    def __init__(self, sent: bytes) -> None:
        """Read the whole events that were `sent` to the client. Raises `Diverged`."""
        self._had: dict[Path, Any] = {}
        """Sent values: appended fields joined, other fields as first sent."""
        self._came: dict[Path, int] = {}
        """Length of each appended field that has been repeated so far."""
        self._head: dict[str, Any] = {}
        self._usage = False
        for event in sent.split(b"\n\n"):
            value = _value(event)
            if value is None:
                continue
            self._head = self._head or {key: value[key] for key in _HEAD if key in value}
            self._usage = self._usage or (not value.get("choices") and "usage" in value)
            for path, leaf in _leaves(value):
                if _appended(path, leaf):
                    had = self._had.setdefault(path, type(leaf)())
                    if type(had) is not type(leaf):
                        raise Diverged("a replica's event changes the type of a field")
                    self._had[path] = had + leaf
                else:
                    self._had.setdefault(path, leaf)

    def news(self, event: bytes) -> bytes:
        """Return the part of an event that the client lacks; empty if it has all of it.

        `event` comes without the blank line at its end; the result has it. Raises `Diverged`.
        """
        value = _value(event)
        if value is None:  # A comment or the end mark.
            return event + b"\n\n" if event.strip() else b""
        value.update((key, self._head[key]) for key in self._head if key in value)
        choices = value.get("choices")
        if not choices:
            return b"" if self._usage else _frame(value)
        kept = []
        for choice in choices:
            index = _index(choice)
            left = self._left((index,), choice)
            if left is not None:
                kept.append({"index": index, **_nothing(choice), **left})
        if not kept:
            return b""
        value["choices"] = kept
        return _frame(value)

    def _left(self, path: Path, value: Any) -> Any:
        """Return the new part of a value, or None."""
        if isinstance(value, dict):
            left = {}
            for key, one in value.items():
                if key not in _ADDRESS and (rest := self._left((*path, key), one)) is not None:
                    left[key] = rest
            if not left:
                return None
            return {key: value[key] for key in _ADDRESS if key in value} | left
        if isinstance(value, list) and path[-1] == "tool_calls":
            calls = [self._left((*path, _index(one)), one) for one in value]
            return [one for one in calls if one is not None] or None
        if value is None:
            return None
        had = self._had.get(path)
        if had is None:
            return value
        if not _appended(path, value):
            return None
        if type(had) is not type(value):
            raise Diverged("another replica continued with another text")
        begin = self._came.get(path, 0)
        self._came[path] = begin + len(value)
        if value[: max(0, len(had) - begin)] != had[begin : begin + len(value)]:
            raise Diverged("another replica continued with another text")
        return value[max(0, len(had) - begin) :] or None


def _nothing(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice's fields that clients always read, with empty values."""
    empty = {"delta": {}, "text": ""}
    return {key: empty.get(key) for key in choice if key in empty or choice[key] is None}


def _appended(path: Path, leaf: Any) -> bool:
    return isinstance(leaf, list) or (isinstance(leaf, str) and path[-1] in _APPENDED)


def _leaves(value: dict[str, Any]) -> list[tuple[Path, Any]]:
    """List paths and values below the choices of an event, without nulls."""
    found: list[tuple[Path, Any]] = []

    def walk(path: Path, one: Any) -> None:
        if isinstance(one, dict):
            for key, below in one.items():
                if key not in _ADDRESS:
                    walk((*path, key), below)
        elif isinstance(one, list) and path[-1] == "tool_calls":
            for call in one:
                walk((*path, _index(call)), call)
        elif one is not None:
            found.append((path, one))

    for choice in value.get("choices") or ():
        walk((_index(choice),), choice)
    return found


def _index(one: Any) -> int:
    """Return the index of a choice or a tool call. Raises `Diverged` if it is neither."""
    index = one.get("index", 0) if isinstance(one, dict) else None
    if not isinstance(index, int):
        raise Diverged("a replica's event has something else than a choice or a call")
    return index


def _depth(value: Any, left: int = MOST_DEPTH) -> None:
    """Raise `Diverged` if a value nests deeper than an event may."""
    if not left:
        raise Diverged("a replica's event nests too deep")
    below = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in below:
        _depth(one, left - 1)


def _value(event: bytes) -> dict[str, Any] | None:
    """Return the object of an event, or None if it has none. Raises `Diverged`."""
    text = event.lstrip(b"\n")
    if not text.startswith(b"data: {"):
        return None
    try:
        found = _object(text[6:])
    except Undecodable:
        raise Diverged("a replica's event is not JSON") from None
    if not isinstance(found.get("choices"), list | None):
        raise Diverged("a replica's event has choices that are no list")
    _depth(found)
    return found


def _frame(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
