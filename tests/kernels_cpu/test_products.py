"""Products from panels against float64, and row invariance bit for bit."""

from __future__ import annotations

import os

import pytest
import torch
from cpu_cases import KINDS, exact_product, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.weights import BlockWeight, DenseWeight, StackedWeight

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 17, 18, 25, 64)


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: float = 2e-6,
    among: torch.Tensor | None = None,
) -> None:
    """Compare, relative to the largest number of `among`, or of `want`: one result alone may be
    what is left of large terms."""
    scale = (want if among is None else among).abs().max().clamp_min(1e-30)
    assert torch.isfinite(got).all()
    assert ((got.double() - want).abs().max() / scale) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("out", "width"), [(16, 256), (40, 512), (1, 768), (33, 4864)])
def test_against_float64(ops: CpuOperators, kind: str, out: int, width: int) -> None:
    weight = random_blocks(kind, out, width)
    packed = pack(weight, ops.team)
    torch.manual_seed(1)
    x, bias = torch.randn(max(ROWS), width), torch.randn(out)
    want = exact_product(x, weight) + bias
    for rows in ROWS:
        close(ops.linear(x[:rows], packed, bias), want[:rows], among=want)


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "Q8_0", "MXFP4", "IQ4_NL"])
def test_widths_of_32(ops: CpuOperators, kind: str) -> None:
    for width in (32, 96, 544):
        weight = random_blocks(kind, 20, width)
        x = torch.randn(9, width)
        close(ops.linear(x, pack(weight, ops.team), None), exact_product(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_levels_and_threads_agree(best: CpuOperators, ops: CpuOperators, kind: str) -> None:
    weight = random_blocks(kind, 56, 512, seed=3)
    x = torch.randn(40, 512)
    one = CpuOperators(1, ops.team.level)
    want = best.linear(x, pack(weight, best.team), None)
    for other in (ops, one):
        for rows in (1, 15, 40):
            got = other.linear(x[:rows], pack(weight, other.team), None)
            assert torch.equal(got, want[:rows])


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    out=st.integers(1, 100),
    blocks=st.integers(1, 4),
    first=st.integers(0, 30),
    rows=st.integers(1, 40),
)
def test_row_invariance(kind: str, out: int, blocks: int, first: int, rows: int) -> None:
    ops = CpuOperators(2, os.environ.get("KERNELS_LEVEL_UNDER_TEST"))
    weight = pack(random_blocks(kind, out, 256 * blocks), ops.team)
    torch.manual_seed(0)
    x = torch.randn(64, 256 * blocks) * torch.logspace(-3, 3, 64).unsqueeze(1)
    whole = ops.linear(x, weight, None)
    assert torch.equal(ops.linear(x[first : first + rows], weight, None), whole[first:][:rows])


@pytest.mark.parametrize("kind", KINDS)
def test_every_count_of_rows(ops: CpuOperators, kind: str) -> None:
    """Each way of cutting rows into passes, and every kernel of it: the bits of the whole."""
    weight = pack(random_blocks(kind, 33, 256), ops.team)
    x = torch.randn(44, 256)
    whole = ops.linear(x, weight, None)
    for rows in range(1, len(x)):
        assert torch.equal(ops.linear(x[:rows], weight, None), whole[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out", [144, 16 * 24 - 3])
def test_runs_of_panels_have_the_bits_of_one_row(ops: CpuOperators, kind: str, out: int) -> None:
    """So many panels for one thread that it takes two at once, and one that is left over."""
    one = CpuOperators(1, ops.team.level)
    weight, x = pack(random_blocks(kind, out, 512), one.team), torch.randn(13, 512)
    alone = torch.cat([one.linear(row[None], weight, None) for row in x])
    for rows in range(2, 14):
        assert torch.equal(one.linear(x[:rows], weight, None), alone[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_many_passes(ops: CpuOperators, kind: str) -> None:
    weight = random_blocks(kind, 33, 768)
    packed = pack(weight, ops.team)
    x = torch.randn(1100, 768)
    got = ops.linear(x, packed, None)
    close(got, exact_product(x, weight))
    assert torch.equal(ops.linear(x[700:701], packed, None), got[700:701])


def test_stacked_parts_of_different_kinds(ops: CpuOperators) -> None:
    kinds, outs = ("Q5_0", "Q5_0", "Q8_0", "Q4_K"), (90, 18, 17, 3)
    parts = [random_blocks(k, o, 512, seed=i) for i, (k, o) in enumerate(zip(kinds, outs))]  # noqa: B905
    packed = StackedWeight(tuple(pack(part, ops.team) for part in parts))
    bias = torch.randn(sum(outs))
    for rows in (1, 8):
        x = torch.randn(rows, 512)
        want = torch.cat([exact_product(x, part) for part in parts], 1) + bias
        close(ops.linear(x, packed, bias), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("out", "width"), [(50, 48), (16, 7), (3, 1), (130, 300)])
def test_dense(ops: CpuOperators, dtype: torch.dtype, out: int, width: int) -> None:
    data = torch.randn(out, width).to(dtype)
    packed = pack(DenseWeight(data), ops.team)
    x = torch.randn(21, width)
    whole = ops.linear(x, packed, None)
    close(whole, x.double() @ data.double().T, 1e-5)
    for rows in (1, 2, 3, 8, 13):
        assert torch.equal(ops.linear(x[:rows], packed, None), whole[:rows])


def test_a_huge_vocabulary(best: CpuOperators) -> None:
    weight = random_blocks("Q8_0", 151_936, 64)
    x = torch.randn(2, 64)
    close(best.linear(x, pack(weight, best.team), None), exact_product(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_codes(ops: CpuOperators, kind: str) -> None:
    """All bits set and all clear: the widest sums of every format, activations at ±127."""
    for byte in (0, 255):
        weight = random_blocks(kind, 16, 256)
        blocks = weight.data.view(16, -1)
        keep = random_blocks(kind, 16, 256)
        from cpu_cases import BLOCKS

        _, size, halves = BLOCKS[kind]
        shaped = blocks.view(16, -1, size)
        shaped[:] = byte
        for at in halves:
            shaped[..., at : at + 2] = keep.data.view(16, -1, size)[..., at : at + 2]
        packed = pack(BlockWeight(kind, blocks, (16, 256)), ops.team)
        for x in (torch.ones(7, 256), -torch.ones(7, 256)):
            close(ops.linear(x, packed, None), exact_product(x, weight), 1e-5)


def test_zeros_denormals_and_the_very_large(ops: CpuOperators) -> None:
    weight = random_blocks("Q5_0", 32, 64)
    packed = pack(weight, ops.team)
    x = torch.zeros(4, 64)
    x[1] = 1e-40  # denormal: counts as zero
    x[2] = 1e36
    x[3, :32], x[3, 32:] = 1e-20, 1.0
    got = ops.linear(x, packed, None)
    assert (got[:2] == 0).all()
    close(got[2:], exact_product(x[2:], weight), 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_a_number_spreads_over_its_row_and_no_further(ops: CpuOperators, bad: float) -> None:
    for kind in ("Q5_0", "Q4_K", "Q6_K", "Q8_0"):
        weight = pack(random_blocks(kind, 20, 256), ops.team)
        for rows in (3, 9):
            x = torch.randn(rows, 256)
            clean = ops.linear(x, weight, None)
            x[1, 100] = bad
            got = ops.linear(x, weight, None)
            assert got[1].isnan().all()
            others = [row for row in range(rows) if row != 1]
            assert torch.equal(got[others], clean[others])
