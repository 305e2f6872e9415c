"""The workload of pictures: drawings are what they say, and a run against a model that sees."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.bench.drawings import COLOURS, NUMBERS, QUESTIONS, SHAPES, drawing, is_right
from headrace.bench.lengths import parse_lengths
from headrace.bench.material import Material
from headrace.bench.mock import Behaviour, MockServer
from headrace.bench.options import RunOptions
from headrace.bench.report import figure_rows, html_report
from headrace.bench.run import make_sessions, run_bench
from headrace.bench.workload import Wish, make_workload

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import Running, headrace, running

LEAST = 60
"""Pixels of a side from which a shape can be counted."""


def areas(covered: np.ndarray) -> list[int]:  # type: ignore[type-arg]
    """Sizes of the connected parts of a mask."""
    left, found = {(int(y), int(x)) for y, x in np.argwhere(covered)}, []
    while left:
        edge, size = [left.pop()], 0
        while edge:
            y, x = edge.pop()
            size += 1
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
        found.append(size)
    return found


def test_a_drawing_is_what_it_says() -> None:
    """Read by Pillow; of a shape's box a square fills all, a circle π/4, a triangle half."""
    pytest.importorskip("PIL", reason="needs the extra pictures")
    from PIL import Image

    rng, seen = random.Random(4), set()
    for _ in range(60):
        width, height = rng.randint(LEAST, 200), rng.randint(LEAST, 200)
        made = drawing(width, height, rng)
        pixels = np.array(Image.open(io.BytesIO(made.png)))
        assert pixels.shape == (height, width, 3)
        colour = np.array(COLOURS[made.colour])
        covered = (pixels == colour).all(2)
        assert (pixels[~covered] >= 236).all(), "the ground alone is beside it"
        found = areas(covered)
        assert len(found) == made.number
        side = 2 * 0.35 * min(width / 3, height / 2)
        filled = sum(found) / len(found) / side**2
        nearest = min((1.0, "square"), (0.785, "circle"), (0.5, "triangle"), key=_near(filled))
        assert nearest[1] == made.shape
        seen |= {made.shape, made.colour, NUMBERS[made.number - 1]}
    assert seen == {*SHAPES, *COLOURS, *NUMBERS}


def _near(filled: float) -> object:
    return lambda pair: abs(pair[0] - filled)


@pytest.mark.parametrize("size", [(1, 1), (1, 4096), (4096, 1), (7, 9)])
def test_drawings_have_any_size(size: tuple[int, int]) -> None:
    one = drawing(*size, random.Random(1))
    assert one == drawing(*size, random.Random(1))
    assert one.url.startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("Three.", "three", True),
        ("There are 3 red circles", "three", True),
        ("2, or three", "three", False),
        ("It is RED!", "red", True),
        ("a blue one, not red", "red", False),
        ("Circles", "circle", True),
        ("", "circle", False),
        ("reddish", "red", False),
        ("13", "three", False),
    ],
)
def test_the_first_word_of_its_kind_is_the_answer(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) == right


def test_a_session_asks_about_one_picture() -> None:
    wish = Wish(
        4, 3, parse_lengths("9"), parse_lengths("5"), Material(), False, turns=3,
        picture=parse_lengths("fixed:40"),
    )  # fmt: skip
    sessions = make_workload("pictures", wish)
    for session in sessions:
        assert [bool(turn.picture) for turn in session.turns] == [True, False, False]
        assert {turn.text for turn in session.turns} == set(QUESTIONS.values())
        assert len({turn.right for turn in session.turns}) == 3
    assert len({session.turns[0].picture for session in sessions}) == 4


def test_what_cannot_be_asked_is_named() -> None:
    for given, words in (
        ({"picture": "uniform:10:5000"}, "4096 pixels at most"),
        ({"picture": "x"}, "picture must be N"),
        ({"endpoint": "completions"}, "needs the chat endpoint"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            RunOptions(workload="pictures", **given).verify()
    wide = RunOptions(workload="pictures", picture="lognormal:4000:3", requests=30, turns=1)
    sessions, _ = make_sessions(wide, Material())
    assert len(sessions) == 30


def test_answers_are_judged_and_a_server_without_counts_has_none() -> None:
    with MockServer(Behaviour(ttft=0.0, itl=0.0)) as mock:
        options = RunOptions(
            mock.url, workload="pictures", picture="40", requests=6, turns=1, output="3", warmup=0
        )
        result = run_bench(options).result
    assert result["succeeded"] == 6
    assert result["figures"]["right_answers"]["value"] == 0
    assert "picture_tokens" not in result["samples"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip("PIL", reason="needs the extra pictures")
    from tiny.seeing_chat import make

    folder = tmp_path_factory.mktemp("seeing_bench")
    make(folder)
    words = ["serve", str(folder), "--port", "0", "--threads", "2", "--max-context", "1024"]
    with running(headrace(*words, "--kv-dtype", "float32")) as one:
        yield one


@pytest.mark.slow
def test_a_run_states_picture_tokens_and_right_answers(server: Running, tmp_path: Path) -> None:
    options = RunOptions(
        server.url, workload="pictures", picture="uniform:40:200", requests=4, turns=2,
        think_seconds=0.0, output="4", concurrency=2,
    )  # fmt: skip
    result = run_bench(options, tmp_path).result
    assert result["succeeded"] == result["requests"] == 8
    assert 0 <= result["figures"]["right_answers"]["value"] <= 1
    counts = result["samples"]["picture_tokens"]
    assert counts["high"] <= 10 * 4, "ten tiles of four rows"
    assert counts["low"] >= 4
    assert counts["mean"] < result["samples"]["input_tokens"]["mean"]
    assert any(title == "right answers" for title, _ in figure_rows(result))
    page = html_report(result)
    assert "Picture tokens, tok" in page
    assert "sides of uniform:40:200 pixels" in page
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert all(line["picture_tokens"] and line["right"] is not None for line in lines)
