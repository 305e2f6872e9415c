"""Random paged batches, and attention over them by its definition in float64."""

from __future__ import annotations

import numpy as np
import torch

from headrace.base.graph import AttentionSpec, RouteSpec
from headrace.kernels.operators import GroupBatch, KvLayer, Operators, StepBatch
from headrace.kernels.reference_attention import scale_above
from headrace.kernels.value_codes import decode, encode
from headrace.kernels.weights import Weight


def make_batch(
    entries: list[tuple[int, int]],
    *,
    block_size: int = 16,
    window: int | None = None,
    vocabulary: int = 100,
    seed: int = 0,
) -> tuple[StepBatch, int]:
    """A batch of (start, count) entries on scattered blocks → it, and how many blocks there are."""
    rng = np.random.default_rng(seed)
    lengths = [start + count for start, count in entries]
    width = max(-(-length // block_size) for length in lengths)
    total = sum(-(-length // block_size) for length in lengths) + 3
    free = list(rng.permutation(np.arange(1, total)))
    tables = np.zeros((len(entries), width), np.int32)
    positions, slots = [], []
    for row, ((start, count), length) in enumerate(zip(entries, lengths, strict=True)):
        used = -(-length // block_size)
        tables[row, :used] = [free.pop() for _ in range(used)]
        # The control plane lets go of what is wholly out of the first query's window.
        if window is not None:
            tables[row, : max(0, start - window + 1) // block_size] = 0
        places = np.arange(start, start + count)
        positions.append(places)
        slots.append(
            tables[row, places // block_size].astype(np.int64) * block_size + places % block_size
        )
    counts = [count for _, count in entries]
    bounds = np.concatenate([[0], np.cumsum(counts)])
    batch = StepBatch(
        tokens=torch.from_numpy(rng.integers(0, vocabulary, bounds[-1])),
        positions=torch.from_numpy(np.concatenate(positions)),
        query_starts=torch.from_numpy(bounds.astype(np.int32)),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        groups=[
            GroupBatch(torch.from_numpy(tables), torch.from_numpy(np.concatenate(slots)), window)
        ],
        sample_rows=torch.from_numpy(bounds[1:] - 1),
        max_count=max(counts),
        max_length=max(lengths),
    )
    return batch, total


def one_of(batch: StepBatch, first: int, last: int, entry: int) -> StepBatch:
    """Tokens first … last − 1, all of one entry, as a step of their own."""
    group = batch.groups[0]
    return StepBatch(
        batch.tokens[first:last].clone(),
        batch.positions[first:last].clone(),
        torch.tensor([0, last - first], dtype=torch.int32),
        (batch.positions[last - 1 : last] + 1).int(),
        [
            GroupBatch(
                group.tables[entry : entry + 1], group.slots[first:last].clone(), group.window
            )
        ],
        torch.tensor([last - first - 1]),
        last - first,
        int(batch.positions[last - 1]) + 1,
    )


def make_kv(
    blocks: int, kv_heads: int, block_size: int, width: int, dtype: torch.dtype = torch.float32
) -> KvLayer:
    """Random in all blocks but the null block."""
    shape = (blocks, kv_heads, block_size, width)
    k, v = torch.randn(shape), torch.randn(shape)
    k[0] = v[0] = 0
    return KvLayer(k.to(dtype), v.to(dtype))


def quantised(kv: KvLayer, dtype: torch.dtype) -> KvLayer:
    """The same KV in another type; int8 with a scale per token and head, uint8 with values in four
    bits."""
    if dtype == torch.uint8:
        k, k_scale = _codes(kv.k)
        v, v_scale = encode(kv.v)
        return KvLayer(k, v, k_scale, v_scale)
    if dtype != torch.int8:
        return KvLayer(kv.k.to(dtype), kv.v.to(dtype))
    (k, k_scale), (v, v_scale) = (_codes(x) for x in (kv.k, kv.v))
    return KvLayer(k, v, k_scale, v_scale)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_above(x.abs().amax(-1) / 127)
    return (x / scale.float().unsqueeze(-1)).round().to(torch.int8), scale


def attention_by_definition(
    q: torch.Tensor,
    kv: KvLayer,
    batch: StepBatch,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token after the other, in float64."""
    view = batch.groups[0]
    repeats, size = q.shape[1] // kv.k.shape[1], kv.block_size
    out = torch.zeros(q.shape, dtype=torch.float64)
    bounds = batch.query_starts.tolist()
    for entry in range(len(bounds) - 1):
        table = view.tables[entry].long()
        for token in range(bounds[entry], bounds[entry + 1]):
            position = int(batch.positions[token])
            first = 0 if view.window is None else max(0, position - view.window + 1)
            last = position if batch.reach is None else int(batch.reach[token])
            places = torch.arange(first, last + 1)
            blocks, offsets = table[places // size], places % size
            keys, values = (  # Of each position and head.
                _numbers(x, s, blocks, offsets).repeat_interleave(repeats, dim=1)
                for x, s in ((kv.k, kv.k_scale), (kv.v, kv.v_scale))
            )
            scores = torch.einsum("hd,phd->hp", q[token].double(), keys) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
            assert weights.isfinite().all()
            out[token] = torch.einsum("hp,phd->hd", weights, values)
            sums = weights.sum(dim=1, keepdim=True)
            if sinks is not None:
                sums += torch.exp(sinks.double().unsqueeze(1) - scores.amax(dim=1, keepdim=True))
            out[token] /= sums
    return out.reshape(len(q), -1)


def _numbers(
    x: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the numbers at these slots, float64 [tokens, G, E]."""
    found = x[blocks, :, offsets]
    if scales is None:
        return found.double()
    scale = scales[blocks, :, offsets]
    if x.dtype == torch.uint8:
        return decode(found, scale).double()
    return found.double() * scale.double().unsqueeze(-1)


def attend(
    ops: Operators,
    q: torch.Tensor,
    kv: KvLayer,
    batch: StepBatch,
    group: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`Operators.attend` of q [N, H, E]."""
    _, heads, size = q.shape
    spec = AttentionSpec(0, heads, kv.k.shape[1], size, scale, softcap=softcap)
    found: torch.Tensor = ops.attend(q.flatten(1), spec, kv, batch, group, sinks)
    return found


def mixture(
    ops: Operators,
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: list[Weight],
    down: list[Weight],
    active: int,
    normalise: bool,
    activation: str,
) -> torch.Tensor:
    """`Operators.route`, and the experts that it chose."""
    chosen, shares = ops.route(router, RouteSpec(active, normalise), None)
    found: torch.Tensor = ops.experts(x, chosen, shares, gate_up, down, activation)
    return found
