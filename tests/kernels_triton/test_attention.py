"""Triton attention in the interpreter against the reference, over shapes and edge cases."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import attention_by_definition

from headrace.kernels import reference_attention
from headrace.kernels.attention_lists import plan_step
from headrace.kernels.attention_plan import PER_MULTIPROCESSOR, PROGRAMS, AttentionPlan, Planner
from headrace.kernels.operators import GroupBatch, KvLayer, StepBatch
from headrace.kernels.triton import attention_prefill as attention_prefill_module
from headrace.kernels.triton.attention_decode import DecodeConfig, attention_decode
from headrace.kernels.triton.attention_prefill import (
    PrefillConfig,
    attention_prefill,
    heads_beside,
)
from headrace.kernels.triton.quantise import join_terms, two_terms
from headrace.kernels.triton.split import make_tickets

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


def plan_of(batch: StepBatch, widest: int = 1, programs_heads: int = 8) -> AttentionPlan:
    """`programs_heads`: few of them are many pieces."""
    return plan_step(batch, Planner(programs_heads, [batch.groups[0].window], widest))


def make_kv(batch: StepBatch, heads: int, block: int, width: int, kind: str) -> KvLayer:
    blocks = int(batch.groups[0].tables.max()) + 1
    k = torch.randn(blocks, heads, block, width)
    v = torch.randn(blocks, heads, block, width)
    if kind in ("int8", "fp8"):
        dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        high = 127.0 if kind == "int8" else 448.0
        scales = [reference_attention.scale_above(x.abs().amax(-1) / high) for x in (k, v)]
        codes = [x / s.float().unsqueeze(-1) for x, s in zip((k, v), scales, strict=True)]
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
    config, tickets, plan = DecodeConfig(tile=32), make_tickets(CPU), plan_of(batch)
    attention_decode(q, kv, plan, 0, view, out, scale, softcap, config, tickets)
    assert not tickets.any(), "the counters are as they were"
    short, tall = PrefillConfig(rows=32, tile=32), PrefillConfig(rows=64, tile=32)
    attention_prefill(q, kv, plan, view, out, scale, softcap, short, longest=batch.max_length)
    tolerance = 2e-2 if kind == "bfloat16" else 2e-5
    torch.testing.assert_close(
        out.view(len(q), -1).float(), expected, atol=tolerance, rtol=tolerance
    )
    everything = torch.full_like(q, float("nan"))
    plan = plan_of(batch, widest=0)
    attention_prefill(q, kv, plan, view, everything, scale, softcap, tall, longest=64)
    torch.testing.assert_close(
        everything.view(len(q), -1).float(), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("case", [*CASES[1:4], CASES[5]])
@pytest.mark.parametrize("kind", ["float32", "fp8"])
def test_sinks_take_their_share(case: tuple[object, ...], kind: str) -> None:
    """Against float64, in one piece and in several, of a token and of a chunk; scores of sinks far
    below and far above all others, and fp16's largest."""
    entries, heads, kv_heads, width, block, window, softcap = case  # type: ignore[misc]
    torch.manual_seed(13)
    batch = make_batch(entries, block, window)
    kv = make_kv(batch, kv_heads, block, width, kind)
    q = torch.randn(len(batch.tokens), heads, width)
    sinks = torch.cat([3 * torch.randn(heads - 3), torch.tensor([60.0, -60.0, 65504.0])])
    scale = width**-0.5
    expected = attention_by_definition(q, kv, batch, scale, softcap, sinks).float()
    view, tickets = batch.groups[0], make_tickets(CPU)
    for programs in (1, PROGRAMS):
        out, plan = torch.full_like(q, float("nan")), plan_of(batch, 3, programs)
        rest = scale, softcap, DecodeConfig(tile=32), tickets
        attention_decode(q, kv, plan, 0, view, out, *rest, sinks=sinks)
        config = scale, softcap, PrefillConfig(rows=32, tile=32)
        attention_prefill(q, kv, plan, view, out, *config, longest=batch.max_length, sinks=sinks)
        torch.testing.assert_close(out.flatten(1), expected, atol=2e-5, rtol=2e-5)
        out = torch.full_like(q, float("nan"))
        plan = plan_of(batch, widest=0)
        attention_prefill(q, kv, plan, view, out, *config, longest=64, sinks=sinks)
        torch.testing.assert_close(out.flatten(1), expected, atol=2e-5, rtol=2e-5)


DRAFTS = [
    # entries, H, G, E, block, window, softcap
    ([(300, 5), (7, 1), (126, 4), (0, 8)], 8, 2, 32, 16, None, None),
    ([(254, 4), (120, 8), (0, 1)], 4, 4, 32, 8, 127, None),
    ([(150, 3), (3, 2)], 4, 1, 80, 32, None, 30.0),
]


@pytest.mark.parametrize("case", DRAFTS)
@pytest.mark.parametrize("kind", ["float32", "fp8"])
@pytest.mark.parametrize("heads_of_plan", [1, PROGRAMS])
def test_drafts_are_verified_where_tokens_decode(
    case: tuple[object, ...], kind: str, heads_of_plan: int
) -> None:
    """Entries of up to eight tokens in one or many pieces, some of which a token sees nothing of;
    entries of one beside them."""
    entries, heads, kv_heads, width, block, window, softcap = case  # type: ignore[misc]
    torch.manual_seed(11)
    batch = make_batch(entries, block, window)
    kv = make_kv(batch, kv_heads, block, width, kind)
    q = torch.randn(len(batch.tokens), heads, width)
    wide = kv
    if kv.k_scale is not None:
        wide = KvLayer(
            kv.k.float() * kv.k_scale.unsqueeze(-1), kv.v.float() * kv.v_scale.unsqueeze(-1)
        )
    expected = reference_attention.attention(q, wide, batch, 0, width**-0.5, softcap)
    out, plan = torch.full_like(q, float("nan")), plan_of(batch, 8, heads_of_plan)
    assert not len(plan.chunks)
    assert len(entries) < len(plan.pieces[0]) <= len(entries) + PROGRAMS // heads_of_plan
    view, tickets = batch.groups[0], make_tickets(CPU)
    for config in (DecodeConfig(tile=32), DecodeConfig(tile=32, ahead=True)):
        attention_decode(q, kv, plan, 0, view, out, width**-0.5, softcap, config, tickets)
        torch.testing.assert_close(out.view(len(q), -1), expected, atol=2e-5, rtol=2e-5)


CHUNKED = [
    # entries, H, G, E, block, tokens of a chunk
    ([(95, 1), (96, 1), (3, 1), (150, 1)], 4, 2, 32, 16, 48),
    ([(1000, 1), (1023, 1), (1024, 1)], 4, 1, 32, 16, 512),
    ([(0, 70), (45, 5), (130, 33)], 8, 2, 64, 16, 48),
]


@pytest.mark.parametrize("case", CHUNKED)
@pytest.mark.parametrize("kind", ["float32", "fp8"])
@pytest.mark.parametrize("heads_of_plan", [1, PROGRAMS])
def test_a_chunk_is_seen_from_its_begin(
    case: tuple[object, ...], kind: str, heads_of_plan: int
) -> None:
    """Tokens, drafts and prompts on both sides of a chunk's begin, in pieces of which the first lie
    before it."""
    entries, heads, kv_heads, width, block, chunk = case  # type: ignore[misc]
    torch.manual_seed(17)
    batch = make_batch(entries, block, chunk)
    kv = make_kv(batch, kv_heads, block, width, kind)
    q = torch.randn(len(batch.tokens), heads, width)
    wide = kv
    if kv.k_scale is not None:
        wide = KvLayer(
            kv.k.float() * kv.k_scale.unsqueeze(-1), kv.v.float() * kv.v_scale.unsqueeze(-1)
        )
    scale = width**-0.5
    expected = reference_attention.attention(q, wide, batch, 0, scale, None, chunked=True)
    whole = reference_attention.attention(q, wide, batch, 0, scale, None)
    assert (whole - expected).abs().max() > 0.01, "a window is another thing"
    view, tickets = batch.groups[0], make_tickets(CPU)
    decode, prefill = DecodeConfig(tile=32), PrefillConfig(rows=32, tile=32)
    for widest in (0, 1, 8):
        out, plan = torch.full_like(q, float("nan")), plan_of(batch, widest, heads_of_plan)
        rest = view, out, scale, None
        attention_decode(q, kv, plan, 0, *rest, decode, tickets, chunked=True)
        longest = batch.max_length
        attention_prefill(q, kv, plan, *rest, prefill, longest=longest, chunked=True)
        torch.testing.assert_close(out.flatten(1), expected, atol=2e-5, rtol=2e-5)


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
    out, ahead = torch.full_like(q, float("nan")), torch.full_like(q, float("nan"))
    plan, view, tickets = plan_of(batch), batch.groups[0], make_tickets(CPU)
    for found, config in ((out, DecodeConfig(tile=64)), (ahead, DecodeConfig(tile=64, ahead=True))):
        attention_decode(q, kv, plan, 0, view, found, width**-0.5, softcap, config, tickets)
    torch.testing.assert_close(
        out.view(len(q), -1).float() / magnitude, expected / magnitude, atol=4e-3, rtol=8e-3
    )
    assert torch.equal(out, ahead), "when scales are asked for changes no bit"


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
    plan, config, longest = plan_of(batch, 0), PrefillConfig(rows=16, tile=16), batch.max_length
    attention_prefill(q, kv, plan, batch.groups[0], out, 0.2, None, config, longest=longest)
    torch.testing.assert_close(out.view(len(q), -1), expected, atol=2e-5, rtol=2e-5)


def test_sections_are_divisors_of_the_heads() -> None:
    a_half = attention_prefill_module.L2 // 2
    assert [heads_beside(heads, a_half) for heads in (1, 2, 7, 8)] == [1, 2, 1, 2]
    assert heads_beside(8, 100 * a_half) == 1
    assert heads_beside(8, 1000) == 8
    assert heads_beside(6, a_half // 2 + 1) == 3


def busiest(step: list[tuple[int, int]], heads: int, *, last_first: bool) -> float:
    """Time of attention over its work divided by the multiprocessors of an H100: tiles of `heads`
    KV heads come side by side, each program goes to the first free place.

    A tile's work is the tiles of 64 KV tokens up to its own place, and two for start and end.
    """
    places, kv_heads, rows, tile = 132, 8, 128 // 4, 64
    chunks = [(start, count) for start, count in step if count > 1]
    tiles = [0.0] * (sum(count for _, count in chunks) // rows + len(chunks))
    at = 0
    for number, (start, count) in enumerate(chunks):
        for place in range(-(-count // rows)):
            last = start + min((place + 1) * rows, count)
            tiles[at // rows + number + place] = 2 + -(-last // tile)
        at += count
    free = [0.0] * places
    for _ in range(kv_heads // heads):
        for work in reversed(tiles) if last_first else tiles:
            for _ in range(heads):
                heapq.heapreplace(free, free[0] + work)
    return max(free) / (sum(tiles) * kv_heads / places)


def test_the_longest_tiles_come_first() -> None:
    """By the counted order of programs: within 3 % of the work over the multiprocessors."""
    for step, before in (
        ([(0, 2048)], 1.2),
        ([(0, 8192)], 1.05),
        ([*[(1500, 1)] * 872, (0, 1000)], 1.5),
    ):
        assert busiest(step, 1, last_first=False) > before
        assert busiest(step, 4, last_first=True) < 1.035


@pytest.mark.parametrize(
    "lengths",
    [
        [1000] * 256,
        [*[1000] * 255, 10_000],
        [*[1000] * 255, 70_000],
        [1500] * 864,
        [4096] * 32,
        [1024],
        [100_000],
    ],
    ids=lambda lengths: f"{len(lengths)}x{max(lengths)}",
)
def test_hardly_a_program_has_nothing_to_do(lengths: list[int]) -> None:
    """However unequal sequences are; a grid as long as the longest had 28 times what worked."""
    heads, planner = 8, Planner(8, [None])
    pieces, _ = planner.lists(np.ones(len(lengths), np.int64), np.array(lengths))
    assert heads * len(pieces) <= heads * len(lengths) + PROGRAMS
    assert heads * (planner.most_pieces(len(lengths)) - len(pieces)) <= PROGRAMS


def test_a_small_device_gets_fewer_pieces() -> None:
    """One sequence of 100,000 tokens over two heads, on 40 multiprocessors and on 132."""
    counts, lengths = np.array([1]), np.array([100_000])
    pieces = {
        programs: len(Planner(2, [None], programs=programs).lists(counts, lengths)[0])
        for programs in (40 * PER_MULTIPROCESSOR, None)
    }
    assert 120 < pieces[40 * PER_MULTIPROCESSOR] <= 161
    assert 380 < pieces[None] <= 529


def test_shorter_pieces_give_the_same() -> None:
    torch.manual_seed(5)
    batch = make_batch([(300, 1), (7, 1)], 16, None)
    kv = make_kv(batch, 1, 16, 32, "float32")
    q = torch.randn(2, 2, 32)
    found = []
    for heads in (1, PROGRAMS):
        out = torch.full_like(q, float("nan"))
        plan, config = plan_of(batch, 1, heads), DecodeConfig()
        assert len(plan.pieces[0]) == (4 if heads == 1 else 3)
        attention_decode(q, kv, plan, 0, batch.groups[0], out, 0.2, None, config, make_tickets(CPU))
        found.append(out)
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def across(kv: KvLayer) -> KvLayer:
    """The same numbers, as a GPU's cache in e4m3 has them."""
    v = kv.v.view(torch.uint8).transpose(2, 3).contiguous().view(kv.v.dtype)
    found = KvLayer(kv.k, v.transpose(2, 3), kv.k_scale, kv.v_scale)
    assert found.across
    assert not kv.across
    return found


FIRST_CASES = [
    # entries, H, G, E, window, softcap, widest
    ([(16, 1), (0, 1), (129, 1)], 14, 2, 64, None, None, 1),
    ([(300, 1), (7, 1)], 4, 4, 32, 64, 30.0, 1),
    ([(150, 1), (60, 3), (9, 1)], 8, 1, 80, None, None, 4),
]


@pytest.mark.parametrize("case", FIRST_CASES)
@pytest.mark.parametrize("magnitude", [1e-3, 3e3])
def test_codes_as_first_sides(case: tuple[object, ...], magnitude: float) -> None:
    """Products of e4m3 as it is are nearer to the values than a query and weights in bf16 are;
    prompts read the same cache."""
    entries, heads, kv_heads, width, window, softcap, widest = case  # type: ignore[misc]
    torch.manual_seed(4)
    batch = make_batch(entries, 16, window)
    kv = make_kv(batch, kv_heads, 16, width, "fp8")
    assert kv.k_scale is not None
    assert kv.v_scale is not None
    kv.v_scale *= magnitude
    kv.v_scale[:, :, 3] *= 2.0**-40
    q = torch.randn(len(batch.tokens), heads, width).to(torch.bfloat16)
    wide = KvLayer(kv.k.float() * kv.k_scale.unsqueeze(-1), kv.v.float() * kv.v_scale.unsqueeze(-1))
    scale, view, turned = width**-0.5, batch.groups[0], across(kv)
    expected = reference_attention.attention(q.float(), wide, batch, 0, scale, softcap)
    for programs in (1, PROGRAMS):
        out, plan = torch.full_like(q, float("nan")), plan_of(batch, widest, programs)
        rest = view, out, scale, softcap
        attention_decode(q, turned, plan, 0, *rest, DecodeConfig(tile=64), make_tickets(CPU))
        error = (out.view(len(q), -1).float() - expected).norm() / expected.norm()
        assert error < 2.6e-3, "of which bf16 results are 1.6e-3"
    prompts = []
    for cache in (kv, turned):
        prompts.append(torch.full_like(q, float("nan")))
        config = PrefillConfig(rows=32, tile=32)
        rest = view, prompts[-1], scale, softcap, config
        attention_prefill(q, cache, plan_of(batch, widest=0), *rest, longest=320)
    assert torch.equal(*prompts), "a cache's form changes no bit of a prompt"


@triton.jit
def _terms_kernel(x, y, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = row[:, None] * WIDTH + column[None, :]
    terms, back = two_terms(tl.load(x + at))
    sums = tl.trans(join_terms(terms.to(tl.float32))) * back[:, None]
    tl.store(y + at, sums)


def test_two_terms_have_eight_digits() -> None:
    """Rows may be of any size; their small numbers lose no more than their largest one leaves."""
    torch.manual_seed(9)
    x = torch.randn(8, 64) * 10.0 ** torch.arange(-6, 10, 2)[:, None]
    x[3] = 0.0
    x[4, ::2] *= 1e-4
    y = torch.full_like(x, float("nan"))
    _terms_kernel[(1,)](x, y, ROWS=8, WIDTH=64)
    largest = x.abs().amax(1, keepdim=True)
    assert ((y - x).abs() <= x.abs() * 2.0**-8 + largest * 2.0**-20).all()
    assert (y[3] == 0).all()
