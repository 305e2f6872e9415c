"""What a tool's parameters may be: for dialects that write each by itself, text without quotes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from .jsonstream import refuse_constant
from .tools import Tool

Written = Literal["text", "json", "either"]
"""How a value is written: as text, as JSON, or as text that is JSON where it reads as such."""
_MAX_DEPTH = 16
_PYTHON = {"True": "true", "False": "false", "None": "null"}


def written(tool: Tool | None, name: str) -> Written:
    """How a value of this parameter stands between its tags."""
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
    """(name, schema, whether it is required) of each parameter that the tool declares; a schema
    brings the definitions along that it may refer to."""
    root = tool.parameters
    required = root.get("required") or ()
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    declared = root.get("properties")
    return [
        (name, {**shared, **one} if isinstance(one, Mapping) else one, name in required)
        for name, one in (declared.items() if isinstance(declared, Mapping) else ())
    ]


def choices(schema: Any) -> list[Any]:
    """The values that a schema lists, where it does."""
    if not isinstance(schema, Mapping):
        return []
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else []


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """A schema, or what it refers to among the definitions of `root`."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        schema = found
    return schema


def as_json(text: str) -> str:
    """Text between tags as JSON: what can be read as a value that is no string, else a string."""
    body = text.strip()
    body = _PYTHON.get(body, body)
    try:
        value = json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else body


def escaped(text: str) -> str:
    """Text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """JSON's names of the types that a schema allows; "any" where it does not say."""
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
