"""Gemma 3 (Gemma team 2025), text: five windowed layers to one full, norms on both sides."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import KvCache, Operators, StepBatch
from ..layers.build import Builder
from ..layers.codes import Stream
from ..layers.feed_forward import FeedForward
from ..layers.norm import Norm
from .decoder import AttendingLayer, Decoder


class Gemma3Layer(AttendingLayer):
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, build: Builder, index: int) -> None:
        super().__init__(build, index)
        at = f"model.layers.{index}."
        self.after_attention = Norm(build, f"{at}post_attention_layernorm")
        self.feed_forward_norm = Norm(build, f"{at}pre_feedforward_layernorm")
        self.feed_forward = FeedForward(build, f"{at}mlp.")
        self.after_feed_forward = Norm(build, f"{at}post_feedforward_layernorm")

    def __call__(
        self,
        ops: Operators,
        stream: Stream,
        batch: StepBatch,
        cache: KvCache,
        rows: Array | None = None,
    ) -> Stream:
        q, residual = self.begin(ops, stream, batch, cache, rows)
        mixed, _ = self.attention.mix(ops, q, batch, cache, rows)
        x = self.after_attention(ops, mixed)
        normed, residual = self.feed_forward_norm.add_for(
            ops, x, residual, self.feed_forward.consumer
        )
        inner, _ = self.feed_forward(ops, normed)
        return self.after_feed_forward(ops, inner), residual


class Gemma3(Decoder):
    """Embeddings are scaled, norms multiply by 1 + weight, the head is tied."""

    layer = Gemma3Layer
