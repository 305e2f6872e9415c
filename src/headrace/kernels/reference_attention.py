"""Reference of the paged KV cache and of attention over it.

Row invariance fixes the shape of every product. Keys are visited in tiles of `TILE` tokens counted
from the start of the sequence, and their partial sums are added in order. A tile that a query
cannot see adds exact zeros. Query rows are padded to a multiple of `ROWS`, because below that the
library changes its order of summation with the number of rows. So a query's result does not depend
on the number of others, on the longest sequence of the batch, or on the cut of the prompt into
chunks.
"""

from __future__ import annotations

import torch

from .operators import GroupBatch, KvLayer, StepBatch
from .value_codes import decode, encode

TILE = 128
"""Tokens per partial sum; a multiple of every block size."""
ROWS = 8
SCORES = 1 << 24
"""Most scores held at once, in elements: long prompts are cut by queries."""
GATHERED = 1 << 23
"""Most elements of K gathered at once in a decode batch."""
_FP8_MAX = 448.0
_INT8_MAX = 127.0


def store(kv: KvLayer, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
    """Write key and value [N, G, E] of each token to its slot [N]; without a value, K is V too."""
    block = torch.div(slots, kv.block_size, rounding_mode="floor")
    offset = slots - block * kv.block_size
    pairs = ((kv.k, kv.k_scale, key), (kv.v, kv.v_scale, value))
    for cache, scales, rows in pairs:
        if rows is None:
            continue
        if scales is None:
            cache[block, :, offset] = rows.to(cache.dtype)
            continue
        if cache.dtype == torch.uint8:
            cache[block, :, offset], scales[block, :, offset] = encode(rows)
            continue
        high = _INT8_MAX if cache.dtype == torch.int8 else _FP8_MAX
        wide = rows.float()
        scale = scale_above(wide.abs().amax(-1) / high)
        codes = wide / scale.float().unsqueeze(-1)
        if cache.dtype == torch.int8:
            codes = codes.round_()
        cache[block, :, offset] = codes.to(cache.dtype)
        scales[block, :, offset] = scale


def scale_above(least: torch.Tensor) -> torch.Tensor:
    """Return the smallest normal bf16 numbers not below these fp32 ones: with such a scale no code
    is clipped."""
    least = least.clamp_min(torch.finfo(torch.float32).tiny)
    above = ((least.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    return torch.where(least.isnan(), least, above).to(torch.bfloat16)


def gather(cache: torch.Tensor, scales: torch.Tensor | None, tables: torch.Tensor) -> torch.Tensor:
    """Gather blocks of a cache [blocks, G, S, E] in table order [B, T] → fp32 [B · G, T · S, E]. A
    cache of four-bit values has E / 2."""
    _, heads, size, width = cache.shape
    entries, length = tables.shape
    # One index over (block, head) collects each head's tokens in a single copy.
    index = (tables.long().unsqueeze(1) * heads) + torch.arange(
        heads, device=tables.device
    ).unsqueeze(1)
    flat = index.reshape(-1)
    rows = cache.view(-1, size, width)[flat]
    if cache.dtype == torch.uint8:
        assert scales is not None
        rows = decode(rows, scales.view(-1, size)[flat])
        return rows.reshape(entries * heads, length * size, 2 * width)
    rows = rows.float()
    if scales is not None:
        rows *= scales.view(-1, size)[flat].unsqueeze(-1)
    return rows.reshape(entries * heads, length * size, width)


def attention(
    q: torch.Tensor,
    kv: KvLayer,
    batch: StepBatch,
    group: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """Compute `Operators.attend`; q [N, H, E]."""
    tokens, heads, width = q.shape
    out = q.new_empty(tokens, heads, width)
    view = batch.groups[group]
    reach = batch.positions if batch.reach is None else batch.reach
    bounds = batch.query_starts.tolist()
    lengths = batch.lengths.tolist()
    singles = [b for b in range(len(lengths)) if bounds[b + 1] - bounds[b] == 1]
    for chosen, longest in _decode_batches(singles, lengths, kv.k.shape[1] * width):
        entries = torch.tensor(chosen, device=q.device)
        rows = batch.query_starts[entries].long()
        positions = batch.positions[rows].unsqueeze(1)
        first = 0
        if view.window is not None:
            first = _tile_start(min(lengths[b] for b in chosen) - view.window)
        out[rows] = _attend(
            q[rows].unsqueeze(1),
            kv,
            view,
            entries,
            positions,
            positions,
            first,
            longest,
            scale,
            softcap,
            sinks,
            chunked=chunked,
        ).squeeze(1)
    for b, length in enumerate(lengths):
        begin, end = bounds[b], bounds[b + 1]
        if end - begin <= 1:  # Done above, or padding without tokens.
            continue
        step = max(ROWS, SCORES // (heads * _tile_end(length)))
        for low in range(begin, end, step):
            high = min(low + step, end)
            start = length - (end - low)
            first = 0 if view.window is None else _tile_start(start + 1 - view.window)
            out[low:high] = _attend(
                q[low:high].unsqueeze(0),
                kv,
                view,
                torch.tensor([b], device=q.device),
                batch.positions[low:high].unsqueeze(0),
                reach[low:high].unsqueeze(0),
                first,
                length - (end - high) if batch.reach is None else int(reach[high - 1]) + 1,
                scale,
                softcap,
                sinks,
                chunked=chunked,
            ).squeeze(0)
    return out.view(tokens, heads * width)


def _decode_batches(
    entries: list[int], lengths: list[int], per_token: int
) -> list[tuple[list[int], int]]:
    """Group entries of similar length, so that padding to the longest is bounded."""
    batches: list[tuple[list[int], int]] = []
    for b in sorted(entries, key=lambda b: -lengths[b]):
        if batches:
            chosen, longest = batches[-1]
            full = (len(chosen) + 1) * _tile_end(longest) * per_token > GATHERED
            if not full and 2 * _tile_end(lengths[b]) >= _tile_end(longest):
                chosen.append(b)
                continue
        batches.append(([b], lengths[b]))
    return batches


def _tile_start(position: int) -> int:
    return max(0, position) // TILE * TILE


def _tile_end(length: int) -> int:
    return -(-length // TILE) * TILE


def _attend(
    q: torch.Tensor,
    kv: KvLayer,
    view: GroupBatch,
    entries: torch.Tensor,
    positions: torch.Tensor,
    reach: torch.Tensor,
    first: int,
    length: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """Attend from q [B, M, H, E] at positions [B, M] to the tokens `first` … `length` - 1, each up
    to its `reach` [B, M] → like q."""
    batch, count, heads, width = q.shape
    kv_heads, size = kv.k.shape[1], kv.block_size
    shared = heads // kv_heads
    tables = view.tables[entries, first // size : -(-length // size)]
    missing = (_tile_end(length) - first) // size - tables.shape[1]
    tables = torch.nn.functional.pad(tables, (0, missing))
    keys = gather(kv.k, kv.k_scale, tables)
    values = gather(kv.v, kv.v_scale, tables)
    total = keys.shape[1]
    places = torch.arange(first, first + total, device=q.device)
    if kv.bias is not None:
        turned = torch.from_numpy(kv.bias.at(places.numpy()))
        keys.view(batch, kv_heads, total, width).add_(turned)
    # Slots after the end of a sequence hold stale values, whose weight must be zero.
    beyond = places >= reach[:, -1:] + 1
    values.view(batch, kv_heads, total, width).masked_fill_(beyond[:, None, :, None], 0.0)

    rows = count * shared
    padding = -rows % ROWS
    queries = q.view(batch, count, kv_heads, shared, width).transpose(1, 2)
    queries = queries.reshape(batch * kv_heads, rows, width).float() * scale
    queries = torch.nn.functional.pad(queries, (0, 0, 0, padding))

    def of_rows(places: torch.Tensor) -> torch.Tensor:
        own = places.repeat_interleave(shared, 1)
        return torch.cat([own, own[:, -1:].expand(-1, padding)], 1).unsqueeze(-1)

    at = of_rows(positions)
    hidden = places > of_rows(reach)
    if view.window is not None:
        # A chunk never begins before a window of its length would.
        first_seen = at // view.window * view.window if chunked else at - view.window + 1
        hidden |= places < first_seen

    scores = torch.bmm(queries, keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)) * softcap
    per_head = scores.view(batch, kv_heads, rows + padding, total)
    per_head.masked_fill_(hidden.unsqueeze(1), float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True)  # A shift only: gradients need not include it.
    scores.sub_(highest).exp_()
    tiles = total // TILE
    sums = scores.view(batch * kv_heads, rows + padding, tiles, TILE).sum(-1)
    norm = sums[..., 0]
    result = torch.bmm(scores[..., :TILE], values[:, :TILE])
    for tile in range(1, tiles):
        span = slice(tile * TILE, (tile + 1) * TILE)
        norm = norm + sums[..., tile]
        result += torch.bmm(scores[..., span], values[:, span])
    if sinks is not None:
        # [G, M · H / G], in the rows' order; a sink has a share of the weights but no value.
        own = sinks.float().view(kv_heads, 1, shared).expand(-1, count, -1).flatten(1)
        own = torch.nn.functional.pad(own, (0, padding)).repeat(batch, 1)
        norm = norm + torch.exp(own - highest.squeeze(-1))
    result = result[:, :rows] / norm[:, :rows].unsqueeze(-1)
    result = result.view(batch, kv_heads, count, shared, width).transpose(1, 2)
    return result.reshape(batch, count, heads, width).to(q.dtype)
