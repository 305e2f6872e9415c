"""Gemma 4: `<|tool_call>call:NAME{key:value,…}<tool_call|>`, once per call; text between two marks
of its own, all else as in JSON except for keys without quotes."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

from ..calls import MAX_NAME, Calls, SectionReader, read_to, read_until
from ..jsonstream import MAX_DEPTH, Ended, Malformed, Reader, Writer, read_literal, skip_space
from ..lark import TEXT, Rules, json_value, listed, literal
from ..parameters import as_json, choices, closed, properties, resolved
from ..tools import Tool
from .dialect import CallFormat, Dialect, Value

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MAX_LISTS = 4
"""Depth of nested lists that are held to a schema; deeper ones may hold any value."""


@dataclass(frozen=True, slots=True)
class Gemma4Format(CallFormat):
    begin: str = OPEN + "call:NAME{"
    end: str = "}" + CLOSE
    quoted: bool = False

    def body(self, arguments: str) -> str:
        return _written(json.loads(arguments))[1:-1]

    def arguments(
        self, tool: Tool, name: str, value: Value, special: Mapping[str, int]
    ) -> tuple[str, Rules]:
        rules = _Values(tool, value, special)
        parts = [
            (f"{literal(key + ':', special)} {rules.value(schema)}", required)
            for key, schema, required in properties(tool)
        ]
        if parts:
            return name, [*listed(name, parts, '","'), *rules.found.items()]
        if closed(tool):
            return '""', []
        rules.value({})
        return '(g_pair ("," g_pair)*)?', list(rules.found.items())


def _written(value: Any) -> str:
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return json.dumps(value)


class _Values:
    """Rules for values by their schemas; the content of inner objects is free."""

    def __init__(self, tool: Tool, scalar: Value, special: Mapping[str, int]) -> None:
        self.found: dict[str, str] = {}
        self._tool, self._scalar, self._special = tool, scalar, special

    def value(self, schema: Any, depth: int = 0) -> str:
        schema = resolved(schema, self._tool.parameters)
        allowed = choices(schema)
        if allowed:
            texts = (literal(_written(one), self._special) for one in allowed)
            return "(" + " | ".join(texts) + ")"
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind == "string":
            return self._text()
        if kind in ("integer", "number", "boolean", "null"):
            return self._scalar(schema)
        if kind == "array" and schema.get("items") and depth < MAX_LISTS:
            one = self.value(schema["items"], depth + 1)
            return f'"[" ({one} ("," {one})*)? "]"'
        text, scalar = self._text(), json_value({"type": ["number", "boolean", "null"]})
        self.found["g_value"] = f"{text} | g_object | g_list | {scalar}"
        self.found["g_pair"] = '/[A-Za-z_][A-Za-z0-9_.-]{0,63}/ ":" g_value'
        self.found["g_object"] = '"{" (g_pair ("," g_pair)*)? "}"'
        self.found["g_list"] = '"[" (g_value ("," g_value)*)? "]"'
        return {"array": "g_list", "object": "g_object"}.get(str(kind), "g_value")

    def _text(self) -> str:
        mark = self._special.get(QUOTE)
        if mark is not None:
            self.found["g_text"] = f"<[{mark}]> {TEXT} <[{mark}]>"
        else:
            self.found["g_text"] = f"{literal(QUOTE, self._special)} g_rest"
            self.found[f"g_rest[suffix={json.dumps(QUOTE)}]"] = TEXT
        return "g_text"


def read(opener: str, calls: Calls) -> SectionReader:
    calls.begin()
    char = yield from skip_space()
    yield from read_literal("call:", char)
    name = yield from read_until("{", MAX_NAME)
    calls.start(name.strip())
    yield from _read_object(calls.writer, 0)
    calls.end()
    char = yield from skip_space()
    yield from read_literal(CLOSE, char)
    return None


def _read_object(writer: Writer, depth: int) -> Generator[None, str, None]:
    """Read an object, after its opening brace."""
    writer.open("{")
    char = yield from skip_space()
    comma = ""
    while char != "}":
        char = yield from _read_comma(comma, char)
        if char == "<":
            yield from read_literal(QUOTE[1:])
            key = yield from read_until(QUOTE, MAX_NAME)
            char = yield from skip_space()
            yield from read_literal(":", char)
        else:
            key = char + (yield from read_until(":", MAX_NAME))
        writer.hold(f"{comma}{json.dumps(key.strip(), ensure_ascii=False)}: ")
        comma = ", "
        char = yield from _read_value(writer, (yield from skip_space()), depth + 1)
    writer.close()


def _read_list(writer: Writer, depth: int) -> Generator[None, str, None]:
    """Read a list, after its opening bracket."""
    writer.open("[")
    char = yield from skip_space()
    comma = ""
    while char != "]":
        char = yield from _read_comma(comma, char)
        writer.hold(comma)
        comma = ", "
        char = yield from _read_value(writer, char, depth + 1)
    writer.close()


def _read_comma(comma: str, char: str) -> Reader:
    """Read no separator before the first item, else a comma; return the character that begins the
    item."""
    if not comma:
        return char
    if char != ",":
        raise Malformed("expected a comma")
    char = yield from skip_space()
    if char in "}]":
        raise Malformed("expected an item")
    return char


def _read_value(writer: Writer, char: str, depth: int) -> Reader:
    """Read a value that begins with `char`; return the next character that is not a space."""
    if depth > MAX_DEPTH:
        raise Malformed("nested too deeply")
    if char == "<":
        yield from read_literal(QUOTE[1:])
        yield from read_to((QUOTE,), writer.text)
        writer.text("")
        writer.close()
        return (yield from skip_space())
    if char in "{[":
        yield from (_read_object if char == "{" else _read_list)(writer, depth)
        return (yield from skip_space())
    scalar = ""
    try:
        while char not in ",}]":
            scalar += char
            if len(scalar) > MAX_NAME:
                raise Malformed("a number is too long")
            char = yield
    except Ended:
        value = as_json(scalar.strip())
        if not value.startswith('"'):
            writer.write(value)
        raise
    writer.write(as_json(scalar.strip()))
    return char


GEMMA4 = Dialect(
    name="gemma4",
    read=read,
    format=Gemma4Format(),
    openers=(OPEN,),
    closers=(CLOSE,),
    markers=frozenset([OPEN, CLOSE, QUOTE]),
    marks=(OPEN, QUOTE),
)
