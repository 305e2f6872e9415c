"""Specs of the nodes `write` and `attend` of a step graph: attention of one layer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .arch import Rope

Values = Literal["own", "normed", "keys", "elsewhere"]
"""Source of a layer's V: a product of its own; the same, each head scaled to a root mean square of
one; K straight from its product, scaled so; or K and V written by another layer (Gemma 4)."""


class AttentionSpec(NamedTuple):
    """Grouped-query attention of one layer: made once, read by `write` and `attend`."""

    layer: int
    """The layer whose K and V they are."""
    heads: int
    kv_heads: int
    size: int
    """E, numbers of a head."""
    scale: float
    """Factor on q·k before the softmax."""
    rope: Rope | None = None
    window: int | None = None
    """Positions that a query sees, itself included; None for all before it. Bidirectional: maximum
    tokens of a window, whose bounds are an input of the step; None for the whole entry."""
    softcap: float | None = None
    eps: float = 0.0
    """Epsilon of the norms on the heads of q and k, if `write` has their gains."""
    norm_offset: float = 0.0
    bidirectional: bool = False
    """Whether every token sees its whole entry. Nothing is cached: `attend` reads qkv, in which a
    `write` before it, if there is one, has normed and rotated q and k."""
    whole_norm: bool = False
    """Whether the norms of q and k are over all of their heads together (OLMo 2)."""
    latent: bool = False
    """Whether K is V too, of one KV head: `write` reads no v, and the layer keeps one array."""
    rotated: int | None = None
    """Number of a head's first dimensions that the rope covers, if `Rope.share` does not say."""
    values: Values = "own"
    chunked: bool = False
    """Whether the window is a chunk: a query sees the earlier part of its own chunk (Llama 4)."""
    behind: bool = False
    """Whether heads of q and k are scaled to a root mean square of one after the rotation, without
    a gain."""
    across: bool = False
    """Whether this is cross attention: queries see all of their entry's input, whose K and V an
    encoder's graph writes."""
    reach: int = 0
    """Bidirectional: most tokens of an entry, a multiple of 16, if scores have a bias for each
    distance of a key (T5): [H, 2 · reach], that of a key d behind at reach − 1 + d. 0: none."""
    growth: tuple[float, int, int] | None = None
    """(growth, every, first): queries at position p are multiplied by 1 + growth · log(1 + ⌊(p +
    first) / every⌋)."""

    @property
    def turned(self) -> int:
        """Dimensions that the rope's table covers."""
        return self.size if self.rotated is None else self.rotated

    @property
    def kind(self) -> str:
        """full, sliding, bidirectional or cross."""
        if self.bidirectional:
            return "bidirectional"
        if self.across:
            return "cross"
        return "full" if self.window is None else "sliding"

    @property
    def windowed(self) -> bool:
        """Whether every token sees the tokens of its own window, before and after it."""
        return self.bidirectional and self.window is not None

    @property
    def queries(self) -> int:
        """Width of q and of the result."""
        return self.heads * self.size

    @property
    def stacked(self) -> int:
        """Width of those of q, k and v that exist, side by side."""
        return (self.heads + self.kept * self.kv_heads) * self.size

    @property
    def kept(self) -> int:
        """Number of K and V in the input of `write`."""
        if self.values == "elsewhere":
            return 0
        return 1 if self.latent or self.values == "keys" else 2


class LatentSpec(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, section 2.1) of one layer.

    The cache holds, per token, a latent of `rank` numbers and one rotated key part of `rope_size`
    that all heads share.
    """

    layer: int
    heads: int
    rank: int
    rope_size: int
    plain_size: int
    """Numbers of a head's q and k that are not rotated."""
    value_size: int
    scale: float
    rope: Rope | None = None
    window: int | None = None

    @property
    def kind(self) -> str:
        return "latent"

    @property
    def queries(self) -> int:
        """Width of q."""
        return self.heads * (self.plain_size + self.rope_size)

    @property
    def size(self) -> int:
        """Numbers that a token keeps: its rotated key part, then its latent."""
        return self.rope_size + self.rank

    @property
    def absorbed(self) -> AttentionSpec:
        """The same attention with q packed in the form of latents: all heads share one key, whose
        latent is the value too."""
        return AttentionSpec(
            self.layer,
            self.heads,
            1,
            self.size,
            self.scale,
            self.rope,
            self.window,
            latent=True,
            rotated=self.rope_size,
        )
