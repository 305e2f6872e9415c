"""Blocks of encodings that texts attend to: written by an encoder, read by each token of a text.

The encoding with slot s has the s-th part of a cross group's blocks, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.graph import AttentionSpec, Graph, Value
from ..base.groups import kept_arrays
from ..base.step import GroupShape, PoolShape
from ..kernels.arrays import Array, host, tensor
from ..kernels.operators import GroupBatch, KvCache, KvLayer, StepBatch
from .kv_tensors import allocate_kv
from .part import Part

Floats = npt.NDArray[np.float32]
_NONE = np.zeros(0, np.int64)


class CrossBlocks:
    """The blocks of all slots, and the steps that write and read them."""

    def __init__(self, arch: ModelArch, encoder: Graph, coded: bool) -> None:
        """`coded`: attention of the encoder is in codes of eight bits, too."""
        assert arch.cross is not None
        self._rows, self._width, self._coded = arch.cross.rows, arch.heads * arch.head_dim, coded
        layers = {arch.cross.first + layer: layer for layer, _ in arch.cross.aligned}
        self.aligned: list[tuple[int, int, Value]] = []
        """Node that writes K and V of each aligned layer of the text part, and what it writes."""
        self._within: dict[int, AttentionSpec] = {}
        for index, node in enumerate(encoder.nodes):
            spec = node.spec
            if isinstance(spec, AttentionSpec) and node.kind == "write" and spec.layer in layers:
                self.aligned.append((index, layers[spec.layer], node.reads[0]))
            elif isinstance(spec, AttentionSpec) and spec.bidirectional:
                self._within[spec.layer] = spec

    def bind(self, pool: PoolShape, cache: KvCache, part: Part) -> KvCache:
        """Take the blocks from the text part's cache; return the cache of the encoder."""
        (group,) = pool.cross
        self._group, self._size, self._host = len(pool.groups), pool.block_size, part.operators.host
        self._blocks = -(-self._rows // pool.block_size)
        layers: dict[int, KvLayer] = {layer: cache.layers[layer] for layer in group.layers}
        groups = dict.fromkeys(layers, 0)
        if self._coded and self._host:
            own = self._room(group)
            layers |= dict.fromkeys(self._within, own)
            groups |= dict.fromkeys(self._within, 1)
        return KvCache(layers, groups)

    def _room(self, group: GroupShape) -> KvLayer:
        """Make the K and V that each layer of the encoder uses in turn."""
        spec = next(iter(self._within.values()))
        dtype = "int8" if group.arrays[0].dtype == "int8" else "bfloat16"
        arrays = kept_arrays(spec, dtype)
        shape = GroupShape("within", (0,), None, self._blocks, arrays)
        kept = allocate_kv(PoolShape(self._size, (shape,)), "cpu", host=True)
        return kept.layers[0]

    def keys_in(self, kv: Array) -> Floats:
        """Return K of what a node writes [n, 2 · width]."""
        found: Floats = host(kv)[:, : self._width].copy()
        return found

    def writing(self, units: int, slot: int) -> StepBatch:
        """Return the step of one input of `units` rows, which attend to each other."""
        positions = np.arange(units, dtype=np.int64)
        tables = np.arange(self._blocks, dtype=np.int32)[None]
        first = slot * self._blocks
        groups = [
            self._group_of(tables + np.int32(first), positions + first * self._size),
            self._group_of(tables, positions),
        ]
        last = np.full(units, units - 1, np.int64)
        bounds, lengths = np.array([0, units], np.int32), np.array([units], np.int32)
        rest = self._view(bounds), self._view(lengths), groups, self._view(_NONE), units, units
        seen = StepBatch(self._view(positions), self._view(last), *rest)
        return StepBatch(self._view(positions), self._view(positions), *rest, across=seen)

    def reading(self, batch: StepBatch, read: Sequence[tuple[int, int]]) -> StepBatch:
        """Return the tokens of a step as they attend; `read`: slot and rows of each entry's input.

        Consecutive entries with one input are one entry, so its K and V are read once for all of
        their tokens.
        """
        firsts = [at for at, one in enumerate(read) if not at or one != read[at - 1]]
        bounds = host(batch.query_starts)[[*firsts, len(read)]]
        slots = np.array([read[at][0] for at in firsts], np.int32)
        lengths = np.array([read[at][1] for at in firsts], np.int32)
        tables = slots[:, None] * self._blocks + np.arange(self._blocks, dtype=np.int32)
        counts = np.diff(bounds)
        last = np.repeat(lengths, counts).astype(np.int64) - 1
        group = GroupBatch(self._view(tables), batch.tokens, None)
        return StepBatch(
            batch.tokens,
            self._view(last),
            self._view(bounds),
            self._view(lengths),
            [group] * (self._group + 1),
            batch.sample_rows,
            int(counts.max()),
            int(lengths.max()),
        )

    def _group_of(self, tables: npt.NDArray[np.int32], slots: npt.NDArray[np.int64]) -> GroupBatch:
        return GroupBatch(self._view(tables), self._view(slots), None)

    def _view(self, array: npt.NDArray[Any]) -> Array:
        return array if self._host else tensor(array)
