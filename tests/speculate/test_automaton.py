"""A suffix automaton counts as a search of all texts does."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate import SuffixDrafter, names_of
from headrace.speculate.automaton import DEPTH, NONE, WINDOW, Context, SuffixAutomaton, empty

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), max_size=3)
"""Three words, so that most substrings come again."""
SMALL = st.sampled_from([(3, 5), (4, 5), (2, 7), (6, 64)])
"""Depth and window."""


def built(texts: list[list[int]], depth: int, window: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(depth, window)
    for text in texts:
        automaton.cut()
        automaton.extend(text)
    return automaton


def occurrences(texts: list[list[int]], wanted: list[int]) -> int:
    return sum(
        text[at : at + len(wanted)] == wanted
        for text in texts
        for at in range(len(text) - len(wanted) + 1)
    )


def context_of(automaton: SuffixAutomaton, tokens: Sequence[int]) -> Context[int]:
    context = empty()
    automaton.follow(context, tokens)
    return context


@given(texts=TEXTS, asked=st.lists(st.integers(0, 3), max_size=12), shape=SMALL)
def test_contexts_are_the_longest_that_occur(
    texts: list[list[int]], asked: list[int], shape: tuple[int, int]
) -> None:
    automaton = built(texts, *shape)
    length = context_of(automaton, asked)[1]
    longest = max(
        (
            n
            for n in range(min(len(asked), shape[0]) + 1)
            if occurrences(texts, asked[len(asked) - n :])
        ),
        default=0,
    )
    assert length == (longest if any(texts) else 0)


@given(texts=TEXTS, asked=st.lists(st.integers(0, 2), min_size=1, max_size=6), shape=SMALL)
def test_counts_are_those_of_a_search(
    texts: list[list[int]], asked: list[int], shape: tuple[int, int]
) -> None:
    automaton = built(texts, *shape)
    context = context_of(automaton, asked)
    tail = asked[len(asked) - context[1] :]
    count, likeliest = automaton.counts(context)
    if tail:
        assert count == occurrences(texts, tail)
    followers = Counter({token: occurrences(texts, [*tail, token]) for token in range(3)})
    if likeliest == NONE:
        assert not followers.total()
    else:
        assert followers[likeliest] == max(followers.values())


@given(
    texts=TEXTS,
    asked=st.lists(st.integers(0, 2), max_size=6),
    shape=SMALL,
    most=st.integers(0, 5),
    least=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_a_path_is_the_likeliest_as_long_as_it_is_likely(
    texts: list[list[int]], asked: list[int], shape: tuple[int, int], most: int, least: float
) -> None:
    """Each step against a search of all texts; the context is the longest that was followed."""
    automaton = built(texts, *shape)
    context = context_of(automaton, asked)
    tokens, matched, score = automaton.path(context, most, 0, 1, least)
    assert len(tokens) <= most
    followed = [
        length
        for length in range(1, min(len(asked), shape[0]) + 1)
        if any(occurrences(texts, [*asked[len(asked) - length :], one]) for one in range(3))
    ]
    assert matched == max(followed, default=0) or context[1] < max(followed, default=0)
    at, alive, expected = asked[len(asked) - matched :], 1.0, 0.0
    for token in tokens:
        at = at[-shape[0] :]
        followers = {one: occurrences(texts, [*at, one]) for one in range(3)}
        assert followers[token] == max(followers.values())
        if len(at) < shape[0]:
            alive *= min(1.0, followers[token] / occurrences(texts, at))
            expected += alive
            assert alive >= least
        at.append(token)
    if matched + len(tokens) <= shape[0]:
        assert score == pytest.approx(expected)


@given(texts=TEXTS, shape=SMALL)
def test_the_end_is_the_context_of_the_last_tokens(
    texts: list[list[int]], shape: tuple[int, int]
) -> None:
    automaton = built(texts, *shape)
    last = texts[-1] if texts else []
    assert automaton.end[1] == min(len(last), shape[0])
    assert automaton.counts(automaton.end) == automaton.counts(context_of(automaton, last))
    assert automaton.size == sum(map(len, texts))


def test_of_equal_counts_the_last_one_is_the_likeliest() -> None:
    automaton = built([[1, 2, 1, 3]], DEPTH, WINDOW)
    assert automaton.counts(context_of(automaton, [1]))[1] == 3
    automaton.extend([1, 2])
    assert automaton.counts(context_of(automaton, [1]))[1] == 2


FRESH = """
import mmap, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_automaton import DEPTH, WINDOW, built
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
text = [n * n % 30_011 for n in range(300_000)]
built([text[:300]], DEPTH, WINDOW)
before = resident()
automaton = built([text], DEPTH, WINDOW)
print((resident() - before) / automaton.held)
"""


def test_bytes_are_told_as_they_are() -> None:
    """The count is compared with the memory of a fresh process, which has no room left over."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not say what a process holds")
    command = [sys.executable, "-c", FRESH, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.7 < float(done.stdout) < 1.3


def test_without_the_library_n_grams_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.speculate import automaton, speculation

    monkeypatch.setattr(automaton, "library", lambda *_: None)
    monkeypatch.setattr(speculation, "library", lambda *_: None)
    assert "suffix" not in names_of("auto")
    assert "ngram" in names_of("auto")
    with pytest.raises(RuntimeError):
        SuffixDrafter()
