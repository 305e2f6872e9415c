"""Routing, placing and grouped products in the interpreter against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import mixture

from headrace.base.graph import RouteSpec
from headrace.kernels.checkpoint_values import values
from headrace.kernels.reference import ReferenceOperators, unpack_rows
from headrace.kernels.triton import gated as gated_module
from headrace.kernels.triton import moe as moe_module
from headrace.kernels.triton import moe_packed, moe_products
from headrace.kernels.triton.moe import experts, place, route
from headrace.kernels.triton.moe_products import MoeConfig
from headrace.kernels.triton.moe_tiles import expert_table
from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.packed import tile_weight
from headrace.kernels.triton.product_dense import DenseConfig, product_dense
from headrace.kernels.triton.product_fp8 import quantise_weight
from headrace.kernels.triton.product_packed import ProductConfig, expand, product_packed
from headrace.kernels.triton.product_packed_skinny import (
    PackedSkinnyConfig,
    product_packed_skinny,
)
from headrace.kernels.triton.split import make_tickets
from headrace.kernels.triton.unpack import E2M1
from headrace.kernels.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    StackedWeight,
    TiledWeight,
    Weight,
)
from headrace.loader.prepare import Expansion
from headrace.quant.fp4 import fp4_weight
from headrace.quant.ggml import dequantise
from headrace.quant.rows import unpack
from tiny.blocks import random_blocks

from .test_product_packed import random_weight


@pytest.mark.parametrize(("tokens", "count", "active"), [(1, 4, 2), (37, 6, 3), (5, 40, 8)])
def test_equals_reference(tokens: int, count: int, active: int) -> None:
    torch.manual_seed(tokens)
    width, intermediate = 48, 40
    x = torch.randn(tokens, width)
    router = torch.randn(tokens, count)
    gate_up = list(torch.randn(count, 2 * intermediate, width) * 0.1)
    down = list(torch.randn(count, width, intermediate) * 0.1)
    for normalise in (False, True):
        wrapped: list[list[Weight]] = [[DenseWeight(w) for w in part] for part in (gate_up, down)]
        expected = mixture(
            ReferenceOperators(torch.float32), x, router, *wrapped, active, normalise, "silu"
        )
        tables = (expert_table(part, x.dtype) for part in wrapped)
        actual = experts(
            x,
            *route(router, RouteSpec(active, normalise)),
            *tables,
            count,
            "silu",
            MoeConfig(16, 32, 32),
        )
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def dense_experts(count: int, out: int, width: int) -> list[torch.Tensor]:
    torch.manual_seed(out)
    return list(torch.randn(count, out, width) * 0.1)


def quantised(kind: str, matrix: torch.Tensor) -> tuple[Weight, torch.Tensor]:
    """→ (as `prepare` makes it, the values that it stands for)."""
    out, width = matrix.shape
    if kind == "fp8":
        weight = quantise_weight(matrix)
        return weight, weight.values()
    if kind == "blocks":
        scales = torch.full((-(-out // 128), -(-width // 128)), 0.001)
        scales[-1, -1] = 0.002
        wide = scales.repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
        block = Fp8Weight((matrix / wide).to(torch.float8_e4m3fn), scales)
        return block, block.values()
    bits = int(kind)
    packed = random_weight(bits, 16 if bits == 6 else 32, out, width, offsets=bits != 8)
    return tile_weight(packed), unpack_rows(packed)


@pytest.mark.parametrize("kind", ["4", "5", "6", "8", "fp8", "blocks"])
@pytest.mark.parametrize("tokens", [1, 4, 5, 21])
def test_quantised_experts(kind: str, tokens: int) -> None:
    """One tile an assignment, tiles of 8 and of 16 rows, and with four tokens a split input."""
    experts, active, width, inner = 5, 2, 640 if tokens == 4 else 160, 192
    torch.manual_seed(3)
    x, router = torch.randn(tokens, width), torch.randn(tokens, experts)
    parts = [
        [quantised(kind, matrix) for matrix in dense_experts(experts, *shape)]
        for shape in ((2 * inner, width), (width, inner))
    ]
    wrapped: list[list[Weight]] = [[DenseWeight(values) for _, values in part] for part in parts]
    expected = mixture(ReferenceOperators(torch.float32), x, router, *wrapped, active, True, "silu")
    ops = TritonOperators(torch.float32)
    actual = mixture(
        ops, x, router, *([w for w, _ in part] for part in parts), active, True, "silu"
    )
    error = (actual - expected).norm() / expected.norm()
    # Activations in e4m3 are wrong by a few percent; packed weights are exact.
    assert error < (0.06 if kind in ("fp8", "blocks") else 2e-5)
    alone = mixture(
        ops, x[-1:], router[-1:], *([w for w, _ in part] for part in parts), active, True, "silu"
    )
    torch.testing.assert_close(alone[0], actual[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["4", "6"])
def test_packed_experts_by_whole_chunks(kind: str) -> None:
    """Products as sm_100 has them; 160 inputs end within a chunk."""
    count, active, tokens = 3, 2, 21
    torch.manual_seed(3)
    x, router = torch.randn(tokens, 160).half(), torch.randn(tokens, count)
    chosen = route(router, RouteSpec(active))
    # Tables have the addresses of weights.
    weights: list[list[Weight]] = [
        [quantised(kind, matrix)[0] for matrix in dense_experts(count, *shape)]
        for shape in ((384, 160), (160, 192))
    ]
    tables = [expert_table(part, x.dtype) for part in weights]
    whole, parts = (
        experts(x, *chosen, *tables, count, "silu", MoeConfig(16, 32, whole=each))
        for each in (True, False)
    )
    torch.testing.assert_close(whole, parts, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", ["dense", "5", "fp8", "blocks"])
@pytest.mark.parametrize("tokens", [1, 21])
def test_clamped_experts_with_biases(kind: str, tokens: int) -> None:
    """Experts of gpt-oss; gates and values beyond their bounds."""
    experts, active, width, inner = 5, 2, 160, 192
    torch.manual_seed(17)
    x, router = 3 * torch.randn(tokens, width), torch.randn(tokens, experts)
    shapes = (2 * inner, width), (width, inner)
    parts = [
        [
            (DenseWeight(matrix), matrix) if kind == "dense" else quantised(kind, matrix)
            for matrix in dense_experts(experts, *shape)
        ]
        for shape in shapes
    ]
    biases = 6 * torch.randn(experts * 2 * inner), 6 * torch.randn(experts * width)
    given: list[list[Weight]] = [[DenseWeight(values) for _, values in part] for part in parts]
    reference, ops = ReferenceOperators(torch.float32), TritonOperators(torch.float32)
    chosen, shares = reference.route(router, RouteSpec(active), None)
    expected = reference.experts(x, chosen, shares, *given, "clamped", biases)
    chosen, shares = ops.route(router, RouteSpec(active), None)
    weights: list[list[Weight]] = [[weight for weight, _ in part] for part in parts]
    actual = ops.experts(x, chosen, shares, *weights, "clamped", biases)
    error = (actual - expected).norm() / expected.norm()
    assert error < (0.06 if kind in ("fp8", "blocks") else 2e-5)
    without = ops.experts(x, chosen, shares, *weights, "clamped")
    assert (without - expected).norm() / expected.norm() > 0.1


@pytest.mark.parametrize("kind", ["dense", "5", "fp8", "blocks"])
@pytest.mark.parametrize(("tokens", "active"), [(1, 1), (3, 2), (21, 2)])
def test_shares_of_what_experts_read(kind: str, tokens: int, active: int) -> None:
    """Experts of Llama 4, of which a row has one, or more."""
    experts, width, inner = 5, 160, 192
    torch.manual_seed(19)
    x, router = torch.randn(tokens, width), torch.randn(tokens, experts)
    parts = [
        [
            (DenseWeight(matrix), matrix) if kind == "dense" else quantised(kind, matrix)
            for matrix in dense_experts(experts, *shape)
        ]
        for shape in ((2 * inner, width), (width, inner))
    ]
    given: list[list[Weight]] = [[DenseWeight(values) for _, values in part] for part in parts]
    weights: list[list[Weight]] = [[weight for weight, _ in part] for part in parts]
    reference, ops = ReferenceOperators(torch.float32), TritonOperators(torch.float32)
    chosen, shares = ops.route(router, RouteSpec(active, False, "sigmoid"), None)
    expected = reference.experts(x, chosen, shares, *given, "silu", inside=True)
    actual = ops.experts(x, chosen, shares, *weights, "silu", inside=True)
    error = (actual - expected).norm() / expected.norm()
    assert error < (0.06 if kind in ("fp8", "blocks") else 2e-5)
    outside = ops.experts(x, chosen, shares, *weights, "silu")
    assert (outside - expected).norm() / expected.norm() > 0.1


@pytest.mark.parametrize("kind", ["dense", "4", "8", "fp8"])
def test_tiles_of_one_assignment_give_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows give what tiles of an expert's rows give: in the deterministic mode a row has one
    answer."""
    experts, active, width, inner = 5, 2, 160, 192
    torch.manual_seed(5)
    x, router = torch.randn(4, width), torch.randn(4, experts)
    parts: list[list[Weight]] = [
        [DenseWeight(m) if kind == "dense" else quantised(kind, m)[0] for m in made]
        for made in (dense_experts(experts, 2 * inner, width), dense_experts(experts, width, inner))
    ]
    found = []
    for most in (4, 0):
        monkeypatch.setattr(moe_module, "SINGLE_TOKENS", most)
        ops = TritonOperators(torch.float32, deterministic=True)
        found.append(mixture(ops, x, router, *parts, active, True, "silu"))
    assert torch.equal(*found)


def test_a_layer_of_one_token_is_four_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is counted or placed, and the gate is in the product."""
    launched: list[str] = []
    for module in (moe_module, moe_products, moe_packed, gated_module):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernel = Launches(getattr(module, name), name, launched)
            monkeypatch.setattr(module, name, kernel)
    x, router = torch.randn(1, 160), torch.randn(1, 5)
    for kind in ("dense", "4"):
        parts: list[list[Weight]] = [
            [DenseWeight(m) if kind == "dense" else quantised(kind, m)[0] for m in made]
            for made in (dense_experts(5, 384, 160), dense_experts(5, 160, 192))
        ]
        launched.clear()
        mixture(TritonOperators(torch.float32), x, router, *parts, 2, True, "silu")
        own = "_dense_kernel" if kind == "dense" else "_few_kernel"
        assert launched == ["_route_kernel", own, own, "_gather_kernel"]


class Launches:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, name: str, launched: list[str]) -> None:
        self._kernel, self._name, self._launched = kernel, name, launched

    def __getitem__(self, grid: Any) -> Any:
        self._launched.append(self._name)
        return self._kernel[grid]


def test_experts_of_mixed_formats_become_dense() -> None:
    matrices = dense_experts(3, 256, 64)
    mixed: list[Weight] = [
        DenseWeight(matrices[0]),
        quantise_weight(matrices[1]),
        quantised("4", matrices[2])[0],
    ]
    table = expert_table(mixed, torch.float32)
    assert table.blocked is None
    assert table.packed is None
    assert len(table.kept) == 3
    kept = [weight.data for weight in table.kept if isinstance(weight, DenseWeight)]
    assert torch.equal(kept[1], quantise_weight(matrices[1]).values())


def test_experts_stay_as_the_file_has_them() -> None:
    ops = TritonOperators(torch.float32)
    packed = random_weight(4, 32, 48, 64, offsets=True)
    assert isinstance(ops.prepare(packed, "moe", None), TiledWeight)  # type: ignore[arg-type]
    pair = ops.prepare(StackedWeight((packed, packed)), "moe", None)  # type: ignore[arg-type]
    assert isinstance(pair, TiledWeight)
    assert pair.shape == (96, 64)
    fp8 = quantise_weight(torch.randn(256, 64))
    assert isinstance(ops.prepare(fp8, "moe", None), Fp8Weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize(
    "spec",
    [
        RouteSpec(3, False),
        RouteSpec(3),
        RouteSpec(3, scores="sigmoid"),
        RouteSpec(3, scores="sqrt_softplus"),
    ],
)
def test_a_router_that_overflowed_names_experts(value: float, spec: RouteSpec) -> None:
    """A chosen expert becomes an address: an invalid one would end the step of every sequence."""
    router = torch.randn(4, 6)
    router[0] = value
    router[1, 2] = value
    router[2, 1:] = value
    chosen, shares = route(router, spec)
    assert chosen.min() >= 0
    assert chosen.max() < 6
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    plain, same = route(router[3:], spec)
    assert torch.equal(chosen[3:], plain)
    assert torch.equal(shares[3:], same)
    if value != value or (value > 0 and spec.scores != "sigmoid"):  # Sigmoids of ±∞ are 0 and 1.
        assert shares[:3].isnan().any(1).all(), "the row's result says that it overflowed"


ROUTES = (
    (RouteSpec(4, True, "sigmoid", 2.5, 4, 2), 24, True),
    (RouteSpec(4, True, "sigmoid", 2.5, 8, 4), 40, True),
    (RouteSpec(6, False, "softmax", 16.0, 8, 3, best=1), 160, False),
    (RouteSpec(3, False), 7, False),
    (RouteSpec(8, True, "sigmoid"), 128, False),
    (RouteSpec(2, True, "softmax", 0.5), 6, True),
    (RouteSpec(6, True, "sqrt_softplus", 1.5), 160, True),
)
"""Spec, experts, bias: GLM-4.5, DeepSeek-V3 and V2, Qwen1.5, MiniMax-M2, ERNIE, DeepSeek-V4."""


@pytest.mark.parametrize(("spec", "count", "biased"), ROUTES)
def test_routes_of_all_kinds(spec: RouteSpec, count: int, biased: bool) -> None:
    """The same experts as the reference's, with the same shares; equal scores among them."""
    torch.manual_seed(count)
    logits = torch.randn(33, count)
    logits[1] = 0.0
    logits[2, ::2] = logits[2, 1]
    bias = torch.randn(count) * 0.3 if biased else None
    chosen, shares = route(logits, spec, bias)
    wanted, theirs = ReferenceOperators(torch.float32).route(logits, spec, bias)
    order = wanted.argsort(-1)
    assert torch.equal(chosen.long(), wanted.gather(-1, order))
    torch.testing.assert_close(shares, theirs.gather(-1, order), atol=1e-6, rtol=1e-5)
    gains = torch.randn(count)
    gained = route(logits, spec, bias, gains)
    assert torch.equal(gained[0], chosen)
    theirs = ReferenceOperators(torch.float32).route(logits, spec, bias, gains)[1]
    torch.testing.assert_close(gained[1], theirs.gather(-1, order), atol=1e-6, rtol=1e-5)
    alone, share = route(logits[5:6], spec, bias)
    assert torch.equal(alone[0], chosen[5])
    assert torch.equal(share[0], shares[5])


def test_every_assignment_is_placed_once() -> None:
    torch.manual_seed(0)
    experts, rows = 9, 16
    chosen, shares = route(torch.randn(50, experts), RouteSpec(3))
    torch.testing.assert_close(shares.sum(1), torch.ones(50))
    tiles = place(chosen, experts, rows)
    listed = tiles.listed
    found = listed[listed >= 0]
    assert not tiles.single
    assert sorted(found.tolist()) == list(range(150))
    owner = tiles.expert.repeat_interleave(rows)[listed >= 0]
    assert torch.equal(owner, chosen.view(-1)[found.long()])


@pytest.mark.parametrize(("rows", "outs", "width"), [(1, 40, 64), (70, 130, 100), (33, 16, 257)])
def test_dense_product(rows: int, outs: int, width: int) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, width), torch.randn(outs, width), torch.randn(outs)
    config = DenseConfig(32, 32, 32)
    y = product_dense(x, weight, bias, config)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(product_dense(x[row : row + 1], weight, bias, config)[0], y[row])


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K"])
def test_codes_of_two_and_three_bits_take_four(kind: str) -> None:
    data = torch.from_numpy(random_blocks(kind, 9, 512, seed=2))
    weight = BlockWeight(kind, data, (9, 512))
    made = tile_weight(unpack(weight))
    assert made.bits == 4
    exact = dequantise(weight, torch.float32)
    near = float(exact.abs().max()) * 2**-10
    torch.testing.assert_close(expand(made, 0, 9, torch.float32), exact, atol=near, rtol=0)


def test_mxfp4_keeps_its_four_bits_without_loss() -> None:
    random = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (7, 5, 17), generator=random, dtype=torch.uint8)
    blocks[:, :, 0] = torch.randint(110, 134, (7, 5), generator=random, dtype=torch.uint8)
    weight = BlockWeight("MXFP4", blocks.flatten(1), (7, 160))
    made = tile_weight(unpack(weight), e2m1=True)
    assert (made.bits, made.zero) == (E2M1, 0)
    assert made.codes.shape == (2, 7, 64)
    exact = dequantise(weight, torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(expand(made, 0, 7, dtype).float(), exact)
    of_model = TritonOperators(torch.bfloat16).prepare(weight, "moe", Expansion())
    assert isinstance(of_model, TiledWeight)
    assert torch.equal(of_model.codes, made.codes)
    # Few rows and many see the same numbers.
    x = torch.randn(20, 160, generator=random)
    wanted = (x[:2].double() @ exact.double().T).float()
    few = PackedSkinnyConfig(outs=32, programs=0)
    found = product_packed_skinny(x[:2], made, None, few, make_tickets(torch.device("cpu")))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-5)
    many = product_packed(x, made, None, ProductConfig(32, 32))
    torch.testing.assert_close(many[:2], wanted, atol=1e-3, rtol=1e-5)
    assert exact.abs().max() > 2**7 * exact.abs()[exact != 0].min()


def test_nvfp4_keeps_its_four_bits() -> None:
    rng = np.random.default_rng(3)
    stored = {
        "weight_packed": rng.integers(0, 256, (9, 96), np.uint8),
        "weight_scale": rng.integers(0, 0x7F, (9, 12), np.uint8),
        "weight_global_scale": np.array([2048], np.float32),
    }
    held = fp4_weight(stored, "w")
    exact = torch.from_numpy(values(held))
    arrays = {
        name: torch.from_numpy(getattr(held, name)) for name in ("codes", "scales", "offsets")
    }
    weight = replace(held, **arrays)
    made = TritonOperators(torch.bfloat16).prepare(weight, "linear", Expansion())
    assert isinstance(made, TiledWeight)
    assert (made.bits, made.zero, made.group) == (E2M1, 0, 16)
    assert made.codes.shape == (2, 9, 64)
    assert torch.equal(expand(made, 0, 9, torch.float32), exact)
    x = torch.randn(20, 192, generator=torch.Generator().manual_seed(1))
    wanted = (x.double() @ exact.double().T).float()
    near = 1e-5 * float(wanted.abs().max())
    few = PackedSkinnyConfig(outs=32, programs=0)
    found = product_packed_skinny(x[:2], made, None, few, make_tickets(torch.device("cpu")))
    torch.testing.assert_close(found, wanted[:2], atol=near, rtol=1e-5)
    many = product_packed(x, made, None, ProductConfig(32, 32))
    torch.testing.assert_close(many, wanted, atol=near, rtol=1e-5)
