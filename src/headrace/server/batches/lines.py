"""Lines of a batch's file: each is a request, or the reason why it is invalid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ...base.foreign import Undecodable, any_json
from ..vectors import IN_WORK

RESPONSES = "/v1/responses"
MOST_LINES = 50_000
MOST_ID = 512
"""Characters of a custom_id."""
PRIORITY = 10_000
"""Priority of a batch's requests under the policy "priority": a week later than interactive
ones."""
_FIELDS = {"custom_id", "method", "url", "body"}
_VECTORS = ("input", "query", "documents", "text_1", "text_2")
"""Body fields whose texts each are, or may be, one model input."""


@dataclass(frozen=True, slots=True)
class Line:
    """One non-empty line. Either `body` or `problem` is set."""

    number: int
    """Line number from 1, as in editors."""
    custom_id: str | None = None
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None
    """(code, message)"""


def read_lines(path: Path, endpoint: str, max_line: int) -> Iterator[Line]:
    """Yield all non-empty lines. Raises `OSError`; the content of a line raises nothing."""
    seen: set[str] = set()
    with path.open("rb") as file:
        for number, raw in enumerate(_bounded(file, max_line), start=1):
            if raw is None or raw.strip():
                yield _line(number, raw, endpoint, max_line, seen)


def _bounded(file: Any, most: int) -> Iterator[bytes | None]:
    """Yield lines; None for a line longer than `most` bytes, which is not held."""
    while piece := file.readline(most + 1):
        if len(piece) <= most or piece.endswith(b"\n"):
            yield piece
            continue
        while (rest := file.readline(1 << 16)) and not rest.endswith(b"\n"):
            pass
        yield None


def _line(number: int, raw: bytes | None, endpoint: str, max_line: int, seen: set[str]) -> Line:
    if raw is None:
        return Line(number, problem=("line_too_long", f"a line may have {max_line} bytes"))
    custom_id: str | None = None
    try:
        value = any_json(raw)
    except Undecodable as error:
        return Line(number, problem=("invalid_json_line", f"the line is not valid JSON: {error}"))
    if not isinstance(value, dict):
        return Line(number, problem=("invalid_json_line", "the line must be a JSON object"))
    given = value.get("custom_id")
    if isinstance(given, str) and 0 < len(given) <= MOST_ID:
        custom_id = given
    problem = _problem(value, custom_id, endpoint, seen)
    if custom_id is not None:
        seen.add(custom_id)
    if problem is not None:
        return Line(number, custom_id, problem=problem)
    return Line(number, custom_id, body=value["body"])


def _problem(
    value: dict[str, Any], custom_id: str | None, endpoint: str, seen: set[str]
) -> tuple[str, str] | None:
    unknown = sorted(value.keys() - _FIELDS)
    if custom_id is None:
        return "invalid_custom_id", f"custom_id must be a text of 1 to {MOST_ID} characters"
    if custom_id in seen:
        return "duplicate_custom_id", "an earlier line has this custom_id"
    if unknown:
        return "unknown_parameter", f"{unknown[0][:100]} is not a known field of a line"
    if value.get("method") != "POST":
        return "invalid_method", "method must be POST"
    if value.get("url") != endpoint:
        return "mismatched_url", f"url must be {endpoint}, the endpoint of the batch"
    body = value.get("body")
    if not isinstance(body, dict):
        return "invalid_body", "body must be an object"
    for name in ("stream", "background"):
        if body.get(name):
            return "invalid_body", f"{name} is not allowed in a batch"
    return None


def sequences_of(body: dict[str, Any], endpoint: str = "") -> int:
    """Return the number of engine rows that the request may hold at once, at least one.

    The body is not validated: the route reports errors in it before the engine sees it.
    """
    if endpoint == RESPONSES:  # Its `input` is one conversation.
        return 1
    n = body.get("n")
    choices = n if type(n) is int and n > 0 else 1
    texts = sum(_items(body[name]) for name in _VECTORS if name in body)
    return max(choices * _items(body.get("prompt")), min(texts, IN_WORK))


def _items(value: Any) -> int:
    """Count the inputs in a text, a list of ids, or a list of either."""
    several = isinstance(value, list) and bool(value) and type(value[0]) is not int
    return len(value) if several else 1


def last_in_line(body: dict[str, Any], endpoint: str = "") -> bytes:
    """Return the body to be served, with a priority below interactive requests.

    A response is in the results file. It is also stored for retrieval only if the line asks for it:
    many thousands would leave no room for others.
    """
    if endpoint == RESPONSES and body.get("store") is None:
        body = {**body, "store": False}
    given = body.get("priority")
    if given is None or type(given) is int:
        body = {**body, "priority": max(given or 0, PRIORITY)}
    return msgspec.json.encode(body)
