"""Stop strings: what is passed on does not depend on how the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.text import StopStrings

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By trying every beginning of the text."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_any_cut_gives_the_same(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    stream = StopStrings(stops, include=include)
    passed = ""
    for part in cut(text, places):
        passed += stream.feed(part)
        # Never more than the end result, whatever comes.
        assert reference(text, stops, include)[0].startswith(passed)
    if stream.matched is None:
        passed += stream.finish()
    assert (passed, stream.matched) == reference(text, stops, include)


@given(LETTERS, STOPS)
def test_holds_back_only_the_beginning_of_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    passed = stream.feed(text)
    if stream.matched is None:
        held = text[len(passed) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        # And everything that could be one is held.
        for length in range(len(held) + 1, len(text) + 1):
            assert not any(stop.startswith(text[-length:]) for stop in stops)


def test_the_first_complete_stop_wins() -> None:
    stream = StopStrings(["abcd", "bc"])
    assert stream.feed("xab") == "x"
    assert stream.feed("cd") == "a"
    assert stream.matched == "bc"
    assert stream.feed("more") == ""
    assert stream.finish() == ""


def test_no_stops_pass_everything_on() -> None:
    stream = StopStrings([])
    assert stream.feed("text") == "text"
    assert stream.finish() == ""
