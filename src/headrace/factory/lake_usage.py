"""Requests, tokens and failures by key, from the access logs in the fleet's store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from .lake import QUERIES, Lake
from .rows import micros

USAGE = "key", "model", "requests", "prompt tokens", "cached", "completion tokens"
"""Columns of the sums."""
FAILURES = "status", "error", "field", "path", "key", "requests", "last"
"""Columns of failed requests; `last`: the time of the newest, in UTC."""


def usage_rows(
    lake: Lake, since: datetime | None, key: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return one row of `USAGE` for each key and model. None: all times, keys or services.

    Raises `OptionError`, `Untrusted`.
    """
    return _rows(lake, QUERIES["usage"], USAGE, since, key, service)


def failure_rows(
    lake: Lake, since: datetime | None, key: str | None, service: str | None
) -> list[dict[str, Any]]:
    """Return one row of `FAILURES` for each kind of failure, the most frequent first; at most 200.

    Raises `OptionError`, `Untrusted`.
    """
    return _rows(lake, QUERIES["failures"], FAILURES, since, key, service)


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
