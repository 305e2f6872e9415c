"""Latent attention on the CPU kernels: keys that are values too, and the heads' products."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import attend, make_batch, make_kv, quantised
from kv_pages import as_pages

from headrace.base.graph import LatentSpec
from headrace.kernels import latent
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.operators import KvLayer
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import DenseWeight, Weight
from headrace.loader.prepare import Expansion

ENTRIES = [(0, 1), (0, 70), (130, 1), (63, 6), (5, 40), (600, 3)]
SPEC = LatentSpec(layer=0, heads=3, rank=48, rope_size=16, plain_size=24, value_size=40, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_keys_that_are_values_give_the_bits_of_both_stored(
    ops: CpuOperators, dtype: torch.dtype, block_size: int
) -> None:
    batch, blocks = make_batch(ENTRIES, block_size=block_size)
    torch.manual_seed(0)
    k = make_kv(blocks, 1, block_size, 80).k
    twice = as_pages(quantised(KvLayer(k, k.clone()), dtype))
    once = KvLayer(twice.k, twice.k, twice.k_scale, twice.k_scale)
    q = torch.randn(len(batch.tokens), 16, 80)
    want = attend(ops, q, twice, batch, 0, 0.1, None)
    assert torch.equal(attend(ops, q, once, batch, 0, 0.1, None), want)


def test_what_lies_behind_an_end_counts_for_nothing(ops: CpuOperators) -> None:
    """Another's old keys may be there, and no numbers at all."""
    batch, blocks = make_batch([(0, 7), (20, 1)])
    kv = make_kv(blocks, 1, 16, 32)
    for dtype in (torch.float32, torch.bfloat16):
        clean, bad = kv.k.to(dtype), kv.k.to(dtype).clone()
        for entry, length in enumerate((7, 21)):
            block = batch.groups[0].tables[entry, (length - 1) // 16]
            clean[block, :, (length - 1) % 16 + 1 :] = 0
            bad[block, :, (length - 1) % 16 + 1 :] = float("nan")
        q = torch.randn(len(batch.tokens), 4, 32)
        found = []
        for k in (clean, bad):
            page = as_pages(KvLayer(k, k)).k
            found.append(attend(ops, q, KvLayer(page, page), batch, 0, 0.2, None))
        assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_the_products_of_the_heads(ops: CpuOperators, rows: int) -> None:
    torch.manual_seed(1)
    q, own = torch.randn(rows, SPEC.queries), torch.randn(rows, SPEC.rank)
    rotary, mixed = torch.randn(rows, 16), torch.randn(rows, SPEC.heads * SPEC.size)
    packing = [torch.randn(48, 24) for _ in range(3)]
    unpacking = [torch.randn(40, 48) for _ in range(3)]

    def prepared(
        backend: CpuOperators | ReferenceOperators, of: list[torch.Tensor]
    ) -> list[Weight]:
        return [backend.prepare(DenseWeight(each), "heads", Expansion()) for each in of]

    heads = q.view(rows, 3, 40).double()
    want = torch.cat(
        [
            torch.cat([heads[:, h, 24:], heads[:, h, :24] @ packing[h].double().T], 1)
            for h in range(3)
        ]
        + [rotary.double(), own.double()],
        1,
    )
    values = [
        mixed.view(rows, 3, 64)[:, h, 16:].double() @ unpacking[h].double().T for h in range(3)
    ]
    for backend in (ops, ReferenceOperators(torch.float32)):
        given = q, own, rotary, SPEC, prepared(backend, packing)
        torch.testing.assert_close(latent.absorb(backend, *given).double(), want, atol=2e-5, rtol=0)
        found = latent.unpack(backend, mixed, SPEC, prepared(backend, unpacking))
        torch.testing.assert_close(found.double(), torch.cat(values, 1), atol=2e-5, rtol=0)
