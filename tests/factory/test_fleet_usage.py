"""Chargeback: requests and tokens by key and model, from the access logs of the fleet."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("duckdb", reason="duckdb is not installed")

from headrace.base.errors import OptionError
from headrace.cli.factory_fleet import command
from headrace.factory.lake import Lake
from headrace.factory.lake_usage import failure_rows, usage_rows

NOW = datetime.now(UTC)


def line(ago: timedelta, **fields: Any) -> str:
    stamp = (NOW - ago).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    record = {"ts": stamp, "level": "info", "logger": "headrace.server", "message": "exchange"}
    return json.dumps({**record, "fields": {"path": "/v1/chat/completions", **fields}})


def work(prompt: int, cached: int, completion: int, **more: Any) -> dict[str, Any]:
    return {
        "status": 200,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "completion_tokens": completion,
        **more,
    }


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    day = timedelta(days=1)
    log = tmp_path / "server.log"
    log.write_text(
        "\n".join(
            [
                line(day, key="a", model="m", **work(10, 4, 5)),
                line(2 * day, key="a", model="m", **work(1, 0, 2)),
                line(day, key="a", model="adapter", **work(3, 0, 3)),
                line(day, key="b", model="m", **work(7, 7, 1)),
                line(day, model="m", **work(2, 0, 2)),
                line(day, key="a", status=429, error="rate_limit_exceeded"),
                line(day, key="b", status=400, error="invalid_value", param="top_p"),
                line(2 * day, key="b", status=400, error="invalid_value", param="top_p"),
                line(40 * day, key="b", status=500),
                line(day, key="c", model="m", **work("x", 10**30, None)),  # type: ignore[arg-type]
                line(40 * day, key="a", model="m", **work(100, 0, 100)),
            ]
        )
        + "\n"
    )
    made = Lake(tmp_path / "lake")
    made.take_logs(log, "chat")
    return made


def sums(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, ...]]:
    return {(key, model): tuple(rest) for key, model, *rest in (row.values() for row in rows)}


def test_sums_by_key_and_model(lake: Lake) -> None:
    month = NOW - timedelta(days=30)
    assert sums(usage_rows(lake, month, None, None)) == {
        ("a", "adapter"): (1, 3, 0, 3),
        ("a", "m"): (2, 11, 4, 7),
        ("b", "m"): (1, 7, 7, 1),
        ("c", "m"): (1, 0, 0, 0),
        ("–", "m"): (1, 2, 0, 2),
    }
    assert sums(usage_rows(lake, None, "a", None))["a", "m"] == (3, 111, 4, 107)
    assert usage_rows(lake, month, "a' OR '1'='1", None) == []
    assert usage_rows(lake, month, None, "other") == []


def test_failures_by_kind(lake: Lake) -> None:
    month = NOW - timedelta(days=30)
    rows = [tuple(row.values())[:6] for row in failure_rows(lake, month, None, None)]
    path = "/v1/chat/completions"
    assert rows == [
        (400, "invalid_value", "top_p", path, "b", 2),
        (429, "rate_limit_exceeded", "–", path, "a", 1),
    ]
    assert [row["status"] for row in failure_rows(lake, None, "b", None)] == [400, 500]
    last = failure_rows(lake, month, "b", "chat")[0]["last"]
    assert last == f"{NOW - timedelta(days=1):%Y-%m-%d %H:%M:%S}"


def test_names_of_logs_are_not_markup(lake: Lake, tmp_path: Path) -> None:
    log = tmp_path / "hostile.log"
    log.write_text(line(timedelta(days=1), key="[/x]", model="[red]m", **work(1, 0, 1)) + "\n")
    lake.take_logs(log, "chat")
    done = CliRunner().invoke(command, ["usage", "--into", str(lake.root)])
    assert done.exit_code == 0, done.output
    assert "[/x]" in done.output
    assert "[red]m" in done.output


@pytest.mark.parametrize("days", ["1e7", "nan", "inf", "-1"])
def test_days_have_bounds(lake: Lake, days: str) -> None:
    for words in (["usage", "--days", days], ["ingest", "--keep-days", days]):
        done = CliRunner().invoke(command, [*words, "--into", str(lake.root)])
        assert isinstance(done.exception, OptionError)
        assert "days must be from 0 to 36500" in done.exception.message


def test_the_command(lake: Lake) -> None:
    arguments = ["usage", "--into", str(lake.root), "--key", "b"]
    done = CliRunner().invoke(command, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(done.output)
    assert row == {
        "key": "b",
        "model": "m",
        "requests": 1,
        "prompt tokens": 7,
        "cached": 7,
        "completion tokens": 1,
    }
    shown = CliRunner().invoke(command, arguments).output
    assert "prompt tokens" in shown
    for more in ([], ["--failed"]):
        done = CliRunner().invoke(command, ["usage", "--into", str(lake.root / "x"), *more])
        assert done.exit_code == 0
        assert done.output.startswith("no such requests; headrace factory ingest")
