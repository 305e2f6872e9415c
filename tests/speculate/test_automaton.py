"""A suffix automaton counts as a search of all texts does."""

from __future__ import annotations

from collections import Counter
from sys import getsizeof

from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate.automaton import DEPTH, NONE, ROOT, WINDOW, Context, SuffixAutomaton

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


def context_of(automaton: SuffixAutomaton, tokens: list[int]) -> Context:
    context: Context = (ROOT, 0)
    for token in tokens:
        context = automaton.next(context, token)
    return context


@given(texts=TEXTS, asked=st.lists(st.integers(0, 3), max_size=12), shape=SMALL)
def test_contexts_are_the_longest_that_occur(
    texts: list[list[int]], asked: list[int], shape: tuple[int, int]
) -> None:
    automaton = built(texts, *shape)
    _, length = context_of(automaton, asked)
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
    if tail:
        assert automaton.count(context) == occurrences(texts, tail)
    followers = Counter({token: occurrences(texts, [*tail, token]) for token in range(3)})
    likeliest = automaton.likeliest(context)
    if likeliest == NONE:
        assert not followers.total()
    else:
        assert followers[likeliest] == max(followers.values())
    shorter = automaton.shorter(context)
    if context[1]:
        assert shorter[1] < context[1]
        more = asked[len(asked) - shorter[1] :] if shorter[1] else []
        assert not more or occurrences(texts, more) >= occurrences(texts, tail)


@given(texts=TEXTS, shape=SMALL)
def test_the_end_is_the_context_of_the_last_tokens(
    texts: list[list[int]], shape: tuple[int, int]
) -> None:
    automaton = built(texts, *shape)
    last = texts[-1] if texts else []
    assert automaton.end[1] == min(len(last), shape[0])
    assert automaton._settled(automaton.end) == context_of(automaton, last)
    assert automaton.size == sum(map(len, texts))


def test_of_equal_counts_the_last_one_is_the_likeliest() -> None:
    automaton = built([[1, 2, 1, 3]], DEPTH, WINDOW)
    assert automaton.likeliest(context_of(automaton, [1])) == 3
    automaton.extend([1, 2])
    assert automaton.likeliest(context_of(automaton, [1])) == 2


def test_bytes_are_told_as_they_are() -> None:
    """What the interpreter says of every part, added up."""
    automaton = built([[n % 7 * (n % 5) for n in range(3000)]], DEPTH, WINDOW)
    entries = sum(len(more) for more in automaton._more.values()) + len(automaton._more)
    dictionaries = sum(map(getsizeof, automaton._more.values())) + getsizeof(automaton._more)
    arrays = sum(getsizeof(one) for one in vars(automaton).values() if hasattr(one, "typecode"))
    assert automaton.held == arrays + dictionaries + 64 * entries
