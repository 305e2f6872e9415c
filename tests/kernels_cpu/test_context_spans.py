"""Contexts of several spans of 512 positions: one result, however many threads share them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import attend, attention_by_definition, make_batch, make_kv, quantised
from kv_pages import as_pages
from test_attention import DTYPES, against_float64, one_of, share

from headrace.kernels.cpu import library
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.operators import StepBatch

SPAN = 512


@pytest.fixture(scope="module")
def teams() -> dict[int, CpuOperators]:
    """More threads than this machine has cores: for who computes what, not for speed."""
    return {threads: CpuOperators(threads) for threads in range(1, 10)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("entries", "heads", "kv_heads", "size", "window", "softcap", "block_size"),
    [
        ([(2_000, 1)], 16, 2, 64, None, None, 16),  # cut into parts, a span or several each
        ([(511, 1), (512, 1), (1_023, 1), (1_024, 1)], 4, 1, 32, None, None, 16),
        ([(1_400, 1)], 4, 1, 32, 512, None, 16),
        ([(1_400, 5)], 10, 1, 48, 600, 5.0, 8),  # one product's rows enter a span apart
        ([(505, 15)], 7, 1, 32, None, None, 16),
        ([(1_020, 30), (10, 1)], 3, 1, 16, 520, None, 32),
    ],
)
def test_against_float64(
    teams: dict[int, CpuOperators],
    dtype: torch.dtype,
    entries: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
) -> None:
    chosen = [teams[1], teams[3]]
    against_float64(chosen, dtype, entries, heads, kv_heads, size, window, softcap, block_size)


def rows_alone(
    ops: CpuOperators, q: torch.Tensor, kv: object, batch: StepBatch, softcap: float | None
) -> torch.Tensor:
    """Each token as a step of its own."""
    results = []
    bounds = batch.query_starts.tolist()
    for entry, (first, last) in enumerate(itertools.pairwise(bounds)):
        for row in range(first, last):
            alone = one_of(batch, row, row + 1, entry)
            results.append(attend(ops, q[row : row + 1], kv, alone, 0, 0.2, softcap))  # type: ignore[arg-type]
    return torch.cat(results)


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    heads=st.sampled_from([(4, 1), (14, 2), (3, 3), (20, 1)]),
    block_size=st.sampled_from([8, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 1, 300, SPAN, SPAN + 1, 700]),
    softcap=st.sampled_from([None, 5.0]),
    few=st.integers(1, 9),
    many=st.integers(1, 9),
)
def test_a_row_knows_neither_threads_nor_batch(
    teams: dict[int, CpuOperators],
    data: st.DataObject,
    heads: tuple[int, int],
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    few: int,
    many: int,
) -> None:
    start = st.one_of(
        st.integers(0, 3 * SPAN),
        st.sampled_from([SPAN - 1, SPAN, 2 * SPAN - 1, 2 * SPAN, 4 * SPAN + 7]),
    )
    entry = st.tuples(start, st.one_of(st.just(1), st.integers(1, 30)))
    entries = data.draw(st.lists(entry, min_size=1, max_size=4))
    batch, blocks = make_batch(entries, block_size=block_size, window=window)
    if window is None and data.draw(st.booleans()):  # a prefix in common, gone through together
        share(batch, 0, len(entries), min(start for start, _ in entries) // block_size)
    kv = as_pages(quantised(make_kv(blocks, heads[1], block_size, 16), dtype))
    torch.manual_seed(0)
    q = 3 * torch.randn(len(batch.tokens), heads[0], 16)
    want = attend(teams[few], q, kv, batch, 0, 0.2, softcap)
    assert want.isfinite().all()
    assert torch.equal(attend(teams[many], q, kv, batch, 0, 0.2, softcap), want)
    assert torch.equal(rows_alone(teams[many], q, kv, batch, softcap), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_levels_and_threads_give_the_same_bits(dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(1_600, 1), (500, 30), (4, 1)])
    torch.manual_seed(0)
    kv = as_pages(quantised(make_kv(blocks, 1, 16, 32), dtype))
    q = 3 * torch.randn(len(batch.tokens), 4, 32)
    results = [
        attend(CpuOperators(threads, name), q, kv, batch, 0, 0.2, None)
        for name in library.LEVELS
        if library.level(name) is not None
        for threads in (1, 5)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_nan_stays_in_its_row(teams: dict[int, CpuOperators]) -> None:
    batch, blocks = make_batch([(1_700, 1), (1_300, 1)])
    kv = as_pages(make_kv(blocks, 1, 16, 16))
    q = torch.randn(2, 4, 16)
    want = attend(teams[1], q, kv, batch, 0, 0.2, None).view(2, 4, 16)
    q[0, 1, 3] = float("nan")
    for ops in teams.values():
        got = attend(ops, q, kv, batch, 0, 0.2, None).view(2, 4, 16)
        assert got[0, 1].isnan().all()
        got[0, 1] = want[0, 1]
        assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [2, 5])
def test_values_far_apart_from_span_to_span(teams: dict[int, CpuOperators], threads: int) -> None:
    """A span whose weights vanish beside another's, before and behind it: no NaN, nothing lost."""
    batch, blocks = make_batch([(4 * SPAN - 1, 1)])
    kv = make_kv(blocks, 1, 16, 16)
    table = batch.groups[0].tables[0].long()
    for span, value in enumerate((-300.0, 300.0, -300.0, 0.0)):
        kv.k[table[32 * span : 32 * span + 32]] = value
    q = torch.full((1, 1, 16), 1.0)
    got = attend(teams[threads], q, as_pages(kv), batch, 0, 1.0, None)
    want = attention_by_definition(q, kv, batch, 1.0, None)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-6)


def test_more_parts_than_threads(teams: dict[int, CpuOperators]) -> None:
    """Many items, some of them cut: of odd lengths, and more parts than threads."""
    batch, blocks = make_batch([(3_000, 1), (700, 2), (90, 1), (1_025, 1), (511, 3), (40, 1)])
    kv = as_pages(make_kv(blocks, 2, 16, 16))
    q = torch.randn(len(batch.tokens), 6, 16)
    want = attend(teams[1], q, kv, batch, 0, 0.2, None)
    for ops in teams.values():
        for _ in range(5):
            assert torch.equal(attend(ops, q, kv, batch, 0, 0.2, None), want)
