"""What the nodes `write` and `attend` of a step graph are told: attention of one layer."""

from __future__ import annotations

from typing import Literal, NamedTuple

from .arch import Rope

Values = Literal["own", "normed", "keys", "elsewhere"]
"""Where a layer's V come from: a product of their own; the same, each head scaled to a root mean
square of one; K as they come from their product, scaled so; or K and V are those of another layer,
which has written them (Gemma 4)."""


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
    """Positions that a query sees, itself included; None: all before it."""
    softcap: float | None = None
    eps: float = 0.0
    """Epsilon of the norms on the heads of q and k, where `write` has their gains."""
    norm_offset: float = 0.0
    bidirectional: bool = False
    """Every token sees its whole entry, nothing is cached: no `write`, and `attend` reads qkv."""
    whole_norm: bool = False
    """The norms of q and k are over all of their heads together (OLMo 2)."""
    latent: bool = False
    """K is V too, of one KV head: `write` reads no v, and the layer keeps one array."""
    rotated: int | None = None
    """How many of a head's first numbers the rope is made for, where `Rope.share` does not say."""
    values: Values = "own"
    chunked: bool = False
    """The window is a chunk: a query sees what of its own chunk lies before it (Llama 4)."""
    behind: bool = False
    """Heads of q and k are scaled to a root mean square of one behind the rotation, without a
    gain."""
    growth: tuple[float, int] | None = None
    """(growth, every) of the queries, as `arch.Chunks` says."""

    @property
    def turned(self) -> int:
        """The numbers that the rope's table is made for."""
        return self.size if self.rotated is None else self.rotated

    @property
    def kind(self) -> str:
        """full, sliding or bidirectional."""
        if self.bidirectional:
            return "bidirectional"
        return "full" if self.window is None else "sliding"

    @property
    def queries(self) -> int:
        """Width of q and of the result."""
        return self.heads * self.size

    @property
    def stacked(self) -> int:
        """Width of q, k and v side by side, of those that a layer has."""
        return (self.heads + self.kept * self.kv_heads) * self.size

    @property
    def kept(self) -> int:
        """How many of K and V are in what `write` reads."""
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
        """The same attention once q is packed as latents are: all heads share one key, whose
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
