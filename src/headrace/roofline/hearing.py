"""Work, bytes and memory of a Whisper, by its sizes alone (Radford et al. 2022).

D numbers a position, E and L layers of encoder and decoder, F positions of a window's sound (50 a
second), M mels, V tokens. Weights and KV are in eight bits unless stated otherwise, as
`speech.network` keeps them. A weight has an fp16 scale for 32 codes; K and V have one for each head
of a position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from .hardware import Hardware

WINDOW = 30.0
"""Seconds that the encoder takes at a time."""
HEAD_SIZE = 64
BLOCK = 16
"""Positions of a block of KV."""
CODED = 34 / 32
"""Bytes of a weight in eight bits."""
KV_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / HEAD_SIZE}
"""Bytes of a number of K or V, including its share of a scale."""


@dataclass(frozen=True, slots=True)
class WhisperSizes:
    """The sizes of one model, and the bytes of a number of its file."""

    width: int
    encoder_layers: int
    decoder_layers: int
    mels: int
    vocab: int
    frames: int = 1_500
    """Positions of a whole window."""
    context: int = 448
    """Tokens of the decoder."""
    file_bytes: int = 2


class HearingPart(NamedTuple):
    """One kind of work: its amount, and its least bytes."""

    name: str
    flops: float
    bytes: float
    """Weights and K and V; activations of a layer stay in the cache."""

    def seconds(self, hardware: Hardware) -> float:
        """Return the longer of compute and memory time, at the full rate of int8 products."""
        return max(self.flops / hardware.rate("int8"), self.bytes / hardware.bandwidth)


def window_parts(sizes: WhisperSizes, positions: float) -> list[HearingPart]:
    """Count the work of encoding `positions` positions of one window.

    Parts are the two convolutions, the layers, and writing K and V of the decoder's cross
    attention.
    """
    d, f = sizes.width, positions
    convolution = (12 * sizes.mels + 6 * d) * d * f
    kernels = (3 * sizes.mels + 3 * d) * d * sizes.file_bytes
    layers, cross = sizes.encoder_layers, sizes.decoder_layers
    return [
        HearingPart("convolutions", convolution, kernels),
        HearingPart("encoder, products", layers * 24 * d * d * f, layers * 12 * d * d * CODED),
        HearingPart("encoder, attention", layers * 4 * f * f * d, 0.0),
        HearingPart(
            "cross K and V",
            cross * 4 * d * d * f,
            cross * 2 * d * d * CODED + cross_bytes(sizes, f),
        ),
    ]


def token_parts(sizes: WhisperSizes, positions: float, users: int = 1) -> list[HearingPart]:
    """Count the work of one token of a text while `users` decode in one step, each with its own
    sound: weights are read once for all of them."""
    d, layers = sizes.width, sizes.decoder_layers
    weights = layers * 14 * d * d + sizes.vocab * d
    return [
        HearingPart("decoder and head, weights", 2 * weights, weights * CODED / users),
        HearingPart("cross attention", layers * 4 * positions * d, cross_bytes(sizes, positions)),
    ]


def cross_bytes(sizes: WhisperSizes, positions: float, kind: str = "int8") -> float:
    """Return the bytes of one window's cross-attention K and V, as far as it has sound."""
    return 2 * sizes.decoder_layers * positions * sizes.width * KV_BYTES[kind]


def hearing_memory(
    sizes: WhisperSizes, windows: int, sequences: int, *, coded: bool = True, kv: str = "int8"
) -> list[tuple[str, int]]:
    """Return (name, bytes) of the parts of a network with room for these windows and sequences.

    Room that no window or sequence has used yet is not touched. A process therefore begins with the
    first two rows and grows by a window and its sequences at a time.
    """
    d, layers = sizes.width, sizes.decoder_layers
    each = CODED if coded else sizes.file_bytes
    weights = sizes.encoder_layers * 12 * d * d + layers * 16 * d * d + sizes.vocab * d
    kernels = (3 * sizes.mels + 3 * d) * d
    cross = BLOCK * math.ceil(sizes.frames / BLOCK)
    own = BLOCK * math.ceil(sizes.context / BLOCK)
    return [
        ("weights", round(weights * each + kernels * sizes.file_bytes)),
        (f"cross K and V, {windows} windows", round(windows * cross_bytes(sizes, cross, kv))),
        (
            f"own K and V, {sequences} sequences",
            round(sequences * 2 * layers * own * d * KV_BYTES[kv]),
        ),
    ]
