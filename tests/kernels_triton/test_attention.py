"""Triton attention in the interpreter against the reference, over shapes and edge cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from headrace.kernels import reference_attention
from headrace.kernels.operators import GroupBatch, KvLayer, StepBatch
from headrace.kernels.triton import attention_prefill as attention_prefill_module
from headrace.kernels.triton.attention_decode import DecodeConfig, attention_decode
from headrace.kernels.triton.attention_prefill import (
    PrefillConfig,
    attention_prefill,
    heads_beside,
)
from headrace.kernels.triton.split import make_tickets

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_waves

CPU = torch.device("cpu")


def make_batch(entries: list[tuple[int, int]], block: int, window: int | None) -> StepBatch:
    """A step of (start, count) entries whose tables are a shuffled pool."""
    lengths = [start + count for start, count in entries]
    width = -(-max(lengths) // block) + 1
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(len(entries) * width, generator=generator) + 1
    tables = order.view(len(entries), width).to(torch.int32)
    if window is not None:
        for b, (start, _) in enumerate(entries):
            tables[b, : max(0, start + 1 - window) // block] = 0
    starts = torch.tensor([0] + [count for _, count in entries]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(s, s + c) for s, c in entries])
    owner = torch.cat([torch.full((c,), b) for b, (_, c) in enumerate(entries)])
    slots = tables[owner, positions // block].long() * block + positions % block
    return StepBatch(
        tokens=torch.zeros_like(positions),
        positions=positions,
        query_starts=starts,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        groups=[GroupBatch(tables, slots, window)],
        sample_rows=starts[1:].long() - 1,
        max_count=max(count for _, count in entries),
        max_length=max(lengths),
    )


def make_kv(batch: StepBatch, heads: int, block: int, width: int, kind: str) -> KvLayer:
    blocks = int(batch.groups[0].tables.max()) + 1
    k = torch.randn(blocks, heads, block, width)
    v = torch.randn(blocks, heads, block, width)
    if kind in ("int8", "fp8"):
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        high = 127.0 if kind == "int8" else 448.0
        scales = [x.abs().amax(-1) / high for x in (k, v)]
        codes = [x / s.unsqueeze(-1) for x, s in zip((k, v), scales, strict=True)]
        if kind == "int8":
            codes = [c.round() for c in codes]
        return KvLayer(codes[0].to(dtype), codes[1].to(dtype), *scales)
    dtype = getattr(torch, kind)
    return KvLayer(k.to(dtype), v.to(dtype))


CASES = [
    # entries, H, G, E, block, window, softcap
    ([(0, 1)], 2, 1, 64, 16, None, None),
    ([(16, 1), (0, 1), (129, 1)], 14, 2, 64, 16, None, None),
    ([(300, 1), (7, 1)], 4, 4, 32, 8, 64, None),
    ([(150, 1), (3, 1)], 4, 1, 80, 32, None, 30.0),
    ([(0, 5), (33, 1), (100, 40)], 6, 2, 64, 16, None, None),
    ([(0, 70), (65, 3)], 8, 2, 64, 16, 33, 50.0),
    ([(20, 17)], 3, 3, 48, 16, None, None),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8"])
def test_equals_reference(case: tuple[object, ...], kind: str) -> None:
    entries, heads, kv_heads, width, block, window, softcap = case  # type: ignore[misc]
    torch.manual_seed(3)
    batch = make_batch(entries, block, window)
    kv = make_kv(batch, kv_heads, block, width, kind)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    q = torch.randn(len(batch.tokens), heads, width).to(dtype)
    scale = width**-0.5
    wide = KvLayer(kv.k.float(), kv.v.float(), kv.k_scale, kv.v_scale)
    if kv.k_scale is not None:
        wide = KvLayer(
            kv.k.float() * kv.k_scale.unsqueeze(-1), kv.v.float() * kv.v_scale.unsqueeze(-1)
        )
    expected = reference_attention.attention(q.float(), wide, batch, 0, scale, softcap)
    out = torch.full_like(q, float("nan"))
    view = batch.groups[0]
    config, tickets = DecodeConfig(split=128, tile=32), make_tickets(CPU)
    attention_decode(q, kv, batch, view, out, scale, softcap, config, tickets)
    assert not tickets.any(), "the counters are as they were"
    attention_prefill(
        q, kv, batch, view, out, scale, softcap, PrefillConfig(rows=32, tile=32), skip_single=True
    )
    tolerance = 2e-2 if kind == "bfloat16" else 2e-5
    torch.testing.assert_close(
        out.view(len(q), -1).float(), expected, atol=tolerance, rtol=tolerance
    )
    everything = torch.full_like(q, float("nan"))
    attention_prefill(
        q, kv, batch, view, everything, scale, softcap, PrefillConfig(rows=64, tile=32)
    )
    torch.testing.assert_close(
        everything.view(len(q), -1).float(), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("case", CASES[1:4])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("magnitude", [1e-3, 3e3])
def test_codes_as_halves(case: tuple[object, ...], kind: str, magnitude: float) -> None:
    """A half-precision model's decode multiplies 8-bit codes in fp16, whatever V's size."""
    entries, heads, kv_heads, width, block, window, softcap = case  # type: ignore[misc]
    torch.manual_seed(4)
    batch = make_batch(entries, block, window)
    kv = make_kv(batch, kv_heads, block, width, kind)
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    kv.v_scale *= magnitude
    q = torch.randn(len(batch.tokens), heads, width).to(torch.bfloat16)
    wide = KvLayer(kv.k.float() * kv.k_scale.unsqueeze(-1), kv.v.float() * kv.v_scale.unsqueeze(-1))
    expected = reference_attention.attention(q.float(), wide, batch, 0, width**-0.5, softcap)
    out = torch.full_like(q, float("nan"))
    attention_decode(
        q,
        kv,
        batch,
        batch.groups[0],
        out,
        width**-0.5,
        softcap,
        DecodeConfig(split=128, tile=64),
        make_tickets(CPU),
    )
    torch.testing.assert_close(
        out.view(len(q), -1).float() / magnitude, expected / magnitude, atol=4e-3, rtol=8e-3
    )


@pytest.mark.parametrize("held", [1, 2, 6])
def test_heads_in_sections_give_the_same(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many KV heads L2 holds, each tile of each head is computed once."""
    torch.manual_seed(8)
    batch = make_batch([(0, 33), (5, 1), (40, 20)], 16, None)
    kv = make_kv(batch, 6, 16, 32, "float32")
    q = torch.randn(len(batch.tokens), 12, 32)
    expected = reference_attention.attention(q, kv, batch, 0, 0.2, None)
    head = 2 * batch.max_length * 32 * 4
    monkeypatch.setattr(attention_prefill_module, "L2", held * head)
    assert heads_beside(6, head) == held
    out = torch.full_like(q, float("nan"))
    attention_prefill(
        q, kv, batch, batch.groups[0], out, 0.2, None, PrefillConfig(rows=16, tile=16)
    )
    torch.testing.assert_close(out.view(len(q), -1), expected, atol=2e-5, rtol=2e-5)


def test_sections_are_divisors_of_the_heads() -> None:
    a_half = attention_prefill_module.L2 // 2
    assert [heads_beside(heads, a_half) for heads in (1, 2, 7, 8)] == [1, 2, 1, 2]
    assert heads_beside(8, 100 * a_half) == 1
    assert heads_beside(8, 1000) == 8
    assert heads_beside(6, a_half // 2 + 1) == 3


def test_the_longest_tiles_come_first() -> None:
    """By the counted order of programs: within 3 % of the work over the multiprocessors."""
    for step, before in (("2,048", 1.2), ("8,192", 1.05), ("1,000 and 872 decodes", 1.5)):
        tiles = gpu_waves.tiles_of(gpu_waves.STEPS[step])
        old, *_, new = list(gpu_waves.ORDERS.values())[:5]
        assert gpu_waves.over_ideal(old(tiles), gpu_waves.UNITS) > before
        assert gpu_waves.over_ideal(new(tiles), gpu_waves.UNITS) < 1.035


def test_few_sequences_are_cut_shorter() -> None:
    config = DecodeConfig(split=512, tile=64, programs=264)
    assert config.split_of(8, 1024) == 128
    assert config.split_of(32, 4096) == 256
    assert config.split_of(256, 4096) == 512
    assert DecodeConfig(split=512, tile=256).split_of(1, 100) == 256


def test_shorter_splits_give_the_same() -> None:
    torch.manual_seed(5)
    batch = make_batch([(300, 1), (7, 1)], 16, None)
    kv = make_kv(batch, 1, 16, 32, "float32")
    q = torch.randn(2, 2, 32)
    found = []
    for programs in (0, 264):
        out = torch.full_like(q, float("nan"))
        config = DecodeConfig(split=512, tile=64, programs=programs)
        attention_decode(q, kv, batch, batch.groups[0], out, 0.2, None, config, make_tickets(CPU))
        found.append(out)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
