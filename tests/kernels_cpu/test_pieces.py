"""A part in pieces: whatever runs between two of them, an item has the rows that it has alone and
by operators called one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.base.slices import slices
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.pieces import LoweredPieces, pieces_of
from headrace.kernels.in_pieces import InterpretedPieces
from headrace.kernels.operators import StepBatch
from headrace.kernels.prepared import Prepared
from headrace.kernels.weights import DenseWeight
from headrace.models.sounds import SoundArch, describe_sounds
from headrace.models.whisper import WhisperArch

ARCH = SoundArch(WhisperArch(64, 2, 1, 8, 40, 60).part(2, 60), 8, 48, 0)
GRAPH = describe_sounds(ARCH)


@pytest.fixture(scope="module")
def operators() -> CpuOperators:
    return CpuOperators(2)


@pytest.fixture(scope="module")
def weights(operators: CpuOperators) -> Prepared:
    draw, made = np.random.default_rng(1), Prepared()
    for ref in GRAPH.weights():
        size = sum(ref.rows)
        if ref.role == "vector":
            made.by_key[ref.key] = draw.normal(1, 0.2, size).astype(np.float32)
        else:
            data = draw.normal(0, 0.2, (size, ref.width)).astype(np.float32)
            made.by_key[ref.key] = operators.prepare(DenseWeight(data), ref.role, None)  # type: ignore[arg-type]
    return made


def step(units: int) -> StepBatch:
    positions = np.arange(units)
    bounds, lengths = np.array([0, units], np.int32), np.array([units], np.int32)
    none = np.zeros(0, np.int64)
    return StepBatch(positions, positions, bounds, lengths, [], none, units, units)


def features(units: int) -> np.ndarray:
    rows = np.random.default_rng(units).normal(size=(2 * units + 1, 8))
    return rows.astype(np.float32)


def alone(runner: Any, units: int) -> np.ndarray:
    item = runner.begin(step(units), features(units))
    for bound in slices(GRAPH)[1:]:
        runner.run(item, bound)
    return np.array(runner.rows(item, GRAPH.outputs["hidden"]))


@pytest.mark.parametrize("units", [2, 16, 34, 60])
def test_records_and_operators_agree(
    operators: CpuOperators, weights: Prepared, units: int
) -> None:
    pieces = pieces_of(operators, GRAPH, weights, 60)
    assert pieces is not None
    found = alone(pieces, units)
    assert found.shape == (units // 2, 48)
    assert np.array_equal(found, alone(pieces, units)), "nothing is left of the run before"
    wanted = alone(InterpretedPieces(operators, GRAPH, weights), units)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_items_take_turns(operators: CpuOperators, weights: Prepared) -> None:
    """Piece by piece in turn, one of them begun late; one is forgotten halfway."""
    pieces = pieces_of(operators, GRAPH, weights, 60)
    assert isinstance(pieces, LoweredPieces)
    bounds = slices(GRAPH)[1:]
    sizes = (60, 34, 12)
    wanted = {units: alone(pieces, units) for units in sizes}
    items = {units: pieces.begin(step(units), features(units)) for units in sizes}
    order = [60, 34, 60, 12, 34, 60, 34, 60, 34, 60, 34]  # 12 gets no further.
    found: dict[int, np.ndarray] = {}
    done = dict.fromkeys(sizes, 0)
    for units in order:
        pieces.run(items[units], bounds[done[units]])
        done[units] += 1
        if done[units] == len(bounds):
            found[units] = pieces.rows(items[units], GRAPH.outputs["hidden"]).copy()
    assert found.keys() == {60, 34}
    assert all(np.array_equal(found[units], wanted[units]) for units in found)


def test_who_has_no_records_is_run_otherwise(weights: Prepared) -> None:
    class Others:
        host, team = True, None

    assert pieces_of(Others(), GRAPH, weights, 60) is None  # type: ignore[arg-type]
