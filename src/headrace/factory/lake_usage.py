"""Requests and tokens by key and model, from the access logs in the fleet's store."""

from __future__ import annotations

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


def usage_rows(
    lake: Lake, since: datetime | None, key: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return one row of `USAGE` for each key and model. None: all times, keys or services.

    Raises `OptionError`, `Untrusted`.
    """
    given = {"since": 0 if since is None else micros(since), "key": key, "service": service}
    with lake.open() as database:
        found = database.execute(_QUERY, given).fetchall()
    return [dict(zip(USAGE, row, strict=True)) for row in found]
