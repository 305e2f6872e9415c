"""BERT (Devlin et al. 2018): an encoder for embeddings, or with a head for scores of pairs."""

from __future__ import annotations

from typing import cast

from ..kernels.arrays import Array
from ..kernels.operators import EncoderOperators, KvCache, Operators, StepBatch
from ..layers.build import Builder
from ..layers.encoder import EncoderLayer, InputEmbedding
from ..layers.linear import Linear


class Bert:
    """Embedding, post-norm layers; with `Encoder.labels` also the pooled first token's head."""

    def __init__(self, build: Builder) -> None:
        arch, encoder = build.arch, build.arch.encoder
        assert encoder is not None
        self.embedding = InputEmbedding(build, encoder.types)
        self.layers = [EncoderLayer(build, f"encoder.layer.{i}.") for i in range(arch.layers)]
        self.pooler = self.classifier = None
        if encoder.labels:
            self.pooler = Linear(build, "pooler.dense", rows=arch.hidden, width=arch.hidden)
            self.classifier = Linear(build, "classifier", rows=encoder.labels, width=arch.hidden)
        build.source.finish()

    def forward(self, ops: Operators, batch: StepBatch, cache: KvCache) -> tuple[Array, Array]:
        """→ hidden [N, D] after the last layer; no logits: [0, 0]."""
        # Backends are asked for these where the question says that the model is an encoder.
        encoder = cast(EncoderOperators, ops)
        x = self.embedding(encoder, batch)
        for layer in self.layers:
            x = layer(encoder, x, batch)
        return x, x[:0, :0]

    def logits(self, ops: Operators, hidden: Array, rows: Array) -> Array:
        """hidden [N, D], rows [R] (each an entry's first token) → [R, labels]."""
        assert self.pooler is not None, "an encoder without a head gives no logits"
        assert self.classifier is not None
        encoder = cast(EncoderOperators, ops)
        x = encoder.activate(self.pooler(ops, ops.select(hidden, rows)), "tanh")
        return self.classifier(ops, x)
