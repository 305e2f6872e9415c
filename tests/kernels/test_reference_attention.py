"""Paged attention and the KV cache of the reference, against their definition."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import attend, attention_by_definition, make_batch, make_kv

from headrace.kernels.operators import KvLayer
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.reference_attention import store

OPS = ReferenceOperators(torch.float32)

BATCHES = {
    "one token": [(0, 1)],
    "decode": [(0, 1), (1, 1), (16, 1), (127, 1), (128, 1), (300, 1)],
    "prefill": [(0, 37)],
    "chunks": [(5, 2), (120, 17), (0, 1), (250, 8), (31, 33)],
    "decode next to prefill": [(200, 1), (0, 130), (40, 1)],
}


@pytest.mark.parametrize("window", [None, 1, 20, 128])
@pytest.mark.parametrize("name", BATCHES)
def test_attention(name: str, window: int | None) -> None:
    torch.manual_seed(0)
    for heads, kv_heads, width, size, softcap in (
        (4, 2, 32, 16, None),
        (3, 3, 8, 8, None),
        (5, 1, 24, 32, 2.0),
    ):
        batch, blocks = make_batch(BATCHES[name], block_size=size, window=window)
        kv = make_kv(blocks, kv_heads, size, width)
        q = torch.randn(len(batch.tokens), heads, width)
        ours = attend(OPS, q, kv, batch, 0, 0.3, softcap)
        theirs = attention_by_definition(q, kv, batch, 0.3, softcap)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_long_prompt_is_cut_by_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch, blocks = make_batch([(70, 90), (0, 50)])
    kv = make_kv(blocks, 2, 16, 16)
    q = torch.randn(140, 4, 16)
    whole = attend(OPS, q, kv, batch, 0, 0.25, None)
    monkeypatch.setattr("headrace.kernels.reference_attention.SCORES", 4 * 256 * 13)
    assert torch.equal(attend(OPS, q, kv, batch, 0, 0.25, None), whole)


def test_decode_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    batch, blocks = make_batch([(length, 1) for length in (3, 500, 7, 130, 260, 20, 1)])
    kv = make_kv(blocks, 2, 16, 16)
    q = torch.randn(7, 4, 16)
    whole = attend(OPS, q, kv, batch, 0, 0.25, None)
    monkeypatch.setattr("headrace.kernels.reference_attention.GATHERED", 1)
    assert torch.equal(attend(OPS, q, kv, batch, 0, 0.25, None), whole)


def test_what_lies_behind_a_sequence_does_not_matter() -> None:
    """Blocks come back from others with whatever they hold, NaN included."""
    torch.manual_seed(0)
    batch, blocks = make_batch([(20, 1), (0, 19), (3, 2)])
    clean = make_kv(blocks, 2, 16, 16)
    dirty = KvLayer(clean.k.clone(), clean.v.clone())
    for entry, length in enumerate(batch.lengths.tolist()):
        for block, tail in ((batch.groups[0].tables[entry, length // 16], length % 16),):
            dirty.k[block, :, tail:] = float("nan")
            dirty.v[block, :, tail:] = float("inf")
    q = torch.randn(22, 4, 16)
    expected = attend(OPS, q, clean, batch, 0, 0.25, None)
    assert torch.equal(attend(OPS, q, dirty, batch, 0, 0.25, None), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.int8, 6e-2), (torch.float8_e4m3fn, 0.2)],
)
def test_smaller_kv_types(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    batch, blocks = make_batch([(0, 40)])
    exact = KvLayer(torch.zeros(blocks, 2, 16, 32), torch.zeros(blocks, 2, 16, 32))
    scaled = dtype in (torch.int8, torch.float8_e4m3fn)
    scales = [
        torch.zeros(blocks, 2, 16, dtype=torch.bfloat16) if scaled else None for _ in range(2)
    ]
    small = KvLayer(exact.k.to(dtype), exact.v.to(dtype), *scales)
    k, v = torch.randn(40, 2, 32) * 3, torch.randn(40, 2, 32)
    k[3] = 0
    store(exact, k, v, batch.groups[0].slots)
    store(small, k, v, batch.groups[0].slots)
    q = torch.randn(40, 4, 32)
    ours = attend(OPS, q, small, batch, 0, 0.1, None)
    theirs = attend(OPS, q, exact, batch, 0, 0.1, None)
    assert (ours - theirs).abs().max() < tolerance
    assert not torch.equal(ours, theirs)


def test_store_touches_its_slots_only() -> None:
    batch, blocks = make_batch([(14, 5), (0, 1)])
    kv = KvLayer(torch.full((blocks, 2, 16, 8), 7.0), torch.full((blocks, 2, 16, 8), 8.0))
    k, v = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    slots = batch.groups[0].slots
    store(kv, k, v, slots)
    flat_k = kv.k.transpose(1, 2).reshape(-1, 2, 8)
    flat_v = kv.v.transpose(1, 2).reshape(-1, 2, 8)
    assert torch.equal(flat_k[slots], k)
    assert torch.equal(flat_v[slots], v)
    others = torch.ones(len(flat_k), dtype=torch.bool)
    others[slots] = False
    assert (flat_k[others] == 7).all()
    assert (flat_v[others] == 8).all()
