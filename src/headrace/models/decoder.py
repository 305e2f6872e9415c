"""The decoder that most families share: embedding, pre-norm layers, norm, head."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

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

    def __call__(
        self, ops: Operators, stream: Stream, batch: StepBatch, cache: KvCache
    ) -> Stream: ...


class PreNormLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x)) (Llama)."""

    def __init__(self, build: Builder, index: int) -> None:
        at = f"model.layers.{index}."
        self.attention_norm = Norm(build, f"{at}input_layernorm")
        self.attention = Attention(build, index, f"{at}self_attn.")
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

    def __call__(self, ops: Operators, stream: Stream, batch: StepBatch, cache: KvCache) -> Stream:
        normed, residual = self.attention_norm.add_for(ops, *stream, self.attention.qkv)
        stream = self.attention(ops, normed, batch, cache, residual)
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

    def forward(
        self, ops: Operators, batch: StepBatch, cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """→ hidden [N, D] after the last norm, fp32 logits [R, V] of `batch.sample_rows`."""
        stream: Stream = (self.vocabulary.embed(ops, batch.tokens), None)
        for layer in self.layers:
            stream = layer(ops, stream, batch, cache)
        hidden, _ = self.norm.add(ops, *stream)
        return hidden, self.logits(ops, hidden, batch.sample_rows)

    def logits(self, ops: Operators, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """hidden [N, D], rows [R] → fp32 [R, V]."""
        return self.vocabulary.logits(ops, hidden, rows)
