"""Which layer groups a model has, and what a block of each holds: stated here, once.

The pool and its bytes, copies between blocks, the memory plan and the prices of the roofline follow
from it. It states the meaning of a block; how a backend lays its pages out is the backend's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from .arch import ModelArch, Recurrence
from .step import MOST_DRAFTS, ArrayShape, GroupShape, PoolShape

ARRAY_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1, "uint8": 1}
"""Bytes of one number of a type that can be kept."""
KV_DTYPES = ("float32", "bfloat16", "float16", "fp8", "int8", "k8v4")
"""Types of a KV cache. k8v4 keeps values two to a byte, and everything else as int8 does."""
SCALED = ("int8", "fp8", "k8v4")
"""Types that come with a scale per token and head."""


def kept_arrays(arch: ModelArch, kv_dtype: str, layer: int = 0) -> tuple[ArrayShape, ...]:
    """What a layer keeps of one token.

    Keys and values of each KV head [G, E]; of latent attention (MLA) one vector of rope_dim +
    kv_rank numbers, of one head. One bfloat16 scale per head of each where the type needs one.
    """
    named: dict[str, tuple[int, ...]]
    if arch.mla is not None:
        named = {"latent": (1, arch.mla.rope_dim + arch.mla.kv_rank)}
    else:
        named = dict.fromkeys(("k", "v"), arch.kv_shape(layer))
    kind = "int8" if kv_dtype == "k8v4" else kv_dtype
    arrays = [ArrayShape(name, shape, kind) for name, shape in named.items()]
    if kv_dtype == "k8v4" and arch.mla is None:
        heads, size = arch.kv_shape(layer)
        arrays[1] = ArrayShape("v", (heads, size // 2), "uint8")
    if kv_dtype in SCALED:
        arrays += [ArrayShape(f"{one.name}_scale", one.shape[:-1], "bfloat16") for one in arrays]
    return tuple(arrays)


def state_arrays(of: Recurrence) -> tuple[ArrayShape, ...]:
    """What one layer keeps of one sequence, in fp32.

    `inputs` of the convolution, each in the row that its position says (modulo their number): with
    those of drafts, so that refusing drafts is to write over them. `state` is settled: no draft is
    in it. Behind it, in `tail`, is of each draft and head what goes into a state, until the step
    that follows takes in those that were accepted.
    """
    arrays = [ArrayShape("inputs", (of.taps - 1 + MOST_DRAFTS, of.channels), "float32")]
    if of.kind != "conv":
        sizes = of.key_size, of.value_size
        arrays.append(ArrayShape("state", (of.value_heads, *sizes), "float32"))
        tail = MOST_DRAFTS, of.value_heads, sum(sizes) + 2
        arrays.append(ArrayShape("tail", tail, "float32"))
    return tuple(arrays)


def kept_bytes(arrays: Iterable[ArrayShape]) -> int:
    """Bytes of one token in one layer; of a state group, of one sequence."""
    return sum(math.prod(array.shape) * ARRAY_BYTES[array.dtype] for array in arrays)


def layer_groups(arch: ModelArch, kv_dtype: str, blocks: int = 2) -> tuple[GroupShape, ...]:
    """The layer groups of a model with so many blocks each, full attention first, states last.

    None for an encoder: it reads an input whole and keeps nothing between two steps.
    """
    if arch.encoder is not None:
        return ()
    members: dict[int | None, list[int]] = {}
    of = arch.recurrence
    without = {*of.layers, *of.bare} if of else ()
    for layer in range(arch.layers):
        if layer not in without and arch.kept_by(layer) == layer:
            members.setdefault(arch.window(layer), []).append(layer)
    full = "latent" if arch.mla else "full"
    paged = tuple(
        GroupShape(
            full if window is None else f"window{window}",
            tuple(members[window]),
            window,
            blocks,
            kept_arrays(arch, kv_dtype, members[window][0]),
        )
        for window in sorted(members, key=lambda window: (window is not None, window or 0))
    )
    if of is None:
        return paged
    return (*paged, GroupShape("state", of.layers, None, blocks, state_arrays(of), state=True))


def pool_of_rank(pool: PoolShape, kv_heads: Mapping[int, int]) -> PoolShape:
    """What of `pool` a rank keeps, which has layers with so many KV heads, and whole states."""
    groups = []
    for group in pool.groups:
        arrays, layers = group.arrays, tuple(each for each in group.layers if each in kv_heads)
        if layers and not group.state:
            heads = kv_heads[layers[0]]
            arrays = tuple(each._replace(shape=(heads, *each.shape[1:])) for each in arrays)
        groups.append(group._replace(arrays=arrays, layers=layers))
    return replace(pool, groups=tuple(groups))


def pool_bytes(pool: PoolShape) -> int:
    """Bytes of a whole pool: Σ over groups of blocks · bytes per block."""
    return sum(group.blocks * block_bytes(group, pool.block_size) for group in pool.groups)


def block_bytes(group: GroupShape, block_size: int) -> int:
    """Bytes of one block in all layers: of `block_size` tokens, or of one state."""
    tokens = 1 if group.state else block_size
    return tokens * len(group.layers) * kept_bytes(group.arrays)
