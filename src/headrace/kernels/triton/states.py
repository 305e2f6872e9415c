"""Recurrent states: the gated delta rule and selective state spaces, token by token.

Arithmetic. A head's state of 128 x 128 numbers in fp32 is read and written once a step and entry:
128 KiB, for 5 to 7 operations a number and token; a token's own inputs are nothing compared with
that. With one token an entry bandwidth binds (4 MiB a layer and sequence with 32 heads, as
Qwen3-Next has them: 1.3 microseconds of an H100); a prompt stays in registers and is bound by how
long a token waits for the one before it: two sums over keys. So columns of a state, which do not
depend on each other, are programs of a warp each: the sums stay within it, and no barrier is met.
Prompts take few columns a program, so that one sequence fills the device; decoding takes whole
sectors of memory. A token's inputs are requested while the token before is computed.

The chunked form, which multiplies 64 tokens at once on the tensor cores, rounds by where chunks
begin: it would have to begin at multiples of 64 of the sequence, whatever a step brings. It is not
here.

Drafts go into `StateLayer.tail` by a kernel of its own: programs of other columns still read the
preceding step's drafts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ...base.recurrent import DeltaSpec, SsmSpec
from ..arrays import tensor
from ..operators import StateLayer, StepBatch
from ..state_lines import NOWHERE, device_lines
from .gated import softplus
from .state_rows import read_entry

FEW_COLUMNS = 8
"""Columns per program if entries have many tokens: 32 numbers a thread."""
COLUMNS = 16
"""Columns per program if entries have one token: 64 bytes of each key's row; twice as many
spill."""
IDLE = tl.constexpr(NOWHERE)
TOGETHER = 1024
"""Numbers that a program norms."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Heads of a recurrence: a constant of kernels."""

    key_heads: int
    heads: int
    keys: int
    values: int
    tiled: bool
    delta: bool


@triton.jit
def _token(sources, token, head, places, SHAPE: tl.constexpr):
    """Load a token's inputs to a head: q, k [keys], v [columns], decay, step, and v as it was."""
    mixed, gates, steps, head_decay, head_step, mixed_stride, gates_stride, steps_stride = sources
    keys, columns, real, inside = places
    KEY_HEADS: tl.constexpr = SHAPE.key_heads
    HEADS: tl.constexpr = SHAPE.heads
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.values
    group = head % KEY_HEADS if SHAPE.tiled else head // (HEADS // KEY_HEADS)
    at = mixed + token * mixed_stride
    gate = tl.load(gates + token * gates_stride + head).to(tl.float32) + head_step
    softened = softplus(gate)
    decay = tl.exp(-head_decay * softened)
    if SHAPE.delta:
        q = tl.load(at + group * KEYS + keys, mask=real, other=0.0).to(tl.float32)
        k = tl.load(at + (KEY_HEADS + group) * KEYS + keys, mask=real, other=0.0).to(tl.float32)
        own = at + 2 * KEY_HEADS * KEYS + head * VALUES + columns
        given = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        q = q * (1.0 / tl.sqrt(tl.sum(q * q, 0) + 1e-6)) * (1.0 / KEYS**0.5)
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
        step = 1.0 / (1.0 + tl.exp(-tl.load(steps + token * steps_stride + head).to(tl.float32)))
        v = given
    else:
        at += HEADS * VALUES + group * KEYS
        k = tl.load(at + keys, mask=real, other=0.0).to(tl.float32)
        q = tl.load(at + KEY_HEADS * KEYS + keys, mask=real, other=0.0).to(tl.float32)
        own = mixed + token * mixed_stride + head * VALUES + columns
        given = tl.load(own, mask=inside, other=0.0).to(tl.float32)
        v = given * softened
        step = decay * 0.0
    return q, k, v, decay, step, given


@triton.jit
def _advance(state, k, v, decay, step, DELTA: tl.constexpr):
    """Return the state [keys, columns] after a token."""
    state = state * decay
    if DELTA:
        v = step * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * v[None, :]


@triton.jit(do_not_specialize=["table_stride"])
def _walk_kernel(
    mixed,
    gates,
    steps,
    decays,
    biases,
    skips,
    states,
    tail,
    out,
    query_starts,
    lengths,
    table,
    state_rows,
    mixed_stride,
    gates_stride,
    steps_stride,
    table_stride,
    SHAPE: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    DRAFTS: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Walk an entry's tokens; results are fp32 [N, HEADS, VALUES], before norm and gate. ALONE: no
    entry has more than one."""
    HEADS: tl.constexpr = SHAPE.heads
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.values
    entry = tl.program_id(2)
    head = tl.program_id(1)
    first, count, length, block = read_entry(query_starts, lengths, table, entry, table_stride)
    if count == 0:
        return
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = keys < KEYS
    inside = columns < VALUES
    mask = real[:, None] & inside[None, :]
    home = keys[:, None] * VALUES + columns[None, :]
    start = length - count
    line = state_rows + entry * 6
    settled = tl.load(line)
    certain = tl.load(line + 1)
    keep_at = tl.load(line + 2)
    keep_block = tl.load(line + 3).to(tl.int64)
    then_at = tl.load(line + 4)
    then_block = tl.load(line + 5).to(tl.int64)
    # Padding of a graph walks nowhere; its results must be finite.
    walks = certain < IDLE
    cell = (block.to(tl.int64) * HEADS + head) * (KEYS * VALUES)
    state = tl.load(states + cell + home, mask=mask & (settled > 0), other=0.0)
    for behind in range(tl.where(walks, start - settled, 0)):
        width: tl.constexpr = KEYS + VALUES + 2
        into = tail + ((block.to(tl.int64) * DRAFTS + behind) * HEADS + head) * width
        k = tl.load(into + keys, mask=real, other=0.0)
        v = tl.load(into + KEYS + columns, mask=inside, other=0.0)
        gate = tl.load(into + KEYS + VALUES)
        state = _advance(state, k, v, gate, tl.load(into + KEYS + VALUES + 1), SHAPE.delta)
    head_decay = tl.exp(tl.load(decays + head).to(tl.float32))
    head_step = tl.load(biases + head).to(tl.float32)
    sources = mixed, gates, steps, head_decay, head_step, mixed_stride, gates_stride, steps_stride
    places = keys, columns, real, inside
    skip = 0.0
    if not SHAPE.delta:
        skip = tl.load(skips + head).to(tl.float32)
    token = first.to(tl.int64)
    q, k, v, decay, step, given = _token(sources, token, head, places, SHAPE)
    for number in range(1 if ALONE else count):
        if not ALONE:
            # After the last token, that token is read again.
            then = (first + tl.minimum(number + 1, count - 1)).to(tl.int64)
            next_q, next_k, next_v, next_decay, next_step, next_given = _token(
                sources, then, head, places, SHAPE
            )
        to = out + ((first + number).to(tl.int64) * HEADS + head) * VALUES + columns
        if walks:
            state = _advance(state, k, v, decay, step, SHAPE.delta)
            tl.store(to, tl.sum(state * q[:, None], 0) + given * skip, mask=inside)
        else:
            tl.store(to, tl.zeros([COLUMNS], tl.float32), mask=inside)
        if number + 1 == certain:
            tl.store(states + cell + home, state, mask=mask)
        if start + number + 1 == keep_at:
            kept = (keep_block * HEADS + head) * (KEYS * VALUES)
            tl.store(states + kept + home, state, mask=mask)
        if start + number + 1 == then_at:
            kept = (then_block * HEADS + head) * (KEYS * VALUES)
            tl.store(states + kept + home, state, mask=mask)
        if not ALONE:
            q, k, v, decay, step, given = next_q, next_k, next_v, next_decay, next_step, next_given


@triton.jit(do_not_specialize=["table_stride"])
def _tail_kernel(
    mixed,
    gates,
    steps,
    decays,
    biases,
    tail,
    query_starts,
    lengths,
    table,
    state_rows,
    mixed_stride,
    gates_stride,
    steps_stride,
    table_stride,
    SHAPE: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    VALUES_PADDED: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Write each draft's inputs to a head's state into the entry's block."""
    HEADS: tl.constexpr = SHAPE.heads
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.values
    entry = tl.program_id(1)
    head = tl.program_id(0)
    first, count, _length, block = read_entry(query_starts, lengths, table, entry, table_stride)
    certain = tl.load(state_rows + entry * 6 + 1)
    keys = tl.arange(0, KEYS_PADDED)
    columns = tl.arange(0, VALUES_PADDED)
    real = keys < KEYS
    inside = columns < VALUES
    head_decay = tl.exp(tl.load(decays + head).to(tl.float32))
    head_step = tl.load(biases + head).to(tl.float32)
    sources = mixed, gates, steps, head_decay, head_step, mixed_stride, gates_stride, steps_stride
    places = keys, columns, real, inside
    for number in range(certain, tl.minimum(count, certain + DRAFTS)):
        _q, k, v, decay, step, _given = _token(
            sources, (first + number).to(tl.int64), head, places, SHAPE
        )
        width: tl.constexpr = KEYS + VALUES + 2
        place = block.to(tl.int64) * DRAFTS + number - certain
        into = tail + (place * HEADS + head) * width
        tl.store(into + keys, k, mask=real)
        tl.store(into + KEYS + columns, v, mask=inside)
        tl.store(into + KEYS + VALUES, decay)
        tl.store(into + KEYS + VALUES + 1, step)


@triton.jit
def _finish_kernel(
    x,
    z,
    gain,
    y,
    z_stride,
    eps,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    TOGETHER: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Apply an RMS norm over each of PARTS parts of a row, and silu(z) before it. With the delta
    rule silu(z) comes after it, and all parts have one gain."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.arange(0, WIDTH_PADDED)
    mask = (part < PARTS)[:, None] & (column < WIDTH)[None, :]
    place = part[:, None] * WIDTH + column[None, :]
    values = tl.load(x + token * (PARTS * WIDTH) + place, mask=mask, other=0.0)
    gate = tl.load(z + token * z_stride + place, mask=mask, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if not DELTA:
        values *= gate
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 1) / WIDTH + eps)
    values *= factor[:, None]
    if DELTA:
        own = tl.load(gain + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        values = values * own[None, :] * gate
    else:
        values *= tl.load(gain + place, mask=mask, other=0.0).to(tl.float32)
    to = y + token * (PARTS * WIDTH) + place
    tl.store(to, values.to(y.dtype.element_ty), mask=mask)


def recur(
    given: Sequence[torch.Tensor],
    spec: DeltaSpec | SsmSpec,
    weights: Sequence[torch.Tensor],
    layer: StateLayer,
    batch: StepBatch,
    group: int,
    *,
    columns: int | None = None,
) -> torch.Tensor:
    """Compute `Operators.recur`. The `columns` of a state in a program affect how sums are rounded;
    None: chosen by the step."""
    assert layer.state is not None
    assert layer.tail is not None
    delta = isinstance(spec, DeltaSpec)
    # The delta rule has the inputs of the step, then those of the decay.
    mixed, z, *more = given
    steps, gates = more if delta else (more[0], more[0])
    decays, biases, *rest = weights
    states, tail = tensor(layer.state), tensor(layer.tail)
    table, rows = tensor(batch.groups[group].tables), device_lines(batch)
    entries, count, values = len(batch.lengths), len(mixed), spec.value_size
    # One kernel for all steps where their columns are given, and with them the rounding.
    alone = columns is None and batch.max_count == 1
    if columns is None:
        columns = COLUMNS if alone else FEW_COLUMNS
    columns = min(columns, triton.next_power_of_2(values))
    out = torch.empty(count, spec.values, dtype=torch.float32, device=mixed.device)
    strides = mixed.stride(0), gates.stride(0), steps.stride(0), table.stride(0)
    step = batch.query_starts, batch.lengths, table, rows
    shape = {
        "SHAPE": StateShape(
            spec.key_heads,
            spec.value_heads,
            spec.key_size,
            values,
            isinstance(spec, DeltaSpec) and spec.tiled,
            delta,
        ),
        "KEYS_PADDED": triton.next_power_of_2(spec.key_size),
        "DRAFTS": tail.shape[1],
        "num_warps": 1,
    }
    _walk_kernel[(triton.cdiv(values, columns), spec.value_heads, entries)](
        mixed,
        gates,
        steps,
        decays,
        biases,
        rest[0],
        states,
        tail,
        out,
        *step,
        *strides,
        COLUMNS=columns,
        ALONE=alone,
        **shape,
    )
    if batch.max_count > 1:
        _tail_kernel[(spec.value_heads, entries)](
            mixed,
            gates,
            steps,
            decays,
            biases,
            tail,
            *step,
            *strides,
            VALUES_PADDED=triton.next_power_of_2(values),
            **shape,
        )
    parts = spec.value_heads if isinstance(spec, DeltaSpec) else spec.norm_groups
    width = spec.values // parts
    padded = triton.next_power_of_2(width)
    together = min(triton.next_power_of_2(parts), max(1, TOGETHER // padded))
    y = torch.empty(count, spec.values, dtype=mixed.dtype, device=mixed.device)
    _finish_kernel[(count, triton.cdiv(parts, together))](
        out,
        z,
        rest[-1],
        y,
        z.stride(0),
        spec.eps,
        PARTS=parts,
        WIDTH=width,
        WIDTH_PADDED=padded,
        TOGETHER=together,
        DELTA=delta,
        num_warps=max(1, min(8, together * padded // 256)),
    )
    return y
