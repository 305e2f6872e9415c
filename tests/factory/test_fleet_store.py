"""The fleet's store: what is taken in, once; what is refused; what dies in the middle."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import HeadraceError, InvalidRequest, OptionError, Untrusted
from headrace.factory import lake as lake_module
from headrace.factory.lake import Lake
from headrace.factory.rows import MOST_LINE, REASONS, log_row, micros, scrape_rows
from headrace.factory.sources import history_rows, run_row, take_source
from headrace.obs.logs import HIDDEN, JsonFormatter

pytest.importorskip("duckdb", reason="duckdb is not installed")


def line(number: int = 0, **changes: Any) -> bytes:
    made = {
        "ts": f"2026-11-23T10:{number // 60 % 60:02d}:{number % 60:02d}.250Z",
        "level": "info",
        "logger": "headrace.server",
        "message": f"request {number}",
        "pid": 7,
        "fields": {"path": "/v1/chat/completions", "status": 200, "seconds": 0.5},
        **changes,
    }
    return json.dumps(made).encode() + b"\n"


def rows(lake: Lake, query: str) -> list[tuple[Any, ...]]:
    with lake.open() as database:
        found: list[tuple[Any, ...]] = database.execute(query).fetchall()
        return found


def test_what_the_server_writes_is_taken_in(tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log = logging.Logger("headrace.server")
    log.addHandler(handler)
    told = {"request_id": "r1", "method": "POST", "path": "/v1", "status": 503, "seconds": 0.25}
    log.info("exchange", extra=told)
    try:
        raise ValueError("x" * 20_000)
    except ValueError:
        log.exception("failed " + "y" * 20_000, extra={"note": "z" * 5_000})
    source = tmp_path / "log"
    source.write_text(stream.getvalue())
    lake = Lake(tmp_path / "lake")
    taken = lake.take_logs(source, "chat")
    assert (taken.rows, dict(taken.refused)) == (2, {})
    query = "SELECT service, request_id, path, status, seconds, fields FROM logs ORDER BY status"
    assert rows(lake, query)[0] == ("chat", "r1", "/v1", 503, 0.25, '{"method":"POST"}')
    ((stack,),) = rows(lake, "SELECT stack FROM logs WHERE level = 'error'")
    assert "ValueError" in stack


def test_a_log_that_grows_is_taken_in_once_whatever_its_name(tmp_path: Path) -> None:
    source, lake = tmp_path / "log", Lake(tmp_path / "lake")
    source.write_bytes(line(1) + line(2) + line(3)[:20])
    assert lake.take_logs(source, "chat").rows == 2
    assert lake.take_logs(source, "chat").known
    with source.open("ab") as file:
        file.write(line(3)[20:] + line(4))
    source.rename(tmp_path / "log.1")
    assert lake.take_logs(tmp_path / "log.1", "chat").rows == 2
    source.write_bytes(line(5))
    assert lake.take_logs(source, "chat").rows == 1
    assert rows(lake, "SELECT count(*), count(DISTINCT message) FROM logs") == [(5, 5)]
    assert lake.take_logs(source, "other").rows == 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (b"x" * (MOST_LINE + 9) + b"\n", "too long"),
        (b"{\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b'{"new": ' + b"[" * 100_000 + b"\n", "not JSON"),
        (b'"a line of text"\n', "not a log line"),
        (line(level="loud"), "not a log line"),
        (line(ts="yesterday"), "not a log line"),
        (line(ts="2026-11-23T10:00:00"), "not a log line"),
        (line(pid=-1), "not a log line"),
        (line(pid=2**40), "not a log line"),
        (line(message="x" * 10_000), "not a log line"),
        (line(fields={"deep": {"er": 1}}), "not a log line"),
        (line(fields={str(n): n for n in range(100)}), "not a log line"),
        (line(ts="1970-01-01T00:00:00Z"), "time out of range"),
        (line(ts="9999-01-01T00:00:00Z"), "time out of range"),
    ],
)
def test_hostile_lines_are_refused_and_counted(tmp_path: Path, wrong: bytes, reason: str) -> None:
    assert reason in REASONS
    source, lake = tmp_path / "log", Lake(tmp_path / "lake")
    source.write_bytes(line(1) + wrong + b"\n" + line(2))
    taken = lake.take_logs(source, "chat")
    assert (taken.rows, dict(taken.refused)) == (2, {reason: 1})
    assert lake.take_logs(source, "chat").known
    assert dict(lake.refused()) == {reason: 1}
    lake.take_logs(source, "other")
    lake.merge()
    assert dict(lake.refused()) == {reason: 2}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.binary(max_size=200).map(lambda data: data.replace(b"\n", b""))
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.dictionaries(
            st.sampled_from(["message", "logger", "pid", "fields", "error", "request_id", "new"]),
            JSON,
        ).map(lambda changes: line(**changes).strip()),
        max_size=12,
    )
)
def test_every_line_is_a_row_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "log").write_bytes(line() + b"\n".join(lines) + b"\n")
    lake = Lake(folder / "lake")
    taken = lake.take_logs(folder / "log", "chat")
    assert taken.rows + taken.refused.total() == 1 + sum(bool(one.strip()) for one in lines)
    assert rows(lake, "SELECT count(*) FROM logs") == [(taken.rows,)]


def test_secrets_are_hidden_once_more() -> None:
    told = {"api_key": "abcdefgh", "note": "authorization: Bearer abcdefgh", "count": 10**30}
    row = log_row(line(message="token=abcdefgh was sent", fields=told), "chat")
    assert isinstance(row, bytes)
    assert b"abcdefgh" not in row
    assert row.count(HIDDEN.encode()) == 3


def _take(folder: Path, at: str, count: int) -> None:
    """Take in a log, and die where it is to happen the `count`-th time."""
    real, seen = getattr(os, at), [0]

    def deadly(*words: Any) -> Any:
        if (words and str(words[0]).endswith(".parquet")) or at == "fsync":
            seen[0] += 1
            if seen[0] == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*words)

    setattr(os, at, deadly)
    lake_module.BATCH = 40
    lake = Lake(folder / "lake")
    lake.take_logs(folder / "log", "chat")
    lake.merge()


@pytest.mark.slow
@pytest.mark.parametrize("at", ["fsync", "replace", "unlink"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_killed_anywhere_nothing_is_lost_or_twice(tmp_path: Path, at: str, count: int) -> None:
    (tmp_path / "log").write_bytes(b"".join(line(n) for n in range(150)) + b"{\n")
    spawn = multiprocessing.get_context("spawn")
    dying = spawn.Process(target=_take, args=(tmp_path, at, count))
    dying.start()
    dying.join()
    last = spawn.Process(target=_take, args=(tmp_path, at, 0))
    last.start()
    last.join()
    assert dying.exitcode in (-signal.SIGKILL, 0)
    assert last.exitcode == 0
    lake = Lake(tmp_path / "lake")
    assert rows(lake, "SELECT count(*), count(DISTINCT message) FROM logs") == [(150, 150)]
    assert dict(lake.refused()) == {"not JSON": 1}
    assert len(lake.files("logs")) == 1


def test_merging_keeps_rows_places_and_what_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_module, "BATCH", 10)
    source, lake = tmp_path / "log", Lake(tmp_path / "lake")
    source.write_bytes(b"".join(line(n) for n in range(95)))
    lake.take_logs(source, "chat")
    assert len(lake.files("logs")) == 10
    assert lake.merge() == 10
    assert lake.merge() == 0
    assert rows(lake, "SELECT count(*) FROM logs") == [(95,)]
    assert lake.merge(micros(datetime(2026, 11, 23, 10, 1, tzinfo=UTC))) == 0
    assert rows(lake, "SELECT count(*), min(message) FROM logs") == [(35, "request 60")]
    assert lake.take_logs(source, "chat").known


METRICS = """# TYPE headrace_certified_share gauge
headrace_certified_share 0.97
# TYPE up gauge
up{a="b",x="q\\"uote"} NaN
up{a="c"} 1
"""


def test_scrapes_builds_and_runs_are_taken_in_once(tmp_path: Path) -> None:
    lake, source = Lake(tmp_path / "lake"), tmp_path / "chat.prom"
    source.write_text(METRICS)
    assert take_source(lake, str(source), "chat").rows == 2
    assert take_source(lake, str(source), "chat").known
    query = "SELECT service, name, labels, value FROM metrics ORDER BY name DESC"
    assert rows(lake, query) == [
        ("chat", "up", '{"a": "c"}', 1.0),
        ("chat", "headrace_certified_share", "{}", 0.97),
    ]
    with pytest.raises(ValueError, match="more than"):
        list(scrape_rows("x 1\n" * 50_001, "chat", datetime.now(UTC)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.prom", b"no metric { at all\n"),
        ("a.prom", b"\xff\xfe\n"),
        ("a.duckdb", b"nothing of the kind"),
        ("a.json", b"{}"),
        ("a.json", b'{"schema": "headrace-bench/1"}'),
    ],
)
def test_sources_that_are_none_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(HeadraceError) as error:
        take_source(Lake(tmp_path / "lake"), str(tmp_path / name), "chat")
    assert isinstance(error.value, InvalidRequest)


def test_a_result_is_the_run_that_the_history_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.bench.history import History

    result = {
        "created": "2026-11-23T10:00:00+00:00",
        "commit": "abc",
        "figures": {"output_throughput": {"value": 100.0}},
        "samples": {"ttft": {"mean": 0.1, "percentiles": {"p50": 0.09}}},
        "options": {
            "arrivals": None,
            "concurrency": 4,
            "url": "http://127.0.0.1:8000",
            "trace": None,
            "workload": "fixed",
            "input": "8",
            "output": "8",
        },
        "machine": {"cpu": "a processor", "cores": 2, "gpus": []},
        "server": {"model": "m", "version": "1+abc", "software": "Headrace", "commit": "def"},
        "valid": True,
    }
    History(tmp_path / "history.duckdb").add(result)
    assert history_rows(tmp_path / "history.duckdb") == [run_row(result)]
    assert run_row(result)["commit"] == "def"


def test_a_store_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file", tmp_path / "a*b"):
        with pytest.raises(OptionError):
            Lake(wrong)
    lake = Lake(tmp_path / "lake")
    with pytest.raises(OptionError, match="service"):
        lake.take_logs(tmp_path / "file", "a b")
    with pytest.raises(InvalidRequest):
        lake.take_logs(tmp_path / "absent", "chat")
    (tmp_path / "lake" / "metrics" / "x.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(Untrusted), lake.open():
        pass
