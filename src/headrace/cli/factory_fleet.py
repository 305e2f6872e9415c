"""Commands over the whole fleet: ingest, page, watch."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from ..factory.lake import Lake, lake_folder
from ..factory.rows import micros
from ..factory.sources import take_source
from .factory_parts import AsJson

Into = Annotated[
    Path | None, typer.Option("--into", help="The fleet's store; none: in the cache folder.")
]


def ingest(
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="Logs, /metrics addresses, .prom, results, .duckdb, factory stores."),
    ] = None,
    service: Annotated[str, typer.Option(help="Whose logs and metrics these are.")] = "headrace",
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Again after so many seconds, until Ctrl-C.")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Log lines older than this go.")
    ] = None,
    into: Into = None,
    as_json: AsJson = False,
) -> None:
    """Take what is new of logs, metrics, runs and builds into the fleet's store."""
    lake = Lake(lake_folder(into))
    while True:
        for source in sources or ():
            taken = take_source(lake, source, service)
            refused = dict(taken.refused)
            if as_json:
                print(json.dumps({"source": source, "rows": taken.rows, "refused": refused}))
            elif not taken.known or every is None:
                told = "".join(f", {count} refused: {why}" for why, count in refused.items())
                print(f"{source}: {taken.rows} rows{told}", flush=True)
        if every is None:
            break
        time.sleep(every)
    before = None
    if keep_days is not None:
        before = micros(datetime.now(UTC) - timedelta(days=keep_days))
    lake.merge(before)
