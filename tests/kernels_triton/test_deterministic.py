"""The deterministic mode by property: a row's bits do not depend on what else is in the batch,
on how its prompt was cut, nor on where its blocks lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import attend, mixture

from headrace.base.errors import OptionError
from headrace.kernels.backend import Question
from headrace.kernels.operators import KvLayer
from headrace.kernels.select import choose
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.weights import DenseWeight, Weight
from oracle import graphs

from .test_attention import make_batch
from .test_product_packed import random_weight

OPS = TritonOperators(torch.float32, deterministic=True)
few = settings(max_examples=6, deadline=None, derandomize=True)
BLOCK, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 32


def attended(entries: list[tuple[int, int]], streams: list[int]) -> list[torch.Tensor]:
    """Attention of sequences whose q, k and v are functions of (stream, place) alone."""
    batch = make_batch(entries, BLOCK, None)
    view = batch.groups[0]
    k = torch.zeros(int(view.tables.max()) + 1, KV_HEADS, BLOCK, WIDTH)
    v = torch.zeros_like(k)
    q = []
    for entry, ((start, count), stream) in enumerate(zip(entries, streams, strict=True)):
        generator = torch.Generator().manual_seed(stream)
        whole = torch.randn(200, HEADS + 2 * KV_HEADS, WIDTH, generator=generator)
        q.append(whole[start : start + count, :HEADS])
        for place in range(start + count):
            block = int(view.tables[entry, place // BLOCK])
            k[block, :, place % BLOCK] = whole[place, HEADS : HEADS + KV_HEADS]
            v[block, :, place % BLOCK] = whole[place, HEADS + KV_HEADS :]
    out = attend(OPS, torch.cat(q), KvLayer(k, v), batch, 0, WIDTH**-0.5, None)
    return list(out.split([count for _, count in entries]))


@few
@given(
    length=st.integers(2, 90),
    cut=st.floats(0.01, 0.99),
    others=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=3),
)
def test_attention(length: int, cut: float, others: list[tuple[int, int]]) -> None:
    first = max(1, min(length - 1, int(length * cut)))
    (whole,) = attended([(0, length)], [1])
    streams = [1, *range(2, 2 + len(others))]
    begin = attended([(0, first), *others], streams)[0]
    rest = attended([(first, length - first), *others], streams)[0]
    last = attended([*others, (length - 1, 1)], [*streams[1:], 1])[-1]
    assert torch.equal(torch.cat([begin, rest]), whole)
    assert torch.equal(last, whole[-1:])


@few
@given(rows=st.integers(1, 70), place=st.floats(0, 1), packed=st.sampled_from([0, 4, 6]))
def test_products(rows: int, place: float, packed: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 256)
    weight: Weight = (
        tile_weight(random_weight(packed, 32, 48, 256, offsets=True))
        if packed
        else DenseWeight(torch.randn(48, 256))
    )
    row = int(place * (rows - 1))
    together = OPS.linear(x, weight, None)[row]
    assert torch.equal(OPS.linear(x[row : row + 1], weight, None)[0], together)


@few
@given(rows=st.integers(1, 12), place=st.floats(0, 1))
def test_experts(rows: int, place: float) -> None:
    torch.manual_seed(rows)
    x, router = torch.randn(rows, 32), torch.randn(rows, 6)
    torch.manual_seed(0)
    gate_up: list[Weight] = [DenseWeight(w) for w in torch.randn(6, 32, 32)]
    down: list[Weight] = [DenseWeight(w) for w in torch.randn(6, 32, 16)]
    ops = TritonOperators(torch.float32, deterministic=True)
    row = int(place * (rows - 1))
    together = mixture(ops, x, router, gate_up, down, 2, True, "silu")[row]
    alone = mixture(ops, x[row : row + 1], router[row : row + 1], gate_up, down, 2, True, "silu")[0]
    assert torch.equal(alone, together)


def test_the_reference_does_not_promise_it_on_a_gpu() -> None:
    question = Question(
        "cuda",
        "bfloat16",
        "bfloat16",
        graphs.decoder(),
        frozenset({"bfloat16"}),
        deterministic=True,
    )
    with pytest.raises(OptionError, match="depends on the batch"):
        choose(question, "ref")


def test_the_option_reaches_the_operators() -> None:
    question = Question(
        "cpu", "float32", "float32", graphs.decoder(), frozenset({"float32"}), deterministic=True
    )
    operators, _ = choose(question, "triton")
    assert operators.linear.__self__.deterministic  # type: ignore[attr-defined]
