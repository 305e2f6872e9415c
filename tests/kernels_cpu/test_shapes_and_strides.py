"""Every operator record at shapes, strides and values that nobody chose.

A record on matrices whose rows lie apart gives the bits of the same record on dense ones, and what
lies between the rows stays as it was; dense ones are compared with a definition in float64, here or
in the tests of the operator. What is touched beyond a row or a page is what the sanitizers look
for (test_sanitizers.py, which also runs this file).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cpu_cases import KINDS, quantise_rows, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_batch, make_kv, quantised
from kv_pages import as_pages
from test_sampling_operators import parameters

from headrace.base.graph import AttentionSpec
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.drawing import drawing
from headrace.kernels.cpu.emit import NOT_QUANTISED, Emitted, QuantisedRows, matrix
from headrace.kernels.cpu.head import Head
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import PLANES, pack
from headrace.kernels.cpu.records import ROWS_N, ROWS_R, HrLinear, HrSix, HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import BlockWeight, DenseWeight, LoraWeight, StackedWeight

CANARY = -12345.678
SPECIAL = (float("nan"), float("inf"), -float("inf"), 1e-41, -1e-41, 3e38, -3e38, 0.0, -0.0)
APART = st.sampled_from([0, 1, 3, 16, 37])
ROWS = st.integers(1, 14)
SEED = st.integers(0, 2**16)
many = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(2, os.environ.get("KERNELS_LEVEL_UNDER_TEST"))


def values(rows: int, width: int, seed: int, odd: bool = True) -> torch.Tensor:
    """fp32; one in a hundred is none, infinite, a denormal or as large as they get."""
    rng = np.random.default_rng(seed)
    x = (4 * rng.standard_normal((rows, width))).astype(np.float32)
    if odd:
        where = rng.random(x.shape) < 0.01
        x[where] = rng.choice(np.array(SPECIAL, np.float32), where.sum())
    return torch.from_numpy(x)


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values in rows `gap` further apart."""
    room = torch.full((x.shape[0], x.shape[1] + gap), CANARY, dtype=x.dtype)
    view = room[:, : x.shape[1]]
    view.copy_(x)
    return view


def untouched(*views: torch.Tensor) -> None:
    for view in views:
        room = view._base
        assert room is not None
        assert (room[:, view.shape[1] :] == torch.tensor(CANARY).to(room.dtype)).all()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.contiguous().view(torch.int32), want.contiguous().view(torch.int32))


def close(got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def run(team: Team, ops: Sequence[Emitted], step: HrStep) -> None:
    team.run(emit.program(ops), len(ops), step)


def steps(rows: int, which: int) -> HrStep:
    """So many rows of the kind `which`, and another number of the other kind."""
    return HrStep(n=rows) if which == ROWS_N else HrStep(n=rows + 17, r=rows)


def codes(rows: int, width: int) -> QuantisedRows:
    room = QuantisedRows(rows, width)
    room.data.fill(0)
    return room


@many
@given(
    rows=ROWS,
    width=st.integers(1, 150),
    gaps=st.tuples(APART, APART, APART),
    seed=SEED,
    summed=st.booleans(),
    coded=st.booleans(),
    which=st.sampled_from([ROWS_N, ROWS_R]),
)
def test_norm(
    team: Team,
    rows: int,
    width: int,
    gaps: tuple[int, ...],
    seed: int,
    summed: bool,
    coded: bool,
    which: int,
) -> None:
    width = width * 32 if coded and width < 10 else width
    coded = coded and width % 32 == 0
    x, residual = values(rows, width, seed), values(rows, width, seed + 1)
    weight = values(1, width, seed + 2, False)[0]
    results = []
    for each in ((0, 0, 0), gaps):
        a, r, y = apart(x, each[0]), apart(residual, each[1]), apart(torch.zeros_like(x), each[2])
        room = codes(rows, width)
        op = emit.norm(
            matrix(a),
            matrix(r) if summed else None,
            weight,
            1e-6,
            1.0,
            matrix(y),
            room.struct if coded else NOT_QUANTISED,
            which,
        )
        run(team, [op], steps(rows, which))
        untouched(a, r, y)
        same_bits(a, x)
        results.append((y.clone(), r.clone(), tensor(room.data).clone()))
    for first, second in zip(*results, strict=True):
        if first.dtype == torch.float32:
            same_bits(first, second)
        else:
            assert torch.equal(first, second)
    # By definition, where float32 neither overflows nor is handed what is not finite.
    total = x + residual if summed else x
    same_bits(results[0][1], total if summed else residual)
    plain = (total.abs() < 1e18).all(1)
    exact = total[plain].double()
    want = exact / (exact.square().mean(1, keepdim=True) + 1e-6).sqrt() * (weight.double() + 1)
    close(results[0][0][plain], want, 2e-5, 1e-6)
    bad = total.isnan().any(1)
    assert results[0][0][bad].isnan().all()


@many
@given(rows=ROWS, width=st.integers(1, 5000), gaps=st.tuples(APART, APART), seed=SEED)
def test_add_select_and_softcap(
    team: Team, rows: int, width: int, gaps: tuple[int, int], seed: int
) -> None:
    x, y = values(rows, width, seed), values(rows, width, seed + 1)
    a, b = apart(x, gaps[0]), apart(y, gaps[1])
    run(team, [emit.add(matrix(a), matrix(b), width, ROWS_N)], HrStep(n=rows))
    same_bits(b, x + y)

    pick = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(seed))
    step = HrStep(n=rows, r=rows, sample_rows=pick.data_ptr())
    run(team, [emit.select(matrix(a), matrix(b), width)], step)
    same_bits(b, x[pick])

    run(team, [emit.softcap(matrix(b), width, 20.0)], step)
    untouched(a, b)
    same_bits(a, x)
    exact = x[pick].double()
    close(b, 20 * torch.tanh(exact / 20), 1e-5, 1e-5)


@many
@given(
    rows=ROWS,
    width=st.integers(1, 1100),
    gaps=st.tuples(APART, APART),
    seed=SEED,
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu"]),
    coded=st.booleans(),
    which=st.sampled_from([ROWS_N, ROWS_R]),
)
def test_gated(
    team: Team,
    rows: int,
    width: int,
    gaps: tuple[int, int],
    seed: int,
    activation: str,
    coded: bool,
    which: int,
) -> None:
    width = -(-width // 32) * 32 if coded else width
    x = values(rows, 2 * width, seed)
    results = []
    for each in ((0, 0), gaps):
        a, y, room = apart(x, each[0]), apart(torch.zeros(rows, width), each[1]), codes(rows, width)
        op = emit.gated(
            matrix(a),
            width,
            activation,
            matrix(y),
            room.struct if coded else NOT_QUANTISED,
            which,
        )
        run(team, [op], steps(rows, which))
        untouched(a, y)
        results.append((y.clone(), tensor(room.data).clone()))
    same_bits(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    gate, up = x[:, :width], x[:, width:]
    plain = (gate.abs() < 1e4) & (up.abs() < 1e4)
    want = ReferenceOperators(torch.float64).gated(x.double(), activation)
    close(results[0][0][plain], want[plain], 5e-6, 5e-5)
    assert results[0][0][gate.isnan() | up.isnan()].isnan().all()


def expanded(room: QuantisedRows, rows: int, width: int) -> torch.Tensor:
    """The rows that the codes stand for, in float64."""
    lanes = room.data.view(np.dtype(HrSix))[..., 0]["lanes"]
    scales = lanes["unit"]["scale"].astype(np.float64)
    found = lanes["codes"].astype(np.float64) * scales[..., None]
    # [blocks, units, 6, 32] → [rows, width]
    return torch.from_numpy(found.transpose(0, 2, 1, 3).reshape(-1, width)[:rows].copy())


@many
@given(rows=ROWS, units=st.integers(1, 40), gap=APART, seed=SEED, odd=st.booleans())
def test_quantise(team: Team, rows: int, units: int, gap: int, seed: int, odd: bool) -> None:
    width = 32 * units
    x = values(rows, width, seed, odd)
    a, room = apart(x, gap), codes(rows, width)
    run(team, [emit.quantise(matrix(a), room.struct, width, ROWS_N)], HrStep(n=rows))
    untouched(a)
    finite = x.view(rows, units, 32).isfinite().all(-1)
    got = expanded(room, rows, width).view(rows, units, 32)
    want = quantise_rows(x.nan_to_num(0, 0, 0)).view(rows, units, 32)
    close(got[finite], want[finite], 1e-12, 0.0)
    assert got[~finite].isnan().all()


@many
@given(
    rows=st.integers(0, 30),
    outs=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    kinds=st.permutations([*KINDS, "F32", "F16", "BF16"]),
    blocks=st.integers(1, 2),
    gaps=st.tuples(APART, APART),
    seed=SEED,
    biased=st.booleans(),
    accumulate=st.booleans(),
    which=st.sampled_from([ROWS_N, ROWS_R]),
)
def test_linear(
    team: Team,
    rows: int,
    outs: list[int],
    kinds: list[str],
    blocks: int,
    gaps: tuple[int, int],
    seed: int,
    biased: bool,
    accumulate: bool,
    which: int,
) -> None:
    width, total = 256 * blocks, sum(outs)
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    parts = [
        DenseWeight(values(out, width, seed + n, False).to(dtypes[kind]))
        if kind in dtypes
        else random_blocks(kind, out, width, seed + n)
        for n, (kind, out) in enumerate(zip(kinds, outs, strict=False))
    ]
    weight = StackedWeight(tuple(pack(part, team) for part in parts))
    x, before = values(rows, width, seed, False), values(rows, total, seed + 9, False)
    bias = values(1, total, seed + 5, False)[0] if biased else None
    results = []
    for each, start, more in (
        ((0, 0), torch.zeros_like(before), False),
        (gaps, before, accumulate),
    ):
        a, y, room = apart(x, each[0]), apart(start, each[1]), codes(rows, width)
        op = emit.linear(room.struct, matrix(a), weight, bias, matrix(y), which, accumulate=more)
        run(team, [emit.quantise(matrix(a), room.struct, width, which), op], steps(rows, which))
        untouched(a, y)
        results.append(y.clone())
    # With a bias, the sum is y + (product + bias): each rounded once.
    same_bits(results[1], before + results[0] if accumulate else results[0])


@many
@given(
    rows=st.integers(1, 30),
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    units=st.integers(1, 5),
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu"]),
    seed=SEED,
    which=st.sampled_from([ROWS_N, ROWS_R]),
)
def test_gate_up_is_its_parts(
    team: Team,
    rows: int,
    kinds: tuple[str, str],
    units: int,
    activation: str,
    seed: int,
    which: int,
) -> None:
    weight = StackedWeight(
        tuple(pack(random_blocks(k, 32 * units, 256, seed), team) for k in kinds)
    )
    x, y = values(rows, 256, seed), torch.zeros(rows, 64 * units)
    inner, fused, parted = codes(rows, 256), codes(rows, 32 * units), codes(rows, 32 * units)
    quantise = emit.quantise(matrix(x), inner.struct, 256, which)
    step = steps(rows, which)
    run(team, [quantise, emit.gate_up(inner.struct, weight, activation, fused.struct, which)], step)
    product = emit.linear(inner.struct, None, weight, None, matrix(y), which)
    gate = emit.gated(matrix(y), 32 * units, activation, None, parted.struct, which)
    run(team, [quantise, product, gate], step)
    assert np.array_equal(fused.data, parted.data)


@many
@given(
    rows=st.integers(1, 30),
    kind=st.sampled_from([*KINDS, PLANES, PLANES, "F32"]),
    out=st.integers(1, 150),
    gap=APART,
    seed=SEED,
    odd=st.booleans(),
    which=st.sampled_from([ROWS_N, ROWS_R]),
)
def test_the_most_likely_token(
    team: Team, rows: int, kind: str, out: int, gap: int, seed: int, odd: bool, which: int
) -> None:
    """Chosen by the product's own values: the lowest of equal ones, 0 where there is no number."""
    part = (
        DenseWeight(values(out, 256, seed, False))
        if kind == "F32"
        else random_blocks("Q8_0" if kind == PLANES else kind, out, 256, seed)
    )
    weight = pack(part, team, planes=kind == PLANES)
    x, y, room = apart(values(rows, 256, seed, odd), gap), torch.zeros(rows, out), codes(rows, 256)
    if odd:
        x[0] = 0  # All equal.
    quantise = emit.quantise(matrix(x), room.struct, 256, which)
    product = emit.linear(room.struct, matrix(x), weight, None, matrix(y), which)
    run(team, [quantise, product], steps(rows, which))
    op = product[1]
    assert isinstance(op, HrLinear)
    head = Head(op, team.threads, rows)
    run(team, [quantise, *head.records()], steps(rows, which))
    untouched(x)
    want = np.argmax(np.where(np.isnan(y.numpy()), -np.inf, y.numpy()), axis=1)
    assert head.tokens.tolist() == want.tolist()


@many
@given(
    rows=st.integers(0, 12),
    kind=st.sampled_from([*KINDS, "dense"]),
    width=st.integers(1, 70),
    gaps=st.tuples(APART, APART),
    seed=SEED,
)
def test_embed(
    team: Team, rows: int, kind: str, width: int, gaps: tuple[int, int], seed: int
) -> None:
    tokens = torch.randint(7, (rows,), generator=torch.Generator().manual_seed(seed))
    weight: BlockWeight | DenseWeight
    if kind == "dense":
        weight = DenseWeight(apart(values(7, width, seed), gaps[0]))
        want = weight.data[tokens] * 0.5
    else:
        width = 512
        weight = random_blocks(kind, 7, width, seed)
        want = CpuOperators(1).embed(tokens, weight, 0.5)
    y = apart(torch.zeros(rows, width), gaps[1])
    run(
        team,
        [emit.embed(weight, 0.5, matrix(y))],
        HrStep(n=rows, tokens=tokens.data_ptr()),
    )
    untouched(y)
    same_bits(y, want)


@many
@given(
    rows=ROWS,
    width=st.integers(1, 90),
    outs=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    room=st.integers(1, 9),
    slots=st.integers(1, 3),
    gaps=st.tuples(APART, APART, APART),
    seed=SEED,
)
def test_lora(
    team: Team,
    rows: int,
    width: int,
    outs: list[int],
    room: int,
    slots: int,
    gaps: tuple[int, int, int],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    ranks = rng.integers(0, room + 1, slots).astype(np.int32)
    parts = len(outs)
    down = values(slots * parts * room, width, seed, False).view(slots, parts, room, width)
    ups = tuple(values(slots * room, out, seed + 3, False).view(slots, room, out) for out in outs)
    for slot, rank in enumerate(ranks):  # the rest is not read but filled with zeros
        down[slot, :, rank:] = 0
    addition = LoraWeight(down.view(slots, parts * room, width).contiguous(), ups, ranks)
    adapters = torch.from_numpy(rng.integers(-1, slots, rows).astype(np.int32))
    x, before = values(rows, width, seed + 1, False), values(rows, sum(outs), seed + 2, False)
    results = []
    for each in ((0, 0, 0), gaps):
        a, y = apart(x, each[0]), apart(before, each[1])
        inner = apart(torch.zeros(rows, parts * room), each[2])
        run(
            team,
            emit.lora(matrix(a), addition, matrix(inner), matrix(y), ROWS_N),
            HrStep(n=rows, adapters=adapters.data_ptr()),
        )
        untouched(a, y, inner)
        results.append(y.clone())
    same_bits(results[0], results[1])
    want = before.double()
    for row, slot in enumerate(adapters.tolist()):
        if slot >= 0:
            want[row] += torch.cat(
                [
                    (down[slot, p].double() @ x[row].double()) @ ups[p][slot].double()
                    for p in range(parts)
                ]
            )
    close(results[0], want, 1e-5, 1e-2)
    # Of some tokens alone: each has the adapter of its own token, and the same bits.
    picked = torch.from_numpy(np.flatnonzero(rng.integers(0, 2, rows)))
    few, y, inner = x[picked], before[picked], torch.zeros(len(picked), parts * room)
    run(
        team,
        emit.lora(matrix(few), addition, matrix(inner), matrix(y), ROWS_R),
        HrStep(n=rows, r=len(picked), adapters=adapters.data_ptr(), sample_rows=picked.data_ptr()),
    )
    same_bits(y, results[0][picked])


@many
@given(
    entries=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 30)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 2), (14, 2), (9, 3), (7, 1)]),
    units=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8]),
    block_size=st.sampled_from([8, 16, 24, 32, 40]),
    window=st.sampled_from([None, 1, 30]),
    gaps=st.tuples(APART, APART),
    seed=SEED,
    coded=st.booleans(),
)
def test_rope_and_attention(
    team: Team,
    entries: list[tuple[int, int]],
    heads: tuple[int, int],
    units: int,
    dtype: torch.dtype,
    block_size: int,
    window: int | None,
    gaps: tuple[int, int],
    seed: int,
    coded: bool,
) -> None:
    size, coded = 16 * units, coded and units % 2 == 0
    batch, blocks = make_batch(entries, block_size=block_size, window=window, seed=seed)
    n, (own, shared) = len(batch.tokens), heads
    torch.manual_seed(seed)
    made = as_pages(quantised(make_kv(blocks, shared, block_size, size), dtype))
    angle = torch.outer(torch.arange(200.0), torch.rand(size // 2))
    rope = RopeTable(angle.cos(), angle.sin())
    spec = AttentionSpec(0, own, shared, size, 0.2, eps=1e-6)
    norm, qkv = torch.rand(size), values(n, (own + 2 * shared) * size, seed, False)
    results = []
    for each in ((0, 0), gaps):
        kept = [
            None if x is None else x.clone() for x in (made.k, made.v, made.k_scale, made.v_scale)
        ]
        layer = type(made)(*kept)  # type: ignore[arg-type]
        a, y, room = (
            apart(qkv, each[0]),
            apart(torch.zeros(n, own * size), each[1]),
            codes(n, own * size),
        )
        cache = emit.kv(layer, own, shared, 0)
        ops = [
            emit.rope(cache, matrix(a), spec, (norm, norm), rope),
            emit.attention(
                cache,
                matrix(a),
                matrix(y),
                room.struct if coded else NOT_QUANTISED,
                None,
                spec,
                ROWS_N,
            ),
        ]
        run(team, ops, fill_step(HrStep(), batch))
        untouched(a, y)
        assert y.isfinite().all()
        results.append((a.clone(), y.clone(), tensor(room.data).clone(), *kept))
    for first, second in zip(*results, strict=True):
        assert first is None or torch.equal(first, second)
    if coded:  # the codes are those of the result
        alone = codes(n, own * size)
        y = results[0][1].contiguous()
        run(team, [emit.quantise(matrix(y), alone.struct, own * size, ROWS_N)], HrStep(n=n))
        assert torch.equal(tensor(alone.data), results[0][2])
    # Of some tokens alone: the same bits.
    chosen = np.random.default_rng(seed).integers(0, 3, n) == 0
    batch.sample_rows = picked = torch.from_numpy(np.flatnonzero(chosen))
    few, room = torch.zeros(len(picked), own * size), codes(len(picked), own * size)
    op = emit.attention(
        cache,
        matrix(results[0][0]),
        matrix(few),
        room.struct if coded else NOT_QUANTISED,
        None,
        spec,
        ROWS_R,
    )
    run(team, [op], fill_step(HrStep(), batch))
    same_bits(few, results[0][1][picked])
    if coded:
        alone = codes(len(picked), own * size)
        op = emit.quantise(matrix(few), alone.struct, own * size, ROWS_R)
        run(team, [op], HrStep(r=len(picked)))
        assert np.array_equal(alone.data, room.data)


@many
@given(
    rows=st.integers(1, 6),
    vocabulary=st.sampled_from([1, 15, 16, 17, 500, 513, 3000]),
    gap=APART,
    seed=SEED,
    top_k=st.sampled_from([0, 1, 20, 5000]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.2]),
    odd=st.booleans(),
)
def test_draw(
    team: Team,
    rows: int,
    vocabulary: int,
    gap: int,
    seed: int,
    top_k: int,
    top_p: float,
    min_p: float,
    odd: bool,
) -> None:
    logits = values(rows, vocabulary, seed, odd)
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    asked = parameters(rows, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)
    view = apart(logits, gap)
    drawer = drawing(team)
    tokens = drawer.draw(view, asked)
    assert torch.equal(tokens, drawer.draw(logits.clone(), asked))
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    untouched(view)
