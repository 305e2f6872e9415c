"""The architecture of a model, as numbers: what the layers, the KV pool and the roofline read.

Foreign configs (a Hugging Face `config.json`, GGUF metadata) are turned into this by
`base.arch_reader`, with explicit keys; nothing behind that border sees a foreign key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""What a router makes of its logits: a softmax over all, or of each its sigmoid or √ log(1 + eˣ)
(DeepSeek-V4)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base frequency and how positions are stretched.

    `kind` "linear" divides frequencies by `factor`; "llama3" does so only for wavelengths longer
    than `original_context / low_freq_factor`, with a ramp up to `high_freq_factor`
    (Llama 3.1, section 3.4); "yarn" is Peng et al. 2023; "long" divides each frequency by its own
    factor (LongRoPE, Ding et al. 2024): `short` up to the original context, `long` beyond;
    "proportional" (Gemma 4) has frequencies of the whole head, and zero for the pairs behind
    `share` of them, which so stay as they are.
    """

    theta: float = 10_000.0
    kind: Literal["plain", "linear", "llama3", "yarn", "long", "proportional"] = "plain"
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
    """The part of a head, from its first number on, that is rotated."""
    truncate: bool = True
    """The bounds of the ramp of "yarn" are whole pairs."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1), else half of what is rotated apart."""

    def divisors(self, context: int) -> tuple[float, ...]:
        """The factors of "long" with which a context of so many tokens is served, and no other."""
        return self.long if context > self.original_context else self.short

    def rotated(self, size: int) -> int:
        """How many of a head's numbers."""
        return size if self.kind == "proportional" else int(size * self.share)


@dataclass(frozen=True, slots=True)
class Caps:
    """Bounds that numbers near softly: cap · tanh(x / cap); None: there is none."""

    scores: float | None = None
    """Scores of attention, before its softmax."""
    logits: float | None = None


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture of experts in place of the dense feed-forward."""

    experts: int
    active: int
    intermediate: int
    normalise: bool = True
    """Weights of the chosen experts are scaled to sum to one."""
    shared_intermediate: int = 0
    shared_gate: bool = False
    """What the shared expert gives is multiplied by a sigmoid of the row (Qwen2-MoE)."""
    dense_layers: int = 0
    """The first layers that keep a dense feed-forward."""
    dense_at: tuple[int, ...] = ()
    """Further layers that keep one (Qwen3-MoE)."""
    scores: Scoring = "softmax"
    bias: bool = False
    """Added to the scores for the choice alone."""
    scale: float = 1.0
    """Factor on the shares."""
    groups: int = 1
    active_groups: int = 1
    """So many of the groups, the best, are chosen from."""
    best_of_group: int = 2
    """A group is worth the sum of so many of its experts' scores, the highest."""
    clamped: bool = False
    """Router and experts have biases, the latter a gate of their own (gpt-oss): see
    `graph.ExpertsSpec`."""
    inside: bool = False
    """Shares multiply what the experts read, not what they give (Llama 4)."""

    def mixes(self, layer: int) -> bool:
        """Is the feed-forward of this layer a mixture?"""
        return layer >= self.dense_layers and layer not in self.dense_at


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2): what is cached is a latent, not K and V."""

    kv_rank: int
    q_rank: int | None
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Layers that keep a state of fixed size in place of K and V for each token.

    "conv" (LFM2): the last inputs of a short convolution, and nothing else. The others keep those,
    and of each value head a matrix [key_size, value_size]: "delta" is gated DeltaNet (Yang et al.
    2024), "ssm" Mamba 2 (Dao and Gu 2024).
    """

    kind: Literal["conv", "delta", "ssm"]
    layers: tuple[int, ...]
    """Which layers, ascending."""
    taps: int
    """A convolution sees so many inputs, its newest included."""
    channels: int
    """Width of the convolution."""
    bias: bool = False
    """The convolution has one."""
    key_heads: int = 0
    """Heads of q and k; of "ssm" groups of B and C."""
    value_heads: int = 0
    key_size: int = 0
    """Numbers of a key; of "ssm" of B and C."""
    value_size: int = 0
    tiled: bool = False
    """Value heads take key heads in turn (GGUF of Qwen3.5)."""
    bare: tuple[int, ...] = ()
    """Layers of neither state nor attention: a feed-forward alone (Nemotron-H)."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """How the layers of one model differ from one another (Gemma 4).

    A layer without a window has heads of its own shape; the last layers keep no K and V; each layer
    has a part of an embedding.
    """

    size: int
    """Numbers of a head of a layer without a window."""
    kv_heads: int
    """KV heads of such a layer."""
    one_product: bool = False
    """Such a layer has no product of V: its values are its keys before norm and rope."""
    shared: int = 0
    """So many of the last layers read K and V of the last layer of their kind before them."""
    wide: bool = False
    """The layers that share have a feed-forward twice as wide."""
    embedded: int = 0
    """Numbers that each layer has of each token; 0: none."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Attention of Llama 4: a window is a chunk, a query sees what of its own chunk lies before it.

    Layers without a window have no positions, and their queries grow with theirs: by
    1 + `growth` · log(1 + ⌊(p + 1) / `every`⌋) (Nakanishi 2025, arXiv 2501.19399).
    """

    normed: bool
    """Heads of q and k are scaled to a root mean square of one behind their rotation."""
    growth: float = 0.0
    every: int = 8192


@dataclass(frozen=True, slots=True)
class Encoder:
    """A BERT-style encoder (Devlin et al. 2018): every token sees all others, in one pass.

    Its positions are learned, its norms come after the residual and have a bias, as all its
    matrices do, its feed-forward has no gate. `ModelArch.norm_eps` is that of its layer norms.
    """

    types: int
    """Rows of the token type table."""
    labels: int = 0
    """Outputs of the classification head on the pooled first token; 0: there is none."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the vectors of an input's tokens become one.

    "mean" of all, "cls" the first, "last" the last; `normalise` scales it to length one.
    """

    kind: Literal["mean", "cls", "last"] = "last"
    normalise: bool = True
    shortens: bool = False
    """Leading parts of a vector are vectors too (Kusupati et al. 2022, Matryoshka)."""


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A decoder-only transformer, dense or MoE; or, where `encoder` says so, an encoder."""

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
    """Rope of the windowed layers, where it differs (Gemma 3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer: the sliding window in tokens, or None for full attention."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = False
    attention_scale: float | None = None
    """None: head_dim ** -0.5."""
    sinks: bool = False
    """Each head has a score beside those of its positions, which takes its share and gives nothing
    (gpt-oss)."""
    caps: Caps = Caps()
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """1.0 where the norm multiplies by (1 + weight) (Gemma)."""
    whole_qk_norm: bool = False
    """The norms of q and k are over all heads together (OLMo 2)."""
    residual_scale: float = 1.0
    """Factor on what a block adds to the residual (Granite)."""
    logits_scale: float = 1.0
    nope: tuple[bool, ...] = ()
    """Per layer: its heads are not rotated (SmolLM3)."""
    fused: tuple[Literal["qkv", "gate_up"], ...] = ()
    """Products that are one tensor in the files (Phi-3)."""
    moe: Moe | None = None
    mla: Mla | None = None
    encoder: Encoder | None = None
    recurrence: Recurrence | None = None
    uneven: Uneven | None = None
    chunks: Chunks | None = None

    @property
    def attention_gate(self) -> bool:
        """Is what attention gives multiplied by a sigmoid of `gate_proj`, as it is beside the delta
        rule (Qwen3-Next)?"""
        return self.recurrence is not None and self.recurrence.kind == "delta"

    @property
    def task(self) -> Literal["tokens", "vector", "score"]:
        """What the model was made for: to generate; or to compute an input once, whole, for its
        vector or the score of a pair. A model that generates makes vectors too."""
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
        """(KV heads, numbers of a head) of a layer that attends."""
        if self.uneven is None or self.window(layer) is not None:
            return self.kv_heads, self.head_dim
        return self.uneven.kv_heads, self.uneven.size

    def kept_by(self, layer: int) -> int:
        """The layer whose K and V a layer reads: itself, or an earlier one."""
        own = self.layers - (self.uneven.shared if self.uneven else 0)
        if layer < own:
            return layer
        return max(at for at in range(own) if self.window(at) == self.window(layer))
