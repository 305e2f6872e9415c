"""Copies of hot experts: who gets which, and how even that makes ranks."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "roofline"))
from spare_experts import evenness, placed, row


@given(
    st.lists(st.integers(0, 10_000), min_size=8, max_size=64), st.integers(1, 8), st.integers(0, 9)
)
def test_every_expert_has_a_place_and_no_rank_more_than_its_share(
    loads: list[int], ranks: int, spare: int
) -> None:
    places = placed([*map(float, loads)], ranks, spare)
    found = Counter(one for place in places for one in place)
    assert sorted(found) == [*range(len(loads))]
    assert found.total() == len(loads) + spare
    assert max(map(len, places)) <= -(-(len(loads) + spare) // ranks)
    if any(loads):
        least = min(1.0, sum(loads) / ranks / max(load / found[n] for n, load in enumerate(loads)))
        assert 0 < evenness(loads, places) <= least + 1e-9


def test_by_hand() -> None:
    """The hottest gets both copies; what is left lies beside the lightest."""
    places = placed([90.0, 30.0, 20.0, 10.0], 3, 2)
    assert sorted(map(sorted, places)) == [[0, 1], [0, 2], [0, 3]]
    assert evenness([90.0, 30.0, 20.0, 10.0], places) == pytest.approx(50 / 60)


@pytest.mark.parametrize("ranks", [8, 16, 32])
def test_an_eighth_more_places_evens_out_the_published_skew(ranks: int) -> None:
    found = row("deepseek-v3", 1024, ranks)
    assert found["with copies"] >= 0.9
    assert found["with copies"] >= found["packed"] > found["as they are"] + 0.2
