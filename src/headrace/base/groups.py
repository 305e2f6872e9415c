"""KV groups of a step graph, and the content of a block of each: the only definition.

The pool and its bytes, copies between blocks, the memory plan and the prices of the roofline follow
from it. It defines the meaning of a block; each backend chooses the memory layout of its pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from .graph import AttentionSpec, Graph, LatentSpec, Node
from .recurrent import ConvSpec, DeltaSpec, SsmSpec
from .step import MOST_DRAFTS, ArrayShape, GroupShape, PoolShape

ARRAY_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "uint8": 1}
"""Bytes of one number of each storable type."""
KV_DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "k8v4")
"""Types of a KV cache. k8v4 keeps values two to a byte, and everything else like int8."""
SCALED = ("int8", "fp8", "k8v4")
"""Types with a scale per token and head."""


def kept_arrays(spec: AttentionSpec | LatentSpec, kv_dtype: str) -> tuple[ArrayShape, ...]:
    """Return the arrays that a layer keeps of one token.

    Keys and values of each KV head [G, E]; for latent attention (MLA) one vector of rope_size +
    rank numbers, of one head. Types with scales add one bfloat16 scale per head of each array.
    """
    kind = "int8" if kv_dtype == "k8v4" else kv_dtype
    if isinstance(spec, LatentSpec) or spec.latent:
        arrays = [ArrayShape("latent", (1, spec.size), kind)]
    else:
        heads, size = spec.kv_heads, spec.size
        v = ArrayShape("v", (heads, size), kind)
        if kv_dtype == "k8v4":
            v = ArrayShape("v", (heads, size // 2), "uint8")
        arrays = [ArrayShape("k", (heads, size), kind), v]
    if kv_dtype in SCALED:
        arrays += [ArrayShape(f"{one.name}_scale", one.shape[:-1], "bfloat16") for one in arrays]
    return tuple(arrays)


def state_arrays(node: Node) -> tuple[ArrayShape, ...]:
    """Return the arrays, in fp32, that a recurrent node keeps of one sequence.

    `inputs` of a convolution lie each in the row of its position (modulo their number). They
    include those of drafts, so that refused drafts are simply overwritten. `state` is settled: it
    contains no draft. `tail` has the operands of each draft's and head's update, until the next
    step applies the accepted ones.
    """
    spec = node.spec
    if isinstance(spec, ConvSpec):
        rows = spec.taps - 1 + MOST_DRAFTS
        return (ArrayShape("inputs", (rows, node.out[0].width), "float32"),)
    assert isinstance(spec, DeltaSpec | SsmSpec)
    sizes = spec.key_size, spec.value_size
    tail = MOST_DRAFTS, spec.value_heads, sum(sizes) + 2
    return (
        ArrayShape("state", (spec.value_heads, *sizes), "float32"),
        ArrayShape("tail", tail, "float32"),
    )


def kept_bytes(arrays: Iterable[ArrayShape]) -> int:
    """Return the bytes of one token in one layer; for a state group, of one sequence."""
    return sum(math.prod(array.shape) * ARRAY_BYTES[array.dtype] for array in arrays)


@lru_cache(maxsize=256)
def graph_groups(graph: Graph, kv_dtype: str, blocks: int = 2) -> tuple[GroupShape, ...]:
    """Return the KV groups of a graph with `blocks` each: full attention first, states last.

    Layers whose blocks hold the same arrays for the same tokens are one group. An encoder has none:
    it reads an input whole and keeps nothing between two steps. For a rank's graph, only its part.
    Layers that attend across are in `cross_groups`.
    """
    layers: dict[int | None, list[int]] = {}
    arrays: dict[int | None, tuple[ArrayShape, ...]] = {}
    latent = False
    for spec in graph.attentions():
        if isinstance(spec, AttentionSpec) and (spec.bidirectional or spec.across or not spec.kept):
            continue
        latent = latent or isinstance(spec, LatentSpec) or spec.latent
        layers.setdefault(spec.window, []).append(spec.layer)
        kept = arrays.setdefault(spec.window, kept_arrays(spec, kv_dtype))
        assert kept == kept_arrays(spec, kv_dtype), "layers of one window keep different arrays"
    full = "latent" if latent else "full"
    groups = [
        GroupShape(
            full if window is None else f"window{window}",
            tuple(layers[window]),
            window,
            blocks,
            arrays[window],
        )
        for window in sorted(layers, key=lambda window: (window is not None, window or 0))
    ]
    states: dict[int, tuple[ArrayShape, ...]] = {}
    for node in graph.nodes:
        if isinstance(node.spec, ConvSpec | DeltaSpec | SsmSpec):
            states[node.spec.layer] = states.get(node.spec.layer, ()) + state_arrays(node)
    if states:
        (shapes,) = set(states.values())
        groups.append(GroupShape("state", tuple(states), None, blocks, shapes, state=True))
    return tuple(groups)


def cross_groups(graph: Graph, kv_dtype: str, blocks: int) -> tuple[GroupShape, ...]:
    """Return the group of the layers that attend to an encoded input, with `blocks`; () without
    any."""
    across = {
        spec.layer: kept_arrays(spec, kv_dtype)
        for spec in graph.attentions()
        if isinstance(spec, AttentionSpec) and spec.across
    }
    if not across:
        return ()
    (kept,) = set(across.values())
    return (GroupShape("cross", tuple(across), None, blocks, kept, cross=True),)


def slot_groups(graph: Graph, kv_dtype: str, slots: int, span: int) -> tuple[GroupShape, ...]:
    """Return the KV groups of a part that has `slots` slots of `span` tokens."""
    return tuple(group._replace(span=span) for group in graph_groups(graph, kv_dtype, slots))


def pool_of_rank(pool: PoolShape, mine: Iterable[GroupShape]) -> PoolShape:
    """Return the blocks of `pool` with the arrays that a rank keeps in them: `mine` are the groups
    of its graph."""
    kept = {group.name: group for group in mine}
    groups = []
    for group in pool.groups:
        of = kept.get(group.name, group._replace(layers=()))
        groups.append(group._replace(layers=of.layers, arrays=of.arrays))
    return replace(pool, groups=tuple(groups))


def pool_bytes(pool: PoolShape) -> int:
    """Return the bytes of a pool without slots: Σ over groups of blocks · bytes per block."""
    return group_bytes((*pool.groups, *pool.cross), pool.block_size)


def group_bytes(groups: Iterable[GroupShape], block_size: int) -> int:
    """Return the bytes of all blocks of these groups."""
    return sum(group.blocks * block_bytes(group, block_size) for group in groups)


def block_bytes(group: GroupShape, block_size: int) -> int:
    """Return the bytes of one block in all layers: of `block_size` tokens, a slot or one state."""
    tokens = 1 if group.state else group.span or block_size
    return tokens * len(group.layers) * kept_bytes(group.arrays)
