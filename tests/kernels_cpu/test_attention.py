"""Attention, rope and the KV write against the reference; row invariance bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_batch, make_kv

from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.operators import GroupBatch, KvLayer, RopeTable, StepBatch
from headrace.kernels.reference import ReferenceOperators

REFERENCE = ReferenceOperators(torch.float32)
SHAPES = [  # heads, KV heads, head size
    (14, 2, 64), (4, 1, 256), (8, 8, 16), (6, 3, 80), (32, 4, 128), (100, 1, 16),
]  # fmt: skip


def transposed(kv: KvLayer) -> KvLayer:
    """The same KV as the CPU kernels keep it: K pages [E, S]."""
    return KvLayer(kv.k.transpose(2, 3).contiguous().view(kv.k.shape), kv.v)


def one_of(batch: StepBatch, first: int, last: int, entry: int) -> StepBatch:
    """Tokens first … last − 1, all of one entry, as a step of their own."""
    group = batch.groups[0]
    return StepBatch(
        batch.tokens[first:last].clone(),
        batch.positions[first:last].clone(),
        torch.tensor([0, last - first], dtype=torch.int32),
        (batch.positions[last - 1 : last] + 1).int(),
        [
            GroupBatch(
                group.tables[entry : entry + 1], group.slots[first:last].clone(), group.window
            )
        ],
        torch.tensor([last - first - 1]),
        last - first,
        int(batch.positions[last - 1]) + 1,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_against_the_reference(
    ops: CpuOperators, heads: int, kv_heads: int, size: int, window: int | None
) -> None:
    batch, blocks = make_batch([(0, 1), (0, 70), (130, 1), (63, 5), (5, 40)], window=window)
    kv = make_kv(blocks, kv_heads, 16, size)
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), heads, size)
    want = REFERENCE.attention(q, kv, batch, 0, size**-0.5, None)
    got = ops.attention(q, transposed(kv), batch, 0, size**-0.5, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_block_sizes_and_softcap(ops: CpuOperators, block_size: int, softcap: float | None) -> None:
    batch, blocks = make_batch([(0, 33), (200, 3), (17, 1)], block_size=block_size)
    kv = make_kv(blocks, 2, block_size, 32)
    q = 3 * torch.randn(len(batch.tokens), 4, 32)
    want = REFERENCE.attention(q, kv, batch, 0, 0.3, softcap)
    got = ops.attention(q, transposed(kv), batch, 0, 0.3, softcap)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_smaller_kv_types(ops: CpuOperators, dtype: torch.dtype) -> None:
    batch, blocks = make_batch([(0, 33), (100, 1)])
    small = make_kv(blocks, 2, 16, 64, dtype)
    wide = KvLayer(small.k.float(), small.v.float())
    q = torch.randn(len(batch.tokens), 6, 64)
    want = REFERENCE.attention(q, wide, batch, 0, 0.1, None)
    got = ops.attention(q, transposed(small), batch, 0, 0.1, None)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("window", [None, 24])
def test_a_row_does_not_know_its_chunk_or_its_batch(ops: CpuOperators, window: int | None) -> None:
    batch, blocks = make_batch([(0, 1), (0, 150), (90, 1)], window=window)
    kv = transposed(make_kv(blocks, 2, 16, 64))
    q = torch.randn(len(batch.tokens), 14, 64)
    whole = ops.attention(q, kv, batch, 0, 0.125, None)
    for first, last in ((1, 2), (1, 14), (64, 65), (60, 70), (100, 151), (150, 151)):
        part = ops.attention(q[first:last], kv, one_of(batch, first, last, 1), 0, 0.125, None)
        assert torch.equal(part, whole[first:last]), (first, last)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 200),
    cut=st.integers(0, 199),
    count=st.integers(1, 40),
    heads=st.sampled_from([(14, 2), (3, 1), (8, 8)]),
    others=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=3),
)
def test_row_invariance(
    length: int, cut: int, count: int, heads: tuple[int, int], others: list[tuple[int, int]]
) -> None:
    ops = CpuOperators(2)
    batch, blocks = make_batch([(0, length), *others])
    kv = transposed(make_kv(blocks, heads[1], 16, 32))
    torch.manual_seed(0)
    q = torch.randn(len(batch.tokens), heads[0], 32)
    whole = ops.attention(q, kv, batch, 0, 0.2, None)
    first = cut % length
    last = min(length, first + count)
    part = ops.attention(q[first:last], kv, one_of(batch, first, last, 0), 0, 0.2, None)
    assert torch.equal(part, whole[first:last])


def test_what_lies_behind_a_sequence_does_not_matter(ops: CpuOperators) -> None:
    batch, blocks = make_batch([(0, 21), (40, 1)])
    kv = transposed(make_kv(blocks, 2, 16, 32))
    q = torch.randn(len(batch.tokens), 4, 32)
    want = ops.attention(q, kv, batch, 0, 0.2, None)
    used = {int(b) for row in batch.groups[0].tables for b in row}
    for block in set(range(blocks)) - used:
        kv.k[block] = float("nan")
        kv.v[block] = float("nan")
    pages = kv.k.view(blocks, 2, 32, 16)  # as they lie: [E, S]
    for row, length in enumerate(batch.lengths.tolist()):
        last = int(batch.groups[0].tables[row, (length - 1) // 16])
        pages[last, :, :, length % 16 :] = float("nan")
        kv.v[last, :, length % 16 :] = float("inf")
    assert torch.equal(ops.attention(q, kv, batch, 0, 0.2, None), want)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), SHAPES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rope_and_cache(
    ops: CpuOperators, heads: int, kv_heads: int, size: int, norms: bool, dtype: torch.dtype
) -> None:
    batch, blocks = make_batch([(0, 5), (30, 1), (17, 20)])
    count = len(batch.tokens)
    angle = torch.outer(torch.arange(64.0), torch.rand(size // 2))
    rope = RopeTable(angle.cos(), angle.sin())
    qkv = torch.randn(count, (heads + 2 * kv_heads) * size)
    weights = (torch.randn(size), torch.randn(size)) if norms else (None, None)
    shape = (blocks, kv_heads, 16, size)
    want_kv = KvLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    got_kv = KvLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
    arguments = (heads, kv_heads, *weights, 1e-6, 1.0, rope)
    want = REFERENCE.rope_and_cache(qkv.clone(), *arguments, want_kv, batch, 0)
    got = ops.rope_and_cache(qkv.clone(), *arguments, got_kv, batch, 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (8e-3, 1e-2)
    torch.testing.assert_close(got_kv.v, want_kv.v, rtol=rtol, atol=atol)
    torch.testing.assert_close(got_kv.k, transposed(want_kv).k, rtol=rtol, atol=atol)
