"""Norms, gates and rotation in the interpreter against the reference."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from headrace.base.arch import Rope
from headrace.base.graph import AttentionSpec
from headrace.kernels.operators import KvLayer
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.gated import gated, gated_codes, multiply
from headrace.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_codes
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.rope_cache import rope_and_cache

from .test_attention import make_batch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {"int8": 0.5, "fp8": 16.0}
"""Largest error in units of the scale: half a step of the coarsest binade."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_and_activations(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    ops, ref = TritonOperators(dtype), ReferenceOperators(dtype)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((5, 384), (384,), (384,)))
    close(ops.layer_norm(x, weight, bias, 1e-6), ref.layer_norm(x, weight, bias, 1e-6), dtype)
    for activation in ("silu", "gelu", "gelu_tanh", "tanh"):
        close(ops.activate(x, activation), ref.activate(x, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(0, 64), (1, 96), (4, 1000), (3, 2100)])
def test_scatter(dtype: torch.dtype, count: int, width: int) -> None:
    torch.manual_seed(1)
    ops, ref = TritonOperators(dtype), ReferenceOperators(dtype)
    x, wide = torch.randn(6, width + 8).to(dtype)[:, :width], torch.randn(count, 2 * width)
    rows, places = wide.to(dtype)[:, :width], torch.randperm(6)[:count]
    expected = ref.scatter(x.clone(), rows, places)
    assert torch.equal(ops.scatter(x, rows, places), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 896), (5, 1000), (2, 5120)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(dtype: torch.dtype, rows: int, width: int, offset: float) -> None:
    torch.manual_seed(1)
    ref = ReferenceOperators(dtype)
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    close(rms_norm(x, weight, 1e-6, offset), ref.rms_norm(x, weight, 1e-6, offset), dtype)
    out, total = add_rms_norm(x, residual, weight, 1e-6, offset)
    expected, expected_total = ref.add_rms_norm(x, residual, weight, 1e-6, offset)
    # The interpreter truncates where it should round to bf16.
    close(total, expected_total, dtype)
    assert dtype == torch.bfloat16 or torch.equal(total, expected_total)
    close(out, expected, dtype)


def spread(scales: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """Scales [N, groups] for every column."""
    return scales.repeat_interleave(group, 1)[:, :width] if group else scales


@pytest.mark.parametrize("codes", ["fp8", "int8"])
@pytest.mark.parametrize(("group", "width"), [(0, 384), (128, 384), (128, 64), (128, 300)])
@pytest.mark.parametrize("added", [False, True])
def test_norm_codes(codes: str, group: int, width: int, added: bool) -> None:
    torch.manual_seed(1)
    x, residual = torch.randn(2, 3, width)
    x[1] = 0.0
    residual[1] = 0.0
    weight = torch.randn(width)
    more = residual if added else None
    out, scales, total = rms_norm_codes(x, more, weight, 1e-6, 0.0, codes, group)
    expected, wanted = ReferenceOperators(torch.float32).add_rms_norm(
        x, residual.clone() if added else torch.zeros_like(x), weight, 1e-6, 0.0
    )
    assert scales.shape == (3, -(-width // group) if group else 1)
    step = spread(scales, group, width)
    assert ((out.float() * step - expected).abs() <= step * ERROR[codes] * 1.01 + 1e-9).all()
    assert not out[1].float().any()
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(1)
    x = (torch.randn(3, 2 * 1300) * 4).to(dtype)
    x[0, 0], x[0, 1], x[0, 2] = 90.0, -90.0, 0.0
    ref = ReferenceOperators(dtype)
    close(gated(x, activation), ref.gated(x.float(), activation), dtype)
    for (codes, share), group in product(ERROR.items(), (0, 128)):
        out, scales = gated_codes(x, activation, codes, group)
        step = spread(scales, group, 1300)
        error = out.float() * step - ref.gated(x.float(), activation)
        assert (error.abs() <= step * share * 1.01).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "relu2"])
def test_multiply(dtype: torch.dtype, activation: str) -> None:
    """Columns of wider matrices."""
    torch.manual_seed(1)
    x, gate = (torch.randn(3, 2 * 1300) * 4).to(dtype).chunk(2, -1)
    ref = ReferenceOperators(torch.float32).multiply(x.float(), gate.float(), activation)
    close(multiply(x, gate, activation), ref, dtype)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "fp8", "fp8 across"])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_cache(kind: str, norms: bool) -> None:
    torch.manual_seed(2)
    heads, kv_heads, width, block = 4, 2, 48, 16
    batch = make_batch([(5, 3), (40, 1), (0, 17)], block, None)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    blocks = int(batch.groups[0].tables.max()) + 1
    kind, across = kind.removesuffix(" across"), kind.endswith("across")
    cache = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, dtype)

    def empty(across: bool = False) -> KvLayer:
        k, v = torch.zeros(2, blocks, kv_heads, block, width).to(cache)
        if across:
            v = v.view(blocks, kv_heads, width, block).transpose(2, 3)
        if kind in ("int8", "fp8"):
            return KvLayer(k, v, *torch.zeros(2, blocks, kv_heads, block, dtype=torch.bfloat16))
        return KvLayer(k, v)

    qkv = torch.randn(len(batch.tokens), (heads + 2 * kv_heads) * width).to(dtype)
    of_q, of_k = torch.randn(2, width).to(dtype)
    both = (of_q, of_k) if norms else ()
    angles = torch.randn(64, width // 2)
    rope = RopeTable(angles.cos(), angles.sin())
    mine, theirs = empty(across), empty()
    spec = AttentionSpec(0, heads, kv_heads, width, 1.0, eps=1e-6)
    arguments = (qkv, spec, both, rope)
    q = rope_and_cache(*arguments, mine, batch, 0)
    expected = ReferenceOperators(dtype).write(*arguments, theirs, batch, 0)
    close(q, expected, dtype)
    for a, b in ((mine.k, theirs.k), (mine.v, theirs.v)):
        if kind in ("int8", "fp8"):
            # A value on the border of two codes may fall to either: one step apart at most.
            step = 1.0 if kind == "int8" else 32.0
            difference = (a.float() - b.float()).abs()
            assert (difference <= step).all()
            assert (difference > 0).float().mean() < 0.01
        else:
            close(a, b, dtype)
    if mine.k_scale is not None and theirs.k_scale is not None:
        close(mine.k_scale, theirs.k_scale, torch.bfloat16)


SHAPES = {
    "in part": ({"rope": Rope(1e4, share=0.5)}, 24),
    "in pairs": ({"rope": Rope(1e4, interleaved=True)}, 24),
    "in part, in pairs": ({"rope": Rope(1e4, share=0.25, interleaved=True)}, 6),
    "not at all": ({}, 0),
    "whole norm": ({"rope": Rope(1e4), "whole_norm": True, "eps": 1e-6}, 24),
    "latents": ({"rope": Rope(1e4, interleaved=True), "latent": True, "rotated": 16}, 8),
    "normed values": ({"rope": Rope(1e4), "values": "normed", "eps": 1e-6}, 24),
    "values of keys": ({"rope": Rope(1e4, interleaved=True), "values": "keys", "eps": 1e-6}, 24),
    "K and V elsewhere": ({"rope": Rope(1e4), "values": "elsewhere", "eps": 1e-6}, 24),
    "by axes": ({"rope": Rope(1e4, axes=(0, 1, 2) * 8)}, 24),
    "in pairs by axes": ({"rope": Rope(1e4, interleaved=True, axes=(0,) * 9 + (1, 2) * 3)}, 15),
    "norms behind": ({"rope": Rope(1e4, interleaved=True), "behind": True, "eps": 0.1}, 24),
    "growing": ({"behind": True, "growth": (0.7, 5, 1), "eps": 1e-6}, 0),
    "growing later": ({"growth": (0.7, 5, 0)}, 0),
}
"""Fields of the spec, and how many pairs of a head of 48 are rotated."""


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "int8"])
def test_heads_that_are_rotated_otherwise(name: str, kind: str) -> None:
    torch.manual_seed(2)
    fields, turned = SHAPES[name]
    width, block, latent = 48, 16, "latent" in fields
    heads, kv_heads = 11, 1 if latent else 3
    batch = make_batch([(5, 3), (40, 1), (0, 17)], block, None)
    if "axes" in name:
        batch.turns = torch.randint(0, 64, (3, len(batch.tokens)))
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    blocks = int(batch.groups[0].tables.max()) + 1
    cache = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, dtype)

    def empty() -> KvLayer:
        k, v = torch.zeros(2, blocks, kv_heads, block, width).to(cache)
        scales = torch.zeros(2, blocks, kv_heads, block, dtype=torch.bfloat16)
        given = scales if kind in ("int8", "fp8") else (None, None)
        return KvLayer(k, k, given[0], given[0]) if latent else KvLayer(k, v, *given)

    spec = AttentionSpec(0, heads, kv_heads, width, 1.0, **fields)
    qkv = torch.randn(len(batch.tokens), spec.stacked).to(dtype)
    both: tuple[torch.Tensor, ...] = ()
    if spec.whole_norm:
        both = tuple(torch.randn(n * width).to(dtype) for n in (heads, kv_heads))
    elif spec.values != "own":
        both = tuple(torch.randn(width).to(dtype) for _ in range(2 if spec.kept else 1))
    angles = torch.randn(64, turned)
    rope = RopeTable(angles.cos(), angles.sin()) if turned else None
    mine, theirs = empty(), empty()
    q = rope_and_cache(qkv, spec, both, rope, mine, batch, 0)
    close(q, ReferenceOperators(dtype).write(qkv, spec, both, rope, theirs, batch, 0), dtype)
    step = {"int8": 1.0, "fp8": 32.0}.get(kind, TOLERANCE[dtype] * 8)
    for a, b in ((mine.k, theirs.k), (mine.v, theirs.v)):
        difference = (a.float() - b.float()).abs()
        assert (difference <= step).all()
        assert kind not in ("int8", "fp8") or (difference > 0).float().mean() < 0.01
        assert (b.float().abs().sum() > 0) == (spec.kept > 0)
