"""The other operators of the reference, against their definitions in float64."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import make_batch, make_kv, mixture

from headrace.base.graph import AttentionSpec
from headrace.kernels.prepared import RopeTable
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.weights import BlockWeight, DenseWeight, PackedWeight, StackedWeight

OPS = ReferenceOperators(torch.float32)
ROWS = (1, 2, 3, 5, 17)


def never(weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
    raise AssertionError("nothing here is in blocks")


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 33), torch.randn(70, 33), torch.randn(70)
    dense = DenseWeight(weight)
    close(OPS.linear(x, dense, None), x.double() @ weight.double().T)
    close(OPS.linear(x, dense, bias), x.double() @ weight.double().T + bias)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits(softcap: float | None) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16), torch.randn(50, 16)
    plain = x.double() @ weight.double().T
    expected = plain if softcap is None else softcap * torch.tanh(plain / softcap)
    got = OPS.logits(x, DenseWeight(weight), softcap)
    assert got.dtype == torch.float32
    close(got, expected)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps) * (weight.double() + offset)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 7, 96])
def test_norms(width: int, offset: float) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, width), torch.randn(5, width), torch.randn(width)
    close(OPS.rms_norm(x, weight, 1e-6, offset), norm(x, weight, 1e-6, offset))
    total = x + residual
    normed, left = OPS.add_rms_norm(x, residual.clone(), weight, 1e-6, offset)
    close(normed, norm(total, weight, 1e-6, offset))
    assert torch.equal(left, total)
    assert torch.equal(OPS.add(x, residual.clone()), total)


def test_norm_of_zeros_is_zero() -> None:
    assert torch.equal(OPS.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6, 0), torch.zeros(2, 8))


def test_embed_and_select() -> None:
    table = torch.randn(10, 4)
    tokens = torch.tensor([3, 3, 9, 0])
    assert torch.equal(OPS.embed(tokens, DenseWeight(table), 1.0), table[tokens])
    assert torch.equal(OPS.embed(tokens, DenseWeight(table), 2.0), table[tokens] * 2)
    assert torch.equal(OPS.select(table, tokens), table[tokens])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated(activation: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(4, 2 * 13) * 4
    gate, up = gate_up.double().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    act = {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))),
        "gelu_tanh": gate * 0.5 * (1 + torch.tanh(inner)),
    }[activation]
    close(OPS.gated(gate_up, activation), act * up)


@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_cache(norms: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 6
    batch, blocks = make_batch([(5, 3), (0, 1), (17, 2)])
    kv = make_kv(blocks, kv_heads, 16, width)
    qkv = torch.randn(6, (heads + 2 * kv_heads) * width)
    q_norm, k_norm = torch.randn(width), torch.randn(width)
    angles = torch.arange(32).double().unsqueeze(1) * torch.tensor([1.0, 0.3, 0.01]).double()
    rope = RopeTable(angles.cos().float(), angles.sin().float())
    spec = AttentionSpec(0, heads, kv_heads, width, 1.0, eps=1e-6)
    both = (q_norm, k_norm) if norms else ()
    q = OPS.write(qkv, spec, both, rope, kv, batch, 0).view(6, heads, width)

    def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = norm(x, weight, 1e-6, 0.0) if norms else x.double()
        # A pair (i, i + E/2) is a complex number that turns by its angle.
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1).contiguous())
        turned = turned * torch.polar(torch.ones(()).double(), angles[batch.positions])[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    parts = qkv.view(6, -1, width)
    close(q, expected(parts[:, :heads], q_norm))
    slots = batch.groups[0].slots
    stored = [cache.transpose(1, 2).reshape(-1, kv_heads, width)[slots] for cache in (kv.k, kv.v)]
    close(stored[0], expected(parts[:, heads : heads + kv_heads], k_norm))
    assert torch.equal(stored[1], parts[:, heads + kv_heads :])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_moe(rows: int, normalise: bool) -> None:
    torch.manual_seed(rows)
    experts, width, inner, active = 6, 16, 12, 2
    x, router = torch.randn(rows, width), torch.randn(rows, experts)
    gate_up = [torch.randn(2 * inner, width) for _ in range(experts)]
    down = [torch.randn(width, inner) for _ in range(experts)]
    shares = torch.softmax(router.double(), -1)
    expected = torch.zeros(rows, width).double()
    for row in range(rows):
        chosen = shares[row].topk(active)
        total = chosen.values.sum() if normalise else 1.0
        for share, expert in zip(chosen.values, chosen.indices, strict=True):
            gate, up = (x[row].double() @ gate_up[expert].double().T).chunk(2)
            hidden = gate * torch.sigmoid(gate) * up
            expected[row] += share / total * (hidden @ down[expert].double().T)
    got = mixture(
        OPS,
        x,
        router,
        [DenseWeight(w) for w in gate_up],
        [DenseWeight(w) for w in down],
        active,
        normalise,
        "silu",
    )
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_prepare_makes_everything_dense() -> None:
    codes = torch.randint(0, 16, (4, 8), dtype=torch.uint8)
    packed = PackedWeight(codes, torch.rand(4, 2), torch.rand(4, 2), 4, 4, (4, 8))
    dense = DenseWeight(torch.randn(3, 8, dtype=torch.bfloat16))
    blocks = BlockWeight("Q8_0", torch.zeros(2, 9, dtype=torch.uint8), (2, 8))
    values = torch.randn(2, 8)
    got = OPS.prepare(
        StackedWeight((packed, dense, blocks)), "linear", lambda weight, dtype: DenseWeight(values)
    )
    assert isinstance(got, DenseWeight)
    assert got.shape == (9, 8)
    spread = (codes.view(4, 2, 4) * packed.scales[..., None] + packed.offsets[..., None]).view(4, 8)
    assert torch.equal(got.data, torch.cat([spread, dense.data.float(), values]))


def test_prepare_leaves_what_is_right_already() -> None:
    weight = torch.randn(3, 8)
    assert OPS.prepare(DenseWeight(weight), "embed", never).data.data_ptr() == weight.data_ptr()
