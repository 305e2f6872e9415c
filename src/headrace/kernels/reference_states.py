"""States in plain PyTorch: the specification of `short_conv`, `delta_rule` and `ssm`.

Every token is one step of its sequence's recurrence, in fp32. Sums run over dimensions of the model
only, so neither the division of a prompt nor other rows change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ..base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from .arrays import tensor
from .operators import STATE_COLUMNS, StateLayer, StepBatch


class Stay(NamedTuple):
    """One sequence in a step: its tokens, its state, and the checkpoints to make."""

    first: int
    """Its first token in the step."""
    tokens: int
    start: int
    """Number of preceding tokens."""
    block: int
    """Block of its state."""
    settled: int
    """Tokens already in the state."""
    certain: int
    """Tokens of the step that are not drafts."""
    keeps: list[tuple[int, int]]
    """(tokens, block): checkpoints to make after this many tokens of the sequence."""


def entries(batch: StepBatch, group: int) -> Iterator[Stay]:
    """Yield the sequences of a step, for a model with states."""
    bounds = batch.query_starts.tolist()
    blocks = batch.groups[group].tables[:, 0].tolist()
    lengths = batch.lengths.tolist()
    given = batch.states
    for number, (first, end) in enumerate(pairwise(bounds)):
        count = end - first
        start = lengths[number] - count
        row = [start, count, *[0] * (STATE_COLUMNS - 2)] if given is None else given[number]
        settled, certain, *kept = np.asarray(row).tolist()
        keeps = [(at, block) for at, block in zip(kept[::2], kept[1::2], strict=True) if at]
        yield Stay(first, count, start, blocks[number], settled, certain, keeps)


def short_conv(
    x: torch.Tensor,
    spec: ConvSpec,
    taps: torch.Tensor,
    bias: torch.Tensor | None,
    layer: StateLayer,
    batch: StepBatch,
    group: int,
) -> torch.Tensor:
    """See `Operators.short_conv`."""
    ring = tensor(layer.inputs)
    wide, before = x.float(), spec.taps - 1
    gate = None
    if spec.gated:
        b, gate, wide = wide.chunk(3, -1)
        wide = b * wide
    weight = taps.float().view(spec.taps, -1)
    out = torch.empty_like(wide)
    for entry in entries(batch, group):
        own = wide[entry.first : entry.first + entry.tokens]
        positions = torch.arange(entry.start - before, entry.start)
        past = ring[entry.block, positions % ring.shape[1]]
        past = torch.where((positions < 0).unsqueeze(1).to(past.device), 0, past)
        line = torch.cat([past, own])
        total = torch.zeros_like(own) if bias is None else bias.float().expand_as(own)
        for tap in range(spec.taps):
            total = total + weight[tap] * line[tap : tap + entry.tokens]
        if spec.activation == "silu":
            total = total / (torch.exp(-total) + 1)
        out[entry.first : entry.first + entry.tokens] = total
        ends = [*entry.keeps, (entry.start + entry.tokens, entry.block)]
        for at, block in ends:
            # A refused draft has overwritten nothing that is still needed.
            kept = before if block != entry.block else ring.shape[1]
            first = max(0, at - kept, entry.start - before)
            places = torch.arange(first, at)
            ring[block, places % ring.shape[1]] = line[places - entry.start + before]
    if gate is not None:
        out = out * gate
    return out.to(x.dtype)


def recur(
    given: Sequence[torch.Tensor],
    spec: DeltaSpec | SsmSpec,
    weights: Sequence[torch.Tensor],
    layer: StateLayer,
    batch: StepBatch,
    group: int,
) -> torch.Tensor:
    """See `Operators.recur`."""
    assert layer.state is not None
    assert layer.tail is not None
    states, tail = tensor(layer.state), tensor(layer.tail)
    kind = _DeltaRule if isinstance(spec, DeltaSpec) else _StateSpace
    rule = kind(spec, given, weights)  # type: ignore[arg-type]
    heads, keys = spec.value_heads, spec.key_size
    out = torch.empty(len(given[0]), heads, spec.value_size, device=states.device)
    for entry in entries(batch, group):
        state = states[entry.block].clone()
        if entry.settled == 0:
            state.zero_()
        for draft in range(entry.start - entry.settled):
            state = rule.advance(state, tail[entry.block, draft], keys)
        keeps = dict(entry.keeps)
        for number in range(entry.tokens):
            at, token = entry.start + number + 1, entry.first + number
            into = rule.into(token)
            state = rule.advance(state, into, keys)
            out[token] = rule.out(state, token)
            if number + 1 == entry.certain:
                states[entry.block] = state
            if number >= entry.certain:
                tail[entry.block, number - entry.certain] = into
            if at in keeps:
                states[keeps[at]] = state
    return rule.end(out).to(given[0].dtype)


class _DeltaRule:
    """`DeltaSpec` over the tokens of a step."""

    def __init__(
        self, spec: DeltaSpec, given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        mixed, self._z, b, a = (each.float() for each in given)
        decay, step, self._gain = (each.float() for each in weights)
        self._spec = spec
        keys, each = spec.key_heads * spec.key_size, spec.value_heads // spec.key_heads
        q, k, v = torch.split(mixed, [keys, keys, spec.values], -1)
        shape = len(mixed), spec.key_heads, spec.key_size
        if spec.tiled:
            q, k = (_unit(one.reshape(shape)).repeat(1, each, 1) for one in (q, k))
        else:
            q, k = (_unit(one.reshape(shape)).repeat_interleave(each, 1) for one in (q, k))
        self._q = q * spec.key_size**-0.5
        v = v.reshape(len(mixed), spec.value_heads, spec.value_size)
        g = torch.exp(-decay.exp() * softplus(a + step)).unsqueeze(-1)
        beta = (1 / (torch.exp(-b) + 1)).unsqueeze(-1)
        self._into = torch.cat([k, v, g, beta], -1)

    def into(self, token: int) -> torch.Tensor:
        """Return [H, K + V + 2]: all inputs of a token to the state."""
        return self._into[token]

    def advance(self, state: torch.Tensor, into: torch.Tensor, keys: int) -> torch.Tensor:
        """Return the state [H, K, V] after a token."""
        k, v = into[:, :keys].unsqueeze(-1), into[:, keys:-2]
        g, beta = into[:, -2].view(-1, 1, 1), into[:, -1:]
        state = state * g
        return state + k * (beta * (v - (state * k).sum(1))).unsqueeze(1)

    def out(self, state: torch.Tensor, token: int) -> torch.Tensor:
        found: torch.Tensor = (state * self._q[token].unsqueeze(-1)).sum(1)
        return found

    def end(self, out: torch.Tensor) -> torch.Tensor:
        """Apply the norm over each head, and the gate [N, H · V]."""
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self._spec.eps)
        found: torch.Tensor = (normed * self._gain).flatten(1) * _silu(self._z)
        return found


class _StateSpace:
    """`SsmSpec` over the tokens of a step."""

    def __init__(
        self, spec: SsmSpec, given: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        mixed, self._z, dt = (each.float() for each in given)
        decay, step, self._skip, self._gain = (each.float() for each in weights)
        self._spec = spec
        keys, each = spec.key_heads * spec.key_size, spec.value_heads // spec.key_heads
        x, b, c = torch.split(mixed, [spec.values, keys, keys], -1)
        shape = len(mixed), spec.key_heads, spec.key_size
        b, self._c = (one.reshape(shape).repeat_interleave(each, 1) for one in (b, c))
        self._x = x.reshape(len(mixed), spec.value_heads, spec.value_size)
        dt = softplus(dt + step)
        g = torch.exp(-decay.exp() * dt).unsqueeze(-1)
        self._into = torch.cat([b, self._x * dt.unsqueeze(-1), g, torch.zeros_like(g)], -1)

    def into(self, token: int) -> torch.Tensor:
        """Return [H, K + V + 2]; the last number is unused."""
        return self._into[token]

    def advance(self, state: torch.Tensor, into: torch.Tensor, keys: int) -> torch.Tensor:
        """Return the state [H, K, V] after a token."""
        b, x = into[:, :keys].unsqueeze(-1), into[:, keys:-2].unsqueeze(1)
        return state * into[:, -2].view(-1, 1, 1) + b * x

    def out(self, state: torch.Tensor, token: int) -> torch.Tensor:
        found = (state * self._c[token].unsqueeze(-1)).sum(1)
        return found + self._x[token] * self._skip.unsqueeze(-1)

    def end(self, out: torch.Tensor) -> torch.Tensor:
        """Apply the gate, and the norm over each part [N, H · V]."""
        gated = out.flatten(1) * _silu(self._z)
        parts = gated.view(len(gated), self._spec.norm_groups, -1)
        parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self._spec.eps)
        found: torch.Tensor = parts.flatten(1) * self._gain
        return found


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Compute log(1 + eˣ)."""
    return functional.softplus(x.contiguous())


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale each row to length one."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (torch.exp(-x) + 1)
