"""The page of a run: what a phone, hostile names and an absent counter must not spoil."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from headrace.bench import live
from headrace.bench.metrics import Run, Slo, parse_slo
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.report import html_report
from headrace.bench.result import document, histogram
from headrace.bench.run import Progress
from headrace.roofline.page import STYLE
from headrace.roofline.plot import Chart, Series, svg


def page(joules: float | None = None, slo: Slo | None = None) -> str:
    records = [
        RequestRecord(
            n,
            n,
            0,
            0,
            0,
            0,
            [10**8, 2 * 10**8],
            2 * 10**8,
            200,
            asked_tokens=2,
            output_tokens=2,
            prompt_tokens=3,
            characters=9,
        )
        for n in range(5)
    ]
    return html_report(
        document(
            run=Run(records, 0, 2 * 10**8, slo, joules=joules),
            options=RunOptions().public(),
            server={"url": "x", "model": "<m>", "version": None},
            audits=[],
            findings=[],
            interrupted=False,
        )
    )


def test_no_chart_is_wider_than_a_phone() -> None:
    widths = re.findall(r"minmax\(([^)]*\)?)", STYLE)
    assert widths == ["min(420px,100%)"]


def test_energy_is_absent_not_guessed() -> None:
    assert "no counter could be read" in page()
    assert "1.00 J/tok, from counters" in page(joules=10.0)


def test_what_a_server_calls_itself_is_escaped() -> None:
    assert "&lt;m&gt;" in page()
    assert "<m>" not in page()


@pytest.mark.parametrize(("at", "end"), [(0.0, False), (10.0, True)])
def test_notes_stay_inside_and_above_the_marks(at: float, end: bool) -> None:
    text = svg(Chart("t", "x", "y", [Series("s", [0, 10], [1, 4], "bars")], notes=[(at, "p99")]))
    anchor = re.search(r'<text x="([\d.]+)" class="tick( end)?" y="[\d.]+">p99', text)
    assert anchor is not None
    assert bool(anchor[2]) is end
    assert 0 < float(anchor[1]) < 640
    both = svg(
        Chart("t", "x", "y", [Series("s", [0, 9], [1, 4], "bars")], notes=[(9, "a"), (9, "b")])
    )
    assert len(set(re.findall(r' y="([\d.]+)">[ab]<', both))) == 2
    highest = min(float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', text))
    assert highest > 34 + 12


def test_a_histogram_of_few_values_shows_them_all() -> None:
    few, many = histogram([0.1] * 20 + [5.0]), histogram([0.1, 0.2] * 500 + [60.0])
    assert sum(few["shares"]) == pytest.approx(1)
    assert few["edges"][-1] == 5.0
    assert many["edges"][-1] < 1, "one that is far away does not flatten the others"
    assert many["quantiles"][-1] == 60.0


def test_an_slo_that_was_missed_is_not_green() -> None:
    for limit, bad in (("1s", False), ("1ms", True)):
        slo = parse_slo(f"ttft:p50<{limit}")
        text = page(slo=slo)
        assert ('class="verdict bad"' in text) is bad


def test_a_run_without_answers_has_no_empty_table() -> None:
    record = RequestRecord(0, 0, 0, 0, 0, 0, [], 10**8, 500, error="x", error_kind="server")
    text = html_report(
        document(
            run=Run([record], 0, 10**8),
            options=RunOptions().public(),
            server={"url": "x", "model": "m", "version": None},
            audits=[],
            findings=[],
            interrupted=False,
        )
    )
    assert "<h2>Latency</h2>" not in text


def test_a_run_without_a_terminal_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    written = io.StringIO()
    progress = Progress(8, phase="running", started=0.0)
    view = live.LiveView(Console(file=written, force_terminal=False))
    for _ in range(4):
        view.watch(progress)
    assert written.getvalue().count("running: 0 of 8 requests") == 2
