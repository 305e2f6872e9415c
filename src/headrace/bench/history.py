"""Runs over time in an embedded DuckDB file, to find the commit that changed a number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ..base.environment import cache_root
from ..base.errors import HeadraceError, InvalidRequest, OptionError, one_of
from ..base.extras import needing
from ..roofline.plot import Chart, Series
from .http import parse_url
from .metrics import FIGURES, SAMPLES
from .result import THROUGHPUT

TABLE = """
CREATE TABLE IF NOT EXISTS runs (
    created TIMESTAMP, bench VARCHAR, commit VARCHAR, machine VARCHAR, model VARCHAR,
    server VARCHAR, workload VARCHAR, load VARCHAR, valid BOOLEAN, metrics JSON, options JSON
)"""


COLUMNS = "created, bench, commit, machine, model, server, workload, load, valid, metrics, options"


def _prepare(database: Any) -> None:
    """Make the table, or migrate one of an earlier version, in which `commit` was the bench's."""
    database.execute(TABLE)
    columns = {row[0] for row in database.execute("DESCRIBE runs").fetchall()}
    if "bench" not in columns:
        database.execute("ALTER TABLE runs RENAME COLUMN commit TO bench")
        database.execute("ALTER TABLE runs ADD COLUMN commit VARCHAR")


def default_path() -> Path:
    return cache_root() / "bench" / "history.duckdb"


class Entry(NamedTuple):
    """One run."""

    created: str
    commit: str
    """Commit that the measured server reports; empty if it reports none."""
    machine: str
    model: str
    server: str
    """Version that the server reports."""
    workload: str
    load: str
    value: float

    @property
    def what(self) -> str:
        """Name of the group of runs comparable with this one."""
        # The commit is left out: each one would otherwise be a separate group.
        server = self.server.partition("+")[0]
        return " · ".join((self.model, server, self.machine, self.workload, self.load))


def row_of(result: dict[str, Any]) -> list[Any]:
    """Return a result's values of `COLUMNS`."""
    options = result["options"]
    metrics = {name: found["value"] for name, found in result["figures"].items()}
    for name, found in result["samples"].items():
        metrics[f"{name}_mean"] = found["mean"]
        for percentile, value in found["percentiles"].items():
            metrics[f"{name}_{percentile}"] = value
    load = options["arrivals"] or f"closed:{options['concurrency']}"
    if kind := result.get("kind"):
        load = f"{kind}:{result['requests'] if kind == THROUGHPUT else options['concurrency']}"
    machine = result["machine"]
    here = ", ".join([machine["cpu"], f"{machine['cores']} cores", *machine["gpus"]])
    host = urlsplit(options["url"]).hostname
    server = result["server"]
    named = [server.get("software"), server["version"] or "unknown"]
    return [
        result["created"],
        result["commit"],
        server.get("commit"),
        # The measured machine: of a remote one only the name is known.
        here if host is None or parse_url(options["url"]).local else f"at {host}",
        server["model"],
        " ".join(str(word) for word in named if word),
        f"{options['trace'] or options['workload']} {options['input']}/{options['output']}",
        load,
        result["valid"],
        json.dumps(metrics),
        json.dumps(options),
    ]


def library(what: str, param: str, extra: str) -> Any:
    """Return DuckDB; raise `PackageAbsent` naming the feature that needs it."""
    with needing(f"the {what} needs", extra, param=param):
        import duckdb
    return duckdb


FILTERS = ("workload", "model", "server", "machine", "load", "commit")


class History:
    """One file, opened for each call, so that several processes can use it in turn."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def add(self, result: dict[str, Any]) -> None:
        values = row_of(result)
        with self._open() as database:
            duckdb = library("history", "history", "bench")
            try:
                _prepare(database)
                marks = ", ".join("?" * len(values))
                database.execute(f"INSERT INTO runs ({COLUMNS}) VALUES ({marks})", values)
            except duckdb.Error as error:
                raise OptionError(f"{self.path}: {error}", param="history") from None

    def metric(self, name: str, **only: str | None) -> list[Entry]:
        """Return the valid runs' values of a metric such as `output_throughput` or `ttft_p99`.

        `only` keeps the runs whose `FILTERS` column contains a text.
        """
        assert set(only) <= set(FILTERS)
        wanted = {column: text for column, text in only.items() if text}
        known = [figure.name for figure in FIGURES] + [
            f"{metric.name}_{suffix}"
            for metric in SAMPLES
            for suffix in ("mean", "p50", "p75", "p90", "p95", "p99")
        ]
        one_of(name, known, "metric")
        if not self.path.is_file():
            raise InvalidRequest(f"no history at {self.path} yet", param="history")
        with self._open() as database:
            _prepare(database)
            found = database.execute(
                "SELECT strftime(created, '%Y-%m-%d %H:%M:%S'), coalesce(commit, ''), machine, "
                "model, server, workload, load, "
                "CAST(json_extract(metrics, '$.' || ?) AS DOUBLE) AS value FROM runs "
                "WHERE valid AND value IS NOT NULL"
                + "".join(
                    f" AND contains(lower(coalesce({column}, '')), lower(?))" for column in wanted
                )
                + " ORDER BY created",
                [name, *wanted.values()],
            ).fetchall()
        return [Entry(*row) for row in found]

    def _open(self) -> Any:
        duckdb = library("history", "history", "bench")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return duckdb.connect(str(self.path))
        except (OSError, duckdb.Error) as error:
            raise OptionError(f"{self.path}: {error}", param="history") from None


def remember(result: dict[str, Any]) -> str | None:
    """Add a result to the history; return the message to print if it was not added."""
    try:
        History().add(result)
    except HeadraceError as error:
        return f"not added to the history: {error.message}"
    return None


def unit_of(name: str) -> str:
    """Return the unit of a metric's value in the history."""
    units = {figure.name: figure.unit for figure in FIGURES}
    units |= {metric.name: metric.unit for metric in SAMPLES}
    return units.get(name) or units[name.rpartition("_")[0]]


def history_chart(name: str, entries: list[Entry]) -> Chart:
    """Draw one line per group of comparable runs (`Entry.what`), over the runs in order."""
    groups: dict[str, list[tuple[int, Entry]]] = {}
    for number, entry in enumerate(entries, 1):
        groups.setdefault(entry.what, []).append((number, entry))
    only = f": {next(iter(groups))}" if len(groups) == 1 else ""  # One group needs no legend.
    return Chart(
        f"{name} over runs{only}",
        "run",
        unit_of(name),
        [
            Series(
                group,
                [number for number, _ in found],
                [entry.value for _, entry in found],
                labels=[f"{entry.created} {entry.commit}: {entry.value:.4g}" for _, entry in found],
            )
            for group, found in groups.items()
        ],
        names=[entry.commit[:7] or str(n) for n, entry in enumerate(entries, 1)]
        if len(entries) <= 16
        else (),
    )
