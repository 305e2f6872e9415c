"""Charts: ticks are round, every point is inside, the SVG is well-formed, pages need no network."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.roofline.composition import decode_step
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.plot import Chart, Series, short, svg, ticks, write_png
from headrace.roofline.report import COLUMNS, digits, html_page, roofline_chart, rows, share_chart
from headrace.roofline.step import step_time

from .archs import LLAMA_8B

TIME = step_time(Case(LLAMA_8B), DEVICES["H200"], decode_step(LLAMA_8B, 8, 1000))


def test_ticks_are_round() -> None:
    assert ticks(0, 10, log=False) == [0, 2, 4, 6, 8, 10]
    assert ticks(1, 1000, log=True) == [1, 10, 100, 1000]
    assert ticks(8, 140, log=True) == [10, 20, 50, 100]
    assert [short(value) for value in (0, 1500, 2e6, 0.25)] == ["0", "1.5k", "2M", "0.25"]


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e12), st.floats(1e-6, 1e12)), min_size=1, max_size=60),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["line", "points", "marked", "bars", "steps", "area"]),
)
def test_every_chart_is_well_formed(
    points: list[tuple[float, float]], log_x: bool, log_y: bool, mark: str
) -> None:
    series = Series("a <b> & c", [x for x, _ in points], [y for _, y in points], mark)
    chart = Chart('"quoted" & <b>', "x", "y", [series], log_x, log_y, [(points[0][0], "<note>")])
    tree = ElementTree.fromstring(svg(chart))
    for circle in tree.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 640
        assert 0 <= float(circle.attrib["cy"]) <= 360


def test_a_long_legend_goes_on_below_itself() -> None:
    names = [f"operators of part {n}, measured" for n in range(6)]
    tree = ElementTree.fromstring(svg(Chart("t", "x", "y", [Series(n, [1], [1]) for n in names])))
    found = [text for text in tree.iter("text") if text.text in names]
    assert len(found) == 6
    for text in found:
        assert float(text.attrib["x"]) + 6.2 * len(text.text or "") < 640
    lowest = max(float(text.attrib["y"]) for text in found)
    assert lowest > 60
    for line in tree.iter("line"):
        assert float(line.attrib["y1"]) > lowest, "the plot begins below it"


def test_names_do_not_overlap() -> None:
    names = [f"{n:07x}" for n in range(14)]
    places = range(1, 15)
    tree = ElementTree.fromstring(
        svg(Chart("t", "x", "y", [Series("", places, places)], names=names))
    )
    shown = [float(text.attrib["x"]) for text in tree.iter("text") if text.text in names]
    assert len(shown) > 4
    assert all(b - a > 6.6 * 7 for a, b in itertools.pairwise(shown))


def test_tags_are_written_beside_their_points() -> None:
    series = Series("runs", [1, 9], [5, 6], "marked", tags=["1 user", "16 users"])
    tree = ElementTree.fromstring(svg(Chart("t", "x", "y", [series])))
    found = {text.text: float(text.attrib["x"]) for text in tree.iter("text")}
    assert 62 < found["1 user"] < found["16 users"] < 640 - 14


def test_empty_and_infinite_series_do_not_break() -> None:
    ElementTree.fromstring(svg(Chart("none", "x", "y", [Series("", [], [])])))
    ElementTree.fromstring(svg(Chart("n", "x", "y", [Series("", [1, 2], [float("nan"), 3])])))


def test_the_table_sums_and_fits_the_columns() -> None:
    lines = rows(TIME)
    assert all(len(line) == len(COLUMNS) for line in lines)
    assert lines[-1][0] == "sum"
    shares = sum(float(line[-1].rstrip("%")) for line in lines[:-1])
    assert shares == pytest.approx(100, abs=0.6)
    assert [digits(value) for value in (0, 1e-9, 0.12345, 12.345, 12345)] == [
        "0",
        "<.001",
        "0.123",
        "12.3",
        "12,345",
    ]


def test_the_page_is_self_contained(tmp_path: Path) -> None:
    page = html_page("Llama", Case(LLAMA_8B), DEVICES["H200"], [("decode", TIME)])
    for outside in ("http://", "https://", "<script src", "<link"):
        assert outside not in page
    assert page.count("<svg") == 2


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    chart = roofline_chart(Case(LLAMA_8B), DEVICES["H200"], TIME, step="decode")
    assert chart.title.endswith("decode")
    (points,) = (one for one in chart.series if one.mark == "points")
    named = [name for text in points.tags for name in text.split(", ") if name]
    assert len(points.tags) == len(points.xs)
    assert len(named) == len(set(named)) == 5, "the longest operators, once each"
    write_png([roofline_chart(Case(LLAMA_8B), DEVICES["H200"], TIME), share_chart(TIME)], path)
    assert path.read_bytes()[:4] == b"\x89PNG"
