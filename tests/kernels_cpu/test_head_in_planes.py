"""A head in two planes: the product's bits, and the token found from bounds (csrc/bound.h)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_cases import random_blocks, same
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_batch
from test_head import TEAMS, Ends, compiled, nothing

from headrace.kernels.cpu import records
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import PLANES
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.weights import BlockWeight, PanelWeight
from oracle.steps import likeliest, results

ODD_SCALES = [0.0, -0.0, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 65504.0, -65504.0]
ODD_INPUTS = [np.nan, np.inf, -np.inf, 0.0, 1e-31, 1e-38, 3e38, -3e38]


def blocks_of(codes: np.ndarray, scales: np.ndarray) -> BlockWeight:
    """Q8_0 of codes [out, K] and scales [out, K / 32]."""
    out, width = codes.shape
    blocks = np.zeros((out, width // 32, 34), np.uint8)
    blocks[..., :2] = scales.astype(np.float16)[..., None].view(np.uint8)
    blocks[..., 2:] = codes.astype(np.int8).reshape(out, -1, 32).view(np.uint8)
    return BlockWeight("Q8_0", torch.from_numpy(blocks.reshape(out, -1)), (out, width))


def two(ops: CpuOperators, weight: BlockWeight) -> tuple[PanelWeight, PanelWeight]:
    """The weight in one plane and in two."""
    plain, planes = ops.prepare(weight, "linear", nothing), ops.prepare(weight, "logits", nothing)
    assert isinstance(plain, PanelWeight)
    assert isinstance(planes, PanelWeight)
    assert (plain.kind, planes.kind) == ("Q8_0", PLANES)
    assert plain.nbytes == planes.nbytes
    assert planes.low_bytes * 17 == planes.nbytes * 6
    assert plain.low_bytes == 0
    return plain, planes


def programs(
    ops: CpuOperators, weight: BlockWeight, table: torch.Tensor, rows: int
) -> tuple[CpuProgram, CpuProgram]:
    """Programs of the same head in one plane, as any other weight, and in two."""
    planes, plain = Ends(ops, weight, table), Ends(ops, weight, table)
    plain.weights.by_key[("head.weight",), "logits"] = ops.prepare(weight, "linear", nothing)
    return compiled(ops, plain, rows), compiled(ops, planes, rows)


def greedy(program: CpuProgram, batch: object) -> np.ndarray:
    """The tokens. Afterwards the head's lower bounds are those of the last step with bounds, NaN of
    the threads that were not in it: on busy cores a part of the team is put aside (ADR 0023)."""
    lower = np.empty((0, 0)) if program._head is None else program._head.head.lower
    before = lower.copy()
    lower.fill(np.nan)
    found = likeliest(program, batch)  # type: ignore[arg-type]
    if np.isnan(lower).all():
        lower[:] = before
    return np.array(found[1])


@pytest.mark.parametrize(("out", "width"), [(1, 32), (17, 96), (333, 256), (64, 896)])
def test_the_product_has_the_same_bits(ops: CpuOperators, out: int, width: int) -> None:
    """At every level, for rows that one pass takes and for more."""
    plain, planes = two(ops, random_blocks("Q8_0", out, width, seed=width))
    for rows in (1, 2, 3, 4, 5, 6, 8, 11, 12, 13, 20, 37):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
        assert same(ops.linear(x, plain, None), ops.linear(x, planes, None)), rows


def test_every_code_comes_back(ops: CpuOperators) -> None:
    """All 256 at each place of a unit: an activation of one hundred-and-twenty-seventh there."""
    codes = np.stack([np.roll(np.arange(-128, 128), -32 * i)[:32] for i in range(8)])
    plain, planes = two(ops, blocks_of(codes, np.ones((8, 1))))
    x = torch.eye(32)
    expected = torch.from_numpy(codes.T.astype(np.float32))
    for weight in (plain, planes):
        assert torch.allclose(ops.linear(x, weight, None), expected, rtol=1e-6)


@settings(max_examples=120, deadline=None)
@given(
    out=st.integers(1, 700),
    units=st.integers(1, 30),
    rows=st.integers(1, records.BOUNDED + 1),
    threads=st.sampled_from([1, 2, 5]),
    like=st.sampled_from(["model", "flat", "ties", "odd", "extreme"]),
    seed=st.integers(0, 2**31),
)
def test_the_token_is_the_one_without_bounds(
    out: int, units: int, rows: int, threads: int, like: str, seed: int
) -> None:
    ops, generator = TEAMS[threads], np.random.default_rng(seed)
    width = 32 * units
    codes = generator.integers(-127, 128, (out, width))
    scales = generator.standard_normal((out, units)) * 0.01
    table = torch.from_numpy(generator.standard_normal((20, width)).astype(np.float32))
    if like == "model":  # Few outputs stand out.
        scales *= np.exp(-4 * generator.random((out, 1)))
    elif like == "ties":
        which = generator.integers(0, max(out // 7, 1), out)
        codes, scales = codes[which], scales[which]
    elif like == "odd":
        at = generator.random(scales.shape) < 0.02
        scales[at] = generator.choice(ODD_SCALES, int(at.sum()))
        places = generator.random(table.shape) < 0.5 / width
        table.numpy()[places] = generator.choice(ODD_INPUTS, int(places.sum()))
    elif like == "extreme":  # The codes that lie farthest from the middle of their bounds.
        codes = generator.choice([-128, -121, 7, 0, 127], (out, width))
        table = table.sign() * float(generator.choice([1e-30, 1e-3, 1, 1e30, 3e38]))
    with np.errstate(over="ignore"):
        weight = blocks_of(codes, scales)
    plain, planes = programs(ops, weight, table, rows)
    batch, _ = make_batch([(3, 1)] * rows, seed=seed % 1000, vocabulary=20)
    for _ in range(3):  # With bounds; and without, where those left too many.
        assert same(greedy(planes, batch), greedy(plain, batch))
    logits, expected = (np.array(results(each, batch)[1]) for each in (planes, plain))
    assert logits.tobytes() == expected.tobytes()
    if rows <= records.BOUNDED:
        check_bounds(planes, expected)


def check_bounds(program: CpuProgram, logits: np.ndarray) -> None:
    """Check the bounds that the last step has left against these logits."""
    assert program._head is not None
    head, (rows, out) = program._head.head, logits.shape
    lower = np.fmax.reduce(head.lower[:, :rows], 0)
    for row in range(rows):
        row_of = logits[row]
        known = row_of[~np.isnan(row_of)]
        assert lower[row] == -np.inf or lower[row] <= known.max()
        for panel in range(-(-out // 16)):
            values, bound = row_of[16 * panel :][:16], head.bounds[row, panel]
            if bound == -np.inf:
                assert (values < lower[row]).all()
            else:
                assert not (values > bound).any()
                assert bound == np.inf or not np.isnan(values).any()


@pytest.fixture
def peaked() -> tuple[BlockWeight, torch.Tensor]:
    """A head whose rows are random but for a few that are like an input: 100 panels and one of 3
    outputs, and the inputs."""
    generator = np.random.default_rng(5)
    table = generator.standard_normal((8, 256)).astype(np.float32)
    codes = generator.integers(-30, 31, (1603, 256))
    for token, at in enumerate((3, 99, 700, 701, 1300, 1601, 1602, 0)):
        codes[at] = np.clip(40 * table[token], -127, 127)
    return blocks_of(codes, np.full((1603, 8), 0.01)), torch.from_numpy(table)


def test_what_cannot_be_the_token_is_not_computed(
    ops: CpuOperators, peaked: tuple[BlockWeight, torch.Tensor]
) -> None:
    weight, table = peaked
    plain, planes = programs(ops, weight, table, 8)
    batch, _ = make_batch([(3, 1)] * 3)
    assert planes._head is not None
    assert planes._head.head.spared() == 0
    for first in range(5):
        batch.tokens[:] = torch.arange(first, first + 3)
        before = worth_of(planes).left
        assert same(greedy(planes, batch), greedy(plain, batch))
        assert 1 <= worth_of(planes).left - before <= 6
        check_bounds(planes, np.array(results(plain, batch)[1]))
    worth = worth_of(planes)
    assert (worth.with_, worth.without) == (5, 0)
    assert planes._head.head.spared() == pytest.approx(6 / 17 - worth.left / 5 / 101)
    # More rows than bounds are for: nothing is left out, and nothing is counted.
    batch, _ = make_batch([(3, 1)] * (records.BOUNDED + 1))
    batch.tokens[:] = torch.arange(records.BOUNDED + 1)
    assert same(greedy(planes, batch), greedy(plain, batch))
    assert (worth.with_, worth.without) == (5, 0)


def worth_of(program: CpuProgram) -> records.HrWorth:
    assert program._head is not None
    return program._head.head.worth


def test_where_all_are_candidates_bounds_are_left_out_for_a_while(
    best: CpuOperators, peaked: tuple[BlockWeight, torch.Tensor]
) -> None:
    """After one step without, two, four, …; and a step that they serve ends that."""
    codes = np.tile(np.random.default_rng(1).integers(-127, 128, (1, 256)), (1603, 1))
    flat, table = blocks_of(codes, np.full((1603, 8), 0.01)), peaked[1]
    plain, planes = programs(best, flat, table, 2)
    batch, _ = make_batch([(3, 1)])
    skips = []
    for _ in range(12):
        assert same(greedy(planes, batch), greedy(plain, batch))
        skips.append(worth_of(planes).skip)
    assert skips == [1, 0, 2, 1, 0, 4, 3, 2, 1, 0, 8, 7]
    for _ in range(400):
        greedy(planes, batch)
    assert worth_of(planes).wait == 64


def test_a_head_of_another_kind_has_no_planes(best: CpuOperators) -> None:
    for kind in ("Q6_K", "Q5_0"):
        weight = best.prepare(random_blocks(kind, 48, 256), "logits", nothing)
        assert isinstance(weight, PanelWeight)
        assert weight.kind == kind
