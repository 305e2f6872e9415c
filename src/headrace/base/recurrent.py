"""Specs of nodes that go on from a sequence's state: see `base.graph`."""

from __future__ import annotations

from typing import Literal, NamedTuple


class ConvSpec(NamedTuple):
    """A causal convolution of each channel by itself: y[t] = Σ taps[i] · x[t + 1 - count + i].

    `gated` (LFM2) reads b, c and x side by side, and is c · conv(b · x).
    """

    layer: int
    taps: int
    activation: Literal["silu"] | None = None
    gated: bool = False


class DeltaSpec(NamedTuple):
    """The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464) of one layer.

    Each value head has a matrix S [key_size, value_size]: S ← e^g · S; S ← S + k (β (v - Sᵀk))ᵀ;
    out = Sᵀq. q and k are of length one, q is divided by √key_size; β = sigmoid(b), g = -e^log ·
    softplus(a + bias). Then an RMS norm over each head, times silu(z).
    """

    layer: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    eps: float
    """Epsilon of the norm."""
    tiled: bool = False
    """Whether value heads take key heads in turn; else those of one key head are adjacent."""

    @property
    def mixed(self) -> int:
        """Width of q, k and v side by side."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def gates(self) -> int:
        """Number of gates per head: decay and step."""
        return 2


class SsmSpec(NamedTuple):
    """A selective state space (Mamba 2, Dao and Gu 2024, arXiv 2405.21060) of one layer.

    Each head has a matrix h [key_size, value_size]: h ← e^(-e^log · dt) · h + B (dt · x)ᵀ; out =
    hᵀC + skip · x, with dt = softplus(dt + bias). Then out · silu(z), and an RMS norm over each of
    `norm_groups` parts.
    """

    layer: int
    key_heads: int
    """Groups that share B and C."""
    value_heads: int
    key_size: int
    """Numbers of B and C."""
    value_size: int
    eps: float
    norm_groups: int = 1

    @property
    def mixed(self) -> int:
        """Width of x, B and C side by side."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def gates(self) -> int:
        return 1
