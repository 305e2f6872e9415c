"""Convolutions, group norms and attention to texts against the reference and float64, with the same
bits whatever else is in the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.base.denoising import strip_of
from headrace.base.graph import AttentionSpec, GroupNormSpec, PictureConvSpec
from headrace.kernels.arrays import address
from headrace.kernels.cpu.emit import NOWHERE, Emitted, bidirectional, matrix, record
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.records import ROWS_N, HrStep
from headrace.kernels.pictured import attend, convolve

Floats = npt.NDArray[np.float32]


def drawn(*shape: int) -> Floats:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def run(ops: CpuOperators, emitted: Emitted, **step: Any) -> None:
    ops._run([emitted], HrStep(**step))


@pytest.mark.parametrize(
    "spec",
    [
        PictureConvSpec(5, 7),
        PictureConvSpec(4, 4, up=2),
        PictureConvSpec(6, 8, stride=2),
        PictureConvSpec(3, 2, side=1),
        PictureConvSpec(3, 5, side=5, up=3),
        PictureConvSpec(7, 5, stride=2),
        PictureConvSpec(4, 3, up=2, cut=1),
    ],
)
@pytest.mark.parametrize("size", [3, 16])
def test_rows_around_each_place(ops: CpuOperators, spec: PictureConvSpec, size: int) -> None:
    x = drawn(2 * spec.lines * spec.columns, size)  # Two pictures.
    wanted = np.concatenate(convolve(x, spec, lambda rows: rows))
    for first, count in ((0, len(wanted)), (len(wanted) // 3, len(wanted) // 2)):
        found = np.full((count, wanted.shape[1]), np.nan, np.float32)
        run(ops, record("AROUND", matrix(x), matrix(found), first, size, *spec), t=count)
        assert np.array_equal(found, wanted[first : first + count])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("groups", "size"), [(4, 8), (1, 5), (32, 96), (3, 60)])
def test_group_norms(ops: CpuOperators, groups: int, size: int, silu: bool) -> None:
    entries, rows = 3, 70
    x, gain, shift = drawn(entries * rows, size) + 2, drawn(size), drawn(1, size)[0]
    spec = GroupNormSpec(groups, 1e-6, silu)

    def normed(x: Floats, count: int) -> Floats:
        y = np.zeros_like(x)
        given = matrix(x), matrix(y), gain, shift, spec.eps, size, groups, silu, ROWS_N
        run(ops, record("GROUP_NORM", *given), n=len(x), b=count)
        return y

    found = normed(x, entries)
    parts = x.astype(np.float64).reshape(entries, rows, groups, -1)
    apart = parts - parts.mean((1, 3), keepdims=True)
    wanted = apart / np.sqrt((apart**2).mean((1, 3), keepdims=True) + spec.eps)
    wanted = wanted.reshape(x.shape) * gain + shift
    if silu:
        wanted /= 1 + np.exp(-wanted)
    assert np.abs(found - wanted).max() < 1e-5
    for entry in range(entries):
        own = slice(entry * rows, (entry + 1) * rows)
        assert np.array_equal(normed(x[own], 1), found[own])


@pytest.mark.parametrize("size", [12, 16, 72])
def test_attention_to_texts(ops: CpuOperators, size: int) -> None:
    heads, lengths, texts = 3, (40, 1, 9), (7, 33, 1)
    spec = AttentionSpec(0, heads, heads, size, size**-0.5, bidirectional=True, across=True)
    bounds, keys = (np.cumsum((0, *each)).astype(np.int32) for each in (lengths, texts))
    q, kv = drawn(bounds[-1], heads * size), drawn(keys[-1], 2 * heads * size)

    def mixed(q: Floats, kv: Floats, starts: npt.NDArray[Any], text: npt.NDArray[Any]) -> Floats:
        y = np.zeros_like(q)
        op = bidirectional(matrix(q), heads, size, spec.scale, matrix(y), matrix(kv))
        step = {"n": len(q), "b": len(starts) - 1, "t": len(kv)}
        run(ops, op, **step, query_starts=address(starts), text_starts=address(text))
        return y

    found = mixed(q, kv, bounds, keys)
    assert np.abs(found - attend(q, kv, spec, bounds, keys, None)).max() < 1e-5
    for at in range(len(lengths)):
        own, text = slice(*bounds[at : at + 2]), slice(*keys[at : at + 2])
        starts, begins = (np.array([0, each[at]], np.int32) for each in (lengths, texts))
        assert np.array_equal(mixed(q[own], kv[text], starts, begins), found[own])


@pytest.mark.parametrize("size", [12, 64])
def test_biases_by_distance(ops: CpuOperators, size: int) -> None:
    heads, reach, lengths = 2, 48, (48, 1, 17)
    spec = AttentionSpec(0, heads, heads, size, 1.0, bidirectional=True, reach=reach)
    bounds = np.cumsum((0, *lengths)).astype(np.int32)
    qkv, bias = drawn(bounds[-1], 3 * heads * size) / 3, drawn(heads * 2 * reach)
    y = np.zeros((len(qkv), heads * size), np.float32)
    given = matrix(qkv), heads, size, 1.0, matrix(y)
    op = bidirectional(*given, NOWHERE, bias, reach)
    run(ops, op, n=len(qkv), b=len(lengths), query_starts=address(bounds))
    q, kv = qkv[:, : heads * size], np.ascontiguousarray(qkv[:, heads * size :])
    wanted = attend(q, kv, spec, bounds, bounds, bias)
    assert np.abs(y - wanted).max() < 1e-5
    plain = attend(q, kv, spec, bounds, bounds, None)
    assert np.abs(y - plain).max() > 0.01, "the biases matter"


def test_strips_divide_what_they_are_of() -> None:
    assert [strip_of(rows) for rows in (1, 64, 4096, 625, 521, 1000)] == [1, 64, 512, 125, 1, 500]
