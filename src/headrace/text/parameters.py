"""Types of a tool's parameters: for dialects that write each by itself, text without quotes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from .jsonstream import PYTHON, Malformed, refuse_constant
from .tools import Tool

Written = Literal["text", "json", "either"]
"""Form of a value: text, JSON, or either: JSON if the text parses as such."""
_MAX_DEPTH = 16
_WORDS = {"true": True, "false": False, "null": None}
"""JSON's words, which models write among Python's."""


def written(tool: Tool | None, name: str) -> Written:
    """Return the form of this parameter's value between its tags."""
    root = tool.parameters if tool else {}
    declared = root.get("properties")
    schema = declared.get(name) if isinstance(declared, Mapping) else None
    kinds = set(_types(schema, root, 0))
    if "any" in kinds or not kinds:
        return "either"
    if kinds == {"string"}:
        return "text"
    return "either" if "string" in kinds else "json"


def properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """List (name, schema, whether it is required) of each parameter that the tool declares. A
    schema includes the definitions that it may refer to."""
    root = tool.parameters
    required = root.get("required") or ()
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    declared = root.get("properties")
    return [
        (name, {**shared, **one} if isinstance(one, Mapping) else one, name in required)
        for name, one in (declared.items() if isinstance(declared, Mapping) else ())
    ]


def choices(schema: Any) -> list[Any]:
    """Return the values that a schema lists, if it does."""
    if not isinstance(schema, Mapping):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else []


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a schema's references among the definitions of `root`."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return schema


def closed(tool: Tool) -> bool:
    """Return whether the tool takes no parameters but those that it declares."""
    return tool.parameters.get("additionalProperties") is False


def as_json(text: str, *, literals: bool = False) -> str:
    """Convert text between tags to JSON: a value other than a string if it parses as one, else a
    string. `literals`: Python's literals are accepted too."""
    body = text.strip()
    body = PYTHON.get(body, body)
    try:
        value = json.loads(body, parse_constant=refuse_constant)
        dumped(value)
    except (ValueError, RecursionError, Malformed):
        if literals:
            try:
                return dumped(literal_value(parsed(body)))
            except Malformed:
                pass
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else body


def parsed(text: str) -> ast.expr:
    """Parse a Python expression; nothing is evaluated. Raises `Malformed`."""
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed("a text that Python does not read") from None


def literal_value(node: ast.expr) -> Any:
    """Return the value of a Python literal; raise `Malformed` for all else."""
    match node:
        case ast.Constant(value=str() as text):
            # A character that JSON escapes as two surrogates is one.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.Constant(value=None | bool() | int() | float()):
            return node.value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [literal_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): literal_value(one) for key, one in zip(keys, values, strict=True)}
    raise Malformed("an argument that is no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return str(literal_value(node))
    raise Malformed("a key that is no text")


def dumped(value: Any) -> str:
    """Write a value as JSON; raise `Malformed` if JSON cannot represent it."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        raise Malformed("a value that JSON does not have") from None
    return text


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Yield JSON's names of the types that a schema allows; "any" if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        yield "any"
        return
    listed = choices(schema)
    if listed:
        yield from ("string" if isinstance(value, str) else "other" for value in listed)
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
        return
    if isinstance(declared, list):
        yield from (kind for kind in declared if isinstance(kind, str))
        return
    branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
    if not isinstance(branches, list):
        yield "any"
        return
    for branch in branches:
        yield from _types(branch, root, depth + 1)
