"""Estimates of acceptance: a prior, what was counted, and what fades."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.speculate import NOTHING, Acceptance, Proposal
from headrace.speculate.acceptance import MEMORY, POSITIONS, PRIOR, STRENGTH


def proposal(length: int = 4, matched: int = 8, drafter: str = "ngram") -> Proposal:
    return Proposal(list(range(length)), matched, drafter)


def test_before_anything_was_tried_the_prior_counts() -> None:
    chances = Acceptance().chances(proposal(matched=8))
    assert chances == [PRIOR[4]] * 4
    assert list(PRIOR) == sorted(PRIOR)


def test_one_trial_moves_the_mean_of_a_beta_prior() -> None:
    acceptance = Acceptance()
    acceptance.record(proposal(length=1), 1)
    row = (STRENGTH * PRIOR[4] + 1) / (STRENGTH + 1)
    cell = (STRENGTH * row + 1) / (STRENGTH + 1)
    assert acceptance.chances(proposal(length=2)) == pytest.approx([cell, row])


def test_what_stands_behind_a_refused_token_was_not_tried() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.record(proposal(length=4), 1)
    first, second, third, _ = acceptance.chances(proposal(length=4))
    assert first > 0.9
    assert second < 0.2
    assert second < third < first


def test_positions_lengths_and_drafters_are_told_apart() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.record(proposal(matched=2), 0)
    assert acceptance.chances(proposal(matched=2))[0] < 0.1
    assert acceptance.chances(proposal(matched=3))[0] < 0.1, "of the same class"
    assert acceptance.chances(proposal(matched=4))[0] == PRIOR[3]
    assert acceptance.chances(proposal(matched=2, drafter="suffix"))[0] == PRIOR[2]


def test_forced_tokens_are_sure() -> None:
    assert Acceptance().survival(proposal(drafter="forced")) == [1.0] * 4


def test_nothing_survives_of_nothing() -> None:
    acceptance = Acceptance()
    acceptance.record(NOTHING, 0)
    assert acceptance.survival(NOTHING) == []


def test_old_trials_fade() -> None:
    acceptance = Acceptance()
    for _ in range(20 * int(MEMORY)):
        acceptance.record(proposal(length=1), 1)
    for _ in range(int(MEMORY)):
        acceptance.record(proposal(length=1), 0)
    assert acceptance.chances(proposal(length=1))[0] < 0.4


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 99), st.integers(0, 12)), max_size=60),
    st.integers(0, 20),
    st.integers(0, 99),
)
def test_chances_are_chances(
    history: list[tuple[int, int, int]], length: int, matched: int
) -> None:
    acceptance = Acceptance()
    for size, context, accepted in history:
        acceptance.record(proposal(size, context), min(accepted, size))
    chances = acceptance.chances(proposal(length, matched))
    survival = acceptance.survival(proposal(length, matched))
    assert len(chances) == len(survival) == length
    assert all(0 < one < 1 for one in chances)
    assert survival == sorted(survival, reverse=True)


def test_it_finds_the_law_that_it_is_shown() -> None:
    acceptance, rng = Acceptance(), random.Random(7)
    law = [0.9, 0.6, 0.3] + [0.3] * POSITIONS
    for _ in range(2000):
        accepted = 0
        while accepted < 5 and rng.random() < law[accepted]:
            accepted += 1
        acceptance.record(proposal(length=5), accepted)
    found = acceptance.chances(proposal(length=3))
    assert found == pytest.approx(law[:3], abs=0.1)
