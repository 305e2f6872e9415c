"""The result of a killed run, from the file written at its start and its finished requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from .audit import Finding
from .options import RunOptions
from .run import STARTED, judge_run, make_run
from .store import read_records


def can_recover(folder: Path) -> bool:
    """Return whether a run started here."""
    return (folder / "run.json").is_file() and (folder / "requests.jsonl").is_file()


def recover(folder: Path) -> dict[str, Any]:
    """Build the document of the requests that ended before the kill; `InvalidRequest` without any.

    The client's audit and the server's histograms are lost with the process; a finding says so.
    """
    path = folder / "run.json"
    try:
        started = json.loads(path.read_text())
        if started["schema"] != STARTED:
            raise ValueError(f"its schema is {started['schema']!r}, not {STARTED!r}")
        options, server = RunOptions(**started["options"]), dict(started["server"])
        options.verify()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no start of a run: {error}", param="result") from None
    records = read_records(folder / "requests.jsonl")
    if not records:
        raise InvalidRequest(f"no request in {folder} had ended", param="result")
    start = min(record.planned_ns for record in records)
    run = make_run(options, records, start, [])
    result = judge_run(options, run, server, [], {}, interrupted=True)
    lost = "the run was killed: no audit of the client, nothing of the server's own histograms"
    result["findings"].append(Finding("warning", "recovered", lost)._asdict())
    return result
