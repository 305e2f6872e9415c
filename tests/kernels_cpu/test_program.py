"""The recorded step: the same bits as call by call, whatever the shape of the step."""

from __future__ import annotations

import os
from typing import cast

import numpy as np
import pytest
import torch
from cpu_cases import random_blocks, same
from kernel_cases import make_batch

from headrace.kernels.arrays import tensor
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.program import CpuProgram
from headrace.kernels.cpu.records import HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.lora import add_lora
from headrace.kernels.operators import (
    KvCache,
    KvLayer,
    Operators,
    RopeTable,
    StepBatch,
    StepLimits,
)
from headrace.kernels.weights import BlockWeight, DenseWeight, LoraWeight, StackedWeight, Weight

HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY = 256, 4, 2, 64, 512, 300


def nothing(weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
    raise AssertionError


class Net:
    """Two layers; `gemma` norms after the blocks as well, so that less can be fused."""

    def __init__(self, ops: CpuOperators, kinds: tuple[str, ...], gemma: bool, dense: bool) -> None:
        torch.manual_seed(0)
        self.gemma = gemma

        def weight(kind: str, out: int, width: int) -> BlockWeight | DenseWeight:
            if dense:
                return DenseWeight(torch.randn(out, width) * width**-0.5)
            return random_blocks(kind, out, width, seed=out)

        def prepare(*parts: BlockWeight | DenseWeight) -> Weight:
            whole = parts[0] if len(parts) == 1 else StackedWeight(parts)
            return ops.prepare(whole, "linear", nothing)

        q, kv = HEADS * SIZE, KV_HEADS * SIZE
        self.table = random_blocks("Q5_0", VOCABULARY, HIDDEN)
        self.qkv = prepare(weight(kinds[0], q, HIDDEN), *(weight(kinds[1], kv, HIDDEN),) * 2)
        self.out = prepare(weight(kinds[0], HIDDEN, q))
        self.gate_up = prepare(*(weight(kinds[1], INNER, HIDDEN),) * 2)
        self.down = prepare(weight(kinds[2], HIDDEN, INNER))
        self.head = prepare(weight(kinds[2], VOCABULARY, HIDDEN))
        self.norm, self.bias = torch.rand(HIDDEN) + 0.5, torch.randn(q + 2 * kv)
        self.head_norm = torch.rand(SIZE) + 0.5
        angle = torch.outer(torch.arange(512.0), torch.rand(SIZE // 2))
        self.rope = RopeTable(angle.cos(), angle.sin())

    def forward(
        self, ops: Operators, batch: StepBatch, cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = ops.embed(batch.tokens, self.table, 1.5)
        x = ops.rms_norm(stream, self.norm, 1e-6, 0.0)
        for kv, group in zip(cache.layers, cache.groups, strict=True):
            norms = self.head_norm if self.gemma else None
            q = ops.rope_and_cache(
                ops.linear(x, self.qkv, self.bias), HEADS, KV_HEADS, norms, norms, 1e-6, 0.0,
                self.rope, kv, batch, group,
            )  # fmt: skip
            mixed = ops.linear(ops.attention(q, kv, batch, group, 0.125, None), self.out, None)
            if self.gemma:
                mixed = ops.rms_norm(mixed, self.norm, 1e-6, 1.0)
            x, stream = ops.add_rms_norm(mixed, stream, self.norm, 1e-6, 0.0)
            inner = ops.gated(ops.linear(x, self.gate_up, None), "gelu_tanh")
            inner = ops.linear(inner, self.down, None)
            x, stream = ops.add_rms_norm(inner, stream, self.norm, 1e-6, 0.0)
        capped = 20.0 if self.gemma else None
        return x, ops.logits(ops.select(x, batch.sample_rows), self.head, capped)


def make_cache(blocks: int) -> KvCache:
    shape = (blocks, KV_HEADS, 16, SIZE)
    return KvCache([KvLayer(torch.zeros(shape), torch.zeros(shape)) for _ in range(2)], [0, 0])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_same_bits_as_call_by_call(
    ops: CpuOperators, gemma: bool, dense: bool, window: int | None
) -> None:
    net = Net(ops, ("Q5_0", "Q8_0", "Q6_K"), gemma, dense)
    cache, apart = make_cache(64), make_cache(64)
    program = ops.compile(net.forward, cache, StepLimits(300, 8, 512))
    assert isinstance(program, CpuProgram)
    for entries in ([(0, 1)], [(0, 200)], [(0, 3), (70, 1), (10, 30)], [(9, 1)] * 8):
        batch, _ = make_batch(entries, window=window)
        hidden, logits = (tensor(x).clone() for x in program(batch))
        want_hidden, want_logits = net.forward(ops, batch, apart)
        assert same(hidden, want_hidden)
        assert same(logits, want_logits)
        assert same(cache.layers[1].k, apart.layers[1].k)


def test_what_is_fused(best: CpuOperators) -> None:
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = best.compile(net.forward, make_cache(4), StepLimits(8, 2, 64))
    assert isinstance(program, CpuProgram)
    layer = ["linear", "rope", "attention", "linear", "norm", "gate_up", "linear", "norm"]
    names = [name.split()[0] for name in program.names]
    assert names == ["embed", "norm", *layer, *layer, "select", "quantise", "linear"]


def test_no_rows_sampled_and_a_batch_over_the_limits(best: CpuOperators) -> None:
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    cache = make_cache(64)
    program = best.compile(net.forward, cache, StepLimits(16, 2, 512))
    assert program is not None
    batch, _ = make_batch([(0, 5)])
    batch.sample_rows = batch.sample_rows[:0]
    assert not fill_step(HrStep(), batch).sample_rows  # A tensor of none has no address.
    hidden, logits = program(batch)
    assert hidden.shape == (5, HIDDEN)
    assert logits.shape == (0, VOCABULARY)
    large, _ = make_batch([(0, 20)])
    hidden, logits = (tensor(x).clone() for x in program(large))
    assert same(hidden, net.forward(best, large, make_cache(64))[0])


def test_a_batch_that_comes_again_is_read_again(best: CpuOperators) -> None:
    """Its numbers, not its addresses; also after another one, and one that is too large."""
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = best.compile(net.forward, make_cache(64), StepLimits(16, 2, 512))
    assert program is not None
    fixed, _ = make_batch([(0, 1)])
    fixed.fixed = True
    other, _ = make_batch([(0, 5)])
    large, _ = make_batch([(0, 20)])
    for step, between in enumerate([None, other, large, None]):
        fixed.tokens.fill_(step + 3)
        hidden, logits = (tensor(x).clone() for x in program(fixed))
        wanted = net.forward(best, fixed, make_cache(64))
        assert same(hidden, wanted[0])
        assert same(logits, wanted[1])
        if between is not None:
            program(between)


def test_adapters_are_records_of_the_program(best: CpuOperators) -> None:
    """The sum of the parts, by definition; tokens without an adapter keep their bits."""
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    torch.manual_seed(0)
    slots, room = 3, 5
    additions = {}
    for weight in (net.qkv, net.out, net.gate_up, net.down):
        outs = [part.shape[0] for part in getattr(weight, "parts", (weight,))]
        additions[id(weight)] = LoraWeight(
            torch.randn(slots, len(outs) * room, weight.shape[1]) * 0.05,
            tuple(torch.randn(slots, room, out) * 0.05 for out in outs),
            np.array([3, 0, 5], np.int32),
        )
    limits, plain_cache, cache = StepLimits(64, 8, 512), make_cache(64), make_cache(64)
    plain = best.compile(net.forward, plain_cache, limits)
    adapted = best.compile_adapted(net.forward, cache, limits, additions, plain)
    assert adapted is not None
    assert plain is not None
    batch, _ = make_batch([(0, 9), (3, 1), (0, 30), (4, 1), (2, 1)])
    of_entry = [2, -1, 0, 1, 0]
    of_token = torch.tensor(of_entry).repeat_interleave(torch.tensor([9, 1, 30, 1, 1])).int()
    groups = [(slot, (of_token == slot).nonzero().squeeze(1)) for slot in range(slots)]
    for weight in additions.values():  # Beyond an adapter's own rank nothing counts.
        for part, up in enumerate(weight.up):
            weight.down[0, part * room + 3 : (part + 1) * room] = 0
            assert up.shape[1] == room

    class Adding:
        def __getattr__(self, name: str) -> object:
            return getattr(best, name)

        def linear(
            self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            y = best.linear(x, weight, bias)
            add_lora(y, x, groups, additions[id(weight)])
            return y

    batch.adapters = of_token
    found = adapted(batch)
    assert found is not None
    hidden, logits = (tensor(x).clone() for x in found)
    wanted = net.forward(cast(Operators, Adding()), batch, make_cache(64))
    torch.testing.assert_close(hidden, wanted[0], atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(logits, wanted[1], atol=2e-2, rtol=2e-2)
    base_hidden, base_logits = (tensor(x).clone() for x in plain(batch))
    for entry, (begin, end) in enumerate(zip((0, 9, 10, 40, 41), (9, 10, 40, 41, 42), strict=True)):
        equal = same(hidden[begin:end], base_hidden[begin:end])
        assert equal == (of_entry[entry] in (-1, 1)), "only who has an adapter differs"
        assert equal == same(logits[entry], base_logits[entry])
    large, _ = make_batch([(0, 70)])
    assert adapted(large) is None


def test_two_programs_and_two_teams_in_turn() -> None:
    first, second = CpuOperators(2), CpuOperators(3)
    net = Net(first, ("Q4_0", "Q5_1", "Q4_K"), False, False)
    programs = [
        ops.compile(net.forward, make_cache(64), StepLimits(64, 4, 512)) for ops in (first, second)
    ]
    batch, _ = make_batch([(0, 7), (3, 1)])
    results = [program(batch)[1].copy() for program in programs * 3 if program is not None]
    assert len(results) == 6
    assert all(same(result, results[0]) for result in results)


def test_after_a_fork() -> None:
    ops = CpuOperators(2)
    net = Net(ops, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = ops.compile(net.forward, make_cache(64), StepLimits(64, 4, 512))
    assert program is not None
    batch, _ = make_batch([(0, 7)])
    want = program(batch)[1].copy()
    child = os.fork()
    if child == 0:
        os._exit(0 if same(program(batch)[1], want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(program(batch)[1], want)


def test_jobs_of_different_lengths_in_quick_succession() -> None:
    """A thread that leaves a job late must not read the next one's list (it once did)."""
    ops = CpuOperators(4)
    net = Net(ops, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = ops.compile(net.forward, make_cache(64), StepLimits(64, 4, 512))
    assert program is not None
    batch, _ = make_batch([(0, 2)])
    x = torch.randn(1, 32)
    want = program(batch)[1].copy()
    for _ in range(300):
        ops.add(x, x.clone())
        assert same(program(batch)[1], want)
