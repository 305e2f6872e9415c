"""Calls in Python's syntax, with named arguments: LFM2 in a list between special tokens, OLMo 3 one
a line between tags."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..calls import MAX_NAME, Calls, SectionReader
from ..jsonstream import MAX_DEPTH, SPACES, Malformed, read_literal, skip_space
from ..lark import Rules, json_value, listed, literal
from ..parameters import closed, dumped, literal_value, parsed, properties
from ..tools import Tool
from .dialect import CallFormat, Dialect, Value

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True, slots=True)
class PythonicFormat(CallFormat):
    begin: str = "NAME("
    end: str = ")"
    quoted: bool = False

    def body(self, arguments: str) -> str:
        given = json.loads(arguments).items()
        return ", ".join(f"{key}={_python(value)}" for key, value in given)

    def arguments(
        self, tool: Tool, name: str, value: Value, special: Mapping[str, int]
    ) -> tuple[str, Rules]:
        parts = [
            (f"{literal(key + '=', special)} {_value(schema, value)}", required)
            for key, schema, required in properties(tool)
        ]
        if parts:
            return name, listed(name, parts, '", "')
        if closed(tool):
            return '""', []
        free = f'/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" {json_value({})}'
        return f'({name} ("," " " {name})*)?', [(name, free)]


def _value(schema: Any, value: Value) -> str:
    """Make the grammar of a value: booleans as Python's words, all else as JSON, which Python reads
    too."""
    if isinstance(schema, Mapping) and schema.get("type") == "boolean":
        return '("True" | "False")'
    return value(schema)


def _python(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(k)}: {_python(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def reader(close: str) -> Callable[[str, Calls], SectionReader]:
    """Make a reader of calls up to `close`: in a list, or one after another."""

    def read(opener: str, calls: Calls) -> SectionReader:
        char = yield from skip_space()
        bracket = char == "["
        if bracket:
            char = yield from skip_space()
        while True:
            calls.begin()
            name = yield from _read_name(char)
            arguments = _parsed((yield from _read_arguments()))
            calls.start(name)
            calls.writer.write(arguments)
            calls.end()
            char = yield from skip_space()
            if char == ",":
                char = yield from skip_space()
            elif bracket and char == "]":
                char = yield from skip_space()
                break
            elif bracket or char == close[0]:
                break
        yield from read_literal(close, char)
        return None

    return read


def _read_name(char: str) -> Generator[None, str, str]:
    """Read the name of a tool, and the bracket after it."""
    name = ""
    while char != "(":
        name += char
        if len(name) > MAX_NAME or char in SPACES:
            raise Malformed("expected a name and an opening bracket")
        char = yield
    return name


def _read_arguments() -> Generator[None, str, str]:
    """Read the text up to the bracket that closes the call, which is read and left out."""
    parts: list[str] = []
    depth, quote, escaped = 0, "", False
    while True:
        char = yield
        if quote:
            quote = quote if char != quote or escaped else ""
            escaped = char == "\\" and not escaped
        elif char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
            if depth > MAX_DEPTH:
                raise Malformed("nested too deeply")
        elif char in _CLOSE:
            if depth == 0:
                if char != ")":
                    raise Malformed("a bracket that nothing opened")
                return "".join(parts)
            depth -= 1
        parts.append(char)


def _parsed(text: str) -> str:
    """Convert named arguments to a JSON object: literals alone, nothing is evaluated."""
    call = parsed(f"_({text.strip()})")
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise Malformed("arguments without names")
    given = {}
    for one in call.keywords:
        if one.arg is None:
            raise Malformed("arguments without names")
        given[one.arg] = literal_value(one.value)
    return dumped(given)


def _dialect(name: str, form: PythonicFormat, marks: Sequence[str]) -> Dialect:
    opener, close = form.open.rstrip("[\n"), form.close.strip("]\n")
    return Dialect(
        name=name,
        read=reader(close),
        format=form,
        openers=(opener,),
        closers=(close,),
        markers=frozenset([opener, close]),
        marks=tuple(marks),
    )


LFM2 = _dialect(
    "lfm2",
    PythonicFormat(open="<|tool_call_start|>[", separator=", ", close="]<|tool_call_end|>"),
    ("List of tools: ", "<|im_start|>"),
)
OLMO3 = _dialect(
    "olmo3",
    PythonicFormat(open="<function_calls>\n", separator="\n", close="\n</function_calls>"),
    ("<function_calls>", "<functions>"),
)
