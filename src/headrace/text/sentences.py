"""Constraints that llguidance accepts although nothing can meet them: grammars without a sentence,
and patterns of property names that leave no name.

Both are tested on a matcher whose tokens are single bytes, with a bound on the work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

MAX_STEPS = 200
"""Number of beginnings of a sentence that are tried."""
MAX_WAITING = 1_000
"""Number of beginnings that wait to be tried."""
MAX_PATTERNS = 16
"""Patterns of property names in one schema that are tried."""
MAX_NAMES = 4_096
"""Characters of the names of an object whose patterns are tried."""
LIMITS: Mapping[str, int] = {"max_lexer_states": 5_000}
WHITE = frozenset(b" \t\r\n")
_DEAD = "NoExtensionBias"
"""llguidance's word for a place where no token may follow."""


@cache
def _bytes() -> Any:
    # Local: a machine without constrained answers needs no llguidance.
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _matcher(source: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    limits: dict[str, Any] = {**LIMITS, "verbose_errors": False}
    return LLMatcher(_bytes(), source, log_level=0, limits=LLParserLimits(**limits))


def _next(matcher: Any) -> tuple[int, ...] | None:
    """Return the bytes that may come next; None if the matcher gave up for any reason except a dead
    end."""
    mask = b"" if matcher.is_error() else bytes(matcher.compute_bitmask())
    if matcher.is_error():
        return () if str(matcher.get_error()).startswith(_DEAD) else None
    return _listed(mask)


@lru_cache(1024)
def _listed(mask: bytes) -> tuple[int, ...]:
    return tuple(
        8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1
    )


def admits_nothing(source: str) -> bool:
    """Return whether a grammar certainly has no sentence.

    All beginnings are followed, up to the bounds. If several kinds of white space leave the same
    choice, one of them is followed. A grammar that needs the model's own tokens is not tested.
    """
    waiting = [_matcher(source)]
    for _ in range(MAX_STEPS):
        if not waiting:
            return True
        matcher = waiting.pop()
        following = _next(matcher)
        if following is None or matcher.is_accepting():
            return False
        after_white = set()
        for byte in following:
            longer = matcher.deep_copy()
            longer.consume_token(byte)
            if byte in WHITE:
                choice = _next(longer)
                if choice in after_white:
                    continue
                after_white.add(choice)
            waiting.append(longer)
        if len(waiting) > MAX_WAITING:
            return False
    return False


def without_idle_patterns(schema: Mapping[str, Any]) -> Any:
    """Remove the `patternProperties` that match only listed names.

    llguidance would offer a further property for each of them, which no name can begin. `allOf`
    adds the pattern's constraint to the listed property.
    """
    left = MAX_PATTERNS

    def mended(value: Any) -> Any:
        nonlocal left
        if isinstance(value, list):
            return [mended(inner) for inner in value]
        if not isinstance(value, Mapping):
            return value
        whole = {key: mended(inner) for key, inner in value.items()}
        patterns, listed = whole.get("patternProperties"), whole.get("properties", {})
        if not isinstance(patterns, dict) or not isinstance(listed, dict):
            return whole
        left -= len(patterns)
        if left < 0 or sum(map(len, listed)) > MAX_NAMES:
            return whole
        kept = dict(patterns)
        for pattern, demand in patterns.items():
            names = _idle(pattern, tuple(listed))
            if names is None:
                continue
            del kept[pattern]
            for name in names if demand not in (True, {}) else ():
                listed = {**listed, name: {"allOf": [listed[name], demand]}}
        return {**whole, "patternProperties": kept, "properties": listed}

    return mended(schema)


@lru_cache(256)
def _idle(pattern: str, listed: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the listed names that a pattern matches; None if it matches others too."""
    every = _matcher(_json({"type": "string", "pattern": pattern}))
    names = () if every.is_error() else tuple(name for name in listed if _follows(every, name))
    exact = {
        "type": "object",
        "properties": {name: {"const": 0} for name in names},
        "required": names,
        "patternProperties": {pattern: {"const": 0}},
        "additionalProperties": False,
    }
    rest = _matcher(_json(exact))
    if rest.is_error():
        return None
    begun = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    text = f'{{{begun}"'.encode()
    taken = rest.try_consume_tokens(list(text))
    if taken == len(text) - 1 or (taken == len(text) and _next(rest) == ()):
        return names
    return None


def _json(schema: Mapping[str, Any]) -> str:
    """Make the grammar of a schema, without white space."""
    guidance = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return "start: %json " + json.dumps({**schema, "x-guidance": guidance})


def _follows(matcher: Any, name: str) -> bool:
    text = json.dumps(name, ensure_ascii=False).encode()
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(list(text)) == len(text) and bool(copy.is_accepting())
