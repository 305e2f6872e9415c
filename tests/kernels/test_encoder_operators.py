"""Operators of encoders: against torch's own, and each row by itself, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional

from headrace.base.graph import AttentionSpec
from headrace.kernels.backend import Question
from headrace.kernels.operators import StepBatch
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.select import choose
from oracle import graphs

OPS = ReferenceOperators(torch.float32)
HEADS, WIDTH = 3, 16
SPEC = AttentionSpec(0, HEADS, HEADS, WIDTH, WIDTH**-0.5, bidirectional=True)


@pytest.fixture(params=[1, 2, 3], ids=["one thread", "two threads", "three"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def batch_of(lengths: list[int]) -> StepBatch:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    none = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        tokens=none,
        positions=none,
        query_starts=bounds.int(),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        groups=[],
        sample_rows=none,
        max_count=max(lengths),
        max_length=max(lengths),
    )


def attention(qkv: torch.Tensor, lengths: list[int], dtype: torch.dtype = torch.float32):
    return ReferenceOperators(dtype).attend(qkv, SPEC, None, batch_of(lengths), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = [1, 5, 8, 9, 33, 2, 5, 100]
    qkv = torch.randn(sum(lengths), 3 * HEADS * WIDTH).to(dtype)
    found = attention(qkv, lengths, dtype)
    assert found.dtype == dtype
    for part, out in zip(qkv.split(lengths), found.split(lengths), strict=True):
        q, k, v = part.float().view(len(part), 3, HEADS, WIDTH).permute(1, 2, 0, 3)
        wanted = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert (out.float() - wanted).abs().max() < tolerance


@pytest.mark.usefixtures("threads")
def test_an_entry_does_not_see_the_batch() -> None:
    torch.manual_seed(0)
    rng = random.Random(1)
    entries = [torch.randn(size, 3 * HEADS * WIDTH) for size in (*range(1, 20), 64, 129, 200)]
    alone = [attention(entry, [len(entry)]) for entry in entries]
    for _ in range(8):
        chosen = rng.choices(range(len(entries)), k=rng.randint(2, 30))
        lengths = [len(entries[place]) for place in chosen]
        found = attention(torch.cat([entries[place] for place in chosen]), lengths)
        for place, out in zip(chosen, found.split(lengths), strict=True):
            assert torch.equal(out, alone[place]), len(entries[place])


@pytest.mark.usefixtures("threads")
def test_rowwise() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(256, 384) * 3 + 1, torch.randn(384), torch.randn(384)
    wide = torch.randn(256, 1536) * 2
    normed = OPS.layer_norm(x, weight, bias, 1e-12)
    assert (normed - functional.layer_norm(x, (384,), weight, bias, 1e-12)).abs().max() < 1e-5
    whole = {act: OPS.activate(wide, act) for act in ("gelu", "gelu_tanh", "tanh", "silu")}
    assert (whole["gelu"] - functional.gelu(wide)).abs().max() < 1e-6
    for rows in (1, 2, 3, 5, 7, 16, 31, 100, 255):
        part = slice(256 - rows, 256)
        assert torch.equal(OPS.layer_norm(x[part], weight, bias, 1e-12), normed[part])
        for act, values in whole.items():
            assert torch.equal(OPS.activate(wide[part], act), values[part]), (act, rows)


def test_the_reference_serves_encoders() -> None:
    question = Question("cpu", "float32", "float32", graphs.encoder(), frozenset({"float32"}))
    _, (*decisions, _) = choose(question, "ref")
    assert [each.name for each in decisions] == [
        f"kernels.{kind}" for kind in graphs.kinds(question.graph)
    ]
    assert {each.value for each in decisions} == {"ref"}
