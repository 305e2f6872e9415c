"""Sources of the fleet's store other than logs: scrapes, bench runs, builds of a store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from ..base.errors import HeadraceError, InvalidRequest, Unreachable, Untrusted
from ..bench.history import COLUMNS, Entry, row_of
from ..bench.result import read_result
from .key import digest_of
from .lake import Lake, Taken, library, named
from .release import Ring, Rings
from .revoke import trusted
from .rows import MOST_LINE, micros, scrape_rows
from .stage import Outcome, Result
from .store import SMALL, Store

WAIT = 10.0
"""Most seconds for a service to return its metrics."""


def take_source(lake: Lake, source: str, service: str) -> Taken:
    """Ingest a source by its type: the address of a `/metrics`, a file of them (`.prom`), a history
    of the bench (`.duckdb`), a result (`.json`, or its folder), a factory's store, or a log.

    Raises `InvalidRequest`, `OptionError`, `Unreachable`, `Untrusted`.
    """
    if source.startswith(("http://", "https://")):
        return _take_scrape(lake, _asked(source), service, datetime.now(UTC), source)
    path = Path(source)
    if not path.exists():
        raise InvalidRequest(f"there is no {source}", param="source")
    if (path / "oci-layout").is_file():
        return lake.take("builds", build_rows(Store(path)))
    if path.suffix == ".duckdb":
        return lake.take("runs", history_rows(path))
    if path.suffix == ".json" or path.is_dir():
        return lake.take("runs", [run_row(read_result(path))])
    if path.suffix == ".prom":
        with path.open("rb") as file:
            data = file.read(SMALL + 1)
        when = datetime.fromtimestamp(path.stat().st_mtime, UTC)
        return _take_scrape(lake, data, service, when, source)
    return lake.take_logs(path, service)


def _asked(url: str) -> bytes:
    data = b""
    try:
        with httpx.stream("GET", url, timeout=WAIT) as answer:
            answer.raise_for_status()
            for chunk in answer.iter_bytes(MOST_LINE):
                if len(data := data + chunk) > SMALL:
                    break
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unreachable(f"{url} told no metrics: {error or type(error).__name__}") from None
    return data


def _take_scrape(lake: Lake, data: bytes, service: str, when: datetime, source: str) -> Taken:
    named(service)
    try:
        if len(data) > SMALL:
            raise ValueError(f"more than {SMALL} bytes")
        rows = list(scrape_rows(data.decode(), service, when))
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidRequest(f"{source} has no metrics: {error}", param="source") from None
    return lake.take("metrics", rows)


def run_row(result: dict[str, Any]) -> dict[str, Any]:
    """Make the row of `runs` from a result of the bench. Raises `InvalidRequest`."""
    try:
        return _run_row(dict(zip(COLUMNS.split(", "), row_of(result), strict=True)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"a result lacks {error}", param="source") from None


def history_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of `runs` from a history of the bench. Raises `InvalidRequest`,
    `OptionError`."""
    duckdb = library()
    try:
        with duckdb.connect(str(path), read_only=True) as database:
            found = database.execute(f"SELECT {COLUMNS} FROM runs ORDER BY created").fetchall()
    except duckdb.Error as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(f"{path} is no history: {reason}", param="source") from None
    return [_run_row(dict(zip(COLUMNS.split(", "), row, strict=True))) for row in found]


def _run_row(row: Mapping[str, Any]) -> dict[str, Any]:
    when = row["created"]
    when = when if isinstance(when, datetime) else datetime.fromisoformat(when)
    machine, model, server = (row[name] or "" for name in ("machine", "model", "server"))
    entry = Entry(str(when), row["commit"] or "", machine, model, server,
                  row["workload"], row["load"], 0.0)  # fmt: skip
    return {
        "ts": micros(when if when.tzinfo else when.replace(tzinfo=UTC)),
        "commit": entry.commit,
        "what": entry.what,
        "valid": bool(row["valid"]),
        "metrics": row["metrics"],
        "options": row["options"],
    }


def build_rows(store: Store) -> Iterator[dict[str, Any]]:
    """Yield a row for each stage of every cell's last build, with the profile that it signed.
    `rings` names the trusted rings that point to that profile. Profiles are not verified here; the
    factory does that."""
    rings: dict[str, str] = {}
    for ring in Ring:
        with suppress(HeadraceError):
            if (now := Rings(store, trusted(None)).read(ring)) is not None:
                rings[ring] = now.profile
    for page in sorted((store.root / "evidence").glob("*.html")):
        cell, profile = page.stem, ""
        with suppress(OSError):
            profile = digest_of((store.root / "profiles" / f"{cell}.json").read_bytes())
        for stage, manifest in sorted(store.remembered(cell).items()):
            try:
                result = Result.read(store.document(manifest))
            except Untrusted as error:
                result = Result(outcome=Outcome.NOT_EVALUATED, reason=error.message)
            yield {
                "ts": page.stat().st_mtime_ns // 1000,
                "cell": cell,
                "stage": stage,
                "outcome": str(result.outcome),
                "reason": result.reason,
                "figures": json.dumps({**result.figures, **result.measured}, sort_keys=True),
                "manifest": manifest,
                "profile": profile,
                "rings": ",".join(ring for ring, digest in rings.items() if digest == profile),
            }
