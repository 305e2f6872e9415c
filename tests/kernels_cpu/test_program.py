"""The recorded step: the same bits as call by call, whatever the shape of the step."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from cpu_cases import random_blocks, same
from kernel_cases import make_batch

from headrace.base.arch import ModelArch, Rope
from headrace.base.graph import (
    ActivationSpec,
    AttentionSpec,
    EmbedSpec,
    Graph,
    LinearSpec,
    NormSpec,
    WeightRef,
)
from headrace.base.verify import verify
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.program import CpuProgram, Variant, compile_program
from headrace.kernels.cpu.records import HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.lora import add_lora
from headrace.kernels.model import Model
from headrace.kernels.operators import KvCache, KvLayer, StepLimits
from headrace.kernels.prepared import Prepared, RopeTable
from headrace.kernels.program import LOGITS, want
from headrace.kernels.weights import BlockWeight, DenseWeight, LoraWeight, StackedWeight, Weight
from headrace.layers.description import Description, vector
from oracle.steps import plain, results

GELU = ActivationSpec("gelu_tanh")
HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCABULARY = 256, 4, 2, 64, 512, 300


def nothing(weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
    raise AssertionError


ARCH = ModelArch(
    family="net",
    vocab_size=VOCABULARY,
    hidden=HIDDEN,
    layers=2,
    heads=HEADS,
    kv_heads=KV_HEADS,
    head_dim=SIZE,
    intermediate=INNER,
    max_context=512,
    norm_eps=1e-6,
)


class Net(Model):
    """Two layers of the same weights; `gemma` norms after the blocks as well, so that less can be
    fused."""

    def __init__(self, ops: CpuOperators, kinds: tuple[str, ...], gemma: bool, dense: bool) -> None:
        torch.manual_seed(0)
        super().__init__(describe_net(gemma), Prepared())

        def weight(kind: str, out: int, width: int) -> BlockWeight | DenseWeight:
            if dense:
                return DenseWeight(torch.randn(out, width) * width**-0.5)
            return random_blocks(kind, out, width, seed=out)

        def prepare(*parts: BlockWeight | DenseWeight) -> Weight:
            whole = parts[0] if len(parts) == 1 else StackedWeight(parts)
            return ops.prepare(whole, "linear", nothing)

        q, kv = HEADS * SIZE, KV_HEADS * SIZE
        self.weights.by_key = {
            (("table.weight",), "embed"): random_blocks("Q5_0", VOCABULARY, HIDDEN),
            (("q.weight", "k.weight", "v.weight"), "linear"): prepare(
                weight(kinds[0], q, HIDDEN), *(weight(kinds[1], kv, HIDDEN),) * 2
            ),
            (("o.weight",), "linear"): prepare(weight(kinds[0], HIDDEN, q)),
            (("gate.weight", "up.weight"), "linear"): prepare(
                *(weight(kinds[1], INNER, HIDDEN),) * 2
            ),
            (("down.weight",), "linear"): prepare(weight(kinds[2], HIDDEN, INNER)),
            (("head.weight",), "logits"): prepare(weight(kinds[2], VOCABULARY, HIDDEN)),
            (("norm.weight",), "vector"): torch.rand(HIDDEN) + 0.5,
            (("q.bias", "k.bias", "v.bias"), "vector"): torch.randn(q + 2 * kv),
            (("head_norm",), "vector"): torch.rand(SIZE) + 0.5,
        }
        angle = torch.outer(torch.arange(512.0), torch.rand(SIZE // 2))
        self.weights.ropes = {(Rope(), SIZE): RopeTable(angle.cos(), angle.sin())}


def describe_net(gemma: bool) -> Graph:
    to = Description(ARCH)
    stream = to.embed("table", VOCABULARY, EmbedSpec(scale=1.5))
    x = to.rms_norm(stream, "norm")
    for layer in range(2):
        spec = AttentionSpec(layer, HEADS, KV_HEADS, SIZE, 0.125, Rope(), eps=1e-6)
        keys = KV_HEADS * SIZE
        qkv = to.linear(x, "q", "k", "v", outputs=[spec.queries, keys, keys], bias=True)
        norms = [vector(["head_norm"], [SIZE])] * 2 if gemma else []
        q = to.node("write", (qkv,), spec.queries, norms, spec)
        mixed = to.linear(to.node("attend", (q,), spec.queries, spec=spec), "o", outputs=HIDDEN)
        if gemma:
            gain = [vector(["norm.weight"], [HIDDEN])]
            mixed = to.node("norm", (mixed,), HIDDEN, gain, NormSpec("rms", 1e-6, 1.0))
        stream = to.add(stream, mixed)
        x = to.rms_norm(stream, "norm")
        inner = to.gated(to.linear(x, "gate", "up", outputs=[INNER, INNER]), GELU)
        stream = to.add(stream, to.linear(inner, "down", outputs=HIDDEN))
        x = to.rms_norm(stream, "norm")
    capped = 20.0 if gemma else None
    logits = to.linear(x, "head", outputs=VOCABULARY, role="logits", spec=LinearSpec(capped))
    graph = to.graph(hidden=x, logits=logits)
    verify(graph)
    return graph


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
    program = ops.compile(plain(ops, net, cache), StepLimits(300, 8, 512))
    assert isinstance(program, CpuProgram)
    for entries in ([(0, 1)], [(0, 200)], [(0, 3), (70, 1), (10, 30)], [(9, 1)] * 8):
        batch, _ = make_batch(entries, window=window)
        hidden, logits = (tensor(x).clone() for x in results(program, batch))
        want_hidden, want_logits = net.forward(ops, batch, apart)
        assert same(hidden, want_hidden)
        assert same(logits, want_logits)
        assert same(cache.layers[1].k, apart.layers[1].k)


def test_what_is_fused(best: CpuOperators) -> None:
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    steps = plain(best, net, make_cache(4))
    program = compile_program(best, steps, StepLimits(8, 2, 64), variant=Variant(every=True))
    assert isinstance(program, CpuProgram)
    layer = ["linear", "rope", "attention", "linear", "norm", "gate_up", "linear", "norm"]
    names = [name.split()[0] for name in program.names]
    assert names == ["embed", "norm", *layer, *layer, "select", "quantise", "linear"]


def test_no_rows_sampled_and_a_batch_over_the_limits(best: CpuOperators) -> None:
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    cache = make_cache(64)
    program = best.compile(plain(best, net, cache), StepLimits(16, 2, 512))
    assert program is not None
    batch, _ = make_batch([(0, 5)])
    batch.sample_rows = batch.sample_rows[:0]
    assert not fill_step(HrStep(), batch).sample_rows  # A tensor of none has no address.
    hidden, logits = results(program, batch)
    assert hidden.shape == (0, HIDDEN)
    assert logits.shape == (0, VOCABULARY)
    large, _ = make_batch([(0, 20)])
    hidden, logits = (tensor(x).clone() for x in results(program, large))
    assert same(hidden, net.forward(best, large, make_cache(64))[0])


def test_a_batch_that_comes_again_is_read_again(best: CpuOperators) -> None:
    """Its numbers, not its addresses; also after another one, and one that is too large."""
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = best.compile(plain(best, net, make_cache(64)), StepLimits(16, 2, 512))
    assert program is not None
    fixed, _ = make_batch([(0, 1)])
    fixed.fixed = True
    other, _ = make_batch([(0, 5)])
    large, _ = make_batch([(0, 20)])
    for step, between in enumerate([None, other, large, None]):
        fixed.tokens.fill_(step + 3)
        hidden, logits = (tensor(x).clone() for x in results(program, fixed))
        wanted = net.forward(best, fixed, make_cache(64))
        assert same(hidden, wanted[0])
        assert same(logits, wanted[1])
        if between is not None:
            results(program, between)


def test_adapters_are_records_of_the_program(best: CpuOperators) -> None:
    """The sum of the parts, by definition; tokens without an adapter keep their bits."""
    net = Net(best, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    torch.manual_seed(0)
    slots, room = 3, 5
    additions = {}
    for ref in net.products():
        additions[ref.names] = LoraWeight(
            torch.randn(slots, len(ref.rows) * room, ref.width) * 0.05,
            tuple(torch.randn(slots, room, out) * 0.05 for out in ref.rows),
            np.array([3, 0, 5], np.int32),
        )
    limits, plain_cache, cache = StepLimits(64, 8, 512), make_cache(64), make_cache(64)
    alone = best.compile(plain(best, net, plain_cache), limits)
    program = best.compile(plain(best, net, cache, additions), limits)
    assert program is not None
    assert alone is not None
    batch, _ = make_batch([(0, 9), (3, 1), (0, 30), (4, 1), (2, 1)])
    of_entry = [2, -1, 0, 1, 0]
    of_token = torch.tensor(of_entry).repeat_interleave(torch.tensor([9, 1, 30, 1, 1])).int()
    groups = [(slot, (of_token == slot).nonzero().squeeze(1)) for slot in range(slots)]
    for weight in additions.values():  # Beyond an adapter's own rank nothing counts.
        for part, up in enumerate(weight.up):
            weight.down[0, part * room + 3 : (part + 1) * room] = 0
            assert up.shape[1] == room

    def adding(ref: WeightRef, x: torch.Tensor, y: torch.Tensor) -> None:
        add_lora(y, x, groups, additions[ref.names])

    everything = want(logits=True, hidden="every")
    batch.adapters = of_token.numpy()
    found = program.step(batch, everything)
    hidden, logits = tensor(found.hidden).clone(), tensor(found.logits).clone()
    wanted = net.forward(best, batch, make_cache(64), adding, every=True)
    torch.testing.assert_close(hidden, wanted[0], atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(logits, wanted[1], atol=2e-2, rtol=2e-2)
    batch.adapters = None
    found = alone.step(batch, everything)
    base_hidden, base_logits = tensor(found.hidden).clone(), tensor(found.logits).clone()
    for entry, (begin, end) in enumerate(zip((0, 9, 10, 40, 41), (9, 10, 40, 41, 42), strict=True)):
        equal = same(hidden[begin:end], base_hidden[begin:end])
        assert equal == (of_entry[entry] in (-1, 1)), "only who has an adapter differs"
        assert equal == same(logits[entry], base_logits[entry])
    large, _ = make_batch([(0, 70)])
    large.adapters = np.zeros(70, np.int32)
    assert results(program, large)[0].shape == (1, HIDDEN), "operator by operator"
    assert program.variant_of(batch, LOGITS) is program
    assert program.variant_of(large, LOGITS) not in (None, program)


def test_two_programs_and_two_teams_in_turn() -> None:
    first, second = CpuOperators(2), CpuOperators(3)
    net = Net(first, ("Q4_0", "Q5_1", "Q4_K"), False, False)
    programs = [
        ops.compile(plain(ops, net, make_cache(64)), StepLimits(64, 4, 512))
        for ops in (first, second)
    ]
    batch, _ = make_batch([(0, 7), (3, 1)])
    found = [results(program, batch)[1].copy() for program in programs * 3]
    assert len(found) == 6
    assert all(same(one, found[0]) for one in found)


def test_after_a_fork() -> None:
    ops = CpuOperators(2)
    net = Net(ops, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = ops.compile(plain(ops, net, make_cache(64)), StepLimits(64, 4, 512))
    assert program is not None
    batch, _ = make_batch([(0, 7)])
    want = results(program, batch)[1].copy()
    child = os.fork()
    if child == 0:
        os._exit(0 if same(results(program, batch)[1], want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(results(program, batch)[1], want)


def test_jobs_of_different_lengths_in_quick_succession() -> None:
    """A thread that leaves a job late must not read the next one's list (it once did)."""
    ops = CpuOperators(4)
    net = Net(ops, ("Q5_0", "Q8_0", "Q6_K"), False, False)
    program = ops.compile(plain(ops, net, make_cache(64)), StepLimits(64, 4, 512))
    assert program is not None
    batch, _ = make_batch([(0, 2)])
    x = torch.randn(1, 32)
    want = results(program, batch)[1].copy()
    for _ in range(300):
        ops.add(x, x.clone())
        assert same(results(program, batch)[1], want)
