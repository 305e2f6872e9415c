"""Contents of the fleet's store, one type per table, and the parsing of foreign lines into rows.

Sources are files written by a service or a build, so they are untrusted. A line becomes a row or is
refused for one of `REASONS`. Secrets are masked here again.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from ..base.foreign import Undecodable, json_reader
from ..obs.logs import HIDDEN, hide_secrets

MOST_LINE = 256 << 10
"""Bytes of one line, including its newline."""
MOST_FIELDS = 64
MOST_SAMPLES = 50_000
"""Samples of one scrape."""
REASONS = ("too long", "not JSON", "not a log line", "time out of range")
SCHEMA = {
    "logs": {
        "ts": "TIMESTAMP", "service": "VARCHAR", "level": "VARCHAR", "logger": "VARCHAR",
        "message": "VARCHAR", "pid": "INTEGER", "request_id": "VARCHAR", "trace_id": "VARCHAR",
        "span_id": "VARCHAR", "error": "VARCHAR", "stack": "VARCHAR", "path": "VARCHAR",
        "status": "INTEGER", "seconds": "DOUBLE", "fields": "VARCHAR",
    },
    "metrics": {
        "ts": "TIMESTAMP", "service": "VARCHAR", "name": "VARCHAR", "labels": "VARCHAR",
        "value": "DOUBLE",
    },
    "runs": {
        "ts": "TIMESTAMP", "commit": "VARCHAR", "what": "VARCHAR", "valid": "BOOLEAN",
        "metrics": "VARCHAR", "options": "VARCHAR",
    },
    "builds": {
        "ts": "TIMESTAMP", "cell": "VARCHAR", "stage": "VARCHAR", "outcome": "VARCHAR",
        "reason": "VARCHAR", "figures": "VARCHAR", "manifest": "VARCHAR", "profile": "VARCHAR",
        "rings": "VARCHAR",
    },
    "alarms": {
        "ts": "TIMESTAMP", "what": "VARCHAR", "metric": "VARCHAR", "before": "VARCHAR",
        "after": "VARCHAR", "change": "DOUBLE", "chance": "DOUBLE", "confirmed": "BOOLEAN",
    },
}  # fmt: skip
"""Columns and DuckDB's types by table; `fields`, `labels`, `metrics`, `options` and `figures` are
JSON objects as text. The only definition of columns."""

Word = Annotated[str, msgspec.Meta(max_length=256)]
Id = Annotated[str, msgspec.Meta(max_length=1100)]
Value = str | int | float | bool | None


class LogLine(msgspec.Struct, kw_only=True):
    """A line of `obs.logs.JsonFormatter`, within its bounds; unknown names are ignored."""

    ts: Annotated[datetime, msgspec.Meta(tz=True)]
    level: Literal["debug", "info", "warning", "error", "critical"]
    logger: Word
    message: Annotated[str, msgspec.Meta(max_length=9_000)]
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    request_id: Id | None = None
    trace_id: Id | None = None
    span_id: Id | None = None
    error: Annotated[str, msgspec.Meta(max_length=9_000)] | None = None
    stack: Annotated[str, msgspec.Meta(max_length=70_000)] | None = None
    fields: Annotated[dict[Word, Value], msgspec.Meta(max_length=MOST_FIELDS)] | None = None


class LogRow(msgspec.Struct, omit_defaults=True):
    """One row of `logs`; `ts` in microseconds since 1970, UTC."""

    ts: int
    service: str
    level: str
    logger: str
    message: str
    pid: int | None = None
    request_id: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    error: str | None = None
    stack: str | None = None
    path: str | None = None
    status: int | None = None
    seconds: float | None = None
    fields: str | None = None


_read = json_reader(LogLine)
_write = msgspec.json.Encoder().encode
_hidden = functools.lru_cache(4096)(hide_secrets)
EARLIEST, LATEST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC)


def log_row(line: bytes, service: str) -> bytes | str:
    """Parse a line into a row as JSON, or return the reason of its refusal, one of `REASONS`."""
    if len(line) > MOST_LINE:
        return REASONS[0]
    try:
        found = _read(line)
    except Undecodable as wrong:
        return REASONS[2 if wrong.well_formed else 1]
    if not EARLIEST <= found.ts < LATEST:
        return REASONS[3]
    fields = found.fields or {}
    row = LogRow(
        micros(found.ts),
        service,
        found.level,
        _text(found.logger),
        _text(found.message),
        found.pid,
        found.request_id and _text(found.request_id),
        found.trace_id and _text(found.trace_id),
        found.span_id and _text(found.span_id),
        found.error and _text(found.error),
        found.stack and _text(found.stack),
    )
    if fields:
        if type(path := fields.pop("path", None)) is str:
            row.path = _text(path[:1024])
        if type(status := fields.pop("status", None)) is int and 0 <= status < 1000:
            row.status = status
        if type(seconds := fields.pop("seconds", None)) in (int, float):
            row.seconds = seconds  # type: ignore[assignment]
    if fields:
        shown = {_text(name): _shown(name, value) for name, value in fields.items()}
        row.fields = _write(shown).decode()
    return _write(row)


def _text(text: str) -> str:
    """Return the text without secrets, and without NUL, which columns cannot hold."""
    return _hidden(text.replace("\0", "") if "\0" in text else text)


def _shown(name: str, value: Value) -> Value:
    if isinstance(value, str):
        if (pair := f"{name}=xxxx") != _hidden(pair):
            return HIDDEN
        return _text(value[:2048])
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return float(value) if abs(value) < 1 << 1000 else None
    return value


def micros(when: datetime) -> int:
    """Return microseconds since 1970, UTC."""
    return round(when.timestamp() * 1e6)


def scrape_rows(text: str, service: str, when: datetime) -> Iterator[dict[str, Any]]:
    """Yield the rows of `metrics` in a response of `/metrics`. Raises `ValueError` if it is
    invalid."""
    count = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            if (count := count + 1) > MOST_SAMPLES:
                raise ValueError(f"more than {MOST_SAMPLES} samples")
            yield {
                "ts": micros(when),
                "service": service,
                "name": sample.name[:256],
                "labels": json.dumps({k[:256]: v[:1024] for k, v in sorted(sample.labels.items())}),
                "value": float(sample.value),
            }
