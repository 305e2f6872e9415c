"""Work, bytes and memory of a Whisper: sums over its two graphs (`models.whisper`).

Weights and KV are in eight bits unless stated otherwise, as the engine keeps them: a weight
has an fp16 scale for 32 codes; K and V have one for each head of a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..base.graph import AttentionSpec, Graph, Node, WeightRef
from ..base.groups import cross_groups, graph_groups, group_bytes
from ..base.step import GroupShape
from ..models.whisper import DECODER, WhisperArch, describe_decoder, describe_encoder
from .hardware import Hardware

WINDOW = 30.0
"""Seconds that the encoder takes at a time."""
BLOCK = 16
"""Positions of a block of KV."""
CODED = 34 / 32
"""Bytes of a weight in eight bits."""


class HearingPart(NamedTuple):
    """One kind of work: its amount, and its least bytes."""

    name: str
    flops: float
    bytes: float
    """Weights and K and V; activations of a layer stay in the cache."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the longer of compute and memory time, at the full rate of int8 products."""
        return max(self.flops / hardware.rate("int8"), self.bytes / hardware.bandwidth)


@lru_cache(maxsize=4)
def _parts(whisper: WhisperArch) -> tuple[Graph, Graph]:
    """Return the graphs of encoder and decoder."""
    return describe_encoder(whisper), describe_decoder(whisper)


def window_parts(whisper: WhisperArch, positions: float) -> list[HearingPart]:
    """Count the work of encoding `positions` positions of one window.

    Parts are the two convolutions, the layers, and writing K and V of the decoder's cross
    attention.
    """
    parts = {
        name: [0.0, 0.0]
        for name in ("convolutions", "encoder, products", "encoder, attention", "cross K and V")
    }
    for node in _parts(whisper)[0].nodes:
        if node.kind == "linear":
            matrix = node.weights[0]
            part = parts[_part_of(matrix)]
            rows = positions * node.out[0].rows.times
            part[0] += 2 * rows * matrix.numbers
            part[1] += matrix.numbers * _bytes_of(matrix, whisper)
        elif node.kind == "attend":
            parts["encoder, attention"][0] += _attention(node, positions, positions)
    parts["cross K and V"][1] += cross_bytes(whisper, positions)
    return [HearingPart(name, *sums) for name, sums in parts.items()]


def _part_of(matrix: WeightRef) -> str:
    (name,) = matrix.names
    if ".conv" in name:
        return "convolutions"
    return "cross K and V" if name.startswith(DECODER) else "encoder, products"


def _bytes_of(matrix: WeightRef, whisper: WhisperArch, coded: float = CODED) -> float:
    """Return the bytes of a number: convolutions stay as the file has them."""
    return whisper.file_bytes if ".conv" in matrix.names[0] else coded


def _attention(node: Node, rows: float, seen: float) -> float:
    assert isinstance(node.spec, AttentionSpec)
    return 4 * rows * seen * node.spec.queries


def token_parts(whisper: WhisperArch, positions: float, users: int = 1) -> list[HearingPart]:
    """Count the work of one token of a text while `users` decode in one step, each with its own
    sound: weights are read once for all of them."""
    _, decoder = _parts(whisper)
    weights = sum(ref.numbers for ref in _matrices(decoder))
    across = sum(
        _attention(node, 1, positions)
        for node in decoder.nodes
        if node.kind == "attend" and isinstance(node.spec, AttentionSpec) and node.spec.across
    )
    return [
        HearingPart("decoder and head, weights", 2 * weights, weights * CODED / users),
        HearingPart("cross attention", across, cross_bytes(whisper, positions)),
    ]


def _matrices(graph: Graph) -> Iterator[WeightRef]:
    """Yield the matrices of products."""
    return (ref for ref in graph.weights() if ref.role in ("linear", "logits"))


def _group(whisper: WhisperArch, name: str, kv: str, rows: float) -> float:
    """Return the bytes of a group of the decoder for `rows` positions, without a null block."""
    decoder = _parts(whisper)[1]
    groups = *graph_groups(decoder, kv, 1), *cross_groups(decoder, kv, 1)
    one: GroupShape = next(group for group in groups if group.name == name)
    return rows * group_bytes([one], 1)


def cross_bytes(whisper: WhisperArch, positions: float, kind: str = "int8") -> float:
    """Return the bytes of one window's cross-attention K and V, as far as it has sound."""
    return _group(whisper, "cross", kind, positions)


def hearing_memory(
    whisper: WhisperArch, windows: int, sequences: int, *, coded: bool = True, kv: str = "int8"
) -> list[tuple[str, int]]:
    """Return (name, bytes) of the parts of a network with room for these windows and sequences.

    Room that no window or sequence has used yet is not touched. A process therefore begins with the
    first two rows and grows by a window and its sequences at a time.
    """
    each = CODED if coded else whisper.file_bytes
    weights = sum(
        ref.numbers * _bytes_of(ref, whisper, each)
        for graph in _parts(whisper)
        for ref in _matrices(graph)
    )
    cross, own = (BLOCK * math.ceil(rows / BLOCK) for rows in (whisper.frames, whisper.context))
    return [
        ("weights", round(weights)),
        (f"cross K and V, {windows} windows", round(windows * cross_bytes(whisper, cross, kv))),
        (
            f"own K and V, {sequences} sequences",
            round(sequences * _group(whisper, "full", kv, own)),
        ),
    ]
