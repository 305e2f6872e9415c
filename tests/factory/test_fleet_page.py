"""The fleet's page from a real store, in a real browser: what it says, and for whom."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="duckdb is not installed")

from headrace.factory.fleet_page import fleet_page
from headrace.factory.lake import Lake
from headrace.factory.rows import scrape_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
BEGIN = datetime(2026, 11, 23, 10, tzinfo=UTC).timestamp()
HOSTILE = "<img src=x onerror=\"document.title='taken'\">"


def scrape(minute: int, restarted: bool) -> str:
    count = (minute - 10 if restarted else minute) * 100
    return f"""headrace_certified_share 0.9{minute % 10}
headrace_profile_info{{profile="tiny.x86",digest="sha256:{"ab" * 32}"}} 1
vllm:time_to_first_token_seconds_sum {count * 0.2}
vllm:time_to_first_token_seconds_count {count}
vllm:inter_token_latency_seconds_sum {count * 0.02}
vllm:inter_token_latency_seconds_count {count}
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    folder = tmp_path_factory.mktemp("fleet")
    lake = Lake(folder / "lake")
    lines = []
    for number in range(400):
        when = datetime.fromtimestamp(BEGIN + number * 3, UTC).isoformat()
        status = 503 if number % 50 == 0 else 200
        fields = {"path": "/v1/chat/completions", "status": status, "seconds": number / 1000}
        line = {"ts": when, "level": "info", "logger": "l", "message": "exchange"}
        lines.append(json.dumps({**line, "fields": fields}))
    (folder / "log").write_text("\n".join(lines) + "\nno line\n")
    lake.take_logs(folder / "log", "chat")
    for minute in range(1, 20):
        when = datetime.fromtimestamp(BEGIN + minute * 60, UTC)
        lake.take("metrics", scrape_rows(scrape(minute, minute > 10), "chat", when))
    stage = {"ts": round(BEGIN * 1e6), "figures": "{}", "manifest": "", "rings": "staging"}
    for cell, outcome, profile in (
        ("tiny.x86", "passed", f"sha256:{'ab' * 32}"),
        (f"bad{HOSTILE}", "failed", ""),
    ):
        row = {**stage, "cell": cell, "outcome": outcome, "profile": profile, "reason": HOSTILE}
        lake.take("builds", [{**row, "stage": "accuracy"}])
    alarm = {"ts": round(BEGIN * 1e6), "what": "m · here", "metric": "ttft_p50", "before": "aaa",
             "after": "bbb", "change": 1.08, "chance": 0.001, "confirmed": True}  # fmt: skip
    lake.take("alarms", [alarm])
    run = {"ts": round(BEGIN * 1e6), "commit": "aaa", "what": "m · here", "valid": True}
    metrics = json.dumps({"ttft_p50": 0.125, "other": 1.0})
    lake.take("runs", [{**run, "metrics": metrics, "options": "{}"}])
    return lake


def test_the_page_says_what_the_store_has(lake: Lake, tmp_path: Path) -> None:
    page = fleet_page(lake)
    for told in ("2.00%", "99.0%", "tiny.x86", "staging", "none signed", "×1.080", "alarm",
                 "ttft_p50 0.125", "1 not JSON"):  # fmt: skip
        assert told in page, told
    assert "Time to first token, mean" in page
    assert "Inter-token latency, mean" in page
    assert HOSTILE not in page
    assert "<script" not in page
    assert "There is none." in fleet_page(Lake(tmp_path / "empty"))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_in_a_browser(lake: Lake, tmp_path: Path, scheme: str, size: tuple[int, int]) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    file = tmp_path / "fleet.html"
    file.write_text(fleet_page(lake))
    check = (Path(__file__).parents[1] / "server" / "page_access.js").read_text()

    def visit() -> dict[str, Any]:
        asked: list[str] = []
        errors: list[str] = []
        with playwright.sync_playwright() as run:
            browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            width, height = size
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": height}
            )
            tab = context.new_page()
            tab.on("request", lambda request: asked.append(request.url))
            tab.on("console", lambda said: errors.append(said.text))
            tab.goto(file.as_uri())
            found = {
                "asked": asked,
                "errors": errors,
                "wrong": tab.evaluate(check),
                "title": tab.title(),
                "headings": tab.eval_on_selector_all("h2", "all => all.map(e => e.textContent)"),
                "lines": tab.eval_on_selector_all(
                    "svg.chart path, svg.chart polyline", "all => all.map(e => e.getBBox().width)"
                ),
                "wide": tab.evaluate("document.documentElement.scrollWidth > innerWidth"),
                "paper": tab.evaluate("getComputedStyle(document.body).backgroundColor"),
            }
            browser.close()
        return found

    with ThreadPoolExecutor(1) as pool:  # Playwright wants no event loop.
        found = pool.submit(visit).result(200)
    assert found["asked"] == [file.as_uri()]
    assert found["errors"] == []
    assert found["title"] == "Headrace fleet"
    assert found["headings"] == ["Services", "Builds and gates", "Alarms", "Runs"]
    assert len([width for width in found["lines"] if width > 100]) >= 3
    assert not found["wide"]
    # Tables scroll in themselves; that the page does not is above.
    assert [one for one in found["wrong"] if not one.startswith("too wide")] == []
    light = sum(map(int, found["paper"].strip("rgb()").split(","))) > 3 * 128
    assert light == (scheme == "light")
