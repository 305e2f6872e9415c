"""OpenAPI document as a page: no script, no asset of another site."""

from __future__ import annotations

import gzip
import hashlib
from functools import partial
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..page.route import ASK_AGAIN, VERSION, Kept, answer

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Show every route with its fields."""
    app = request.app
    document = await app.made("openapi", app.openapi)
    return answer(request, await app.made("docs", partial(_page, document)), ASK_AGAIN)


def _page(document: Schema) -> Kept:
    page = rendered(document, f"page/{VERSION}").encode()
    tag = f'"{hashlib.sha256(page).hexdigest()[:20]}"'
    return Kept("text/html; charset=utf-8", page, gzip.compress(page, 9, mtime=0), tag)


Schema = dict[str, Any]


def rendered(document: Schema, base: str) -> str:
    """Render the page of an OpenAPI document; `base`: the folder of the style sheets."""
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            group = operation.get("tags", ["other"])[0]
            groups.setdefault(group, []).append(_operation(document, path, method, operation))
    names = list(groups)
    menu = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a> ' for name in names)
    body = "".join(
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{"".join(groups[name])}</section>'
        for name in names
    )
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])} {escape(info['version'])}: API</title>"
        f'<link rel="stylesheet" href="{base}/style.css"><link rel="stylesheet" '
        f'href="{base}/docs.css"></head><body><main><h1>{escape(info["title"])} '
        f"{escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        '<p>For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f'<nav aria-label="Groups">{menu}</nav>{body}</main></body></html>'
    )


def _operation(document: Schema, path: str, method: str, operation: Schema) -> str:
    words = operation.get("description") or operation.get("summary", "")
    head, _, rest = words.partition(". ")
    parts = [f"<p>{escape(rest)}</p>"] if rest else []
    asked = operation.get("parameters")
    if asked:
        parts.append(_table("Parameters", [_parameter(document, each) for each in asked]))
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        for each in content["schema"].get("anyOf", [content["schema"]]):
            fields = _fields(document, _resolved(document, each))
            parts.append(_table(f"Body, {kind}", fields))
    parts.append(_answers(document, operation["responses"]))
    return (
        f"<details><summary><b>{method.upper()}</b> <code>{escape(path)}</code> "
        f"<span>{escape(head.rstrip('.'))}</span></summary>"
        f"{''.join(parts)}</details>"
    )


def _answers(document: Schema, responses: Schema) -> str:
    rows = []
    for status, response in responses.items():
        content = response.get("content", {})
        kinds = ", ".join(content)
        words = response.get("description", "")
        shape = " ".join(
            f"{{{', '.join(_resolved(document, each['schema']).get('properties', {}))}}}"
            for each in content.values()
            if status == "200" and _resolved(document, each.get("schema", {})).get("properties")
        )
        rows.append((status, kinds, f"{words} {shape}"))
    return _table("Answers", rows)


def _parameter(document: Schema, given: Schema) -> tuple[str, str, str]:
    kind = f"{_kind(document, given.get('schema', {}))}, in the {given['in']}"
    return given["name"], kind, given.get("description", "")


def _fields(document: Schema, schema: Schema) -> list[tuple[str, str, str]]:
    needed = schema.get("required", ())
    return [
        (
            name,
            _kind(document, spec) + (", required" if name in needed else ""),
            spec.get("description", ""),
        )
        for name, spec in sorted(
            schema.get("properties", {}).items(),
            key=lambda pair: (pair[0] not in needed, "x-headrace-inert" in pair[1]),
        )
    ]


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    lines = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td>{escape(kind)}</td>"
        f"<td>{escape(words)}</td></tr>"
        for name, kind, words in rows
    )
    return f"<h3>{escape(title)}</h3><div><table>{lines}</table></div>"


def _resolved(document: Schema, schema: Schema) -> Schema:
    name = schema.get("$ref", "").rpartition("/")[2]
    found: Schema = document["components"]["schemas"][name] if name else schema
    return found


def _kind(document: Schema, schema: Schema, depth: int = 2) -> str:
    """Describe a type in words; objects show their fields' names, at most two levels of lists
    deep."""
    if "$ref" in schema:
        inner = _resolved(document, schema)
        return f"{{{', '.join(inner.get('properties', {}))}}}" if depth else "object"
    if "anyOf" in schema:
        kinds = [_kind(document, each, depth) for each in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(repr(value) for value in values if value is not None) or "null"
    if schema.get("type") == "array" and depth:
        return f"list of {_kind(document, schema.get('items', {}), depth - 1)}"
    return str(schema.get("type", "anything"))


def _anchor(name: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in name.lower())
