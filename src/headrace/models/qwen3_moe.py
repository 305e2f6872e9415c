"""Qwen3 MoE (Yang et al. 2025): Qwen3 with a mixture of experts as feed-forward."""

from __future__ import annotations

from ..layers.build import Builder
from ..layers.feed_forward import FeedForward, MixtureOfExperts
from .decoder import Decoder, PreNormLayer


class Qwen3MoeLayer(PreNormLayer):
    def make_feed_forward(
        self, build: Builder, index: int, prefix: str
    ) -> FeedForward | MixtureOfExperts:
        moe = build.arch.moe
        assert moe is not None
        dense = index < moe.dense_layers
        return FeedForward(build, prefix) if dense else MixtureOfExperts(build, prefix)


class Qwen3Moe(Decoder):
    layer = Qwen3MoeLayer
