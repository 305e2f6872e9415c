"""The two ends of a language model: token ids to vectors, vectors to logits."""

from __future__ import annotations

from ..kernels.arrays import Array
from ..kernels.operators import Operators
from .build import Builder

TABLE = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Vocabulary:
    """The embedding table and the head; one matrix where they are tied (Press and Wolf 2017)."""

    def __init__(self, build: Builder) -> None:
        arch = build.arch
        self.size = arch.vocab_size
        self.scale, self.softcap = arch.embedding_scale, arch.final_softcap
        table = build.take(TABLE, rows=arch.vocab_size, width=arch.hidden)
        self.table = build.prepare(table, "embed")
        if arch.tied_embedding:
            # Some checkpoints carry the copy along.
            build.source.discard(HEAD)
            self.head = build.prepare(table, "logits")
        else:
            self.head = build.matrix(HEAD, rows=[arch.vocab_size], width=arch.hidden, role="logits")

    def embed(self, ops: Operators, tokens: Array) -> Array:
        """tokens [N] → [N, D]."""
        return ops.embed(tokens, self.table, self.scale)

    def logits(self, ops: Operators, x: Array) -> Array:
        """x [R, D] → fp32 [R, V]."""
        return ops.logits(x, self.head, self.softcap)
