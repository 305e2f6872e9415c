"""Going on with a stream whose replica died, from where its client stands.

What a replica draws is a function of (seed, choice, position), and its bits do not depend on the
batch, so another replica that gets the same request with the same seed gives the same text. It is
asked from the beginning; what the client has is compared with what comes and left out, and the
first difference ends the stream with an error rather than with a text that does not fit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..base.errors import HeadraceError
from ..base.foreign import Undecodable, any_json

MOST_KEPT = 8 * 2**20
"""Bytes of a stream's events that are kept for a migration; a longer one is not migrated."""
END = b"data: [DONE]"
_APPENDED = frozenset(
    {"content", "reasoning_content", "reasoning", "refusal", "text", "arguments", "token_ids"}
)
"""Fields of a choice whose values, one event after the other, are parts of one value."""
_HEAD = ("id", "created", "system_fingerprint")
"""Fields of an event that name the exchange: a client sees the first replica's in all of them."""
_ADDRESS = ("index", "type")
"""Fields that say which part a delta belongs to: kept, whatever was sent before."""

Path = tuple[str | int, ...]


class Diverged(HeadraceError):
    """The other replica's text is not the one that the client has."""

    status = 502
    type = "overloaded_error"
    code = "migration_diverged"


class Resume:
    """What a client has of a stream, and what of the same stream from elsewhere is new to it."""

    def __init__(self, sent: bytes) -> None:
        """`sent`: the whole events that the client was given."""
        self._had: dict[Path, Any] = {}
        """All that was sent of appended fields, the first value of the others."""
        self._came: dict[Path, int] = {}
        """How much of each appended field has come again."""
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
                    self._had[path] = self._had[path] + leaf if path in self._had else leaf
                else:
                    self._had.setdefault(path, leaf)

    def news(self, event: bytes) -> bytes:
        """The part of an event that the client has not; empty where it has all of it.

        `event`: without the blank line at its end; the result has it. Raises `Diverged`.
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
            index = choice.get("index", 0)
            left = self._left((index,), choice)
            if left is not None:
                kept.append({"index": index, **_nothing(choice), **left})
        if not kept:
            return b""
        value["choices"] = kept
        return _frame(value)

    def _left(self, path: Path, value: Any) -> Any:
        """What of a value is new; None where nothing is."""
        if isinstance(value, dict):
            left = {}
            for key, one in value.items():
                if key not in _ADDRESS and (rest := self._left((*path, key), one)) is not None:
                    left[key] = rest
            if not left:
                return None
            return {key: value[key] for key in _ADDRESS if key in value} | left
        if isinstance(value, list) and path[-1] == "tool_calls":
            calls = [self._left((*path, one.get("index", 0)), one) for one in value]
            return [one for one in calls if one is not None] or None
        if value is None:
            return None
        had = self._had.get(path)
        if had is None:
            return value
        if not _appended(path, value):
            return None
        begin = self._came.get(path, 0)
        self._came[path] = begin + len(value)
        if value[: max(0, len(had) - begin)] != had[begin : begin + len(value)]:
            raise Diverged("another replica continued with another text")
        return value[max(0, len(had) - begin) :] or None


def _nothing(choice: dict[str, Any]) -> dict[str, Any]:
    """The fields that clients read of every choice, as they are where there is nothing new."""
    empty = {"delta": {}, "text": ""}
    return {key: empty.get(key) for key in choice if key in empty or choice[key] is None}


def _appended(path: Path, leaf: Any) -> bool:
    return isinstance(leaf, list) or (isinstance(leaf, str) and path[-1] in _APPENDED)


def _leaves(value: dict[str, Any]) -> list[tuple[Path, Any]]:
    """Paths and values below the choices of an event, but for what is null."""
    found: list[tuple[Path, Any]] = []

    def walk(path: Path, one: Any) -> None:
        if isinstance(one, dict):
            for key, below in one.items():
                if key not in _ADDRESS:
                    walk((*path, key), below)
        elif isinstance(one, list) and path[-1] == "tool_calls":
            for call in one:
                walk((*path, call.get("index", 0)), call)
        elif one is not None:
            found.append((path, one))

    for choice in value.get("choices") or ():
        walk((choice.get("index", 0),), choice)
    return found


def _value(event: bytes) -> dict[str, Any] | None:
    """The object of an event; None where it has none."""
    text = event.lstrip(b"\n")
    if not text.startswith(b"data: {"):
        return None
    try:
        found = any_json(text[6:])
    except Undecodable:
        raise Diverged("a replica's event is not JSON") from None
    return found if isinstance(found, dict) else None


def _frame(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
