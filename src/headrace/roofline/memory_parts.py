"""Sizes of the parts of a memory plan: formulas of the wish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..base.arch import ModelArch
from ..base.denoising import strip_of
from ..base.graph import SAMPLED, TEXTS, AttentionSpec, Graph, Rows, Value
from ..base.groups import block_bytes, graph_groups, pool_bytes, pool_of_rank
from ..base.step import GroupShape, PoolShape
from ..models.registry import describe
from .formats import dtype_bytes

SHARE = 0.25
MOST = 4
"""Checkpoints take at most `SHARE` of the bytes of the token groups, and at most `MOST` for each
row; two are the least."""


def with_states(rows: int, block_size: int, groups: Sequence[GroupShape]) -> tuple[GroupShape, ...]:
    """Return a pool's `groups`; a final state group gets its blocks.

    These are the null block, one of each row, and as many checkpoints as are worth their bytes.
    """
    if not groups or not groups[-1].state:
        return tuple(groups)
    *paged, states = groups
    share = int(SHARE * pool_bytes(PoolShape(block_size, tuple(paged))))
    checkpoints = max(2, min(share // block_bytes(states, block_size), MOST * rows))
    return (*paged, states._replace(blocks=1 + rows + checkpoints))


SAMPLING_COPIES = 5
"""fp32 arrays [R, V] alive while sampling: logits, and the arrays of penalties, or probabilities,
sorted values and their int64 indices (two)."""

GRAPH_LOGITS = 10
"""Bytes per logit of the largest decode step that graphs hold: as the product makes it (2), in fp32
and once more outside of their memory. Each graph's further memory is measured at the start."""
GRAPH_ROWS = 1024
"""The largest decode step that is a graph."""

RANK_BYTES = 64 << 20
"""Bytes of a further process before its first step: an interpreter and its libraries, measured
(benchmarks/results/ranks.json)."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Demands on the memory; all counts in tokens, all sizes in bytes."""

    arch: ModelArch
    weight_bytes: int
    rows: int
    step_tokens: int
    max_context: int
    block_size: int
    kv_dtype: str
    dtype: str
    depth: int
    graph_bytes: int
    kv_share: int = 1
    step_bytes: int = 0
    ranks: tuple[tuple[GroupShape, ...], ...] = ()
    """KV groups of each process of this host that shares the model; (): of one."""

    @property
    def processes(self) -> int:
        return max(1, len(self.ranks))


def has_logits(arch: ModelArch) -> bool:
    return "logits" in describe(arch).outputs


def activation_bytes(wish: Wish) -> int:
    """Return the peak of the tensors alive in the largest step of N = step_tokens tokens.

    N · D · b for the residual, plus the largest of
    attention: (D + (H + 2G) · E + 2 · H · E) · N · b  (x, qkv, q, result),
    feed-forward: (D + 2I + I + D) · N · b  (x, gate_up, gated, result), for MoE with I = active ·
    intermediate + shared, and the experts' inputs and outputs 2 · active · D,
    sampling: `SAMPLING_COPIES` · R · V · 4  with R = rows.
    If the step was measured (`Wish.step_bytes`), that. A UNet's entries run one after the other:
    the values of one, and what goes into the step and comes out of it.
    """
    if wish.step_bytes:
        return wish.step_bytes
    arch, tokens, width = wish.arch, wish.step_tokens, dtype_bytes(wish.dtype)
    if arch.denoiser is not None and arch.denoiser.unet is not None:
        own, given = arch.denoiser, arch.denoiser.channels + arch.denoiser.outputs
        return values_bytes(describe(arch), own.tokens, own.texts) + 8 * tokens * given
    shapes = {arch.kv_shape(layer) for layer in range(arch.layers)}
    attention = max(
        arch.hidden + (3 * arch.heads + 2 * kv_heads) * size for kv_heads, size in shapes
    )
    inner, extra = arch.intermediate, 0
    if arch.moe is not None:
        inner = max(
            arch.moe.active * arch.moe.intermediate + arch.moe.shared_intermediate,
            arch.intermediate if arch.moe.dense_layers or arch.moe.dense_at else 0,
        )
        extra = 2 * arch.moe.active * arch.hidden
    if arch.uneven is not None:
        inner *= 1 + arch.uneven.wide
        # The per-layer embeddings of all layers live from the first layer to the last.
        extra += 2 * arch.layers * arch.uneven.embedded
    feed_forward = 2 * arch.hidden + 3 * inner + extra
    sampling = SAMPLING_COPIES * wish.rows * arch.vocab_size * 4 if has_logits(arch) else 0
    return tokens * arch.hidden * width + max(
        tokens * attention * width, tokens * feed_forward * width, sampling
    )


_IN_PLACE = "add", "modulate", "scale", "part", "write"


def values_bytes(graph: Graph, units: int, texts: int = 0) -> int:
    """Return the bytes of a graph's values for one item of `units` rows, whose text has `texts`,
    as backends place them: values of one shape that are never alive together share memory."""
    strips = {
        node: strip_of(node.out[0].rows.of(units)) for node in graph.nodes if node.kind == "conv"
    }
    counts = {TEXTS.name: max(texts, *strips.values(), 1), SAMPLED.name: 1}
    places = {value: value for value in graph.inputs}
    ends: dict[Value, int] = dict.fromkeys(graph.inputs, 0)
    for index, node in enumerate(graph.nodes):
        for value in node.out:
            places[value] = places[node.reads[0]] if node.kind in _IN_PLACE else value
            ends[places[value]] = index
        for value in node.reads:
            ends[places[value]] = index
    kept = {places[value] for value in graph.outputs.values()}
    alive, most = Counter[tuple[Rows, int]](), Counter[tuple[Rows, int]]()
    ending: dict[int, list[Value]] = {}
    for value, last in ends.items():
        if value not in kept:
            ending.setdefault(last, []).append(value)
    alive.update((value.rows, value.width) for value in graph.inputs)
    for index, node in enumerate(graph.nodes):
        alive.update((value.rows, value.width) for value in node.out if places[value] is value)
        room = {(TEXTS, node.weights[0].width): 1} if node in strips else {}
        most |= alive + Counter(room)
        alive.subtract((value.rows, value.width) for value in ending.get(index, ()))
    found = 0
    for (rows, width), count in most.items():  # In fp32, and whole blocks in eight bits too.
        row = 4 * -(-width // 16) * 16 + (width * 34 // 32 if width % 32 == 0 else 0)
        found += count * rows.of(counts.get(rows.name, units)) * row
    return found


def laid_bytes(graph: Graph, units: int) -> int:
    """Return the bytes of keys and values that a thread lays out for the largest attention."""
    laid = [0]
    for node in graph.nodes:
        if node.kind == "attend" and isinstance(spec := node.spec, AttentionSpec):
            wide = spec.size + -(-spec.size // 16) * 16 + 16
            laid.append(4 * node.out[0].rows.of(units) * wide)
    return max(laid)


def table_bytes(wish: Wish) -> int:
    """Return tokens [rows, context] int64, block tables [rows, blocks] int32 per group, rope
    tables.

    Rope: cos and sin of [context, E / 2] fp32, and those of windowed layers if they have a base of
    their own.
    """
    arch = wish.arch
    tokens = wish.rows * wish.max_context * 8
    groups = len(graph_groups(describe(wish.arch), wish.kv_dtype))
    tables = groups * wish.rows * blocks_of(wish, wish.max_context) * 4
    widths = arch.head_dim if arch.local_rope is None else 2 * arch.head_dim
    if arch.uneven is not None:
        widths = arch.head_dim + arch.uneven.size
    ropes = widths * wish.max_context * 4
    return tokens + tables + ropes


def process_bytes(wish: Wish) -> int:
    return RANK_BYTES * (wish.processes - 1)


def fixed_bytes(wish: Wish) -> int:
    """Return everything but the KV pool and the margin."""
    return (
        wish.weight_bytes
        + wish.processes * (activation_bytes(wish) + table_bytes(wish))
        + wish.graph_bytes
        + process_bytes(wish)
    )


def kept_bytes(wish: Wish, pool: PoolShape) -> int:
    """Return the bytes of a pool that this host keeps: those of all its ranks, even with equal
    heads. Otherwise a device's part of every token's KV."""
    if wish.ranks:
        return sum(pool_bytes(pool_of_rank(pool, mine)) for mine in wish.ranks)
    return pool_bytes(pool) // wish.kv_share


def window_cap(wish: Wish, window: int | None) -> int:
    """Return the most blocks that the rows of a group can hold, the null block left out.

    Full attention: rows · ceil(context / S). A window: a row holds the window before its oldest
    query and the chunks in flight, which begin and end inside blocks: rows · (ceil((window + depth
    · step_tokens) / S) + 1), if that is less.
    """
    whole = blocks_of(wish, wish.max_context)
    if window is None:
        return wish.rows * whole
    return wish.rows * min(whole, blocks_of(wish, window + wish.depth * wish.step_tokens) + 1)


def smallest_pool(wish: Wish) -> PoolShape:
    """Return the pool in which one full-context sequence can run alone, and every row starts."""
    least = max(blocks_of(wish, wish.max_context), wish.rows)
    return pool_of(wish, least)


def pool_of(wish: Wish, blocks: int) -> PoolShape:
    groups = [
        group._replace(blocks=1 + min(blocks, window_cap(wish, group.window)))
        for group in graph_groups(describe(wish.arch), wish.kv_dtype)
    ]
    return PoolShape(wish.block_size, with_states(wish.rows, wish.block_size, groups))


def blocks_of(wish: Wish, tokens: int) -> int:
    return -(-tokens // wish.block_size)


def one_token(arch: ModelArch, kv_dtype: str) -> PoolShape:
    """Return a pool of one token, inside every window."""
    groups = graph_groups(describe(arch), kv_dtype, 1)
    return PoolShape(1, tuple(g._replace(blocks=0) if g.state else g for g in groups))
