"""Attention, rope and the KV write against the reference; row invariance bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import attend, attention_by_definition, make_batch, make_kv, one_of, quantised
from kv_pages import as_pages, from_pages

from headrace.base.graph import AttentionSpec
from headrace.kernels.cpu import emit, library
from headrace.kernels.cpu.emit import NOT_QUANTISED, matrix
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.records import ROWS_N, HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.operators import KvLayer, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators

REFERENCE = ReferenceOperators(torch.float32)
SHAPES = [  # heads, KV heads, head size
    (14, 2, 64),
    (4, 1, 256),
    (8, 8, 16),
    (6, 3, 80),
    (32, 4, 128),
    (100, 1, 16),
]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_against_the_reference(
    ops: CpuOperators, heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    batch, blocks = make_batch([(0, 1), (0, 70), (130, 1), (63, 5), (5, 40)], window=window)
    kv = make_kv(blocks, kv_heads, 16, size)
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), heads, size)
    want = attend(REFERENCE, q, kv, batch, 0, size**-0.5, None)
    got = attend(ops, q, as_pages(kv), batch, 0, size**-0.5, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_block_sizes_and_softcap(ops: CpuOperators, block_size: int, softcap: float | None) -> None:
    batch, blocks = make_batch([(0, 33), (200, 3), (17, 1)], block_size=block_size)
    kv = make_kv(blocks, 2, block_size, 32)
    q = 3 * torch.randn(len(batch.tokens), 4, 32)
    want = attend(REFERENCE, q, kv, batch, 0, 0.3, softcap)
    got = attend(ops, q, as_pages(kv), batch, 0, 0.3, softcap)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


CODES = (torch.int8, torch.uint8)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, *CODES]
"""Types of the KV cache: uint8 is k8v4, V values two to a byte, with keys in int8."""
EXACT = (torch.float32, torch.float16)
ERRORS = {torch.bfloat16: 4e-3} | dict.fromkeys(CODES, 4e-4) | dict.fromkeys(EXACT, 2e-6)
"""Largest error, in parts of the root mean square. bf16: queries and weights are rounded to bf16
(2⁻⁹ at most); codes: to whole numbers of 15 bits."""


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def against_float64(
    teams: Sequence[CpuOperators],
    dtype: torch.dtype,
    entries: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
    sharpness: float = 1.5,
) -> None:
    torch.manual_seed(0)
    batch, blocks = make_batch(entries, window=window, block_size=block_size)
    kv = quantised(make_kv(blocks, kv_heads, block_size, size), dtype)
    q = torch.randn(len(batch.tokens), heads, size)
    want = attention_by_definition(q, kv, batch, sharpness * size**-0.5, softcap)
    for ops in teams:
        got = attend(ops, q, as_pages(kv), batch, 0, sharpness * size**-0.5, softcap)
        assert error(got, want) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("entries", "heads", "kv_heads", "size", "window", "softcap", "block_size"),
    [
        ([(0, 1)], 1, 1, 16, None, None, 16),
        ([(0, 33), (100, 1), (1, 2)], 6, 2, 64, None, None, 16),
        ([(0, 29), (64, 3), (127, 1)], 14, 2, 64, 20, None, 16),
        ([(61, 7), (0, 5)], 8, 8, 80, None, 5.0, 8),
        ([(250, 9), (0, 1)], 7, 1, 128, 100, 3.0, 32),
        ([(1_500, 1)], 4, 2, 48, None, None, 128),
    ],
)
def test_every_kv_dtype_against_float64(
    ops: CpuOperators,
    dtype: torch.dtype,
    entries: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
) -> None:
    against_float64([ops], dtype, entries, heads, kv_heads, size, window, softcap, block_size)


def share(batch: StepBatch, first: int, last: int, blocks: int) -> None:
    """Let the tables of entries first … last − 1 begin with the same blocks."""
    tables = batch.groups[0].tables
    tables[first:last, :blocks] = tables[first, :blocks].clone()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 60])
def test_all_levels_give_the_same_bits(dtype: torch.dtype, window: int | None) -> None:
    batch, blocks = make_batch([(0, 70), (130, 1), (130, 2), (135, 1), (200, 1)], window=window)
    share(batch, 1, 5, 8)
    torch.manual_seed(0)
    kv = as_pages(quantised(make_kv(blocks, 2, 16, 64), dtype))
    q = 3 * torch.randn(len(batch.tokens), 14, 64)
    results = [
        attend(CpuOperators(1, name), q, kv, batch, 0, 0.125, None)
        for name in library.LEVELS
        if library.level(name) is not None
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
def test_a_row_does_not_know_its_chunk_or_its_batch(
    ops: CpuOperators, window: int | None, dtype: torch.dtype
) -> None:
    batch, blocks = make_batch([(0, 1), (0, 150), (90, 1)], window=window)
    kv = as_pages(quantised(make_kv(blocks, 2, 16, 64), dtype))
    q = torch.randn(len(batch.tokens), 14, 64)
    whole = attend(ops, q, kv, batch, 0, 0.125, None)
    for first, last in ((1, 2), (1, 14), (64, 65), (60, 70), (100, 151), (150, 151)):
        part = attend(ops, q[first:last], kv, one_of(batch, first, last, 1), 0, 0.125, None)
        assert torch.equal(part, whole[first:last]), (first, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
def test_sinks_take_their_share(window: int | None, dtype: torch.dtype) -> None:
    """By definition: a further key of zeros with the sink as its score and a value of zeros. Far
    above and far below the other scores too; at every level, in chunks and by several threads."""
    batch, blocks = make_batch([(0, 1), (0, 150), (1300, 1), (700, 3)], window=window)
    made = quantised(make_kv(blocks, 2, 16, 64), dtype)
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), 14, 64)
    sinks = torch.cat([3 * torch.randn(11), torch.tensor([60.0, -60.0, 1e4])])
    without = attention_by_definition(q, made, batch, 0.125, None)
    want = attention_by_definition(q, made, batch, 0.125, None, sinks)
    got = attend(REFERENCE, q, made, batch, 0, 0.125, None, sinks)
    assert error(got, want) < 1e-5 if dtype == torch.float32 else error(got, want) < 2e-2
    results = [
        attend(CpuOperators(threads, name), q, as_pages(made), batch, 0, 0.125, None, sinks)
        for threads, name in [(1, name) for name in library.LEVELS] + [(2, None), (3, None)]
        if name is None or library.level(name) is not None
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    assert error(results[0], want) < (2e-5 if dtype == torch.float32 else 2e-2)
    assert error(without, want) > 0.1
    assert (results[0].view(-1, 14, 64)[:, 13] == 0).all()
    for first, last in ((1, 14), (64, 65), (100, 151)):
        small = one_of(batch, first, last, 1)
        part = attend(CpuOperators(1), q[first:last], as_pages(made), small, 0, 0.125, None, sinks)
        assert torch.equal(part, results[0][first:last]), (first, last)


def see_each_other(batch: StepBatch, *runs: tuple[int, int]) -> None:
    """Let the tokens first … behind − 1 of each run, which are of one entry, see each other."""
    batch.reach = batch.positions.clone()
    for first, behind in runs:
        batch.reach[first:behind] = batch.positions[behind - 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 5.0), (60, None), (7, None)])
def test_tokens_that_see_each_other(
    dtype: torch.dtype, window: int | None, softcap: float | None
) -> None:
    """Runs that begin and end inside tiles, one over several of them, one behind tiles that other
    entries share, one over spans: at every level, by several threads, and in any chunk that holds
    the run or what is left of it."""
    entries = [(0, 230), (128, 1), (128, 9), (130, 1), (1_015, 90)]
    batch, blocks = make_batch(entries, window=window)
    share(batch, 1, 4, 8)
    see_each_other(batch, (5, 21), (60, 70), (90, 210), (232, 240), (251, 321))
    torch.manual_seed(0)
    made = quantised(make_kv(blocks, 2, 16, 64), dtype)
    q = torch.randn(len(batch.tokens), 14, 64)
    want = attention_by_definition(q, made, batch, 0.2, softcap)
    kv, results = as_pages(made), []
    for threads, name in [*((1, name) for name in library.LEVELS), (2, None), (3, None)]:
        if name is None or library.level(name) is not None:
            ops = CpuOperators(threads, name)
            results.append(attend(ops, q, kv, batch, 0, 0.2, softcap))
    assert error(results[0], want) < ERRORS[dtype]
    assert all(torch.equal(result, results[0]) for result in results)
    assert error(attend(REFERENCE, q, made, batch, 0, 0.2, softcap), want) < 4e-3
    plain = replace(batch, reach=None)
    assert error(attention_by_definition(q, made, plain, 0.2, softcap), want) > 1e-2
    for first, last, entry in ((5, 21, 0), (17, 60, 0), (90, 211, 0), (200, 230, 0), (251, 331, 4)):
        small = one_of(batch, first, last, entry)
        assert batch.reach is not None
        small.reach = batch.reach[first:last].clone()
        part = attend(CpuOperators(2), q[first:last], kv, small, 0, 0.2, softcap)
        assert torch.equal(part, results[0][first:last]), (first, last)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 200),
    cut=st.integers(0, 199),
    count=st.integers(1, 40),
    heads=st.sampled_from([(14, 2), (3, 1), (8, 8)]),
    others=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_row_invariance(
    length: int,
    cut: int,
    count: int,
    heads: tuple[int, int],
    others: list[tuple[int, int]],
    dtype: torch.dtype,
) -> None:
    ops = CpuOperators(2)
    batch, blocks = make_batch([(0, length), *others])
    kv = as_pages(quantised(make_kv(blocks, heads[1], 16, 32), dtype))
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), heads[0], 32)
    whole = attend(ops, q, kv, batch, 0, 0.2, None)
    first = cut % length
    last = min(length, first + count)
    part = attend(ops, q[first:last], kv, one_of(batch, first, last, 0), 0, 0.2, None)
    assert torch.equal(part, whole[first:last])


@settings(max_examples=30, deadline=None)
@given(
    data=st.data(),
    prefix=st.integers(0, 5),
    heads=st.sampled_from([(14, 2), (3, 1), (8, 8), (12, 2)]),
    block_size=st.sampled_from([8, 16, 32, 64]),
    threads=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from(DTYPES),
    softcap=st.sampled_from([None, 5.0]),
)
def test_entries_that_share_blocks_compute_what_each_does_alone(
    data: st.DataObject,
    prefix: int,
    heads: tuple[int, int],
    block_size: int,
    threads: int,
    dtype: torch.dtype,
    softcap: float | None,
) -> None:
    """Runs of such entries go through the tiles of 64 positions that they share together."""
    shared = prefix * 64
    entry = st.tuples(
        st.integers(shared, shared + 90), st.one_of(st.integers(1, 3), st.integers(1, 40))
    )
    entries = data.draw(st.lists(entry, min_size=2, max_size=20))
    batch, blocks = make_batch(entries, block_size=block_size)
    # Two prompts, and some that have only a part of the second in common.
    cut = data.draw(st.integers(0, len(entries)))
    share(batch, 0, max(cut, 1), shared // block_size)
    if cut < len(entries):
        share(batch, cut, len(entries), shared // block_size)
        part = data.draw(st.integers(cut + 1, len(entries)))
        share(batch, part - 1, len(entries), shared // block_size // 2)
    kv = as_pages(quantised(make_kv(blocks, heads[1], block_size, 32), dtype))
    torch.manual_seed(0)
    q = 3 * torch.randn(len(batch.tokens), heads[0], 32)
    ops = CpuOperators(threads)
    whole = attend(ops, q, kv, batch, 0, 0.2, softcap)
    bounds = batch.query_starts.tolist()
    for row, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone = attend(ops, q[first:last], kv, one_of(batch, first, last, row), 0, 0.2, softcap)
        assert torch.equal(alone, whole[first:last]), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_what_lies_behind_a_sequence_does_not_matter(
    ops: CpuOperators, dtype: torch.dtype, block_size: int
) -> None:
    batch, blocks = make_batch([(0, 21), (40, 1)], block_size=block_size)
    kv = quantised(make_kv(blocks, 2, block_size, 32), dtype)
    q = torch.randn(len(batch.tokens), 4, 32)
    want = attend(ops, q, as_pages(kv), batch, 0, 0.2, None)
    used = {int(b) for row in batch.groups[0].tables for b in row}
    unwritten = torch.zeros(blocks, block_size, dtype=torch.bool)
    unwritten[list(set(range(blocks)) - used)] = True
    for row, length in enumerate(batch.lengths.tolist()):
        last = int(batch.groups[0].tables[row, (length - 1) // block_size])
        unwritten[last, length % block_size :] = length % block_size > 0
    where = unwritten[:, None].expand(-1, 2, -1)
    for name in ("k_scale", "v_scale") if dtype in CODES else ("k", "v"):
        tensor = getattr(kv, name)
        tensor[where] = float("nan") if name.startswith("k") else float("inf")
    assert torch.equal(attend(ops, q, as_pages(kv), batch, 0, 0.2, None), want)


def test_what_other_caches_left_in_the_work_space_does_not_matter(ops: CpuOperators) -> None:
    """Pages of 8 are gathered, and of an odd length the last pair is gathered by half."""
    batch, blocks = make_batch([(20, 1)], block_size=8)
    kv = make_kv(blocks, 2, 8, 32)
    coded = as_pages(quantised(kv, torch.int8))
    q = torch.randn(1, 4, 32)
    want = attend(ops, q, coded, batch, 0, 0.2, None)
    nan = torch.full_like(kv.k, float("nan"))
    assert attend(ops, q, KvLayer(nan, nan.clone()), batch, 0, 0.2, None).isnan().all()
    assert torch.equal(attend(ops, q, coded, batch, 0, 0.2, None), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("start", [1_500, 8_191])
@pytest.mark.parametrize("sharpness", [1e-3, 1.5, 6.0])
def test_codes_in_flat_and_peaked_contexts(
    ops: CpuOperators, dtype: torch.dtype, start: int, sharpness: float
) -> None:
    """All positions weigh alike, or a few nearly everything: weights of fifteen bits are relative
    to the largest of 64 positions, whatever the others are. With seven bits 1,500 flat ones were
    1.6 % off. Where a seventh of the blocks have a value a hundred times as large, whose scale is
    all others' measure, half as far off as bf16."""
    against_float64([ops], dtype, [(start, 1)], 14, 2, 64, None, None, 16, sharpness)
    torch.manual_seed(0)
    batch, blocks = make_batch([(start, 1)])
    kv = make_kv(blocks, 2, 16, 64)
    kv.v[batch.groups[0].tables[0, ::7].long(), :, 5] *= 100  # at one position of each
    kv = quantised(kv, dtype)
    q = torch.randn(1, 14, 64)
    want = attention_by_definition(q, kv, batch, sharpness / 8, None)
    assert error(attend(ops, q, as_pages(kv), batch, 0, sharpness / 8, None), want) < 2e-3


def attend_coarsely(
    ops: CpuOperators, q: torch.Tensor, kv: KvLayer, batch: StepBatch, scale: float
) -> torch.Tensor:
    """With queries and weights of eight bits; q [N, heads, E]."""
    rows, heads, size = q.shape
    spec = AttentionSpec(0, heads, kv.k.shape[1], size, scale)
    y = torch.empty(rows, heads * size)
    cache = emit.kv(kv, heads, spec.kv_heads, 0)
    given = cache, matrix(q.reshape(rows, -1)), matrix(y), NOT_QUANTISED, None, spec, ROWS_N
    ops.team.run(emit.program([emit.attention(*given, coarse=True)]), 1, fill_step(HrStep(), batch))
    return y


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (14, 2)])
@pytest.mark.parametrize("sharpness", [1e-3, 1.5, 6.0])
def test_coarse_rows(dtype: torch.dtype, heads: int, kv_heads: int, sharpness: float) -> None:
    """Eight bits of queries and weights: within 1.5 % of float64 where few positions weigh, beside
    0.04 % of fifteen bits; the same bits at every level, in a chunk or alone."""
    torch.manual_seed(0)
    batch, blocks = make_batch([(0, 70), (1_400, 13)])
    kv = quantised(make_kv(blocks, kv_heads, 16, 64), dtype)
    q, scale = torch.randn(len(batch.tokens), heads, 64), sharpness / 8
    want = attention_by_definition(q, kv, batch, scale, None)
    results = [
        attend_coarsely(CpuOperators(1, name), q, as_pages(kv), batch, scale)
        for name in library.LEVELS
        if library.level(name) is not None
    ]
    assert all(torch.equal(result, results[0]) for result in results)
    fine = attend(CpuOperators(1), q, as_pages(kv), batch, 0, scale, None)
    assert error(fine, want) < 4e-4 < error(results[0], want) < 1.5e-2
    alone = one_of(batch, len(q) - 1, len(q), 1)
    last = attend_coarsely(CpuOperators(2), q[-1:], as_pages(kv), alone, scale)
    assert torch.equal(last, results[0][-1:])


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("window", [None, 30])
def test_a_value_that_is_no_number_is_for_those_who_see_it(
    ops: CpuOperators, dtype: torch.dtype, window: int | None
) -> None:
    """Neither before it in its own tile nor, with a window, long behind it."""
    batch, blocks = make_batch([(0, 120)], window=window)
    kv = quantised(make_kv(blocks, 2, 16, 32), dtype)
    q = torch.randn(120, 4, 32)
    want = attend(ops, q, as_pages(kv), batch, 0, 0.2, None)
    assert kv.v_scale is not None
    kv.v_scale[batch.groups[0].tables[0, 2], :, 5] = float("nan")  # position 37
    got = attend(ops, q, as_pages(kv), batch, 0, 0.2, None)
    sees = torch.arange(120) >= 37
    if window is not None:
        sees &= torch.arange(120) < 37 + window
    assert got[sees].isnan().all()
    assert torch.equal(got[~sees], want[~sees])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nan_stays_in_its_row(ops: CpuOperators, dtype: torch.dtype, bad: float) -> None:
    batch, blocks = make_batch([(0, 30), (40, 1)])
    kv = as_pages(quantised(make_kv(blocks, 2, 16, 32), dtype))
    q = torch.randn(len(batch.tokens), 4, 32)
    want = attend(ops, q, kv, batch, 0, 0.2, None).view(-1, 4, 32)
    q[7, 1, 3] = bad
    got = attend(ops, q, kv, batch, 0, 0.2, None).view(-1, 4, 32)
    assert got[7, 1].isnan().all()
    got[7, 1] = want[7, 1]
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "norms", "block_size"),
    [  # Every two values of two of these meet.
        (*shape, dtype, (i + j) % 2 == 0, (8, 16)[(i + j // 2) % 2])
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_rope_and_cache(
    ops: CpuOperators,
    heads: int,
    kv_heads: int,
    size: int,
    norms: bool,
    dtype: torch.dtype,
    block_size: int,
) -> None:
    batch, blocks = make_batch([(0, 5), (30, 1), (17, 20)], block_size=block_size)
    count = len(batch.tokens)
    angle = torch.outer(torch.arange(64.0), torch.rand(size // 2))
    rope = RopeTable(angle.cos(), angle.sin())
    qkv = torch.randn(count, (heads + 2 * kv_heads) * size)
    weights = (torch.randn(size), torch.randn(size)) if norms else ()
    shape = (blocks, kv_heads, block_size, size)
    want_kv, got_kv = (
        quantised(KvLayer(torch.zeros(shape), torch.zeros(shape)), dtype) for _ in range(2)
    )
    spec = AttentionSpec(0, heads, kv_heads, size, 1.0, eps=1e-6, norm_offset=1.0)
    want = REFERENCE.write(qkv.clone(), spec, weights, rope, want_kv, batch, 0)
    got_kv = as_pages(got_kv)
    got = ops.write(qkv.clone(), spec, weights, rope, got_kv, batch, 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got_kv = from_pages(got_kv)
    # int8: a code may round the other way, where the value before it differs in its last bit.
    rtol, atol = {torch.float32: (1e-5, 1e-5), torch.int8: (0.0, 1.0), torch.uint8: (0.0, 1.0)}.get(
        dtype, (8e-3, 1e-2)
    )
    if dtype == torch.uint8:
        assert (got_kv.v != want_kv.v).float().mean() < 0.01
    else:
        torch.testing.assert_close(got_kv.v.float(), want_kv.v.float(), rtol=rtol, atol=atol)
    torch.testing.assert_close(got_kv.k.float(), want_kv.k.float(), rtol=rtol, atol=atol)
    if dtype in CODES:
        assert (got_kv.k != want_kv.k).float().mean() < 0.01
        slots = batch.groups[0].slots
        for name in ("k_scale", "v_scale"):
            got_scale, want_scale = (
                getattr(kv, name)[slots // block_size, :, slots % block_size]
                for kv in (got_kv, want_kv)
            )
            # Likewise a scale, to the bf16 number beside.
            torch.testing.assert_close(got_scale, want_scale, rtol=2**-7, atol=0)
            assert (got_scale != want_scale).float().mean() < 0.01


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_codes_of_what_is_no_number_are_the_same_at_every_level(dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(0, 5)])
    rope = RopeTable(torch.ones(64, 16), torch.zeros(64, 16))
    torch.manual_seed(0)
    qkv = torch.randn(5, 4 * 32)
    qkv[2, 64 + 7] = qkv[3, 96 + 5] = float("nan")
    results = []
    for name in library.LEVELS:
        if library.level(name) is None:
            continue
        shape = (blocks, 1, 16, 32)
        kv = quantised(KvLayer(torch.zeros(shape), torch.zeros(shape)), dtype)
        spec = AttentionSpec(0, 2, 1, 32, 1.0)
        CpuOperators(1, name).write(qkv.clone(), spec, (), rope, kv, batch, 0)
        assert kv.k_scale is not None
        assert kv.v_scale is not None
        assert kv.k_scale.isnan().sum() == 1
        assert kv.v_scale.isnan().sum() == 1
        results.append(
            torch.cat([kv.k.view(torch.uint8).flatten(), kv.v.view(torch.uint8).flatten()])
        )
    assert all(torch.equal(result, results[0]) for result in results)
