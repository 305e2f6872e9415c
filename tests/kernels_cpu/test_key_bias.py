"""Keys whose large biases are left out of their int8 codes (`kernels/key_bias.py`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import make_batch, make_kv, one_of
from kv_pages import as_pages, from_pages

from headrace.base.arch import Rope
from headrace.base.graph import AttentionSpec
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.key_bias import TILE, KeyBias, key_bias, partners
from headrace.kernels.operators import KvLayer, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators

REFERENCE = ReferenceOperators(torch.float32)
ENTRIES = [(0, 33), (0, 1), (0, 210)]
CONTEXT = 320


def table(rotated: int, factor: float = 1.0) -> RopeTable:
    frequencies = 100.0 ** -(torch.arange(rotated // 2) / (rotated // 2))
    angles = torch.arange(CONTEXT).unsqueeze(1) * frequencies
    return RopeTable(factor * angles.cos(), factor * angles.sin())


def spec_of(size: int, *, interleaved: bool) -> AttentionSpec:
    rope = Rope(10_000.0, interleaved=interleaved)
    return AttentionSpec(0, 4, 2, size, size**-0.5, rope)


def biases(size: int) -> torch.Tensor:
    """[G, E]: a few large ones, as Qwen2.5's first layers have them, among small ones."""
    bias = 0.3 * torch.randn(2, size)
    bias[0, 1], bias[0, size - 2], bias[1, size // 2] = 90.0, -40.0, 12.0
    return bias


def answers(
    ops: ReferenceOperators | CpuOperators,
    kv: KvLayer,
    qkv: torch.Tensor,
    batch: StepBatch,
    spec: AttentionSpec,
    rope: RopeTable | None,
) -> torch.Tensor:
    q = ops.write(qkv.clone(), spec, (), rope, kv, batch, 0)
    return ops.attend(q, spec, kv, batch, 0)


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(
    ("size", "rotated", "interleaved", "factor"),
    [
        (64, 64, False, 1.0),
        (64, 64, True, 1.0),
        (48, 16, False, 1.0),
        (32, 32, False, 1.4),
        (32, 0, False, 1.0),
    ],
)
def test_answers_are_those_of_exact_keys(
    ops: CpuOperators, block_size: int, size: int, rotated: int, interleaved: bool, factor: float
) -> None:
    """Within what eight bits cost keys without a bias, though with their biases in the codes they
    are ten times as far off: whole and interleaved rotation, a part of the head, a scaled table."""
    torch.manual_seed(0)
    batch, blocks = make_batch(ENTRIES, block_size=block_size)
    spec = spec_of(size, interleaved=interleaved)
    rope = table(rotated, factor) if rotated else None
    bias = biases(size)
    qkv = torch.randn(len(batch.tokens), 8 * size)
    qkv[:, 4 * size : 6 * size] += bias.flatten()
    exact = make_kv(blocks, 2, block_size, size)
    exact.k.zero_()
    exact.v.zero_()

    def coded(left_out: KeyBias | None) -> KvLayer:
        codes = torch.zeros(exact.k.shape, dtype=torch.int8)
        scales = torch.ones(exact.k.shape[:-1], dtype=torch.bfloat16)
        return KvLayer(codes, codes.clone(), scales, scales.clone(), left_out)

    left_out = key_bias(bias.numpy(), rope, spec)
    assert left_out is not None
    want = answers(REFERENCE, exact, qkv, batch, spec, rope)

    def off(got: torch.Tensor) -> float:
        return float((got - want).norm() / want.norm())

    reference = off(answers(REFERENCE, coded(left_out), qkv, batch, spec, rope))
    with_codes = off(answers(REFERENCE, coded(None), qkv, batch, spec, rope))
    assert reference < 0.05
    assert with_codes > 4 * reference
    pages = replace(as_pages(coded(left_out)), bias=left_out)
    got = answers(ops, pages, qkv, batch, spec, rope)
    assert off(got) < reference + 0.01
    written = from_pages(pages)
    held = coded(left_out)
    REFERENCE.write(qkv.clone(), spec, (), rope, held, batch, 0)
    assert int((written.k.int() - held.k.int()).abs().max()) <= 1  # another order of roundings


def test_a_row_does_not_depend_on_how_a_prompt_was_cut(ops: CpuOperators) -> None:
    torch.manual_seed(0)
    size, spec, rope = 64, spec_of(64, interleaved=False), table(64)
    left_out = key_bias(biases(size).numpy(), rope, spec)
    qkv = torch.randn(90, 8 * size)
    batch, blocks = make_batch([(0, 90)])
    codes, scales = (
        torch.zeros(blocks, 2, 16, size, dtype=torch.int8),
        torch.ones(blocks, 2, 16, dtype=torch.bfloat16),
    )

    def cut(chunk: int) -> torch.Tensor:
        kv = as_pages(KvLayer(codes.clone(), codes.clone(), scales.clone(), scales.clone()))
        kv = replace(kv, bias=left_out)
        ends = [*range(chunk, 90, chunk), 90]
        steps = [(first, last) for first, last in zip([0, *ends], ends, strict=False)]
        return torch.cat(
            [
                answers(ops, kv, qkv[first:last], one_of(batch, first, last, 0), spec, rope)
                for first, last in steps
            ]
        )

    whole = cut(90)
    assert torch.equal(cut(7), whole)
    assert torch.equal(cut(1), whole)


def test_only_large_biases_are_left_out() -> None:
    spec, rope = spec_of(64, interleaved=False), table(64)
    bias = np.full((2, 64), 0.5, np.float32)
    assert key_bias(bias, rope, spec) is None
    bias[1, 5] = 14
    left_out = key_bias(bias, rope, spec)
    assert left_out is not None
    assert np.argwhere(left_out.values).tolist() == [[1, 5], [1, 37]]  # the whole plane


@pytest.mark.parametrize("interleaved", [False, True])
def test_turns_lead_from_a_tile_s_first_position_to_its_others(interleaved: bool) -> None:
    spec, rope = spec_of(32, interleaved=interleaved), table(16, 1.3)
    left_out = key_bias(np.full((2, 32), 8, np.float32), rope, spec)
    assert left_out is not None
    start, other = left_out.at(np.array([128])), partners(32, 16, interleaved=interleaved)
    cosine, sine = left_out.turns
    low = np.arange(32) % 2 == 0 if interleaved else np.arange(32) < 8
    there = start[:, 0, :, None]
    turned = there * cosine + there[:, other] * np.where(low[:, None], -sine, sine)
    want = np.moveaxis(left_out.at(np.arange(128, 128 + TILE)), 1, 2)
    np.testing.assert_allclose(turned, want, atol=1e-4)
