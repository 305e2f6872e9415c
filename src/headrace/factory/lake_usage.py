"""Requests, tokens and failures by key, from the access logs in the fleet's store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .lake import Lake
from .rows import micros

USAGE = "key", "model", "requests", "prompt tokens", "cached", "completion tokens"
"""Columns of the sums."""
_SUM = "coalesce(sum(TRY_CAST(fields ->> '{}' AS INTEGER)), 0)::BIGINT"
"""Sum of a field; a line is what a service wrote, and may have anything there."""
_QUERY = f"""
SELECT coalesce(fields ->> 'key', '–'), coalesce(fields ->> 'model', '–'), count(*)::BIGINT,
       {_SUM.format("prompt_tokens")},
       {_SUM.format("cached_tokens")},
       {_SUM.format("completion_tokens")}
FROM (
    SELECT ts, service, fields::JSON AS fields FROM logs
    WHERE message = 'exchange' AND fields IS NOT NULL
)
WHERE fields ->> 'prompt_tokens' IS NOT NULL AND ts >= make_timestamp($since)
      AND ($key IS NULL OR fields ->> 'key' = $key)
      AND ($service IS NULL OR service = $service)
GROUP BY 1, 2 ORDER BY 1, 2
"""
"""A line with tokens is a request that did work; a refused one has none."""


FAILURES = "status", "error", "field", "path", "key", "requests", "last"
"""Columns of failed requests; `last`: the time of the newest, in UTC."""
_FAILED = """
SELECT status, coalesce(fields ->> 'error', '–'), coalesce(fields ->> 'param', '–'),
       coalesce(path, '–'), coalesce(fields ->> 'key', '–'), count(*)::BIGINT,
       strftime(max(ts), '%Y-%m-%d %H:%M:%S')
FROM (
    SELECT ts, service, status, path, coalesce(fields, '{}')::JSON AS fields FROM logs
    WHERE message = 'exchange' AND status >= 400
)
WHERE ts >= make_timestamp($since)
      AND ($key IS NULL OR fields ->> 'key' = $key)
      AND ($service IS NULL OR service = $service)
GROUP BY 1, 2, 3, 4, 5 ORDER BY 6 DESC, 7 DESC, 1, 2, 3, 4, 5 LIMIT 200
"""


def usage_rows(
    lake: Lake, since: datetime | None, key: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return one row of `USAGE` for each key and model. None: all times, keys or services.

    Raises `OptionError`, `Untrusted`.
    """
    return _rows(lake, _QUERY, USAGE, since, key, service)


def failure_rows(
    lake: Lake, since: datetime | None, key: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return one row of `FAILURES` for each kind of failure, the most frequent first; at most 200.

    Raises `OptionError`, `Untrusted`.
    """
    return _rows(lake, _FAILED, FAILURES, since, key, service)


def _rows(
    lake: Lake,
    query: str,
    columns: Sequence[str],
    since: datetime | None,
    key: str | None,
    service: str | None,
) -> list[dict[str, Any]]:
    given = {"since": 0 if since is None else micros(since), "key": key, "service": service}
    with lake.open() as database:
        found = database.execute(query, given).fetchall()
    return [dict(zip(columns, row, strict=True)) for row in found]
