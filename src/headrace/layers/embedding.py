"""The two ends of a language model: token ids to vectors, vectors to logits."""

from __future__ import annotations

from ..base.graph import EmbedSpec, LinearSpec, Value
from .description import Description

TABLE = "model.embed_tokens"
HEAD = "lm_head"


def embedding(to: Description) -> Value:
    """Look up the tokens → [N, D]."""
    return to.embed(TABLE, to.arch.vocab_size, EmbedSpec(scale=to.arch.embedding_scale))


def head(to: Description, x: Value) -> Value:
    """Apply the head → fp32 [N, V]; it is the embedding's matrix if both are tied (Press and Wolf
    2017)."""
    arch = to.arch
    name = TABLE if arch.tied_embedding else HEAD
    spec = LinearSpec(arch.caps.logits, arch.logits_scale)
    return to.linear(x, name, outputs=arch.vocab_size, role="logits", purpose="head", spec=spec)
