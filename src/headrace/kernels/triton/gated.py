"""The gate of the feed-forward: act(gate) · up, as values or as 8-bit codes; and any other gate.

Arithmetic: 4 bytes read and 2 written per output element for a handful of operations: bandwidth
binds. Values are cut into tiles over both axes, so one row of a decode step still fills many
multiprocessors. Codes need the row's maximum: one program per row, which reads its row twice (the
second time from L2) rather than keep up to 30,000 values in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .quantise import CODES, store_groups, to_codes

TILE = 1024


@triton.jit
def _tanh(x):
    doubled = tl.exp2(tl.abs(x) * -2.8853900817779268)
    magnitude = (1.0 - doubled) / (1.0 + doubled)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def softplus(x):
    """Compute log(1 + eˣ), to the last digits of small results too."""
    grown = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    more = 1.0 + grown
    near = tl.where(more == 1.0, grown, tl.log(more) * (grown / tl.maximum(more - 1.0, 1e-30)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """Compute act(gate) · up in fp32."""
    gate = gate.to(tl.float32)
    if ACTIVATION == "silu":
        # exp2 of a large positive number is inf and the quotient 0: what silu tends to.
        act = gate / (1.0 + tl.exp2(gate * -1.4426950408889634))
    elif ACTIVATION == "clamped":
        # The gate of gpt-oss, 1.702 · log2(e); a NaN stays one.
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up.to(tl.float32), -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        act = gate / (1.0 + tl.exp2(gate * -2.4554669595930155))
    elif ACTIVATION == "sigmoid":
        act = 1.0 / (1.0 + tl.exp2(gate * -1.4426950408889634))
    elif ACTIVATION == "relu2":
        act = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        act = act * act
    elif ACTIVATION == "tanh":
        act = _tanh(gate)
    elif ACTIVATION == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        cubic = gate + 0.044715 * gate * gate * gate
        act = 0.5 * gate * (1.0 + _tanh(cubic * 0.7978845608028654))
    return act * up.to(tl.float32)


@triton.jit
def _act(gate_up, biases, chosen, row, columns, width, ACTIVATION: tl.constexpr):
    """Compute act(gate) · up of a row in fp32. `biases` [experts, 2 · width] of the row's expert,
    by `chosen`, are added before."""
    mask = columns < width
    at = gate_up + row * 2 * width + columns
    gate = tl.load(at, mask=mask, other=0.0)
    up = tl.load(at + width, mask=mask, other=0.0)
    if biases is not None:
        own = biases + tl.load(chosen + row).to(tl.int64) * 2 * width + columns
        gate = gate.to(tl.float32) + tl.load(own, mask=mask, other=0.0).to(tl.float32)
        up = up.to(tl.float32) + tl.load(own + width, mask=mask, other=0.0).to(tl.float32)
    return activate(gate, up, ACTIVATION)


@triton.jit
def _gated_kernel(
    gate_up, biases, chosen, out, width, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = _act(gate_up, biases, chosen, row, columns, width, ACTIVATION)
    place = out + row * width + columns
    tl.store(place, values.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def _multiply_kernel(
    x, gate, out, width, x_stride, gate_stride, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < width
    values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    gates = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0)
    values = activate(gates, values, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, values, mask=mask)


@triton.jit
def _gated_codes_kernel(
    gate_up,
    biases,
    chosen,
    codes,
    scales,
    width,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    HIGH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    peak = 0.0
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        values = _act(gate_up, biases, chosen, row, columns, width, ACTIVATION)
        # The tile's padding does not belong to the row.
        peak = tl.maximum(peak, tl.max(tl.where(columns < width, tl.abs(values), 0.0), 0))
    scale = tl.maximum(peak / HIGH, 1e-30)
    tl.store(scales + row, scale)
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        scaled = _act(gate_up, biases, chosen, row, columns, width, ACTIVATION) / scale
        coded = to_codes(scaled, codes.dtype.element_ty, HIGH)
        tl.store(codes + row * width + columns, coded, mask=columns < width)


@triton.jit
def _gated_groups_kernel(
    gate_up,
    biases,
    chosen,
    codes,
    scales,
    width,
    groups,
    ACTIVATION: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Compute `_gated_kernel` with codes: a group lies in one tile, so nothing is read twice."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    columns = first + tl.arange(0, TILE)
    values = _act(gate_up, biases, chosen, row, columns, width, ACTIVATION)
    store_groups(codes, scales, row, first, values, width, groups, TILE, GROUP, HIGH)


def gated(
    gate_up: torch.Tensor,
    activation: str,
    biases: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute gate_up [N, 2I] → act(gate) · up [N, I]; activation silu, gelu, gelu_tanh or clamped.

    `biases` [experts, 2I] of each row's expert are added before; `chosen` has the N experts.
    """
    rows, double = gate_up.shape
    width = double // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gated_kernel[(rows, triton.cdiv(width, TILE))](
        gate_up, biases, chosen, out, width, ACTIVATION=activation, TILE=TILE, num_warps=4
    )
    return out


def multiply(x: torch.Tensor, gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute x · act(gate) [N, I], of columns of any matrices; activations silu, gelu, gelu_tanh,
    tanh, relu2 and sigmoid."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _multiply_kernel[(rows, triton.cdiv(width, TILE))](
        x,
        gate,
        out,
        width,
        x.stride(0),
        gate.stride(0),
        ACTIVATION=activation,
        TILE=TILE,
        num_warps=4,
    )
    return out


def gated_codes(
    gate_up: torch.Tensor,
    activation: str,
    codes: str,
    group: int = 0,
    biases: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gated` as codes [N, I] in fp8 or int8, and scales fp32 [N, 1] or
    [N, ceil(I / group)]."""
    rows, double = gate_up.shape
    width = double // 2
    dtype, high = CODES[codes]
    out = torch.empty(rows, width, dtype=dtype, device=gate_up.device)
    groups = triton.cdiv(width, group) if group else 1
    scales = torch.empty(rows, groups, dtype=torch.float32, device=gate_up.device)
    if group:
        _gated_groups_kernel[(rows, triton.cdiv(width, TILE))](
            gate_up,
            biases,
            chosen,
            out,
            scales,
            width,
            groups,
            ACTIVATION=activation,
            TILE=TILE,
            GROUP=group,
            HIGH=high,
            num_warps=4,
        )
        return out, scales
    _gated_codes_kernel[(rows,)](
        gate_up,
        biases,
        chosen,
        out,
        scales,
        width,
        ACTIVATION=activation,
        TILE=2 * TILE,
        HIGH=high,
        num_warps=8,
    )
    return out, scales
