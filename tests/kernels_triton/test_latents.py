"""Attention over latents in the interpreter against the reference: K is V too, of one KV head."""

from __future__ import annotations

import pytest
import torch

from headrace.base.graph import AttentionSpec, LatentSpec
from headrace.kernels import reference_attention
from headrace.kernels.operators import KvLayer, StepBatch
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.attention_decode import head_tiles
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.weights import DenseWeight

from .test_attention import make_batch

ROPE, RANK, BLOCK = 8, 40, 16
CASES = {
    "decode": ([(700, 1), (0, 1), (40, 1)], 4),
    "chunks": ([(0, 37), (300, 5), (20, 1)], 4),
    "tiles of heads": ([(130, 1), (5, 9)], 80),
}


def layer_of(batch: StepBatch, kind: str, dtype: torch.dtype) -> tuple[KvLayer, KvLayer]:
    """→ (the layer, its values in fp32)."""
    blocks = int(batch.groups[0].tables.max()) + 1
    wide = torch.randn(blocks, 1, BLOCK, ROPE + RANK)
    if kind not in ("fp8", "int8"):
        k = wide.to(dtype)
        return KvLayer(k, k), KvLayer(k.float(), k.float())
    high = 448.0 if kind == "fp8" else 127.0
    scale = reference_attention.scale_above(wide.abs().amax(-1) / high)
    codes = wide / scale.float().unsqueeze(-1)
    k = codes.to(torch.float8_e4m3fn) if kind == "fp8" else codes.round().to(torch.int8)
    values = k.float() * scale.float().unsqueeze(-1)
    return KvLayer(k, k, scale, scale), KvLayer(values, values)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "int8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_over_latents(name: str, kind: str, deterministic: bool) -> None:
    torch.manual_seed(3)
    entries, heads = CASES[name]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    batch = make_batch(entries, BLOCK, None)
    layer, wide = layer_of(batch, kind, dtype)
    spec = AttentionSpec(0, heads, 1, ROPE + RANK, 0.2, latent=True, rotated=ROPE)
    q = torch.randn(len(batch.tokens), spec.queries).to(dtype)
    ops = TritonOperators(dtype, deterministic=deterministic)
    found = ops.attend(q, spec, layer, batch, 0).view(len(q), heads, -1)[:, :, ROPE:]
    ref = ReferenceOperators(torch.float32).attend(q.float(), spec, wide, batch, 0)
    expected = ref.view(len(q), heads, -1)[:, :, ROPE:]
    tolerance = 2e-2 if kind == "bfloat16" else 3e-5
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    if deterministic:
        alone = make_batch(entries[:1], BLOCK, None)
        alone.groups[0].tables[:] = batch.groups[0].tables[:1, : alone.groups[0].tables.shape[1]]
        again = ops.attend(q[: entries[0][1]], spec, layer, alone, 0)
        assert torch.equal(again.view(-1, heads, ROPE + RANK)[:, :, ROPE:], found[: entries[0][1]])


def test_tiles_of_heads_are_all_of_one_size() -> None:
    assert [head_tiles(heads) for heads in (1, 16, 64, 80, 128, 20)] == [1, 1, 1, 2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 19, 70])
def test_queries_to_latents_and_back(dtype: torch.dtype, rows: int) -> None:
    """They are columns of wider matrices; a row alone is the row among others."""
    torch.manual_seed(rows)
    spec = LatentSpec(0, heads=3, rank=72, rope_size=8, plain_size=20, value_size=24, scale=1.0)
    wide = torch.randn(rows, spec.queries + spec.size).to(dtype)
    given = wide[:, : spec.queries], wide[:, spec.queries + 8 :], wide[:, spec.queries :][:, :8]
    packing, unpacking = (
        [DenseWeight((torch.randn(*shape) * 0.1).to(dtype)) for _ in range(3)]
        for shape in ((72, 20), (24, 72))
    )
    ops, ref = TritonOperators(dtype, deterministic=True), ReferenceOperators(torch.float32)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}
    wider = [[DenseWeight(w.data.float()) for w in part] for part in (packing, unpacking)]
    found = ops.absorb(*given, spec, packing)
    expected = ref.absorb(*(x.float() for x in given), spec, wider[0])
    torch.testing.assert_close(found.float(), expected, **close)
    fast = TritonOperators(dtype).absorb(*given, spec, packing)
    torch.testing.assert_close(fast.float(), expected, **close)
    assert torch.equal(ops.absorb(*(x[-1:] for x in given), spec, packing)[0], found[-1])
    mixed = torch.randn(rows, spec.heads * spec.size).to(dtype)
    values = ops.unpack(mixed, spec, unpacking)
    torch.testing.assert_close(values.float(), ref.unpack(mixed.float(), spec, wider[1]), **close)
    assert torch.equal(ops.unpack(mixed[:1], spec, unpacking)[0], values[0])
