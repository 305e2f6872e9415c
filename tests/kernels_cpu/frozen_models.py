"""Programs of small random models of every family, and of the real ones, in three variants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from cpu_cases import random_blocks

from headrace.base.arch import Caps, ModelArch, Moe, Rope
from headrace.base.graph import WeightRef
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.program import CpuProgram, Variant, compile_program
from headrace.kernels.operators import KvCache, KvLayer, StepLimits
from headrace.kernels.program import CallByCall
from headrace.kernels.weights import LoraWeight
from headrace.loader.open import open_model
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import Named, WeightSource
from headrace.loader.weights import load_weights
from headrace.models.registry import describe

TINY = ModelArch(
    family="llama",
    vocab_size=96,
    hidden=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    intermediate=96,
    max_context=128,
    norm_eps=1e-5,
)
FAMILIES = {
    "llama": TINY,
    "mistral": replace(TINY, family="mistral", windows=(16, 16, 16)),
    "qwen2": replace(TINY, family="qwen2", qkv_bias=True, tied_embedding=True),
    "qwen3": replace(TINY, family="qwen3", qk_norm=True, output_bias=True),
    "gemma3": replace(
        TINY,
        family="gemma3",
        windows=(16, 16, None),
        qk_norm=True,
        tied_embedding=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding_scale=8.0,
        caps=Caps(30.0, 20.0),
        local_rope=Rope(theta=500.0),
    ),
    "qwen3_moe": replace(
        TINY,
        family="qwen3_moe",
        qk_norm=True,
        moe=Moe(experts=4, active=2, intermediate=32),
    ),
    "mixtral": replace(TINY, family="mixtral", moe=Moe(experts=4, active=2, intermediate=32)),
}
KINDS = {
    "packed": {"q_proj": "Q5_0", "k_proj": "Q5_0", "gate_proj": "Q5_0", "up_proj": "Q5_0"},
    "mixed": {"q_proj": "", "o_proj": "Q8_0", "up_proj": "Q4_0", "down_proj": ""},
}
"""The block format of a matrix by a part of its name, "" for fp32; else Q8_0."""
LIMITS = StepLimits(tokens=24, entries=4, max_context=128)
SLOTS, RANK = 2, 4

Programs = dict[str, CpuProgram | None]


def tiny(family: str, weights: str) -> Programs:
    """The programs of a random model, whose matrices are "packed", "mixed" or "dense"."""
    arch = FAMILIES[family]
    generator = np.random.default_rng(0)

    def weight(name: str, shape: tuple[int, ...]) -> Named:
        kinds = KINDS.get(weights)
        if kinds is None or len(shape) == 1:
            return generator.standard_normal(shape, np.float32)
        kind = next((kind for part, kind in kinds.items() if part in name), "Q8_0")
        if not kind:
            return generator.standard_normal(shape, np.float32)
        block = random_blocks(kind, *shape)
        return replace(block, data=block.data.numpy())

    named = {name: weight(name, shape) for name, shape in describe(arch).tensors().items()}
    return _programs(arch, WeightSource(named.items()))


def programs(name: str) -> Programs:
    """The programs of a model of the catalog."""
    files = open_model(name)
    return _programs(files.arch, WeightSource(load_weights(files)))


def _programs(arch: ModelArch, source: WeightSource) -> Programs:
    """Plain steps, steps that want every hidden state, steps with adapters."""
    ops = CpuOperators(2)
    model = prepare(
        describe(arch), source, ops, device="cpu", dtype="float32", max_context=LIMITS.max_context
    )
    cache = make_cache(arch)
    additions = {ref.names: _addition(ref) for ref in model.products()}
    steps = CallByCall(model, ops, cache, ops.drawing, additions)
    plain = compile_program(ops, steps, LIMITS)
    return {
        "plain": plain,
        "every": compile_program(ops, steps, LIMITS, plain, Variant(every=True)),
        "adapted": compile_program(ops, steps, LIMITS, plain, Variant(adapted=True)),
    }


def make_cache(arch: ModelArch) -> KvCache:
    windows = list(dict.fromkeys(arch.window(layer) for layer in range(arch.layers)))
    shape = 4, arch.kv_heads, 16, arch.head_dim
    layers = [
        KvLayer(np.zeros(shape, np.float32), np.zeros(shape, np.float32))
        for _ in range(arch.layers)
    ]
    groups = [windows.index(arch.window(layer)) for layer in range(arch.layers)]
    return KvCache(layers, groups, windows)


def _addition(product: WeightRef) -> LoraWeight:
    return LoraWeight(
        torch.zeros(SLOTS, len(product.names) * RANK, product.width),
        tuple(torch.zeros(SLOTS, RANK, out) for out in product.rows),
        np.zeros(SLOTS, np.int32),
    )
