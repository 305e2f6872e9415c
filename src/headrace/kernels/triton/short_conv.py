"""Causal convolutions of a few taps, each channel by itself, that go on from a sequence's state.

Arithmetic: a token's C inputs are read `taps` times, all but once from L1 or L2, and C outputs
written: 4 bytes a channel in bf16 for 2 · taps operations. Bandwidth binds, and with few tokens the
launch. There is one program per token and 1,024 channels. A sequence keeps its last inputs in fp32,
each in the row of its position. If every entry has one token, the same program writes them after
the sums. Otherwise a second kernel does: inputs that are still read might be overwritten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...base.recurrent import ConvSpec
from ..arrays import tensor
from ..operators import StateLayer, StepBatch
from ..state_lines import device_lines
from .state_rows import find_entry, read_entry

TILE = 1024


@triton.jit
def _input(x, token, columns, mask, channels, x_stride, GATED: tl.constexpr):
    """Return the inputs of the taps of a token's channels, in fp32."""
    at = x + token * x_stride + columns
    if GATED:
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        return gate * tl.load(at + 2 * channels, mask=mask, other=0.0).to(tl.float32)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _keep(
    x,
    ring,
    entry,
    where,
    channels,
    x_stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write an entry's last inputs, and those of the checkpoints in its step, to their blocks."""
    first, count, length, block, state_rows, columns, mask = where
    start = length - count
    # First, while the checkpoints' earlier inputs are not yet overwritten.
    for number in tl.static_range(2):
        at = tl.load(state_rows + entry * 6 + 2 + 2 * number)
        to = tl.load(state_rows + entry * 6 + 3 + 2 * number)
        if (at > 0) & (to != block):
            for place in range(tl.maximum(at - (TAPS - 1), 0), at):
                own = mask & (place >= start)
                past = mask & (place < start)
                token = (first + place - start).to(tl.int64)
                found = _input(x, token, columns, own, channels, x_stride, GATED)
                before = ring + (block * KEPT + place % KEPT).to(tl.int64) * channels
                found += tl.load(before + columns, mask=past, other=0.0)
                home = ring + (to * KEPT + place % KEPT).to(tl.int64) * channels
                tl.store(home + columns, found, mask=mask)
    for place in range(tl.maximum(start, length - KEPT), length):
        token = (first + place - start).to(tl.int64)
        found = _input(x, token, columns, mask, channels, x_stride, GATED)
        home = ring + (block * KEPT + place % KEPT).to(tl.int64) * channels
        tl.store(home + columns, found, mask=mask)


@triton.jit(do_not_specialize=["entries", "table_stride"])
def _conv_kernel(
    x,
    taps,
    bias,
    ring,
    out,
    query_starts,
    lengths,
    table,
    state_rows,
    entries,
    channels,
    x_stride,
    table_stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    SINGLE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Convolve one token's channels. SINGLE: every entry has one token."""
    row = tl.program_id(0)
    entry = row if SINGLE else find_entry(query_starts, row, entries)
    first, count, length, block = read_entry(query_starts, lengths, table, entry, table_stride)
    position = length - count + row - first
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < channels
    total = tl.zeros([TILE], tl.float32)
    if bias is not None:
        total += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS):
        place = position - (TAPS - 1 - tap)
        token = row - (TAPS - 1 - tap)
        own = mask & (token >= first)
        past = mask & (token < first) & (place >= 0)
        value = _input(x, token.to(tl.int64), columns, own, channels, x_stride, GATED)
        before = ring + (block * KEPT + tl.maximum(place, 0) % KEPT).to(tl.int64) * channels
        value += tl.load(before + columns, mask=past, other=0.0)
        total += value * tl.load(taps + tap * channels + columns, mask=mask, other=0.0)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    if GATED:
        gate = x + row.to(tl.int64) * x_stride + channels + columns
        total *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64) * channels + columns
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)
    if SINGLE:
        where = first, count, length, block, state_rows, columns, mask
        _keep(x, ring, entry, where, channels, x_stride, TAPS, KEPT, GATED)


@triton.jit(do_not_specialize=["table_stride"])
def _keep_kernel(
    x,
    ring,
    query_starts,
    lengths,
    table,
    state_rows,
    channels,
    x_stride,
    table_stride,
    TAPS: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,
    TILE: tl.constexpr,
):
    entry = tl.program_id(0)
    first, count, length, block = read_entry(query_starts, lengths, table, entry, table_stride)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    where = first, count, length, block, state_rows, columns, columns < channels
    _keep(x, ring, entry, where, channels, x_stride, TAPS, KEPT, GATED)


def short_conv(
    x: torch.Tensor,
    spec: ConvSpec,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    layer: StateLayer,
    batch: StepBatch,
    group: int,
) -> torch.Tensor:
    """Compute `Operators.short_conv`."""
    ring, table = tensor(layer.inputs), tensor(batch.groups[group].tables)
    _, kept, channels = ring.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    rows, single, parts = device_lines(batch), batch.max_count == 1, triton.cdiv(channels, TILE)
    entries = len(batch.lengths)
    shape = {"TAPS": spec.taps, "KEPT": kept, "GATED": spec.gated, "TILE": TILE, "num_warps": 4}
    step = batch.query_starts, batch.lengths, table, rows
    _conv_kernel[(len(x), parts)](
        x,
        taps,
        bias,
        ring,
        out,
        *step,
        entries,
        channels,
        x.stride(0),
        table.stride(0),
        SILU=spec.activation == "silu",
        SINGLE=single,
        **shape,
    )
    if not single:
        given = channels, x.stride(0), table.stride(0)
        _keep_kernel[(entries, parts)](x, ring, *step, *given, **shape)
    return out
