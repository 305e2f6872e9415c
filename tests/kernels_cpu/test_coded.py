"""Panels of what safetensors checkpoints hold, against the published definition of each format in
float64: the numbers that lie in the panels bit for bit, and products with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_cases import same
from test_products import ROWS

from headrace.kernels.checkpoint_values import values
from headrace.kernels.cpu.coded import coded
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.weights import (
    DenseWeight,
    Fp8Weight,
    PackedWeight,
    PanelWeight,
    StackedWeight,
)
from headrace.loader.prepare import Expansion
from headrace.quant.fp4 import fp4_weight

Host = np.ndarray[Any, Any]
HALF, BF16, FULL = "half", "bf16", "full"
CASES = {  # bits, group, symmetric, scales → kind of the panels
    (4, 32, True, HALF): "Q4_0",
    (4, 128, True, HALF): "Q4_0",
    (4, 128, False, HALF): "INT4",
    (4, 128, True, BF16): "INT4",
    (4, 128, True, FULL): "INT4",
    (4, 64, False, HALF): "Q5_0",
    (4, 64, True, BF16): "F32",
    (8, 32, True, HALF): "Q8_0",
    (8, 128, True, FULL): "INT8",
    (8, 128, False, HALF): "F32",
}
OUT, IN = 40, 384


def scales_of(generator: np.random.Generator, shape: tuple[int, int], kind: str) -> Host:
    drawn = generator.standard_normal(shape).astype(np.float32) * np.float32(0.01)
    if kind == BF16:  # So small that halves have not their bits.
        drawn *= np.float32(2**-20)
        return (drawn.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return drawn.astype(np.float16).astype(np.float32) if kind == HALF else drawn


def packed(
    bits: int, group: int, symmetric: bool, kind: str, *, ordered: bool = False
) -> tuple[PackedWeight, Host]:
    """→ (a matrix, what it stands for in float64 by w = (code - zero) · scale)."""
    generator = np.random.default_rng(bits + group)
    groups = (OUT, IN // group)
    scales = scales_of(generator, groups, kind)
    zeros = np.full(groups, 1 << (bits - 1))
    if not symmetric:
        zeros = generator.integers(0, (1 << bits) + 1, groups)
    codes = generator.integers(0, 1 << bits, (OUT, IN), dtype=np.uint8)
    codes[0, :2] = 0, (1 << bits) - 1
    order = generator.permutation(IN).astype(np.int32) if ordered else None
    offsets = -(zeros * scales).astype(np.float32)
    wide = [each.repeat(group, 1) for each in (zeros, scales.astype(np.float64))]
    wanted = (codes - wide[0]) * wide[1]
    if order is not None:
        wanted[:, order] = wanted.copy()
    return PackedWeight(codes, scales, offsets, bits, group, (OUT, IN), order=order), wanted


def read_panels(panels: PanelWeight) -> Host:
    """Decode the panels, by the drawing of csrc/layout.h, into float64 [out, in]."""
    out, width = panels.shape
    data = panels.data.reshape(-(-out // 16), -1)
    kind = panels.kind
    if kind == "F32":
        return data.view("<f4").reshape(-1, width, 16).swapaxes(1, 2).reshape(-1, width)[:out]
    if kind == "E4M3":
        codes = data[:, : 16 * width].reshape(-1, width, 16)
        by = data[:, 16 * width :].copy().view("<f4").reshape(len(data), -1, 16)
        numbers = e4m3(codes) * by.astype(np.float64).repeat(128, 1)[:, :width] / 256
        return numbers.swapaxes(1, 2).reshape(-1, width)[:out]
    if kind == "NVFP4":
        return read_nvfp4(data.reshape(len(data), width // 64, -1))[:out]
    span, header = {"INT4": (128, 80), "INT8": (128, 64)}.get(kind, (32, 32))
    blocks = data.reshape(len(data), width // span, -1)
    scales = blocks[..., : 64 if span == 128 else 32].copy()
    scales = scales.view("<f4" if span == 128 else "<f2").astype(np.float64)
    units = blocks[..., header:].reshape(len(data), width // 32, -1)
    if kind in ("Q8_0", "INT8"):
        steps, zero = units.reshape(*units.shape[:2], 8, 16, 4), 128
    else:
        low = units[..., :256].reshape(*units.shape[:2], 4, 16, 4)
        steps, zero = np.concatenate([low & 15, low >> 4], 2), 8
    if kind == "Q5_0":
        fifth = units[..., 256:].reshape(*units.shape[:2], 1, 16, 4)
        steps, zero = steps | (fifth >> np.arange(8)[:, None, None] & 1) << 4, 16
    codes = steps.transpose(0, 3, 1, 2, 4).reshape(len(data) * 16, width).astype(np.float64)
    zeros: Any = zero
    if kind == "INT4":
        zeros = blocks[..., 64:80].swapaxes(1, 2).reshape(-1, width // span).repeat(span, 1)
    scales = scales.swapaxes(1, 2).reshape(-1, width // span).repeat(span, 1)
    return ((codes - zeros) * scales)[:out]


def read_nvfp4(blocks: Host) -> Host:
    """Decode panels of NVFP4 [panels, blocks, bytes]."""
    d = blocks[..., :4].copy().view("<f4").astype(np.float64) / 256
    units = blocks[..., 16:].reshape(*blocks.shape[:2], 2, -1)
    scales = e4m3(units[..., :32].reshape(*units.shape[:3], 2, 16)) * d[..., None, None]
    low = units[..., 32:].reshape(*units.shape[:3], 4, 16, 4)
    steps = np.concatenate([low & 15, low >> 4], 3)
    twice = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])[steps]
    wide = scales.repeat(4, 3)[..., None]  # Four steps of four have one scale.
    found: Host = (twice * wide).transpose(0, 4, 1, 2, 3, 5).reshape(16 * len(blocks), -1)
    return found


def e4m3(codes: Host) -> Host:
    """OCP 8-bit floating point 1.0, number by number."""
    sign, exponent, fraction = codes >> 7, codes >> 3 & 15, codes & 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent.astype(int) - 7)
    found: Host = np.where(exponent == 0, fraction / 8 * 2.0**-6, normal) * (1 - 2.0 * sign)
    return found


def prepared(ops: CpuOperators, weight: Any, role: Any = "linear") -> Any:
    return ops.prepare(weight, role, Expansion())


@pytest.mark.parametrize(("case", "kind"), CASES.items(), ids=str)
def test_the_panels_hold_the_formats_numbers(best: CpuOperators, case: Any, kind: str) -> None:
    weight, wanted = packed(*case)
    found = prepared(best, weight)
    assert found.kind == kind
    if kind == "F32":
        wanted = wanted.astype(np.float32)
    np.testing.assert_array_equal(read_panels(found), wanted)


@pytest.mark.parametrize("rows", [1, OUT])
@pytest.mark.parametrize("width", [96, 128, 300])
@pytest.mark.parametrize("by", ["tensor", "row", "block"])
def test_fp8(ops: CpuOperators, best: CpuOperators, rows: int, width: int, by: str) -> None:
    """Every byte but the two that are no numbers; widths that blocks do not fill."""
    generator = np.random.default_rng(width)
    finite = np.setdiff1d(np.arange(256), [127, 255]).astype(np.uint8)
    codes = generator.choice(finite, (rows, width))
    codes[0, : min(width, 254)] = finite[: min(width, 254)]
    shape = {"tensor": (1, 1), "row": (rows, 1), "block": (-(-rows // 128), -(-width // 128))}[by]
    scales = generator.uniform(1e-4, 2e-2, shape).astype(np.float32)
    wide = scales.astype(np.float64)
    if by == "block":
        wide = wide.repeat(128, 0)[:rows].repeat(128, 1)[:, :width]
    wanted = e4m3(codes) * wide
    panels = prepared(ops, Fp8Weight(codes, scales))
    np.testing.assert_array_equal(read_panels(panels), wanted)
    x = generator.standard_normal((25, width)).astype(np.float32)
    whole = ops.linear(x, panels, None)
    assert np.abs(whole - x @ wanted.T).max() < 2e-6 * np.abs(x @ wanted.T).max() + 1e-9
    for few in (1, 2, 3, 5, 8, 13):
        assert same(ops.linear(x[:few], panels, None), whole[:few])
    assert same(best.linear(x, prepared(best, Fp8Weight(codes, scales)), None), whole)


def nvfp4(out: int, width: int, divisor: float, seed: int = 0) -> dict[str, Host]:
    """Draw a matrix of compressed-tensors, with every code and every scale."""
    rng = np.random.default_rng(seed)
    finite = np.setdiff1d(np.arange(256), [127, 255]).astype(np.uint8)
    scales = rng.choice(finite, (out, width // 16))
    scales.reshape(-1)[: len(finite)] = finite[: scales.size]
    codes = rng.integers(0, 256, (out, width // 2), np.uint8)
    return {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_global_scale": np.array([divisor], np.float32),
    }


@pytest.mark.parametrize("divisor", [2048, -(2.0**-40), 1713.7])
@pytest.mark.parametrize(("out", "width"), [(40, 384), (1, 64), (33, 576)])
def test_nvfp4(ops: CpuOperators, best: CpuOperators, out: int, width: int, divisor: float) -> None:
    """A divisor that is a power of two is exact; others are rounded once more."""
    weight = fp4_weight(nvfp4(out, width, divisor), "w")
    exact = values(weight).astype(np.float64)
    panels = prepared(ops, weight)
    assert panels.kind == "NVFP4"
    assert panels.nbytes == -(-out // 16) * width // 64 * (16 + 2 * (32 + 256))
    held = read_panels(panels)
    if np.log2(abs(divisor)) % 1 == 0:
        np.testing.assert_array_equal(held, exact)
    np.testing.assert_allclose(held, exact, rtol=3e-7)
    x = np.random.default_rng(5).standard_normal((max(ROWS), width)).astype(np.float32)
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    seen = np.rint(groups * (np.float32(127) / top)) * (top / np.float32(127)).astype(np.float64)
    product = seen.reshape(x.shape) @ exact.T
    whole = ops.linear(x, panels, None)
    assert np.abs(whole - product).max() < 2e-6 * np.abs(product).max()
    assert same(best.linear(x, prepared(best, weight), None), whole)
    for rows in ROWS:
        assert same(ops.linear(x[:rows], panels, None), whole[:rows])


def test_nvfp4_of_rows_without_whole_blocks_is_expanded(best: CpuOperators) -> None:
    weight = fp4_weight(nvfp4(5, 80, 3.0), "w")
    found = prepared(best, weight)
    assert found.kind == "F32"
    np.testing.assert_array_equal(read_panels(found), values(weight))


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("case", [case for case, kind in CASES.items() if kind != "F32"], ids=str)
def test_products(ops: CpuOperators, best: CpuOperators, case: Any, ordered: bool) -> None:
    """Against float64 of what the kernels read; the bits of every level and of any other rows."""
    weight, wanted = packed(*case, ordered=ordered)
    panels = prepared(ops, weight)
    assert (panels.order is None) != ordered
    x = np.random.default_rng(5).standard_normal((max(ROWS), IN)).astype(np.float32)
    read = x if weight.order is None else x[:, weight.order]
    groups = read.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    seen = np.rint(groups * (np.float32(127) / top)) * (top / np.float32(127)).astype(np.float64)
    exact = seen.reshape(x.shape) @ (wanted if weight.order is None else wanted[:, weight.order]).T
    whole = ops.linear(x, panels, None)
    assert np.abs(whole - exact).max() < 2e-6 * np.abs(exact).max()
    assert same(best.linear(x, prepared(best, weight), None), whole)
    for rows in ROWS:
        assert same(ops.linear(x[:rows], panels, None), whole[:rows])


def test_parts_of_one_order_share_it_and_others_are_expanded(best: CpuOperators) -> None:
    one, wanted = packed(4, 128, True, HALF, ordered=True)
    plain, _ = packed(4, 128, True, HALF)
    assert [each.kind for each in prepared(best, StackedWeight((one, one))).parts] == ["Q4_0"] * 2
    mixed = prepared(best, StackedWeight((one, plain)))
    assert [each.kind for each in mixed.parts] == ["F32", "Q4_0"]
    x = np.random.default_rng(1).standard_normal((3, IN)).astype(np.float32)
    found = best.linear(x, mixed, None)[:, :OUT]
    assert np.abs(found - x @ wanted.T).max() < 1e-6 * np.abs(x @ wanted.T).max() + 1e-9


@pytest.mark.parametrize("role", ["embed", "moe"])
def test_what_has_no_order_of_inputs_is_expanded(best: CpuOperators, role: str) -> None:
    weight, wanted = packed(4, 128, False, HALF, ordered=True)
    found = prepared(best, weight, role)
    values = found.data if isinstance(found, DenseWeight) else read_panels(found)
    np.testing.assert_array_equal(values, wanted.astype(np.float32))


def test_packing_by_one_thread_and_by_many(best: CpuOperators) -> None:
    alone = CpuOperators(1)
    for case in CASES:
        weight, _ = packed(*case)
        source = coded(weight, ordered=True)
        assert same(pack(source, alone.team).data, pack(source, best.team).data)
