"""Collectors' configurations: they parse, and have the store's columns, no more and no fewer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from headrace.factory.rows import MOST_LINE, SCHEMA

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
