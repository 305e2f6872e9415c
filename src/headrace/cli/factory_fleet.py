"""Commands over the whole fleet: ingest, usage, page, watch."""

from __future__ import annotations

import json
import random
import secrets
import time
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, OptionError
from ..bench.compare import METRICS, REGRESSED, value_of
from ..bench.options import RunOptions
from ..bench.store import write_text
from ..factory.alarms import Suspect, judge, pairs_for, run_pairs, suspects
from ..factory.fleet_page import fleet_page
from ..factory.lake import Lake, lake_folder
from ..factory.lake_usage import FAILURES, USAGE, failure_rows, usage_rows
from ..factory.rows import micros
from ..factory.sources import take_source
from .bench import Measure
from .factory_parts import AsJson
from .flags import argument, flag

command = typer.Typer()
MOST_DAYS = 36_500
"""Most days back from now, a century."""
Into = Annotated[Path | None, flag("The fleet's store; none: in the cache folder.", "--into")]


@command.command()
def ingest(
    sources: Annotated[
        list[str] | None,
        argument("Logs, /metrics addresses, .prom, results, .duckdb, factory stores."),
    ] = None,
    service: Annotated[str, flag("Whose logs and metrics these are.")] = "headrace",
    every: Annotated[
        float | None, flag("Again after so many seconds, until Ctrl-C.", min=0.1)
    ] = None,
    keep_days: Annotated[float | None, flag("Log lines older than this go.")] = None,
    into: Into = None,
    as_json: AsJson = False,
) -> None:
    """Take new logs, metrics, runs and builds into the fleet's store."""
    before = None if keep_days is None else micros(_ago(keep_days, "keep_days"))
    lake = Lake(lake_folder(into))
    while True:
        for source in sources or ():
            taken = take_source(lake, source, service)
            refused = dict(taken.refused)
            if as_json:
                print(json.dumps({"source": source, "rows": taken.rows, "refused": refused}))
            elif not taken.known or every is None:
                refusals = "".join(f", {count} refused: {why}" for why, count in refused.items())
                print(f"{source}: {taken.rows} rows{refusals}", flush=True)
        if every is None:
            break
        time.sleep(every)
    lake.merge(before)


@command.command()
def usage(
    days: Annotated[float, flag("Days back from now; 0: all.")] = 30.0,
    key: Annotated[str | None, flag("Only this API key, by its name.")] = None,
    service: Annotated[str | None, flag("Only this service.")] = None,
    failed: Annotated[
        bool, flag("Instead: failed requests by status, error and path.", "--failed")
    ] = False,
    into: Into = None,
    as_json: AsJson = False,
) -> None:
    """Add up requests and tokens by key and model, from the lines of the access logs."""
    since = _ago(days, "days") if days else None
    asked, columns = (failure_rows, FAILURES) if failed else (usage_rows, USAGE)
    rows = asked(Lake(lake_folder(into)), since, key, service)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print(
            "no such requests; headrace factory ingest LOG --service NAME puts access logs (of "
            "headrace serve --log-format json) into the store"
        )
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    numbers = {name for row in rows for name, value in row.items() if isinstance(value, int)}
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(f"{each:,}" if isinstance(each, int) else each for each in row.values()))
    Console(highlight=False, markup=False).print(table)


def _ago(days: float, param: str) -> datetime:
    """Return the time `days` ago; `OptionError` for NaN, below 0 and above `MOST_DAYS`."""
    if not 0 <= days <= MOST_DAYS:
        name = param.replace("_", "-")
        raise OptionError(f"{name} must be from 0 to {MOST_DAYS}, not {days:g}", param=param)
    return datetime.now(UTC) - timedelta(days=days)


@command.command()
def page(
    out: Annotated[Path, argument("HTML file.")] = Path("fleet.html"), into: Into = None
) -> None:
    """Write the fleet's page: services, latency over time, builds and gates, runs, alarms."""
    print(write_text(out, fleet_page(Lake(lake_folder(into)))))


@command.command()
def watch(
    before: Annotated[str | None, flag("Address of what was there before.")] = None,
    after: Annotated[str | None, flag("Address of what is there now.")] = None,
    what: Annotated[str | None, flag("Series whose name has this in it.")] = None,
    pairs: Annotated[
        int | None, flag("Pairs of runs; none: as many as needed.", min=8, max=20)
    ] = None,
    into: Into = None,
    as_json: AsJson = False,
) -> None:
    """Find changes of the runs' metrics; with both addresses re-run them in pairs, exit code 3 if
    one is confirmed."""
    lake = Lake(lake_folder(into))
    found = [one for one in suspects(lake) if (what or "") in one.what]
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    for one in found:
        change = f"{one.metric} ×{one.change.ratio:.3f} from {one.after} on: {one.what}"
        console.print(f"to be confirmed: {change}", markup=False)
    if before is None or after is None or not found:
        if as_json:
            print(json.dumps({"suspects": len(found), "alarms": []}))
        if found:
            console.print("nobody is told: --before and --after re-run it in pairs")
        return
    asked = [one for one in found if one.what == found[0].what]
    count = pairs or pairs_for(len(asked))
    if count < pairs_for(len(asked)) - 2:
        raise HeadraceError(f"{len(asked)} metrics need {pairs_for(len(asked)) - 2} pairs at least")
    sides = run_pairs(
        lambda number: _measured(console, asked[0], before, number),
        lambda number: _measured(console, asked[0], after, number),
        count,
        random.Random(secrets.randbits(64)),
    )
    verdicts = judge(asked, sides)
    now = micros(datetime.now(UTC))
    lake.take("alarms", [each.row(now) for each in verdicts])
    alarms = [each for each in verdicts if each.confirmed]
    for verdict in verdicts:
        says = "ALARM" if verdict.confirmed else "not confirmed"
        verdict_line = (
            f"{says}: {verdict.suspect.metric} ×{verdict.ratio:.3f}, {verdict.chance:.4f} by chance"
        )
        console.print(verdict_line, *verdict.suspect.causes[:5], sep="; ", markup=False)
    if as_json:
        print(json.dumps({"suspects": len(found), "alarms": [each.row(now) for each in alarms]}))
    if alarms:
        raise typer.Exit(REGRESSED)


def _measured(console: Console, one: Suspect, url: str, number: int) -> dict[str, float]:
    """Repeat the newest run of a series at another address; return its watched metrics."""
    known = {field.name for field in fields(RunOptions)}
    given = {name: value for name, value in one.options.items() if name in known}
    given |= {"url": url, "api_key": None, "seed": 1_000 + number}
    options = RunOptions(**given)
    result = Measure(console, False, None, "this").point(options, None)
    if not result["valid"] or result["interrupted"]:
        raise HeadraceError(f"a run at {url} is invalid or was interrupted: nothing is confirmed")
    values = {
        name if part is None else f"{name}_{part}": value_of(result, name, part)
        for _, name, part, _ in METRICS
    }
    return {name: value for name, value in values.items() if value}
