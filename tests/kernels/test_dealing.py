"""Which rank has which expert."""

from __future__ import annotations

import numpy as np

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


def test_nothing_is_dealt_anew_for_nothing() -> None:
    dealing = Dealing([4], 2, 0)
    assert dealing.better() is None
    dealing.went[0][:] = [10, 10, 10, 9]
    assert dealing.better() is None
