"""The dashboard, and the rules that the chart has: valid, tested, about metrics that exist."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from headrace.obs.life import RequestLife
from headrace.obs.metrics import EngineMetrics
from headrace.server.meter import HttpMeter
from ports import two_ports
from tiny import talker
from tiny.kept import Kept

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS / "server"))
from processes import headrace, running  # noqa: E402

HERE = TESTS.parent / "deploy" / "observability"
RULES = TESTS.parent / "src" / "headrace" / "factory" / "chart" / "rules"
PROMTOOL = shutil.which("promtool")
PROMETHEUS = shutil.which("prometheus")
NAME = re.compile(r"\b(?:vllm:|headrace:|headrace_)[a-z0-9_]+")


def _exposed() -> set[str]:
    """Every sample's name that a server with a model, an adapter and a few requests exposes."""
    metrics = EngineMetrics("m")
    metrics.cache_config = {"block_size": "16"}
    metrics.phases = {"total": 1.0}
    life = RequestLife(1.0, 10, adapter="a")
    metrics.tokens(life, 1, 2.0)
    metrics.ended(life, "stop", 3.0)
    meter = HttpMeter()
    meter.exchange("/health", "GET", 200, 0.1)
    text = generate_latest(metrics.registry) + generate_latest(meter.registry)
    return {
        sample.name
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def _dashboard() -> dict[str, Any]:
    return json.loads((HERE / "dashboard.json").read_text())  # type: ignore[no-any-return]


def test_every_metric_that_is_named_exists() -> None:
    exposed = _exposed()
    rules = "\n".join(path.read_text() for path in RULES.glob("*.yml"))
    expressions = [
        target["expr"] for panel in _dashboard()["panels"] for target in panel.get("targets", [])
    ]
    variables = [one["definition"] for one in _dashboard()["templating"]["list"][1:]]
    # A runbook may speak of a histogram by its family's name.
    families = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in exposed}
    for text, known in (("\n".join(expressions + variables), exposed), (rules, exposed | families)):
        recorded = set(re.findall(r"record: (\S+)", rules))
        named = set(NAME.findall(re.sub(r"model:headrace_\S+", "", text)))
        assert named, "the pattern finds nothing"
        assert not named - known, f"not exposed: {sorted(named - known)}"
        used = set(re.findall(r"model:[a-z0-9_:]+", text))
        assert used <= recorded, f"not recorded: {sorted(used - recorded)}"


def test_the_dashboard_is_what_its_script_makes() -> None:
    made = runpy.run_path(str(HERE / "build_dashboard.py"))["text"]()
    assert (HERE / "dashboard.json").read_text() == made


def test_the_dashboard_is_well_formed() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in places, f"{panel['title']} lies on another"
                places.add((x, y))


def test_every_alert_says_what_to_do_and_has_a_test() -> None:
    text = (RULES / "alerts.yml").read_text()
    alerts = re.findall(r"- alert: (\S+)", text)
    assert len(alerts) >= 10
    for word in ("summary:", "description:", "runbook:", "severity:"):
        assert text.count(word) == len(alerts)
    tested = (HERE / "alerts_test.yml").read_text()
    for alert in alerts:
        fires = f'alertname="{alert}", alertstate="firing"' in tested
        assert fires or f"alertname: {alert}\n        exp_alerts" in tested, alert


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command",
    [
        ["check", "rules", f"{RULES}/recording.yml", f"{RULES}/alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    ],
)
def test_promtool_agrees(command: list[str]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *command], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_our_exposition_clean(served: str) -> None:
    text = httpx.get(f"{served}/metrics").text
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True
    )
    # vLLM's names break its style (colons, units): only what would not parse is wrong here.
    assert "error while linting" not in done.stdout + done.stderr


@pytest.fixture(scope="module")
def served(kept: Kept) -> Iterator[str]:
    model = kept(talker.make)
    with running(headrace("serve", str(model), "--port", "0", "--threads", "1")) as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed")
def test_a_real_prometheus_scrapes_and_every_panel_has_an_answer(
    served: str, tmp_path: Path
) -> None:
    config = (HERE / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", served.removeprefix("http://"))
    config = config.replace(
        "scrape_interval: 5s, evaluation_interval: 15s",
        "scrape_interval: 1s, evaluation_interval: 1s",
    )
    config = config.replace("../../src/headrace/factory/chart/rules", str(RULES))
    (tmp_path / "prometheus.yml").write_text(config)
    port = two_ports()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(PROMETHEUS),
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: httpx.get(f"{url}/-/ready").status_code == 200)
        target = "up{job='headrace'} == 1"
        _until(lambda: _ask(url, target))
        body = {"prompt": "water", "max_tokens": 8, "ignore_eos": True}

        def moves(query: str) -> bool:
            """Is there an answer, while the server has some more work each time?"""
            assert httpx.post(f"{served}/v1/completions", json=body).status_code == 200
            return bool(_ask(url, query))

        _until(lambda: moves('vllm:generation_tokens_total{model_name="tiny"} >= 32'))
        _until(lambda: moves("model:headrace_output_tokens:rate1m > 0"))
        rules = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
        wrong = [
            (rule["name"], rule["lastError"])
            for group in rules
            for rule in group["rules"]
            if rule.get("lastError")
        ]
        assert not wrong
        critical = [
            alert["labels"]["alertname"]
            for alert in httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
            if alert["labels"]["severity"] == "critical"
        ]
        assert not critical
        for panel in _dashboard()["panels"]:
            for wanted in panel.get("targets", []):
                expression = (
                    wanted["expr"]
                    .replace("$__rate_interval", "1m")
                    .replace("$model", ".*")
                    .replace("$instance", ".*")
                )
                answer = httpx.get(f"{url}/api/v1/query", params={"query": expression})
                assert answer.status_code == 200, (panel["title"], answer.text)
                if panel["title"] in ("Tokens per second", "Time to first token", "Sequences"):
                    _until(partial(moves, expression))
    finally:
        process.terminate()
        process.wait(120)


def _ask(url: str, query: str) -> list[Any]:
    found = httpx.get(f"{url}/api/v1/query", params={"query": query}).json()
    return found["data"]["result"]  # type: ignore[no-any-return]


def _until(true: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if true():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.3)
