"""The counted operators are those that the models call: names, shapes, FLOPs and bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace.base.arch import Encoder, ModelArch, Moe
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.operators import StepBatch
from headrace.kernels.reference import ReferenceOperators
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import WeightSource
from headrace.models.registry import describe
from headrace.roofline.composition import compose_plan
from headrace.roofline.counts import Case, Count
from headrace.roofline.operators import count_step
from headrace.roofline.weights import WeightBytes
from headrace.worker.batch import make_batch
from headrace.worker.kv_tensors import allocate_kv
from headrace.worker.rows import BlockTables, Rows

TINY = ModelArch(
    family="llama",
    vocab_size=97,
    hidden=48,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=8,
    intermediate=80,
    max_context=64,
    norm_eps=1e-5,
)
MODELS = {
    "llama": TINY,
    "qwen2": replace(TINY, family="qwen2", qkv_bias=True, tied_embedding=True),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True),
    "gemma3": replace(
        TINY,
        family="gemma3",
        windows=(4, 4, None),
        qk_norm=True,
        tied_embedding=True,
        norm_offset=1.0,
        activation="gelu_tanh",
    ),
    "qwen3_moe": replace(
        TINY,
        family="qwen3_moe",
        qk_norm=True,
        moe=Moe(experts=4, active=2, intermediate=16),
    ),
    "cohere2": replace(TINY, family="cohere2", windows=(4, 4, None), nope=(False, False, True)),
    "glm4": replace(TINY, family="glm4", fused=("gate_up",), qkv_bias=True),
    "olmo2": replace(TINY, family="olmo2", qk_norm=True, whole_qk_norm=True),
    "phi3": replace(TINY, family="phi3", fused=("qkv", "gate_up")),
    "starcoder2": replace(TINY, family="starcoder2", qkv_bias=True, output_bias=True),
    "bert": replace(
        TINY,
        family="bert",
        kv_heads=6,
        activation="gelu",
        encoder=Encoder(types=2),
    ),
    "bert with a head": replace(
        TINY,
        family="bert",
        kv_heads=6,
        activation="gelu",
        encoder=Encoder(types=2, labels=3),
    ),
}
KINDS = {
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "layer_norm": "norm",
    "logits": "linear",
}
"""Operator → the kind of node that it computes, where that is named otherwise."""
STARTS = [0, 9, 3]
MIXED = [7, 1, 5], [True, True, False]
NOTHING = [7, 1, 5], [False, False, False]
DECODING = [1, 1, 1], [True, True, True]
"""(counts, which of them sample)."""


class Recorder:
    """Passes every operator on and keeps what it was called with."""

    def __init__(self, inner: ReferenceOperators) -> None:
        self._inner = inner
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)
        if name in ("prepare", "compile", "name", "host", "joined", "within"):
            return function

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            if name != "route":  # Of a few numbers a row: not counted.
                self.calls.append((KINDS.get(name, name), arguments, result))
            return result

        return call


def run_step(
    arch: ModelArch, kv_dtype: str, counts: list[int], samples: list[bool]
) -> tuple[list[tuple[str, tuple[Any, ...], Any]], StepPlan]:
    """One step of a model with random weights on the reference operators."""
    torch.manual_seed(0)
    tensors = describe(arch).tensors()
    weights = {name: torch.randn(shape) * 0.1 for name, shape in tensors.items()}
    operators = Recorder(ReferenceOperators(torch.float32))
    model = prepare(
        describe(arch),
        WeightSource(weights.items()),
        operators,
        device="cpu",
        dtype="float32",
        max_context=arch.max_context,
    )
    pool = PoolShape(4, graph_groups(describe(arch), kv_dtype, 20))
    rows, tables = (
        Rows(4, arch.max_context, "cpu"),
        BlockTables(4, arch.max_context, pool, "cpu"),
    )
    starts = [0] * len(STARTS) if arch.encoder else STARTS  # An encoder takes inputs whole.
    spec = RequestSpec(SamplingParams(), 0)
    admitted = [
        Admission(row, row, list(range(1, start + count + 1)), start + count, 0, spec)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    for admission in admitted:
        rows.admit(admission)
    for group in range(len(pool.groups)):
        tables.write(
            [BlockWrite(row, group, 0, [1 + 5 * row + i for i in range(4)]) for row in range(3)]
        )
    plan = StepPlan(0, [0, 1, 2], starts, counts, samples, admitted)
    cache = allocate_kv(pool, "cpu")
    batch = make_batch(plan, None, rows, tables, pool, token_types=arch.encoder is not None)
    with torch.inference_mode():
        hidden, _ = model.forward(operators, batch, cache)
        if arch.encoder is not None and arch.encoder.labels:
            scored = [n for n, sampled in enumerate(samples) if sampled]
            first = operators.select(hidden, batch.query_starts[scored].long())
            model.logits(operators, first)
    # Where every row samples there is nothing to select, and nothing is done.
    done = [call for call in operators.calls if call[0] != "select" or call[2] is not call[1][0]]
    return done, plan


@pytest.mark.parametrize(
    ("name", "kv_dtype", "step"),
    [(name, "float32", MIXED) for name in sorted(MODELS)]
    + [("llama", "bfloat16", MIXED), ("gemma3", "int8", MIXED), ("qwen3", "fp8", MIXED)]
    + [
        (name, "float32", step)
        for name in sorted(MODELS)
        if not MODELS[name].encoder
        for step in (NOTHING, DECODING)
    ],
)
def test_counted_is_called(name: str, kv_dtype: str, step: tuple[list[int], list[bool]]) -> None:
    arch = MODELS[name]
    calls, plan = run_step(arch, kv_dtype, *step)
    case = Case(arch, WeightBytes("float32"), "float32", kv_dtype)
    beside = ("sample", "pool")
    counts = [c for c in count_step(case, compose_plan(arch, plan)) if c.operator not in beside]
    called = Counter(operator for operator, _, _ in calls)
    counted: Counter[str] = Counter()
    for count in counts:
        counted[count.operator] += count.calls
    assert counted == called
    for operator in called:
        mine = [c for c in counts if c.operator == operator]
        theirs = [(arguments, result) for op, arguments, result in calls if op == operator]
        check = CHECKS.get(operator)
        if check is not None:
            check(arch, mine, theirs)


def check_products(
    arch: ModelArch, mine: list[Count], theirs: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Shapes, FLOPs and bytes of every product, from the tensors themselves."""
    expected_: Counter[tuple[Any, ...]] = Counter()
    for (x, weight, _), result in theirs:
        out, inner = weight.shape
        flops = 2 * x.shape[0] * out * inner
        expected_[out, inner, flops, weight.nbytes, x.nbytes, result.nbytes] += 1
    counted: Counter[tuple[Any, ...]] = Counter()
    for count in mine:
        key = (
            *(count.shape or ()),
            count.flops,
            count.weight_bytes,
            count.read_bytes,
            count.write_bytes,
        )
        counted[key] += count.calls
    assert counted == expected_


def check_attention(
    arch: ModelArch, mine: list[Count], theirs: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Pairs counted one by one from the positions that the kernel was given."""
    if theirs[0][0][1].bidirectional:
        check_encoder_attention(arch, mine, theirs)
        return
    expected_: Counter[tuple[float, float]] = Counter()
    for (_, spec, layer, batch, group, *_sinks), _result in theirs:
        window = batch.groups[group].window
        seen = list(entry_positions(batch, window))
        pairs = sum(len(positions) for entry in seen for positions in entry)
        cached = sum(len(set().union(*map(set, entry))) for entry in seen)
        heads, size = spec.heads, spec.size
        tensors = (layer.k, layer.v, layer.k_scale, layer.v_scale)
        places = layer.k.shape[0] * layer.k.shape[2]
        kv = sum(tensor.nbytes for tensor in tensors if tensor is not None) // places
        expected_[pairs * heads * (4 * size + 5), cached * kv] += 1
    counted: Counter[tuple[float, float]] = Counter()
    for count in mine:
        counted[count.flops, count.kv_bytes] += count.calls
    assert counted == expected_


def check_encoder_attention(
    arch: ModelArch, mine: list[Count], theirs: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Every token of an input with every token of it."""
    flops = sum(n * n for n in MIXED[0]) * arch.heads * (4 * arch.head_dim + 5)
    (count,) = mine
    assert count.flops == flops
    assert count.read_bytes == theirs[0][0][0].nbytes
    assert count.write_bytes == theirs[0][1].nbytes


def entry_positions(batch: StepBatch, window: int | None) -> list[list[range]]:
    starts, result = batch.query_starts.tolist(), []
    for begin, end in itertools.pairwise(starts):
        positions = batch.positions[begin:end].tolist()
        result.append(
            [range(0 if window is None else max(0, p - window + 1), p + 1) for p in positions]
        )
    return result


def check_moved(
    arch: ModelArch, mine: list[Count], theirs: list[tuple[tuple[Any, ...], Any]]
) -> None:
    """Activations written, in all calls together."""
    written = sum(
        tensor.nbytes
        for _, result in theirs
        for tensor in (result if isinstance(result, tuple) else (result,))
    )
    assert sum(count.write_bytes * count.calls for count in mine) == written


CHECKS = {
    "linear": check_products,
    "attend": check_attention,
    "activate": check_moved,
    "add": check_moved,
    "norm": check_moved,
    "gated": check_moved,
    "select": check_moved,
    "embed": check_moved,
    "write": check_moved,
    "experts": check_moved,
}
