"""Norms and sums by the numbers of entries against float64, and with the same bits whatever else is
in the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from headrace.base.graph import NormSpec
from headrace.kernels.arrays import address
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import NOT_QUANTISED, Emitted, matrix
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.records import HrStep

Floats = npt.NDArray[np.float32]
LENGTHS = (5, 1, 40, 17)
SPEC = NormSpec("layer", 1e-6, 1.0)


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def run(ops: CpuOperators, emitted: Emitted, lengths: tuple[int, ...]) -> None:
    starts = np.cumsum((0, *lengths)).astype(np.int32)
    sizes = {"n": int(starts[-1]), "b": len(lengths), "r": len(lengths)}
    ops._run([emitted], HrStep(**sizes, query_starts=address(starts)))


def normed(ops: CpuOperators, x: Floats, gains: Floats, shifts: Floats, *lengths: int) -> Floats:
    y, width = np.zeros_like(x), x.shape[1]
    given = matrix(x), matrix(gains), matrix(shifts), SPEC, matrix(y), NOT_QUANTISED, width
    run(ops, emit.adaptive_norm(*given), lengths)
    return y


def modulated(ops: CpuOperators, x: Floats, residual: Floats, by: Floats, *lengths: int) -> Floats:
    y = residual.copy()
    run(ops, emit.modulate(matrix(x), matrix(by), matrix(y), x.shape[1]), lengths)
    return y


@pytest.mark.parametrize("width", [2, 7, 16, 48, 100, 384])
def test_each_entry_has_numbers_of_its_own(ops: CpuOperators, width: int) -> None:
    count = sum(LENGTHS)
    x, residual = drawn(count, width), drawn(count, width, 1)[:, :, 0]
    # Columns of a wider product, as the graph has them.
    wide = drawn(len(LENGTHS), 3 * width)
    gains, shifts, factors = (wide[:, at * width : (at + 1) * width] for at in range(3))
    owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    exact = x.astype(np.float64)
    apart = exact - exact.mean(1, keepdims=True)
    plain = apart / np.sqrt((apart**2).mean(1, keepdims=True) + SPEC.eps)
    found = normed(ops, x, gains, shifts, *LENGTHS)
    wanted = plain * (1 + gains[owners].astype(np.float64)) + shifts[owners]
    assert np.abs(found - wanted).max() < 1e-5
    summed = modulated(ops, x, residual, factors, *LENGTHS)
    assert np.abs(summed - (residual + factors[owners].astype(np.float64) * exact)).max() < 1e-5
    begin = 0
    for entry, length in enumerate(LENGTHS):
        rows, own = slice(begin, begin + length), slice(entry, entry + 1)
        alone = normed(ops, x[rows], gains[own], shifts[own], length)
        assert np.array_equal(alone, found[rows])
        alone = modulated(ops, x[rows], residual[rows], factors[own], length)
        assert np.array_equal(alone, summed[rows])
        begin += length
