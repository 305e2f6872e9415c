"""Pieces of llguidance grammars, in its dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .sentences import without_idle_patterns

Rules = list[tuple[str, str]]
"""Names of rules, with their bodies."""
TEXT = r"/(.|\n)*/"

WHITESPACE = r"\x20|\x0A{1,2}[\x20\x09]{0,20}"
"""Whitespace between two tokens of JSON where it is free, llama.cpp's rule: one space, or a new
line with its indentation. More would let a model that took a wrong turn pad for ever."""


def literal(text: str, special: Mapping[str, int]) -> str:
    """Write a text as a grammar expression, its special tokens as `<[id]>`."""
    parts: list[str] = []
    found = sorted((token for token in special if token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    for piece in pieces:
        if piece in special:
            parts.append(f"<[{special[piece]}]>")
        elif piece:
            parts.append(json.dumps(piece, ensure_ascii=False))
    return " ".join(parts) or '""'


def json_value(schema: Mapping[str, Any], *, lenient: bool = False, compact: bool = False) -> str:
    """Write the expression of a JSON value of this schema.

    `lenient`: unsupported keywords are ignored. `compact`: without white space. That costs fewest
    tokens, but a model that would continue with a token like `[` and a new line is left with `[]`
    (ADR 0058).
    """
    guidance: dict[str, Any] = (
        {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        if compact
        else {"whitespace_pattern": WHITESPACE}
    )
    if lenient:
        guidance["lenient"] = True
    if "patternProperties" in (text := json.dumps(schema, ensure_ascii=False)):
        text = json.dumps(without_idle_patterns(schema), ensure_ascii=False)
    return f'%json {text[:-1]}{", " if schema else ""}"x-guidance": {json.dumps(guidance)}}}'


def joined(outer: str, parts: Mapping[str, str]) -> str:
    """Write the grammar `outer` with complete other grammars in it, which it calls `@name`."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": outer}]
    for name, source in parts.items():
        whole = json.loads(source)["grammars"] if source.startswith("{") else None
        first, *more = whole or [{"lark_grammar": source}]
        grammars += [{**first, "name": name}, *more]
    return json.dumps({"grammars": grammars})


def grammar(start: str, rules: Iterable[tuple[str, str]] = ()) -> str:
    """Write a whole grammar from its start expression and named rules."""
    lines = ["%llguidance {}", f"start: {start}"]
    lines += [f"{name}: {body}" for name, body in rules]
    return "\n".join(lines) + "\n"


def listed(name: str, parts: Sequence[tuple[str, bool]], separator: str) -> Rules:
    """Make rules by which `name` is these expressions in their order, with a separator between two.
    Expressions that are not required (the second of each pair) may be missing."""
    rules: Rules = []
    following, first = '""', '""'
    """Rules for the text after an expression, and for the text before the first one."""
    for place in range(len(parts) - 1, -1, -1):
        one, (expression, required) = f"{name}_{place}", parts[place]
        further = f"{separator} {one}" if required else f"({separator} {one})?"
        begun = f"{one} {following}" + ("" if required else f" | {first}")
        rules.append((one, expression))
        rules.append((f"{one}_behind", f"{further} {following}"))
        rules.append((f"{one}_first", begun))
        following, first = f"{one}_behind", f"{one}_first"
    return [(name, first), *rules]
