"""KV in codes on the Triton kernels: keys without their large biases, values in four bits."""

from __future__ import annotations

import pytest
import torch

from headrace.base.arch import Rope
from headrace.base.graph import AttentionSpec
from headrace.kernels.key_bias import key_bias
from headrace.kernels.operators import KvLayer, StepBatch
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.kv_codes import LOOK_UP
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.value_codes import MAGNITUDES, decode

from .test_attention import make_batch
from .test_unpack import numbers, run_ptx

HEADS, KV_HEADS = 6, 2
ENTRIES = [(0, 5), (33, 1), (100, 7), (400, 1)]


def layer(kind: str, batch: StepBatch, size: int, spec: AttentionSpec, rope: RopeTable) -> KvLayer:
    """Empty, with large biases of a few planes: of one head two, of the other one."""
    shape = (int(batch.groups[0].tables.max()) + 1, KV_HEADS, 16, size)
    k = torch.zeros(shape, dtype=torch.int8)
    v = torch.zeros_like(k)
    if kind == "k8v4":
        v = torch.zeros(*shape[:-1], size // 2, dtype=torch.uint8)
    bias = torch.zeros(KV_HEADS, size)
    bias[0, 1], bias[0, size - 2], bias[1, size // 2] = 90.0, -40.0, 12.0
    kept = key_bias(bias.numpy(), rope, spec)
    assert kept is not None
    scales = torch.zeros(2, *shape[:-1], dtype=torch.bfloat16)
    return KvLayer(k, v, *scales, kept, torch.from_numpy(kept.planes()))


@pytest.mark.parametrize(
    ("kind", "size", "window", "softcap", "dtype"),
    [
        ("int8", 64, None, None, torch.bfloat16),
        ("int8", 48, 64, 30.0, torch.float32),
        ("k8v4", 32, 64, 30.0, torch.float32),
        ("k8v4", 64, None, None, torch.bfloat16),
        ("k8v4", 128, None, None, torch.float32),
    ],
)
def test_writes_and_reads_as_the_reference(
    kind: str, size: int, window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    """Single tokens behind one piece and behind several, and chunks of prompts."""
    torch.manual_seed(5)
    batch = make_batch(ENTRIES, 16, None)
    before = make_batch([(0, start + count) for start, count in ENTRIES], 16, None)
    spec = AttentionSpec(0, HEADS, KV_HEADS, size, size**-0.5, Rope(10_000.0), softcap=softcap)
    angles = torch.arange(512)[:, None] * 100.0 ** -(torch.arange(size // 2) / (size // 2))
    rope = RopeTable(angles.cos(), angles.sin())
    mine, theirs = (layer(kind, before, size, spec, rope) for _ in range(2))
    ops, reference = TritonOperators(dtype), ReferenceOperators(dtype)
    assert mine.bias is not None
    bias = torch.from_numpy(mine.bias.values).flatten()

    def qkv(of: StepBatch) -> torch.Tensor:
        made = torch.randn(len(of.tokens), (HEADS + 2 * KV_HEADS) * size)
        made[:, HEADS * size : (HEADS + KV_HEADS) * size] += bias
        return made.to(dtype)

    reference.write(qkv(before), spec, (), rope, theirs, before, 0)
    mine.k, mine.v, mine.k_scale, mine.v_scale = (
        x.clone() for x in (theirs.k, theirs.v, theirs.k_scale, theirs.v_scale)
    )
    latest = qkv(batch)
    q = ops.write(latest.clone(), spec, (), rope, mine, batch, 0)
    other = reference.write(latest, spec, (), rope, theirs, batch, 0)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(q.float(), other.float(), atol=tolerance, rtol=tolerance)
    # A value on the border of two codes may fall to either.
    assert (mine.k != theirs.k).sum() < 0.01 * latest.numel()
    assert (mine.k.int() - theirs.k.int()).abs().max() <= 1
    assert (mine.v != theirs.v).sum() < 0.01 * latest.numel()
    if kind == "k8v4":
        values = [decode(kv.v, kv.v_scale.float()) for kv in (mine, theirs)]
        torch.testing.assert_close(*values, atol=0.2, rtol=0)
    batch.groups[0].window = window
    expected = reference.attend(other, spec, theirs, batch, 0).float()
    found = ops.attend(other, spec, theirs, batch, 0).float()
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_every_code_is_looked_up() -> None:
    """The assembler of the device, line by line."""
    levels = [-x for x in MAGNITUDES[::-1]] + list(MAGNITUDES)
    for first in range(0, 256, 4):
        codes = range(first, first + 4)
        words = run_ptx(LOOK_UP, [sum(code << 8 * i for i, code in enumerate(codes))], 4)
        found = numbers(words, 0x64)
        assert found == [levels[c & 15] for c in codes] + [levels[c >> 4] for c in codes]
