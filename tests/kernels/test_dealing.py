"""Placement of experts on ranks."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.dealing import Dealing


def test_experts_are_dealt_out_in_runs_of_as_many() -> None:
    dealing = Dealing([8, 5], 2, 0)
    assert [owners.tolist() for owners in dealing.owners] == [[0] * 4 + [1] * 4, [0] * 3 + [1] * 2]


def test_the_costly_ones_are_dealt_out_evenly() -> None:
    dealing = Dealing([6], 2, 0)
    dealing.went[0][:] = [90, 80, 70, 0, 0, 0]
    found = dealing.better()
    assert found is not None
    shares = np.bincount(found[0], [90, 80, 70, 0, 0, 0], 2)
    assert shares.max() == 150
    steps = dealing.owners[0]
    dealing.set(found)
    assert steps.tolist() == found[0], "what the steps read is changed, and not another array"
    assert dealing.went[0].tolist() == [45, 40, 35, 0, 0, 0], "what was long ago counts for less"
    assert dealing.better() is None


def test_ranks_that_counted_the_same_come_to_the_same_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.dealing.STEPS", 4)
    ranks = [Dealing([6], 2, rank) for rank in range(2)]
    for rank in ranks:
        rank.went[0][:] = [90, 80, 70, 0, 0, 0]
        rank.begin(3)
        assert rank.owners[0].tolist() == [0, 0, 0, 1, 1, 1]
        rank.begin(4)
        assert rank.sign == ranks[0].sign
    assert ranks[0].owners[0].tolist() == ranks[1].owners[0].tolist() != [0, 0, 0, 1, 1, 1]


def test_what_a_failed_step_counted_is_forgotten() -> None:
    """Ranks may have come to different places of it."""
    ranks = [Dealing([6], 2, rank) for rank in range(2)]
    ranks[0].went[0][:] = [90, 80, 70, 0, 0, 0]
    for rank in ranks:
        rank.forget()
        rank.begin(0)
    assert ranks[0].owners[0].tolist() == ranks[1].owners[0].tolist()


def test_another_map_has_another_sign() -> None:
    ranks = [Dealing([6, 4], 2, rank) for rank in range(2)]
    assert ranks[0].sign == ranks[1].sign
    ranks[1].set([ranks[1].owners[0].tolist(), [1, 0, 0, 1]])
    assert ranks[0].sign != ranks[1].sign
    assert all(rank.sign % 4 == 0 and rank.sign < 2**31 for rank in ranks)


def test_nothing_is_dealt_anew_for_nothing() -> None:
    dealing = Dealing([4], 2, 0)
    assert dealing.better() is None
    dealing.went[0][:] = [10, 10, 10, 9]
    assert dealing.better() is None
