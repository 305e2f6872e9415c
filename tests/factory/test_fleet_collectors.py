"""Collectors' configurations: they parse, and make the store's rows, no more and no fewer.

Vector's language and ClickHouse's engine are packages; Vector itself and Loki are not.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from headrace.factory.rows import MOST_LINE, SCHEMA, log_row

HERE = Path(__file__).parents[2] / "deploy" / "collectors"


def test_vector_makes_the_rows_of_the_store() -> None:
    config = yaml.safe_load((HERE / "vector.yaml").read_text())
    made = config["transforms"]["rows"]["source"].partition(". = {")[2]
    assert re.findall(r'^ *"(\w+)":', made, re.MULTILINE) == list(SCHEMA["logs"])
    assert config["sources"]["headrace"]["max_line_bytes"] == MOST_LINE
    names = {*config["sources"], *config["transforms"], "rows.dropped"}
    for part in ("transforms", "sinks"):
        for one in config[part].values():
            assert set(one["inputs"]) <= names
    assert set(config["sinks"]["loki"]["labels"]) <= {"service", "level"}


def test_clickhouse_has_the_columns_of_the_store() -> None:
    table = (HERE / "clickhouse.sql").read_text().partition("headrace.logs (")[2]
    assert re.findall(r"^    ([a-z_]+) [A-Z]", table, re.MULTILINE) == list(SCHEMA["logs"])


LINE = {"ts": "2026-11-18T12:06:40.125Z", "level": "info", "logger": "a.b", "message": "exchange"}
LINES = [
    LINE | {"pid": 7, "request_id": "r", "trace_id": "t", "span_id": "s"},
    LINE | {"fields": {"path": "/v1", "status": 200, "seconds": 0.25, "method": "POST"}},
    LINE | {"fields": {"path": 1, "status": "200", "seconds": 3, "left": None}},
    LINE | {"ts": "2026-11-18T12:06:40+01:00", "error": "E: 'x'", "stack": "a\n\tb", "new": 1},
]
WRONG = {"ts": "today"}, {"level": 3}
REFUSED = ["no json", "[]", "{}", *(json.dumps(LINE | one) for one in WRONG)]
QUERIED = """
import json, sys
from chdb.session import Session
table, rows = json.load(sys.stdin)
session = Session()
for statement in filter(str.strip, table.split(";")):
    session.query(statement)
given = "date_time_input_format='best_effort', input_format_skip_unknown_fields=0"
session.query(f"INSERT INTO headrace.logs SETTINGS {given} FORMAT JSONEachRow\\n{rows}")
print(session.query("SELECT * FROM headrace.logs", "JSONEachRow"))
"""


def test_vector_and_clickhouse_have_the_rows_of_the_store() -> None:
    """The same lines by each: Vector's program, then ClickHouse's table, as the sink writes."""
    vrl = pytest.importorskip("vrl_python", reason="NOT TESTED: pip install vrl-python")
    pytest.importorskip("chdb", reason="NOT TESTED: pip install chdb")
    config = yaml.safe_load((HERE / "vector.yaml").read_text())
    program = config["transforms"]["rows"]["source"].replace("${SERVICE:-headrace}", "chat")
    rows, wanted = [], []
    for line in map(json.dumps, LINES):
        rows.append(vrl.VRLRuntime.run(program, {"message": line}, "UTC").processed_event)
        wanted.append(json.loads(log_row(line.encode(), "chat")))
    for line in REFUSED:
        assert isinstance(log_row(line.encode(), "chat"), str)
        with pytest.raises(RuntimeError, match="function call error"):
            vrl.VRLRuntime.run(program, {"message": line}, "UTC")
    table = (HERE / "clickhouse.sql").read_text()
    given = json.dumps([table, "\n".join(map(json.dumps, rows))])
    done = subprocess.run(
        [sys.executable, "-c", QUERIED], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line]
    empty = {"pid": 0, "status": None, "seconds": None, "fields": "{}"}
    for one in wanted:
        when = datetime.fromtimestamp(one["ts"] / 1e6, UTC)
        one["ts"] = when.strftime("%Y-%m-%d %H:%M:%S.%f")
    columns = SCHEMA["logs"]
    asked = [{name: one.get(name, empty.get(name, "")) for name in columns} for one in wanted]
    assert sorted(found, key=str) == sorted(asked, key=str)


def test_keda_asks_for_metrics_that_there_are() -> None:
    trigger = yaml.safe_load((HERE.parent / "autoscaling" / "keda.yaml").read_text())["spec"]
    (asked,) = trigger["triggers"]
    names = set(re.findall(r"vllm:\w+", asked["metadata"]["query"]))
    known = (Path(__file__).parents[1] / "obs" / "expected_names.txt").read_text().split()
    assert len(names) == 2
    for name in names:
        assert name in known or name.replace("_count", "_bucket") in known
    found = json.loads((HERE.parents[1] / "benchmarks/results/autoscale.json").read_text())
    assert asked["metadata"]["query"].count(f"/ {found['capacity']}") == 2
    assert asked["metadata"]["threshold"] == "1"
