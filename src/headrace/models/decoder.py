"""The decoder that most families share: embedding, pre-norm layers, norm, head."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..kernels.arrays import Array, floats_like
from ..kernels.operators import KvCache, Operators, StepBatch
from ..layers.attention import Attention
from ..layers.build import Builder
from ..layers.codes import Stream
from ..layers.embedding import Vocabulary
from ..layers.feed_forward import FeedForward, MixtureOfExperts
from ..layers.norm import Norm


class Layer(Protocol):
    """One layer of a decoder."""

    def __init__(self, build: Builder, index: int) -> None: ...

    def remember(self, ops: Operators, stream: Stream, batch: StepBatch, cache: KvCache) -> None:
        """What later steps need of it, and no more: the KV of the step's tokens."""
        ...

    def __call__(
        self,
        ops: Operators,
        stream: Stream,
        batch: StepBatch,
        cache: KvCache,
        rows: Array | None = None,
    ) -> Stream:
        """[N, D] → [N, D], or [R, D] of the tokens `rows` [R] where only theirs are wanted."""
        ...


class AttendingLayer:
    """The first half of a layer."""

    def __init__(self, build: Builder, index: int) -> None:
        at = f"model.layers.{index}."
        self.attention_norm = Norm(build, f"{at}input_layernorm")
        self.attention = Attention(build, index, f"{at}self_attn.")

    def remember(self, ops: Operators, stream: Stream, batch: StepBatch, cache: KvCache) -> None:
        self.begin(ops, stream, batch, cache, None)

    def begin(
        self,
        ops: Operators,
        stream: Stream,
        batch: StepBatch,
        cache: KvCache,
        rows: Array | None,
    ) -> tuple[Array, Array]:
        """→ queries [N, H, E] of norm(x), whose KV is written, and x: [N, D] or [R, D]."""
        normed, residual = self.attention_norm.add_for(ops, *stream, self.attention.qkv)
        if rows is not None:
            # Before the products: what follows them can be joined with the norm behind it.
            residual = ops.select(residual, rows)
        return self.attention.write(ops, normed, batch, cache), residual


class PreNormLayer(AttendingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)) (Llama)."""

    def __init__(self, build: Builder, index: int) -> None:
        super().__init__(build, index)
        at = f"model.layers.{index}."
        self.feed_forward_norm = Norm(build, f"{at}post_attention_layernorm")
        self.feed_forward = self.make_feed_forward(build, index, f"{at}mlp.")

    def make_feed_forward(
        self, build: Builder, index: int, prefix: str
    ) -> FeedForward | MixtureOfExperts:
        """Dense; or, behind the first dense layers, a mixture where the architecture has one."""
        moe = build.arch.moe
        if moe is None or index < moe.dense_layers:
            return FeedForward(build, prefix)
        return MixtureOfExperts(build, prefix)

    def __call__(
        self,
        ops: Operators,
        stream: Stream,
        batch: StepBatch,
        cache: KvCache,
        rows: Array | None = None,
    ) -> Stream:
        q, residual = self.begin(ops, stream, batch, cache, rows)
        stream = self.attention.mix(ops, q, batch, cache, rows, residual)
        normed, residual = self.feed_forward_norm.add_for(ops, *stream, self.feed_forward.consumer)
        return self.feed_forward(ops, normed, residual)


class Decoder:
    """A family sets `layer`; everything else that differs is a number in `ModelArch`."""

    layer: ClassVar[type[Layer]] = PreNormLayer

    def __init__(self, build: Builder) -> None:
        self.vocabulary = Vocabulary(build)
        self.layers = [self.layer(build, index) for index in range(build.arch.layers)]
        self.norm = Norm(build, "model.norm")
        build.source.finish()

    def forward(self, ops: Operators, batch: StepBatch, cache: KvCache) -> tuple[Array, Array]:
        """→ hidden after the last norm, fp32 logits [R, V] of `batch.sample_rows`.

        Behind the KV of the last layer only what `batch` wants is computed: hidden is [R, D] of
        `sample_rows`, or [N, D] with `every_hidden`.
        """
        rows = None if batch.every_hidden else batch.sample_rows
        stream: Stream = (self.vocabulary.embed(ops, batch.tokens), None)
        *layers, last = self.layers
        for layer in layers:
            stream = layer(ops, stream, batch, cache)
        if rows is not None and not len(rows):
            last.remember(ops, stream, batch, cache)
            x = stream[0][:0]
            return x, floats_like(x, 0, self.vocabulary.size)
        hidden, _ = self.norm.add(ops, *last(ops, stream, batch, cache, rows))
        sampled = ops.select(hidden, batch.sample_rows) if rows is None else hidden
        return hidden, self.vocabulary.logits(ops, sampled)

    def logits(self, ops: Operators, hidden: Array, rows: Array) -> Array:
        """hidden [N, D], rows [R] → fp32 [R, V]."""
        return self.vocabulary.logits(ops, ops.select(hidden, rows))
