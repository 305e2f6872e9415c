"""Checks on the device of what other families need: heads rotated otherwise, routes, latents,
states, and whole models of them, call by call and as graphs. See `gpu_checks`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from gpu_kernels import error
from gpu_models import BLOCK, Step, batch_for, build, family_cache, make_batch, of_layers, seeded
from gpu_paths import Rerun

from headrace.base.arch import Chunks, ModelArch, Moe, Rope
from headrace.base.graph import AttentionSpec, LatentSpec, RouteSpec
from headrace.base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from headrace.base.step import MOST_DRAFTS
from headrace.kernels.cuda_graphs import CudaGraphMaker, GraphMaker, GraphProgram
from headrace.kernels.operators import KvLayer, StateLayer, StepBatch, StepLimits
from headrace.kernels.prepared import RopeTable
from headrace.kernels.program import CallByCall, want
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.weights import DenseWeight
from headrace.roofline.known import known

Check = Callable[[str, torch.dtype], float]


def heads_of(fields: dict[str, object], turned: int) -> Check:
    """`write` of heads of 128 of which so many pairs are rotated."""

    def check(device: str, dtype: torch.dtype) -> float:
        latent = "latent" in fields
        width, heads, groups = (576, 16, 1) if latent else (128, 12, 4)
        batch = make_batch(Step("", ((5, 3), (40, 1), (0, 17))), [None], device)
        blocks = int(batch.groups[0].tables.max()) + 1
        spec = AttentionSpec(0, heads, groups, width, 1.0, **fields)  # type: ignore[arg-type]
        qkv = torch.randn(len(batch.tokens), spec.stacked, device=device).to(dtype)
        gains: tuple[torch.Tensor, ...] = ()
        if spec.whole_norm:
            sizes = heads * width, groups * width
            gains = tuple(torch.rand(size, device=device).to(dtype) for size in sizes)
        angles = torch.randn(64, max(1, turned), device=device)
        rope = RopeTable(angles.cos(), angles.sin()) if turned else None
        found = []
        for ops in (TritonOperators(dtype), ReferenceOperators(dtype)):
            shape = blocks, groups, BLOCK, width
            k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
            kv = KvLayer(k, k if latent else v)
            q = ops.write(qkv, spec, gains, rope, kv, batch, 0)  # type: ignore[arg-type]
            found.append((q, kv.k, kv.v))
        return max(error(a, b, 0.01) for a, b in zip(*found, strict=True))

    return check


def routes(device: str, dtype: torch.dtype) -> float:
    """The reference's experts with its shares; scores that differ are far apart in fp32."""
    worst = 0.0
    for spec, experts, biased in (
        (RouteSpec(8, True, "sigmoid", 2.5, 8, 4), 256, True),
        (RouteSpec(6, False, "softmax", 16.0, 8, 3, best=1), 160, False),
        (RouteSpec(6, False), 64, False),
        (RouteSpec(10), 512, False),
        (RouteSpec(8, True, "sigmoid"), 128, True),
        (RouteSpec(6, True, "sqrt_softplus", 1.5), 256, True),
    ):
        logits = torch.randn(70, experts, device=device)
        bias = torch.randn(experts, device=device) * 0.3 if biased else None
        chosen, shares = TritonOperators(dtype).route(logits, spec, bias)
        wanted, theirs = ReferenceOperators(dtype).route(logits, spec, bias)
        order = wanted.argsort(-1)
        # A sum may lie within rounding of another one: one row of 70.
        same = (chosen == wanted.gather(-1, order)).all(-1)
        worst = max(worst, float((~same).sum()) / 1.5)
        if device != "meta":
            theirs = theirs.gather(-1, order)[same]
            worst = max(worst, error(shares[same], theirs, 1e-4))
    return worst


def gating(device: str, dtype: torch.dtype) -> float:
    ref, worst = ReferenceOperators(torch.float32), 0.0
    x, gate = (torch.randn(5, 2600, device=device) * 3).to(dtype).chunk(2, -1)
    for name in ("sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "relu2"):
        wanted = ref.multiply(x.float(), gate.float(), name)
        worst = max(worst, error(TritonOperators(dtype).multiply(x, gate, name), wanted, 0.01))
    return worst


LATENTS = {
    "decode, 16 heads": (Step("", ((2000, 1), (0, 1), (77, 1))), 16),
    "decode, 128 heads": (Step("", ((700, 1), (63, 1))), 128),
    "chunks, 16 heads": (Step("", ((0, 90), (33, 1), (500, 140))), 16),
    "chunks, 128 heads": (Step("", ((150, 40),)), 128),
    "chunks, 20 heads": (Step("", ((50, 70),)), 20),
}


def latents(name: str, kind: str = "bf16", *, deterministic: bool = False) -> Check:
    def check(device: str, dtype: torch.dtype) -> float:
        step, heads = LATENTS[name]
        batch = make_batch(step, [None], device)
        blocks = int(batch.groups[0].tables.max()) + 1
        k = torch.randn(blocks, 1, BLOCK, 576, device=device).to(dtype)
        layer, wide = KvLayer(k, k), KvLayer(k.float(), k.float())
        if kind == "fp8":
            scale = torch.full((blocks, 1, BLOCK), 0.0625, dtype=torch.bfloat16, device=device)
            codes = (k.float() * 16).to(torch.float8_e4m3fn)
            layer = KvLayer(codes, codes, scale, scale)
            wide = KvLayer(codes.float() / 16, codes.float() / 16)
        spec = AttentionSpec(0, heads, 1, 576, 0.1, latent=True, rotated=64)
        q = torch.randn(step.tokens, spec.queries, device=device).to(dtype)
        ops = TritonOperators(dtype, deterministic=deterministic)
        ref = ReferenceOperators(torch.float32)
        shape = step.tokens, heads, 576
        found = ops.attend(q, spec, layer, batch, 0).view(shape)[:, :, 64:]
        expected = ref.attend(q.float(), spec, wide, batch, 0).view(shape)[:, :, 64:]
        return error(found, expected, 0.02)

    return check


def packing(device: str, dtype: torch.dtype) -> float:
    """Queries to latents and back, of V2-Lite's sizes; in few rows and in many."""
    worst, ref = 0.0, ReferenceOperators(torch.float32)
    spec = LatentSpec(0, 16, 512, 64, 128, 128, 1.0)
    given = [
        [DenseWeight((torch.randn(*shape, device=device) * 0.05).to(dtype)) for _ in range(16)]
        for shape in ((512, 128), (128, 512))
    ]
    wide = [[DenseWeight(w.data.float()) for w in part] for part in given]
    for rows, deterministic in ((1, False), (33, True), (300, False)):
        ops = TritonOperators(dtype, deterministic=deterministic)
        q, latent, rotary, mixed = (
            torch.randn(rows, size, device=device).to(dtype) for size in (3072, 512, 64, 16 * 576)
        )
        packed = ref.absorb(q.float(), latent.float(), rotary.float(), spec, wide[0])
        worst = max(worst, error(ops.absorb(q, latent, rotary, spec, given[0]), packed, 0.01))
        values = ref.unpack(mixed.float(), spec, wide[1])
        worst = max(worst, error(ops.unpack(mixed, spec, given[1]), values, 0.01))
    return worst


STATE_STEPS = (
    (((0, 70), (0, 2)), ((0, 70, 65, 7, 70, 8), (0, 2, 0, 0, 0, 0))),
    (((70, 1), (2, 4)), ((70, 1, 0, 0, 0, 0), (2, 1, 0, 0, 0, 0))),
    (((71, 1), (5, 1)), ((71, 1, 72, 6, 0, 0), (3, 1, 0, 0, 0, 0))),
    (((72, 5), (6, 1)), None),
)
"""(start, count) of both entries; `StepBatch.states`: a prompt, drafts, two of three accepted."""


def state_step(number: int, device: str) -> StepBatch:
    entries, states = STATE_STEPS[number]
    batch = make_batch(Step("", entries), [], device, states=True)
    batch.states = None if states is None else np.array(states, np.int32)
    return batch


def states(spec: ConvSpec | DeltaSpec | SsmSpec, *, deterministic: bool = False) -> Check:
    """Steps one after another, from and to states that nobody else writes."""

    def check(device: str, dtype: torch.dtype) -> float:
        channels, worst = 1600, 0.0

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device)

        inputs, state, tail, weights = made(9, 3 + MOST_DRAFTS, channels), None, None, []
        if not isinstance(spec, ConvSpec):
            heads, keys, values = spec.value_heads, spec.key_size, spec.value_size
            state, tail = (
                made(9, heads, keys, values),
                made(9, MOST_DRAFTS, heads, keys + values + 2),
            )
            norms = values if isinstance(spec, DeltaSpec) else spec.values
            weights = [made(heads) for _ in range(2 if isinstance(spec, DeltaSpec) else 3)]
            weights.append(made(norms))
        taps, layers = made(4 * channels), []
        for _ in range(2):
            own = [None if x is None else x.clone() for x in (state, tail)]
            layers.append(StateLayer(inputs.clone(), *own))
        ops = TritonOperators(dtype, deterministic=deterministic), ReferenceOperators(torch.float32)
        for number in range(len(STATE_STEPS)):
            batch, found = state_step(number, device), []
            tokens = len(batch.tokens)
            widths = [3 * channels if isinstance(spec, ConvSpec) and spec.gated else channels]
            if not isinstance(spec, ConvSpec):
                widths = [spec.mixed, spec.values, *[spec.value_heads] * spec.gates]
            given = [made(tokens, width).to(dtype) for width in widths]
            for each, layer in zip(ops, layers, strict=True):
                if device == "meta" and each is ops[1]:
                    continue  # It asks for numbers.
                wide = [x if each is ops[0] else x.float() for x in given]
                step = layer, state_step(number, device), 0
                if isinstance(spec, ConvSpec):
                    found.append(each.short_conv(wide[0], spec, taps, None, *step))
                else:
                    found.append(each.recur(wide, spec, weights, *step))
            worst = max(worst, error(found[0], found[-1], 0.01))
        kept = [(a.inputs, b.inputs) for a, b in [layers]]
        if state is not None:
            kept += [(a.state, b.state) for a, b in [layers]]
        return max([worst, *(error(a, b, 1e-3) for a, b in kept)])

    return check


def small(name: str, layers: int, **changes: object) -> ModelArch:
    """A known model with few layers, narrow ones, few experts."""
    arch = of_layers(known(name)[0], range(layers))
    if (moe := arch.moe) is not None:
        moe = replace(moe, experts=max(16, moe.groups), intermediate=256, active=min(4, moe.active))
    arch = replace(arch, vocab_size=1000, max_context=512, moe=moe)
    return replace(arch, **changes)  # type: ignore[arg-type]


def models() -> dict[str, ModelArch]:
    return {
        "deepseek-v2-lite": small("deepseek-v2-lite", 2, hidden=512, intermediate=512),
        "qwen3-next": small("qwen3-next-80b-a3b", 4, hidden=512),
        "granite-4.0-h-tiny": small("granite-4.0-h-tiny", 6, hidden=1536),
        "lfm2": small("lfm2-1.2b", 3),
        "glm-4": small("glm-4-9b-0414", 2, hidden=512, intermediate=512),
        "olmo-2": small("olmo-2-7b", 2, hidden=512, intermediate=512),
        "gemma-4": small("gemma-4-26b-a4b", 6, hidden=512, intermediate=512),
        "like Llama 4": small(
            "llama-3.1-8b",
            4,
            family="llama4",
            hidden=512,
            intermediate=512,
            windows=(32, 32, 32, None),
            nope=(False, False, False, True),
            moe=Moe(16, 1, 256, False, 256, scores="sigmoid", inside=True),
            chunks=Chunks(normed=True, growth=0.1, every=16),
        ),
    }


MODEL_STEPS = (
    Step("prompts", ((0, 30), (0, 12))),
    Step("decode 2", ((30, 1), (12, 1))),
    Step("mixed", ((31, 1), (13, 7))),
    Step("decode 2", ((32, 1), (20, 1))),
)


EXACT = ("qwen3-next", "gemma-4")
"""Models that are checked in fp32: with these weights heads are normed that are nearly nought (and
states forget within a token), so that the reference itself is 32 and 58 % off in bf16."""


def family(name: str) -> Check:
    """Steps of one model after another, against the reference in fp32 with the same numbers."""

    def check(device: str, dtype: torch.dtype) -> float:
        arch, found = models()[name], []
        if name in EXACT:
            dtype = torch.float32
        for each, kind in (
            (TritonOperators(dtype), dtype),
            (ReferenceOperators(torch.float32), torch.float32),
        ):
            if device == "meta" and found:
                break
            model = build(arch, each, device=device, max_context=512, dtype=kind)
            kv = str(kind).removeprefix("torch.")
            cache = family_cache(arch, 16, device, kv, rows=4)
            logits = []
            for step in MODEL_STEPS:
                batch = batch_for(step, cache, device)
                logits.append(model.forward(each, batch, cache)[1].float())
            found.append(torch.cat(logits))
        norm = (found[0] - found[-1]).norm() / found[-1].norm()
        return float(norm) / (0.005 if name in EXACT else 0.06)

    return check


def replayed(name: str) -> Check:
    """Graphs give what call by call gives, and leave the same states."""

    def check(device: str, dtype: torch.dtype) -> float:
        arch, ops, worst = models()[name], TritonOperators(dtype), 0.0
        model = build(arch, ops, device=device, max_context=512, dtype=dtype)
        kv = str(dtype).removeprefix("torch.")
        caches = [family_cache(arch, 16, device, kv, rows=4) for _ in range(2)]
        for index, cache in enumerate(caches):
            for layer, _ in cache.kept():
                arrays = [layer.k, layer.v] if isinstance(layer, KvLayer) else [layer.inputs]
                if isinstance(layer, StateLayer) and layer.state is not None:
                    arrays.append(layer.state)
                for array in arrays:
                    drawn = seeded(device, 5)
                    values = torch.randn(array.shape, device=device, generator=drawn)
                    array.copy_(values.to(array.dtype))
            assert index < 2
        plain, calls = (CallByCall(model, ops, cache, ops.drawing) for cache in caches)
        cuda = device == "cuda"
        maker: GraphMaker = CudaGraphMaker(torch.device(device)) if cuda else Rerun()
        program = GraphProgram(calls, StepLimits(tokens=64, entries=4, max_context=512), maker)
        program.capture()
        asked = want(logits=True, hidden="sampled")
        for step in MODEL_STEPS:
            found = []
            for each in (plain, program):
                batch = batch_for(step, caches[0], device)
                found.append(each.step(batch, asked).logits.clone())
            worst = max(worst, error(found[1], found[0], 0.03))
        assert program.facts.replayed == len(MODEL_STEPS), program.facts
        for number, layer in caches[0].states.items():
            other = caches[1].states[number]
            # The first block is for padding.
            worst = max(worst, error(other.inputs[1:], layer.inputs[1:], 0.03))
            if layer.state is not None and other.state is not None:
                worst = max(worst, error(other.state[1:], layer.state[1:], 0.03))
        return worst

    return check


DELTA = DeltaSpec(0, 4, 8, 128, 128, 1e-6)
SSM = SsmSpec(0, 1, 24, 128, 64, 1e-5)
FAMILIES: dict[str, Check] = {
    "heads rotated in part": heads_of({"rope": Rope(1e4, share=0.5)}, 32),
    "heads rotated in pairs": heads_of({"rope": Rope(1e4, interleaved=True)}, 64),
    "heads not rotated": heads_of({}, 0),
    "heads normed whole": heads_of({"rope": Rope(1e4), "whole_norm": True, "eps": 1e-6}, 64),
    "latents written": heads_of(
        {"rope": Rope(1e4, interleaved=True), "latent": True, "rotated": 64}, 32
    ),
    "values of keys": heads_of({"rope": Rope(1e4), "values": "keys", "eps": 1e-6}, 64),
    "heads normed behind": heads_of({"rope": Rope(1e4), "behind": True, "eps": 1e-5}, 64),
    "queries that grow": heads_of({"growth": (0.1, 8, 1)}, 0),
    "routes": routes,
    "gating": gating,
    **{f"latents, {name}": latents(name) for name in LATENTS},
    "latents, decode, 16 heads, fp8": latents("decode, 16 heads", "fp8"),
    "latents, chunks, 16 heads, fp8": latents("chunks, 16 heads", "fp8"),
    "latents, chunks, 16 heads, deterministic": latents("chunks, 16 heads", deterministic=True),
    "absorb and unpack": packing,
    "short convolution": states(ConvSpec(0, 4, "silu")),
    "short convolution, gated": states(ConvSpec(0, 4, None, True)),
    "delta rule": states(DELTA),
    "delta rule, deterministic": states(DELTA, deterministic=True),
    "state space": states(SSM),
    "state space, norm of parts": states(SsmSpec(0, 8, 16, 128, 80, 1e-5, norm_groups=8)),
    **{f"model near the reference, {name}": family(name) for name in models()},
    **{
        f"graphs equal eager, {name}": replayed(name)
        for name in ("deepseek-v2-lite", "qwen3-next", "granite-4.0-h-tiny")
    },
}
