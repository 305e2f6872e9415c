"""Grouped products: each tile of rows by the matrix of its own expert, in any format.

Arithmetic as in `product_dense`, `product_packed` and `product_fp8`; what differs is how operands
are found: rows through the list that `moe.place` made, matrices through tables of addresses, since
the experts of a layer need not lie in one tensor. All experts of one table are of one format,
granularity and shape; those of which that is not true are expanded to dense ones once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
import triton.language as tl

from ..arrays import tensor
from ..operators import Coded
from ..weights import DenseWeight, Fp8Weight, TiledWeight, Weight
from .early import launch_options, wait_for_inputs
from .packed import BYTES, planes_of
from .product_fp8 import BLOCK
from .product_packed import expand, step_of, sum_chunks
from .support import INTERPRETED, matrix_product

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """How grouped products are cut; `inner` is that of dense ones."""

    rows: int = 16
    outs: int = 64
    inner: int = 64
    warps: int = 4
    stages: int = 3


@dataclass(slots=True)
class ExpertTable:
    """Where the matrices of a layer's experts are: int64 [experts] addresses of each part."""

    shape: tuple[int, int]
    """(out, in) of every expert."""
    data: torch.Tensor
    scales: torch.Tensor | None = None
    """Of fp8 codes, or the pairs of packed ones."""
    factors: torch.Tensor | None = None
    zero: int | None = None
    """Of packed codes, as `TiledWeight` has it."""
    bits: int = 0
    """Of packed codes; 0: not packed."""
    group: int = 0
    """Inputs that share a packed scale."""
    blocked: bool | None = None
    """Of fp8: one scale per block, or per row; None: not fp8."""
    kept: tuple[Weight, ...] = ()
    """Matrices that only this table keeps alive."""


def expert_table(experts: Sequence[Weight], dtype: torch.dtype) -> ExpertTable:
    """The table of weights as `TritonOperators.prepare` makes them; `dtype` of dense ones."""
    if len({_form(expert) for expert in experts}) > 1 or _form(experts[0]) is None:
        # Formats mixed among experts, or gate and up quantised apart: rare, so not fast.
        dense = tuple(DenseWeight(_values(expert, dtype)) for expert in experts)
        table = expert_table(dense, dtype)
        table.kept = dense
        return table
    first = experts[0]
    if isinstance(first, DenseWeight):
        return ExpertTable(first.shape, _addresses([_of(e, DenseWeight).data for e in experts]))
    if isinstance(first, Fp8Weight):
        fp8 = [_of(expert, Fp8Weight) for expert in experts]
        return ExpertTable(
            first.shape, _addresses([e.data for e in fp8]), _addresses([e.scales for e in fp8]),
            blocked=first.blocked,
        )  # fmt: skip
    tiled = [_of(expert, TiledWeight) for expert in experts]
    return ExpertTable(
        tiled[0].shape, _addresses([e.codes for e in tiled]), _addresses([e.pairs for e in tiled]),
        _addresses([e.factors for e in tiled]), tiled[0].zero, tiled[0].bits, tiled[0].group,
    )  # fmt: skip


def _form(weight: Weight) -> tuple[object, ...] | None:
    """What experts must have in common; None: no kernel takes it as it is."""
    if isinstance(weight, DenseWeight):
        return ("dense", weight.shape, weight.data.dtype)
    if isinstance(weight, Fp8Weight):
        return ("fp8", weight.shape, weight.scales.shape)
    if isinstance(weight, TiledWeight):
        return ("packed", weight.shape, weight.bits, weight.group, weight.zero)
    return None


def _of(weight: Weight, kind: type[Kind]) -> Kind:
    assert isinstance(weight, kind)
    return weight


def _values(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, DenseWeight):
        return tensor(weight.data).to(dtype)
    if isinstance(weight, Fp8Weight):
        return weight.values().to(dtype)
    if isinstance(weight, TiledWeight):
        return expand(weight, 0, weight.shape[0], dtype)
    parts = getattr(weight, "parts", None)
    assert parts is not None, "a weight that `prepare` did not make"
    return torch.cat([_values(part, dtype) for part in parts])


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    assert all(tensor.is_contiguous() for tensor in tensors)
    # What the kernels tell the compiler of every matrix; a mapped file need not be so.
    assert not tensors[0].is_cuda or all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    pointers = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(pointers, dtype=torch.int64, device=tensors[0].device)


@triton.jit
def _dense_kernel(
    x, addresses, listed, tile_expert, y, width, outs, x_stride,
    SHARED: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, INNER: tl.constexpr,
    EARLY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """y[a] = x[a // SHARED] · weight[expert of a]ᵀ for the assignments `a` of this tile."""
    wait_for_inputs(EARLY)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment = tl.load(listed + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    # A fresh allocation is aligned; unless it is told, the compiler loads element by element.
    weight = tl.multiple_of(weight, 16)
    x_at = x + row[:, None] * x_stride + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * width + inner[:, None]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for at in range(0, width, INNER):
        there = inner < width - at
        a = tl.load(x_at, mask=real[:, None] & there[None, :], other=0.0)
        b = tl.load(weight_at, mask=(out < outs)[None, :] & there[:, None], other=0.0)
        total = matrix_product(a, b, total, INTERPRET)
        x_at += INNER
        weight_at += INNER
    y_at = y + assignment[:, None] * outs + out[None, :]
    mask = real[:, None] & (out < outs)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _packed_kernel(
    x, code_addresses, pair_addresses, factor_addresses, listed, tile_expert, y, width, outs,
    chunks, x_stride,
    SHARED: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    STEP: tl.constexpr, EARLY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment = tl.load(listed + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    out_mask = out < outs
    codes = tl.load(code_addresses + expert).to(tl.pointer_type(tl.uint8))
    codes = tl.multiple_of(codes, 16)
    pairs = tl.load(pair_addresses + expert).to(tl.pointer_type(tl.int32))
    pairs = tl.multiple_of(pairs, 16)
    factors = tl.load(factor_addresses + expert).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, STEP)
    total = sum_chunks(
        x + row[:, None] * x_stride + place[None, :], real[:, None],
        codes + out[:, None] * BYTES + place[None, :], pairs, out, out_mask,
        0, chunks, width, outs, tl.zeros([ROWS, OUTS], tl.float32),
        BITS, BYTES, GROUP, ZERO, PLANES, STEP, INTERPRET,
    )  # fmt: skip
    total *= tl.load(factors + out, mask=out_mask, other=0.0)[None, :]
    y_at = y + assignment[:, None] * outs + out[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=real[:, None] & out_mask[None, :])


@triton.jit
def _fp8_kernel(
    x, x_scales, addresses, scale_addresses, listed, tile_expert, y, width, outs, groups,
    BLOCKED: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr,
    INNER: tl.constexpr, EARLY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(EARLY)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment = tl.load(listed + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    out_mask = out < outs
    inner = tl.arange(0, INNER)
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    weight = tl.multiple_of(weight, 16)
    scales = tl.load(scale_addresses + expert).to(tl.pointer_type(tl.float32))
    scales = tl.multiple_of(scales, 16)
    x_at = x + row[:, None] * width + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * width + inner[:, None]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for group in range(tl.cdiv(width, INNER)):
        there = inner < width - group * INNER
        a = tl.load(x_at, mask=real[:, None] & there[None, :], other=0.0)
        b = tl.load(weight_at, mask=out_mask[None, :] & there[:, None], other=0.0)
        if BLOCKED:
            part = matrix_product(a, b, tl.zeros([ROWS, OUTS], tl.float32), INTERPRET)
            row_scale = tl.load(x_scales + row * groups + group, mask=real, other=0.0)
            at = (out // 128) * groups + group
            out_scale = tl.load(scales + at, mask=out_mask, other=0.0)
            total += part * (row_scale[:, None] * out_scale[None, :])
        else:
            total = matrix_product(a, b, total, INTERPRET)
        x_at += INNER
        weight_at += INNER
    if not BLOCKED:
        total *= tl.load(x_scales + row, mask=real, other=0.0)[:, None]
        total *= tl.load(scales + out, mask=out_mask, other=0.0)[None, :]
    y_at = y + assignment[:, None] * outs + out[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=real[:, None] & out_mask[None, :])


def grouped_product(
    x: torch.Tensor | Coded,
    table: ExpertTable,
    listed: torch.Tensor,
    tile_expert: torch.Tensor,
    assignments: int,
    shared: int,
    config: MoeConfig,
    *,
    early: bool = False,
) -> torch.Tensor:
    """x [assignments / shared, in] → [assignments, out]; codes for a table of fp8."""
    outs, width = table.shape
    grid = (tile_expert.shape[0], triton.cdiv(outs, config.outs))
    cut = {"SHARED": shared, "ROWS": config.rows, "OUTS": config.outs, "INTERPRET": INTERPRETED,
           "num_warps": config.warps, "num_stages": config.stages,
           **launch_options(early)}  # fmt: skip
    if isinstance(x, Coded):
        assert table.blocked is not None
        assert table.scales is not None
        y = torch.empty(assignments, outs, dtype=x.dtype, device=x.codes.device)
        _fp8_kernel[grid](
            x.codes, x.scales, table.data, table.scales, listed, tile_expert, y, width, outs,
            x.scales.shape[1], BLOCKED=table.blocked, INNER=BLOCK, **cut,
        )  # fmt: skip
        return y
    assert table.blocked is None
    y = torch.empty(assignments, outs, dtype=x.dtype, device=x.device)
    if table.bits:
        _packed_kernel[grid](
            x, table.data, table.scales, table.factors, listed, tile_expert, y,
            width, outs, -(-width // 128), x.stride(0), BITS=table.bits, BYTES=BYTES[table.bits],
            GROUP=table.group, ZERO=table.zero, PLANES=planes_of(table.group, table.zero),
            STEP=step_of(table.bits, table.group), **cut,
        )  # fmt: skip
    else:
        _dense_kernel[grid](
            x, table.data, listed, tile_expert, y, width, outs, x.stride(0), INNER=config.inner,
            **cut,
        )  # fmt: skip
    return y
