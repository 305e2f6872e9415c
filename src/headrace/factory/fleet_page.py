"""The fleet as one HTML page: services, latency over time, builds and gates, runs, alarms."""

from __future__ import annotations

import html
import json
from datetime import datetime
from typing import Any

from ..roofline.page import cards, charts, page, table
from ..roofline.plot import Chart, Series
from .alarms import NAMES
from .lake import QUERIES, Lake

POINTS = 120
"""Slices of time in a chart."""
MOST = 200
"""Rows of a table; the page reports the number of further ones."""
LATENCIES = {
    "Time to first token": "vllm:time_to_first_token_seconds",
    "Inter-token latency": "vllm:inter_token_latency_seconds",
}
SERVICE = ("service", "profile", "certified share", "exchanges", "failed", "p50", "p95", "errors",
           "last")  # fmt: skip
BUILD = ("cell", "profile", "rings", "passed", "failed", "not evaluated")
ALARM = ("when", "what", "metric", "before → after", "change", "chance", "told")


def fleet_page(lake: Lake) -> str:
    """Make the page, which is self-contained. Raises `Untrusted`, `OptionError`."""
    with lake.open() as database:
        database.execute(
            "CREATE MACRO grown_or_new(grown, value) AS "
            "CASE WHEN grown < 0 THEN value ELSE grown END"
        )
        services = _services(database)
        drawn = _latencies(database) + _errors(database)
        builds, alarms, runs = _builds(database), _alarms(database), _runs(database)
    refused = lake.refused()
    shown = {
        "services": len(services),
        "exchanges": f"{sum(row[3] or 0 for row in services):,}",
        "cells": len(builds),
        "without a profile": sum(row[1] == "none signed" for row in builds),
        "alarms": sum(row[-1] == "alarm" for row in alarms),
    }
    body = cards(shown.items())
    body += _listed("Services", SERVICE, [[_said(value) for value in row] for row in services])
    if drawn:
        body += charts(drawn)
    body += _listed("Builds and gates", BUILD, builds) + _listed("Alarms", ALARM, alarms)
    body += _listed("Runs", ("what", "runs", "last", "last values"), runs)
    counts = ", ".join(f"{count} {why}" for why, count in sorted(refused.items()))
    body += (
        f"<p class='foot'>Lines that were refused: {html.escape(counts) or 'none'}. The certified "
        "share is of the speed that the profile binds. An alarm is told where a re-run in pairs "
        "confirmed it; chance is how likely so much is where nothing has changed.</p>"
    )
    return page("Headrace fleet", f"{lake.root}", body)


def _services(database: Any) -> list[list[Any]]:
    latest: dict[str, dict[str, Any]] = {}
    for service, name, labels, value in database.execute(QUERIES["latest"]).fetchall():
        found = json.loads(labels) if name.endswith("_info") else value
        latest.setdefault(service, {})[name] = found
    rows = {row[0]: row for row in database.execute(QUERIES["services"]).fetchall()}
    made = []
    for service in sorted({*rows, *latest}):
        _, count, failed, median, tail, errors, last = rows.get(service) or (service, *[None] * 6)
        about = latest.get(service, {})
        profile = about.get("headrace_profile_info", {})
        share = about.get("headrace_certified_share")
        made.append([
            service,
            " ".join((profile.get("profile", ""), profile.get("digest", "")[:19])).strip(),
            None if share is None else f"{share:.1%}",
            count,
            None if not count else f"{failed / count:.2%}",
            None if median is None else f"{median * 1e3:,.0f} ms",
            None if tail is None else f"{tail * 1e3:,.0f} ms",
            errors,
            last,
        ])  # fmt: skip
    return made


def _latencies(database: Any) -> list[Chart]:
    """Chart means between scrapes: growth of a histogram's sum over growth of its count."""
    made = []
    for title, name in LATENCIES.items():
        names = [f"{name}_sum", f"{name}_count"]
        rows = database.execute(QUERIES["deltas"], [*names, *names]).fetchall()
        points = [(one, when, s / n * 1e3) for one, when, s, n in rows if n and s is not None]
        if points:
            made.append(_over_time(f"{title}, mean", "ms", points))
    return made


def _errors(database: Any) -> list[Chart]:
    rows = database.execute(QUERIES["errors"]).fetchall()
    return [_over_time("Failed exchanges by minute", "%", rows)] if rows else []


def _over_time(title: str, unit: str, points: list[tuple[str, datetime, float]]) -> Chart:
    """Chart one line per service, of at most `POINTS` slices of time with their means."""
    first, last = points[0][1], max(when for _, when, _ in points)
    width = max((last - first).total_seconds() / POINTS, 1e-6)
    slices: dict[str, dict[int, list[float]]] = {}
    for service, when, value in points:
        place = int((when - first).total_seconds() / width)
        slices.setdefault(service, {}).setdefault(place, []).append(value)
    drawn = [
        Series(
            service,
            [place * width / 60 for place in sorted(found)],
            [sum(found[place]) / len(found[place]) for place in sorted(found)],
            "line" if len(found) > 1 else "points",
        )
        for service, found in sorted(slices.items())[:8]
    ]
    more = f", 8 of {len(slices)} services" if len(slices) > 8 else ""
    return Chart(f"{title}{more}", f"minutes from {first:%Y-%m-%d %H:%M} UTC", unit, drawn)


def _builds(database: Any) -> list[list[str]]:
    rows = database.execute(QUERIES["builds"]).fetchall()
    return [
        [cell, profile[:19] or "none signed", rings or "–", ", ".join(passed or ()),
         "; ".join(failed or ()) or "–", "; ".join(open_ or ()) or "–"]
        for cell, profile, rings, passed, failed, open_ in rows
    ]  # fmt: skip


def _alarms(database: Any) -> list[list[str]]:
    rows = database.execute(QUERIES["alarms"]).fetchall()
    return [
        [f"{ts:%Y-%m-%d %H:%M}", what, metric, f"{before[:12]} → {after[:12]}", f"×{change:.3f}",
         f"{chance:.4f}", "alarm" if confirmed else "nobody: not confirmed"]
        for ts, what, metric, before, after, change, chance, confirmed in rows
    ]  # fmt: skip


def _runs(database: Any) -> list[list[str]]:
    rows = database.execute(QUERIES["runs"]).fetchall()
    return [
        [what, str(count), f"{last:%Y-%m-%d %H:%M}", ", ".join(
            f"{name} {value:.4g}"
            for name, value in json.loads(metrics).items()
            if name in NAMES and value is not None
        )]
        for what, count, last, metrics in rows
    ]  # fmt: skip


def _listed(title: str, header: tuple[str, ...], rows: list[list[str]]) -> str:
    if not rows:
        return f"<h2>{title}</h2><p>There is none.</p>"
    return table(header, rows, title=title, left=True, most=MOST)


def _said(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return "–" if value in (None, "") else f"{value:,}" if isinstance(value, int) else str(value)
