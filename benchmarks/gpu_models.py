"""Real configurations with weights of random numbers, or without any memory ("meta"), for GPU work.

`build` gives a model bound to the Triton operators; `StepMaker` gives steps of any composition.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.base.arch import ModelArch, Rope
from headrace.base.graph import AttentionSpec, RouteSpec
from headrace.base.groups import graph_groups
from headrace.base.step import PoolShape
from headrace.kernels.key_bias import KeyBias
from headrace.kernels.model import Model
from headrace.kernels.operators import GroupBatch, HostStep, KvCache, KvLayer, Operators, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.weights import BlockWeight, Fp8Weight, PackedWeight, Weight
from headrace.loader.prepare import prepare
from headrace.loader.weight_source import Named, WeightSource
from headrace.models.registry import describe
from headrace.roofline.known import known
from headrace.worker.kv_tensors import allocate_kv

BLOCK = 16
GROUP = {"int4": 128, "q4_k": 32, "q5_0": 32, "q6_k": 16, "int8": 128, "mxfp4": 32}
BITS = {"int4": 4, "q4_k": 4, "q5_0": 5, "q6_k": 6, "int8": 8, "mxfp4": 4}
KV = {
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "k8v4": torch.uint8,
}
"""Stored types of a cache by name; of k8v4 that of its values."""

GEMMA_3_1B = ModelArch(
    family="gemma3",
    vocab_size=262_144,
    hidden=1152,
    layers=26,
    heads=4,
    kv_heads=1,
    head_dim=256,
    intermediate=6912,
    max_context=32_768,
    norm_eps=1e-6,
    activation="gelu_tanh",
    rope=Rope(theta=1e6),
    local_rope=Rope(theta=1e4),
    windows=tuple(None if layer % 6 == 5 else 512 for layer in range(26)),
    qk_norm=True,
    tied_embedding=True,
    embedding_scale=1152**0.5,
    norm_offset=1.0,
)
"""From the config.json of google/gemma-3-1b."""

KNOWN = "qwen2.5-0.5b llama-3.1-8b qwen3-30b-a3b gpt-oss-20b deepseek-v2-lite granite-4.0-h-tiny"
ARCHS = {name: known(name)[0] for name in (*KNOWN.split(), "gemma-4-26b-a4b")}
ARCHS |= {"gemma-3-1b": GEMMA_3_1B}


def attend(
    ops: Operators,
    q: torch.Tensor,
    kv: KvLayer,
    batch: StepBatch,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Operators.attend` of q [N, H, E] in the step's first group."""
    _, heads, size = q.shape
    spec = AttentionSpec(0, heads, kv.k.shape[1], size, scale, softcap=softcap)
    found: torch.Tensor = ops.attend(q.flatten(1), spec, kv, batch, 0, sinks)
    return found


def mixture(
    ops: Operators,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: list[Weight],
    down: list[Weight],
    active: int,
    activation: str = "silu",
    biases: tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """`Operators.route`, and the experts that it chose, their shares scaled to one."""
    chosen, shares = ops.route(router, RouteSpec(active), None)
    found: torch.Tensor = ops.experts(x, chosen, shares, gate_up, down, activation, biases)
    return found


def thin(arch: ModelArch) -> ModelArch:
    """One layer of each kind, the first: every kernel of the model, compiled once."""
    of, moe = arch.recurrence, arch.moe
    kinds = [
        (
            arch.window(layer),
            arch.nope[layer] if arch.nope else None,
            of and (layer in of.layers, layer in of.bare),
            moe and moe.mixes(layer),
        )
        for layer in range(arch.layers)
    ]
    return of_layers(arch, sorted({kinds.index(kind) for kind in kinds}))


def of_layers(arch: ModelArch, layers: Sequence[int]) -> ModelArch:
    """A model of these layers alone, which all keep K and V."""

    def places(those: Collection[int]) -> tuple[int, ...]:
        return tuple(at for at, layer in enumerate(layers) if layer in those)

    of, moe = arch.recurrence, arch.moe
    if of is not None:
        of = replace(of, layers=places(of.layers), bare=places(of.bare))
    if moe is not None:
        dense = places([layer for layer in layers if not moe.mixes(layer)])
        moe = replace(moe, dense_layers=0, dense_at=dense)
    windows, nope = (
        tuple(each[layer] for layer in layers) if each else () for each in (arch.windows, arch.nope)
    )
    return replace(arch, layers=len(layers), windows=windows, nope=nope, recurrence=of, moe=moe)


def build(
    arch: ModelArch,
    operators: Operators,
    *,
    device: str,
    weights: str = "bfloat16",
    max_context: int = 16_384,
    dtype: torch.dtype = torch.bfloat16,
) -> Model:
    """A model of random weights, bound to nothing but its operators."""
    source = WeightSource(random_weights(arch, device=device, weights=weights, dtype=dtype))
    with torch.inference_mode():
        return prepare(
            describe(arch),
            source,
            operators,
            device=device,
            dtype=str(dtype).removeprefix("torch."),
            max_context=max_context,
        )


def without_memory(
    arch: ModelArch, architecture: str, weights: str, kv: str, *, deterministic: bool = False
) -> tuple[Model, TritonOperators, KvCache]:
    """A model, its operators for `architecture` and a cache, none of which holds a number."""
    operators = TritonOperators(
        torch.bfloat16,
        deterministic=deterministic,
        architecture=architecture,
        quantise="fp8" if weights == "fp8" else "auto",
    )
    model = build(arch, operators, device="meta", weights=weights)
    return model, operators, make_cache(arch, 64, "meta", KV[kv])


def seeded(device: torch.device | str, seed: int) -> torch.Generator | None:
    """None where there is no memory to draw numbers into."""
    meta = torch.device(device).type == "meta"
    return None if meta else torch.Generator(device).manual_seed(seed)


def random_weights(
    arch: ModelArch, *, device: str, weights: str, dtype: torch.dtype
) -> Iterator[tuple[str, Named]]:
    """Every tensor by its name; matrices of layers in the format `weights`, the ends dense."""
    generator = seeded(device, 1)

    def dense(shape: tuple[int, ...]) -> torch.Tensor:
        if device == "meta" or len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        # In fp32 first: the same numbers whatever the type.
        made = torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)
        return made.to(dtype)

    def named(name: str, shape: tuple[int, ...]) -> Named:
        if weights == "fp8 blocks" and len(shape) == 2 and "layers" in name:
            blocks = [-(-side // 128) for side in shape]
            scales = torch.full(blocks, 0.0001, device=device)
            data = dense(shape) * 10_000 if device != "meta" else dense(shape)
            return Fp8Weight(data.to(torch.float8_e4m3fn), scales)
        whole = len(shape) == 1 or "embed_tokens" in name or "lm_head" in name
        dense_part = weights == "mxfp4" and ".experts." not in name
        if whole or dense_part or weights not in BITS or "mlp.gate.weight" in name:
            return dense(shape)
        out, width = shape
        if weights == "mxfp4":
            blocks = torch.empty(out, width // 32, 17, dtype=torch.uint8, device=device)
            if device != "meta":
                blocks.random_(0, 256, generator=generator)
                blocks[..., 0] = 118
            return BlockWeight("MXFP4", blocks.flatten(1), shape)
        bits, group = BITS[weights], GROUP[weights]
        codes = torch.empty(out, width, dtype=torch.uint8, device=device)
        scales = torch.full((out, -(-width // group)), 0.01, device=device)
        offsets: torch.Tensor | None = scales * -(2.0 ** (bits - 1))
        if device != "meta":
            codes.random_(0, 2**bits, generator=generator)
        elif weights != "q4_k":
            # That offsets are one code times the scale is seen from numbers, which are not here.
            offsets = None
        return PackedWeight(codes, scales, offsets, bits, group, (out, width))

    for name, shape in describe(arch).tensors().items():
        if device == "meta" and "conv" in name:
            yield name, torch.ones(shape)  # Turned on the host: it has to have numbers.
        else:
            yield name, named(name, shape)


@dataclass(frozen=True, slots=True)
class Step:
    """(start, count) of every entry."""

    name: str
    entries: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.entries)

    @property
    def longest(self) -> int:
        return max(start + count for start, count in self.entries)


def decode(batch: int, context: int) -> Step:
    return Step(f"decode {batch} x {context}", ((context, 1),) * batch)


def prefill(count: int, start: int = 0) -> Step:
    return Step(f"prefill {count}" + (f" after {start}" if start else ""), ((start, count),))


def make_batch(
    step: Step, windows: list[int | None], device: str, *, states: bool = False
) -> StepBatch:
    """Tensors of a step; tables hand out blocks 1, 2, 3 … in order. `states`: with a group of
    them, last."""
    used = -(-step.longest // BLOCK)
    tables = 1 + torch.arange(len(step.entries) * used, dtype=torch.int32).view(-1, used)
    counts = torch.tensor([count for _, count in step.entries])
    starts = torch.tensor([start for start, _ in step.entries])
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    positions = torch.arange(step.tokens) - bounds[owner] + starts[owner]
    slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    groups = [GroupBatch(tables.to(device), slots.to(device), window) for window in windows]
    if states:
        own = 1 + torch.arange(len(counts), dtype=torch.int32).view(-1, 1)
        groups.append(GroupBatch(own.to(device), slots.to(device), None))
    return StepBatch(
        tokens=(positions % 1000).to(device),
        positions=positions.to(device),
        query_starts=bounds.to(torch.int32).to(device),
        lengths=(starts + counts).to(torch.int32).to(device),
        groups=groups,
        sample_rows=(bounds[1:] - 1).to(device),
        max_count=int(counts.max()),
        max_length=step.longest,
        host=HostStep(counts.numpy(), (starts + counts).numpy(), bounds[1:].numpy() - 1),
    )


def batch_for(step: Step, cache: KvCache, device: str) -> StepBatch:
    """`make_batch` for the groups of a cache."""
    states = bool(cache.states)
    windows = list(cache.windows[:-1] if states else cache.windows)
    return make_batch(step, windows, device, states=states)


def windows_of(arch: ModelArch) -> list[int | None]:
    """The windows of the layer groups, in the order of the groups."""
    found: list[int | None] = []
    for layer in range(arch.layers):
        if arch.window(layer) not in found:
            found.append(arch.window(layer))
    return found


def family_cache(
    arch: ModelArch, blocks: int, device: str, kv: str = "bfloat16", *, rows: int = 32
) -> KvCache:
    """`make_cache` of any family: latents, and states of `rows` sequences."""
    groups = graph_groups(describe(arch), kv, blocks)
    pool = PoolShape(BLOCK, tuple(g._replace(blocks=rows + 1) if g.state else g for g in groups))
    return allocate_kv(pool, device)


def across(v: torch.Tensor) -> torch.Tensor:
    """Values as a worker keeps those in e4m3 on a GPU: see `KvLayer.across`."""
    return v.transpose(2, 3).contiguous().transpose(2, 3)


def make_cache(
    arch: ModelArch, blocks: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> KvCache:
    """KV of all layers [blocks, G, S, E]; with scales for 8-bit types. Of uint8, which stands for
    k8v4, values have two numbers to a byte. Where keys have biases, int8 ones are kept without
    those of two planes. Latents, states and uneven heads as `family_cache` makes them, in
    `dtype`."""
    if arch.mla or arch.recurrence or arch.uneven:
        return family_cache(arch, blocks, device, str(dtype).removeprefix("torch."), rows=256)
    windows = windows_of(arch)
    shape = (blocks, arch.kv_heads, BLOCK, arch.head_dim)
    layers = []
    four = dtype == torch.uint8
    for _ in range(arch.layers):
        k = torch.zeros(shape, dtype=torch.int8 if four else dtype, device=device)
        v = torch.zeros(*shape[:3], shape[3] // (1 + four), dtype=dtype, device=device)
        coded = dtype.itemsize == 1
        one = torch.ones(shape[:3], dtype=torch.bfloat16, device=device) if coded else None
        scales = [one, None if one is None else one.clone()]
        v = across(v) if dtype == torch.float8_e4m3fn else v
        layers.append(KvLayer(k, v, *scales))
        if arch.qkv_bias and k.dtype == torch.int8:
            angles = torch.zeros(4096, arch.head_dim // 2, device=device)
            values = np.zeros((arch.kv_heads, arch.head_dim), np.float32)
            table = RopeTable(angles, angles.clone())
            layers[-1].bias = KeyBias(values, table, interleaved=False, turns=values)
            layers[-1].planes = torch.zeros(arch.kv_heads, 2, 3, device=device)
    groups = [windows.index(arch.window(layer)) for layer in range(arch.layers)]
    return KvCache(layers, groups, windows)
