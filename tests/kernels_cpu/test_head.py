"""Greedy rows without logits: the token of every row is that of an argmax over the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_cases import BLOCKS, random_blocks, same
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_batch

from headrace.base.arch import ModelArch
from headrace.base.graph import LinearSpec
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu.drawing import drawing
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.draws import RULE, DrawParameters, streams, uniforms
from headrace.kernels.model import Model
from headrace.kernels.operators import (
    KvCache,
    StepLimits,
)
from headrace.kernels.prepared import Prepared
from headrace.kernels.program import BEST, RULES
from headrace.kernels.weights import BlockWeight, DenseWeight, StackedWeight, Weight
from headrace.layers.description import Description
from oracle.steps import likeliest, plain, results

WIDTH, TOKENS = 256, 100
TEAMS = {threads: CpuOperators(threads) for threads in (1, 2, 5)}


def nothing(weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
    raise AssertionError


class Ends(Model):
    """A model of its two ends alone: row t of the table goes into the head."""

    def __init__(
        self, ops: CpuOperators, head: Weight, table: torch.Tensor, softcap: float | None = None
    ) -> None:
        arch = ModelArch(
            family="ends",
            vocab_size=head.shape[0],
            hidden=table.shape[1],
            layers=0,
            heads=1,
            kv_heads=1,
            head_dim=16,
            intermediate=0,
            max_context=512,
            norm_eps=0,
        )
        to = Description(arch)
        x = to.embed("table", len(table))
        logits = to.linear(
            x, "head", outputs=head.shape[0], role="logits", spec=LinearSpec(softcap)
        )
        super().__init__(to.graph(hidden=x, logits=logits), Prepared())
        self.table = DenseWeight(table)
        self.weights.by_key = {
            (("table.weight",), "embed"): self.table,
            (("head.weight",), "logits"): ops.prepare(head, "logits", nothing),
        }


def compiled(ops: CpuOperators, model: Ends, rows: int) -> CpuProgram:
    steps = plain(ops, model, KvCache([], []))
    program = ops.compile(steps, StepLimits(max(rows, 4), rows, 512))
    assert isinstance(program, CpuProgram)
    return program


def repeated(kind: str, out: int, distinct: int, seed: int) -> Weight:
    """A head in which every row comes about out / distinct times, wherever."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(distinct, (out,), generator=generator)
    if kind not in BLOCKS:
        rows = torch.randn(distinct, WIDTH, generator=generator)
        return DenseWeight(rows[which].to(getattr(torch, kind)))
    few = random_blocks(kind, distinct, WIDTH, seed=seed)
    return BlockWeight(kind, few.data[which].contiguous(), (out, WIDTH))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([*BLOCKS, "float32", "float16", "bfloat16"]),
    out=st.integers(1, 900),
    distinct=st.integers(1, 900),
    rows=st.integers(1, 40),
    threads=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 2**31),
)
def test_the_token_is_that_of_an_argmax(
    kind: str, out: int, distinct: int, rows: int, threads: int, seed: int
) -> None:
    """The lowest of equal logits is chosen, in one panel or in several threads' shares."""
    ops = TEAMS[threads]
    torch.manual_seed(seed)
    model = Ends(ops, repeated(kind, out, min(distinct, out), seed), torch.randn(TOKENS, WIDTH))
    program = compiled(ops, model, rows)
    batch, _ = make_batch([(3, 1)] * rows, seed=seed % 1000, vocabulary=TOKENS)
    _, logits = results(program, batch)
    wanted = logits.argmax(-1)
    for _ in range(2):
        found = likeliest(program, batch)
        hidden, tokens = found
        assert same(tokens, wanted)
        assert same(hidden, model.table.data[batch.tokens])


def test_every_level_finds_the_same(ops: CpuOperators) -> None:
    for kind in ("Q8_0", "Q6_K", "bfloat16"):
        model = Ends(ops, repeated(kind, 333, 40, 1), torch.randn(TOKENS, WIDTH))
        program = compiled(ops, model, 20)
        batch, _ = make_batch([(3, 1)] * 20)
        wanted = results(program, batch)[1].argmax(-1)
        found = likeliest(program, batch)
        assert same(found[1], wanted)


@pytest.mark.parametrize("kind", ["Q5_0", "float32"])
def test_rows_that_are_no_numbers(best: CpuOperators, kind: str) -> None:
    """A row without a number gets token 0, as from argmax, and disturbs no other."""
    table = torch.randn(TOKENS, WIDTH)
    model = Ends(best, repeated(kind, 500, 500, 2), table)
    program = compiled(best, model, 6)
    batch, _ = make_batch([(3, 1)] * 6)
    batch.tokens[:] = torch.arange(6)
    table[1, 7], table[4, 200] = float("nan"), float("inf")
    _, logits = results(program, batch)
    if kind == "float32":
        logits[4] = np.where(np.isnan(logits[4]), -np.inf, logits[4])
    wanted = logits.argmax(-1)
    found = likeliest(program, batch)
    assert wanted[1] == 0
    assert same(found[1], wanted)


def test_all_logits_minus_infinity(best: CpuOperators) -> None:
    table = torch.ones(TOKENS, WIDTH)
    table[2, 0] = float("-inf")
    program = compiled(best, Ends(best, DenseWeight(torch.ones(40, WIDTH)), table), 2)
    batch, _ = make_batch([(3, 1)] * 2)
    batch.tokens[:] = torch.tensor([2, 3])
    assert (results(program, batch)[1][0] == -np.inf).all()
    found = likeliest(program, batch)
    assert found[1].tolist() == [0, 0]


def test_where_it_cannot_go_that_way(best: CpuOperators) -> None:
    """A capped head may make equal what is not; one of parts numbers its outputs by parts: then
    the tokens are those of the logits. A step over the limits goes operator by operator."""
    table = torch.randn(TOKENS, WIDTH)
    batch, _ = make_batch([(3, 1)] * 2)
    capped = Ends(best, random_blocks("Q8_0", 64, WIDTH), table, softcap=30.0)
    parts = StackedWeight((random_blocks("Q8_0", 64, WIDTH), random_blocks("Q5_0", 32, WIDTH)))
    for model in (capped, Ends(best, parts, table)):
        program = compiled(best, model, 2)
        found = program.step(batch, BEST)
        assert found.logits is not None
        assert same(found.tokens, found.logits.argmax(-1))
    program = compiled(best, Ends(best, random_blocks("Q8_0", 64, WIDTH), table), 2)
    assert program.step(batch, BEST).logits is None
    large = make_batch([(3, 1)] * 3)[0]
    assert same(likeliest(program, large)[1], results(program, large)[1].argmax(-1))


def test_steps_with_logits_and_without_in_turn(best: CpuOperators) -> None:
    model = Ends(best, random_blocks("Q6_K", 700, WIDTH), torch.randn(TOKENS, WIDTH))
    program = compiled(best, model, 8)
    batch, _ = make_batch([(3, 1)] * 8)
    batch.fixed = True
    for step in range(6):
        batch.tokens[:] = torch.arange(step, step + 8)
        found = likeliest(program, batch)
        assert same(found[1], results(program, batch)[1].argmax(-1))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_tokens_drawn_in_the_step(ops: CpuOperators, softcap: float | None) -> None:
    """The tokens that are drawn from the logits afterwards, with the number of the row's stream and
    place; the most likely where the temperature is zero; none where the candidates have no room."""
    rows, vocabulary = 12, 40_000
    table = torch.randn(TOKENS, WIDTH) * 3
    table[7] = 0  # A flat row: with a nucleus all of the vocabulary are candidates.
    model = Ends(ops, random_blocks("Q8_0", vocabulary, WIDTH), table, softcap)
    program = compiled(ops, model, rows)
    batch, _ = make_batch([(3 + row, 1) for row in range(rows)])
    batch.tokens[:] = torch.arange(rows)
    generator = np.random.default_rng(0)
    rules = np.zeros(rows, RULE)
    rules["temperature"] = [0, 0.7, 1, 1.3] * 3
    rules["temperature"][7] = 1.0
    rules["top_p"] = [0.9, 1.0, 0.8] * 4
    rules["top_p"][7] = 0.95
    rules["top_k"] = [0, 0, 0, 0, 0, 20] * 2
    rules["min_p"] = [0.0, 0.02] * 6
    rules["min_p"][7] = 0.0
    seeds = generator.integers(0, 2**64, rows, dtype=np.uint64)
    choices = generator.integers(0, 4, rows)
    rules["stream"] = streams(seeds, choices)
    for step in range(3):
        batch.positions[:] = torch.arange(rows) + 3 + step
        batch.rules = rules
        found = program.step(batch, RULES)
        logits, tokens = (tensor(x).clone() for x in (found.logits, found.tokens))
        assert same(logits, results(program, batch)[1])
        uniform = uniforms(seeds, choices, batch.positions.numpy() + 1)
        drawn = rules["temperature"] > 0
        columns = {
            name: torch.from_numpy(rules[name][drawn].copy())
            for name in ("temperature", "top_p", "min_p")
        }
        asked = DrawParameters(
            **columns,
            top_k=torch.from_numpy(rules["top_k"][drawn].astype(np.int64)),
            uniform=torch.from_numpy(uniform[drawn]),
        )
        wanted = logits.argmax(-1)
        wanted[torch.from_numpy(drawn)] = drawing(ops.team).draw(logits[drawn], asked)
        wanted[7] = -1
        assert same(tokens, wanted)
    assert len(set(tokens.tolist())) > 6
