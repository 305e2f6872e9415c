"""Lookup in the sequence itself equals the search it stands for."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate import NOTHING, NGramDrafter, Proposal
from headrace.speculate.ngram import REACH

TEXTS = st.lists(st.integers(0, 3), max_size=80)
"""Few words, so that most runs come again."""
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)


def searched(text: list[int], lengths: list[int], most: int) -> Proposal:
    """Return the drafter's promised proposal, by reading the whole text."""
    end = len(text)
    for length in sorted(lengths, reverse=True):
        ends = [
            at for at in range(length, end) if text[at - length : at] == text[end - length : end]
        ]
        if ends and most:
            at = ends[-1]
            matched = length
            while matched < min(at, REACH) and text[at - 1 - matched] == text[end - 1 - matched]:
                matched += 1
            grown = list(text)
            for _ in range(most):
                grown.append(grown[at + len(grown) - end])
            return Proposal(grown[end:], matched, "ngram")
    return NOTHING


@given(text=TEXTS, lengths=LENGTHS, most=st.integers(0, 12))
def test_it_equals_a_search_of_the_text(text: list[int], lengths: list[int], most: int) -> None:
    drafter = NGramDrafter(lengths)
    drafter.extend(text)
    assert drafter.propose(most) == searched(text, lengths, most)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 80), max_size=8))
def test_how_text_is_cut_does_not_matter(text: list[int], cuts: list[int]) -> None:
    whole, parts = NGramDrafter(), NGramDrafter()
    whole.extend(text)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(borders):
        parts.extend(text[begin:end])
        parts.propose(4)
    assert parts.propose(8) == whole.propose(8)


def test_a_copy_goes_on_where_it_stopped() -> None:
    drafter = NGramDrafter()
    drafter.extend([5, 6, 7, 8, 9, 1, 5, 6, 7])
    assert drafter.propose(3) == Proposal([8, 9, 1], 3, "ngram")


def test_repetition_is_proposed_beyond_what_is_known() -> None:
    drafter = NGramDrafter()
    drafter.extend([1, 2, 1, 2])
    assert drafter.propose(5).tokens == [1, 2, 1, 2, 1]


def test_the_most_recent_of_equal_matches_counts() -> None:
    drafter = NGramDrafter([2])
    drafter.extend([1, 2, 3, 1, 2, 4, 1, 2])
    assert drafter.propose(1).tokens == [4]


def test_nothing_follows_what_is_new() -> None:
    drafter = NGramDrafter()
    assert drafter.propose(4) is NOTHING
    drafter.extend([1, 2, 3, 4])
    assert drafter.propose(4) is NOTHING
