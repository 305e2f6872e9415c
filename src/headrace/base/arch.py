"""The architecture of a model, as numbers: input of the layers, the KV pool and the roofline.

`models.reader` turns foreign configs (a Hugging Face `config.json`, GGUF metadata) into this,
with explicit keys. No later code sees a foreign key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .denoising import Denoiser
from .ranking import Ranker

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""A router's function of its logits: a softmax over all, or of each its sigmoid or √ log(1 + eˣ)
(DeepSeek-V4)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and the stretching of positions.

    `kind` "linear" divides frequencies by `factor`; "llama3" does so only for wavelengths longer
    than `original_context / low_freq_factor`, with a ramp up to `high_freq_factor` (Llama 3.1,
    section 3.4); "yarn" is Peng et al. 2023; "long" divides each frequency by its own factor
    (LongRoPE, Ding et al. 2024): `short` up to the original context, `long` beyond; "proportional"
    (Gemma 4) has frequencies of the whole head. Pairs after the first `share` of them have
    frequency zero, so they stay as they are. "axial" has the frequencies of a head of half the size
    once for each of two axes (Qwen2-VL's encoder, Wang et al. 2024); "dealt" deals those of a whole
    head to two axes, in turns (Pixtral's).
    """

    theta: float = 10_000.0
    kind: Literal[
        "plain", "linear", "llama3", "yarn", "long", "proportional", "axial", "dealt"
    ] = "plain"  # fmt: skip
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    share: float = 1.0
    """The leading share of a head that is rotated."""
    truncate: bool = True
    """Whether the bounds of the ramp of "yarn" are rounded to whole pairs."""
    interleaved: bool = False
    """Whether pairs are (2i, 2i + 1); else they lie half of the rotated part apart."""
    axes: tuple[int, ...] = ()
    """Axis by whose position each pair turns (M-RoPE); (): a token has one position."""

    def divisors(self, context: int) -> tuple[float, ...]:
        """Return the factors of "long" for a context of this length; all positions use them."""
        return self.long if context > self.original_context else self.short

    def rotated(self, size: int) -> int:
        """Return the number of rotated dimensions of a head of this size."""
        return size if self.kind == "proportional" else int(size * self.share)


@dataclass(frozen=True, slots=True)
class Caps:
    """Soft bounds: cap · tanh(x / cap); None without one."""

    scores: float | None = None
    """Cap of attention scores, before the softmax."""
    logits: float | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts in place of the dense feed-forward."""

    experts: int
    active: int
    intermediate: int
    normalise: bool = True
    """Whether the routing weights of the chosen experts are scaled to sum to one."""
    shared_intermediate: int = 0
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid of the row (Qwen2-MoE)."""
    dense_layers: int = 0
    """Number of first layers with a dense feed-forward."""
    dense_at: tuple[int, ...] = ()
    """Further layers with a dense feed-forward (Qwen3-MoE)."""
    scores: Scoring = "softmax"
    bias: bool = False
    """Whether a bias is added to the scores, for the choice alone."""
    scale: float = 1.0
    """Factor on the routing weights."""
    groups: int = 1
    active_groups: int = 1
    """Number of best groups from which experts are chosen."""
    best_of_group: int = 2
    """Number of highest expert scores whose sum ranks a group."""
    clamped: bool = False
    """Whether router and experts have biases, and the experts a gate of their own (gpt-oss): see
    `graph.ExpertsSpec`."""
    inside: bool = False
    """Whether routing weights multiply the experts' inputs, not their outputs (Llama 4)."""

    def mixes(self, layer: int) -> bool:
        """Return whether this layer's feed-forward is a mixture."""
        return layer >= self.dense_layers and layer not in self.dense_at


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2): the cache holds a latent, not K and V."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers that keep a state of fixed size in place of K and V for each token.

    "conv" (LFM2) keeps only the last inputs of a short convolution. The others keep those, and for
    each value head a matrix [key_size, value_size]: "delta" is gated DeltaNet (Yang et al. 2024),
    "ssm" Mamba 2 (Dao and Gu 2024).
    """

    kind: Literal["conv", "delta", "ssm"]
    layers: tuple[int, ...]
    """These layers, ascending."""
    taps: int
    """Kernel size of the convolution, its newest input included."""
    channels: int
    """Width of the convolution."""
    bias: bool = False
    """Whether the convolution has a bias."""
    key_heads: int = 0
    """Heads of q and k; for "ssm" groups of B and C."""
    value_heads: int = 0
    key_size: int = 0
    """Numbers of a key; for "ssm" of B and C."""
    value_size: int = 0
    tiled: bool = False
    """Whether value heads take key heads in turn (GGUF of Qwen3.5)."""
    bare: tuple[int, ...] = ()
    """Layers without state and attention: a feed-forward alone (Nemotron-H)."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """Differences between the layers of one model (Gemma 4).

    A layer without a window has heads of its own shape; the last layers keep no K and V; each layer
    has a part of an embedding.
    """

    size: int
    """Numbers of a head of a layer without a window."""
    kv_heads: int
    """KV heads of such a layer."""
    one_product: bool = False
    """Whether such a layer has no product of V: its values are its keys before norm and rope."""
    shared: int = 0
    """Number of last layers that read K and V of the last earlier layer of their kind."""
    wide: bool = False
    """Whether the layers that share have a feed-forward twice as wide."""
    embedded: int = 0
    """Width of each layer's own embedding of a token; 0 without one."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Attention of Llama 4: a window is a chunk, and a query sees the earlier part of its own
    chunk.

    Layers without a window have no rope. Their queries at position p are multiplied by 1 +
    `growth` · log(1 + ⌊(p + 1) / `every`⌋) (Nakanishi 2025, arXiv 2501.19399).
    """

    normed: bool
    """Whether heads of q and k are scaled to a root mean square of one after their rotation."""
    growth: float = 0.0
    every: int = 8192


@dataclass(frozen=True, slots=True)
class Encoder:
    """A BERT-style encoder (Devlin et al. 2018): every token sees all others, in one pass.

    Its positions are learned. Its norms come after the residual. They and all its matrices have a
    bias, its feed-forward has no gate. `ModelArch.norm_eps` is that of its layer norms.
    """

    types: int
    """Rows of the token type table."""
    labels: int = 0
    """Outputs of the classification head on the pooled first token; 0 without a head."""


@dataclass(frozen=True, slots=True)
class Cross:
    """Attention of each layer to an input that an encoder part reads (Vaswani et al. 2017)."""

    first: int
    """Number of the first such layer in the cache; the others follow."""
    rows: int
    """Most positions of an input."""
    aligned: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the attention that follows the input, for alignment."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The pooling of an input's token vectors into one.

    "mean" of all, "cls" the first, "last" the last; `normalise` scales it to length one.
    """

    kind: Literal["mean", "cls", "last"] = "last"
    normalise: bool = True
    shortens: bool = False
    """Whether leading parts of a vector are vectors too (Kusupati et al. 2022, Matryoshka)."""


@dataclass(frozen=True, slots=True)
class BeyondText:
    """Shape of a model without text."""

    ranker: Ranker | None = None
    """Shape of a ranker: it has no transformer layers, and each token is a candidate."""
    denoiser: Denoiser | None = None
    """Shape of a denoiser: each token is a patch of a picture."""


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A decoder-only transformer, dense or MoE; with `encoder`, an encoder."""

    family: str
    """Registry key in `models`: qwen2, qwen3, llama, mistral, gemma3, qwen3_moe …"""
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_context: int
    norm_eps: float
    activation: Activation = "silu"
    rope: Rope = Rope()
    local_rope: Rope | None = None
    """Rope of the windowed layers, if it differs (Gemma 3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer: the sliding window in tokens, or None for full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = False
    attention_scale: float | None = None
    """Factor on q·k; None for head_dim ** -0.5."""
    sinks: bool = False
    """Whether each head has an additional score next to those of its positions, which takes its
    share of the softmax and adds nothing (gpt-oss)."""
    caps: Caps = Caps()
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """1.0 if the norm multiplies by (1 + weight) (Gemma)."""
    whole_qk_norm: bool = False
    """Whether the norms of q and k are over all heads together (OLMo 2)."""
    residual_scale: float = 1.0
    """Factor on a block's output before the residual sum (Granite)."""
    logits_scale: float = 1.0
    nope: tuple[bool, ...] = ()
    """Per layer: whether its heads are not rotated (SmolLM3)."""
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    """Products stored as one tensor in the files (Phi-3)."""
    moe: Moe | None = None
    mla: Mla | None = None
    encoder: Encoder | None = None
    beyond: BeyondText = BeyondText()
    cross: Cross | None = None
    recurrence: Recurrence | None = None
    uneven: Uneven | None = None
    chunks: Chunks | None = None
    growth: tuple[float, int] | None = None
    """(growth, every): queries at position p are multiplied by 1 + growth · log(1 + ⌊p / every⌋)
    (Ministral 3)."""

    @property
    def ranker(self) -> Ranker | None:
        return self.beyond.ranker

    @property
    def denoiser(self) -> Denoiser | None:
        return self.beyond.denoiser

    @property
    def task(self) -> Literal["tokens", "vector", "score", "rank", "picture"]:
        """Purpose of the model: generate tokens, compute an input once for its vector, score a
        pair, rank candidates, or draw a picture. A model that generates makes vectors too."""
        if self.denoiser is not None:
            return "picture"
        if self.ranker is not None:
            return "rank"
        if self.encoder is None:
            return "tokens"
        return "score" if self.encoder.labels else "vector"

    @property
    def scale(self) -> float:
        """Factor on q·k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """Return (KV heads, numbers of a head) of a layer that attends."""
        if self.uneven is None or self.window(layer) is not None:
            return self.kv_heads, self.head_dim
        return self.uneven.kv_heads, self.uneven.size

    def kept_by(self, layer: int) -> int:
        """Return the layer whose K and V a layer reads: itself, or an earlier one."""
        own = self.layers - (self.uneven.shared if self.uneven else 0)
        if layer < own:
            return layer
        return max(at for at in range(own) if self.window(at) == self.window(layer))
