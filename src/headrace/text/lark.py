"""Pieces of llguidance grammars, in its dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

TEXT = r"/(.|\n)*/"

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Whitespace inside JSON: bounded, since a model that likes to indent may never stop."""


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text as a grammar expression, its special tokens as `<[id]>`."""
    parts: list[str] = []
    found = sorted((token for token in special if token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, found))})", text) if found else [text]
    for piece in pieces:
        if piece in special:
            parts.append(f"<[{special[piece]}]>")
        elif piece:
            parts.append(json.dumps(piece, ensure_ascii=False))
    return " ".join(parts) or '""'


def json_value(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A JSON value of this schema. `lenient`: keywords that are not supported are read over."""
    guidance: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if lenient:
        guidance["lenient"] = True
    return "%json " + json.dumps({**schema, "x-guidance": guidance}, ensure_ascii=False)


def grammar(start: str, rules: Iterable[tuple[str, str]] = ()) -> str:
    """A whole grammar from its start expression and named rules."""
    lines = ["%llguidance {}", f"start: {start}"]
    lines += [f"{name}: {body}" for name, body in rules]
    return "\n".join(lines) + "\n"
