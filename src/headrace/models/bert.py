"""BERT (Devlin et al. 2018): an encoder for embeddings, or with a head for scores of pairs."""

from __future__ import annotations

from ..base.arch import ModelArch
from ..base.graph import ActivationSpec, AttentionSpec, EmbedSpec, Graph, Value
from ..layers.description import Description


def bert(arch: ModelArch) -> Graph:
    """Describe norm(x + attention(x)), then norm(x + feed_forward(x)); the norms come after.

    The head, if there is one, is described for every row but asked only for an entry's first.
    """
    encoder = arch.encoder
    assert encoder is not None, "the architecture says nothing of an encoder"
    to = Description(arch)
    types = to.embed(_table("token_type"), encoder.types, EmbedSpec("types"))
    words = to.embed(_table("word"), arch.vocab_size)
    places = to.embed(_table("position"), arch.max_context, EmbedSpec("positions"))
    x = to.layer_norm(to.add(to.add(words, types), places), "embeddings.LayerNorm")
    for layer in range(arch.layers):
        at = f"encoder.layer.{layer}"
        mixed = _attention(to, layer, x, f"{at}.attention")
        x = to.layer_norm(to.add(x, mixed), f"{at}.attention.output.LayerNorm")
        inner = to.linear(
            x, f"{at}.intermediate.dense", outputs=arch.intermediate, bias=True, purpose="up"
        )
        inner = to.activate(inner, ActivationSpec(arch.activation))
        inner = to.linear(
            inner, f"{at}.output.dense", outputs=arch.hidden, bias=True, purpose="down"
        )
        x = to.layer_norm(to.add(x, inner), f"{at}.output.LayerNorm")
    if not encoder.labels:
        return to.graph(hidden=x)
    pooled = to.linear(x, "pooler.dense", outputs=arch.hidden, bias=True, purpose="head")
    pooled = to.activate(pooled, ActivationSpec("tanh"))
    labels = to.linear(pooled, "classifier", outputs=encoder.labels, bias=True, purpose="head")
    return to.graph(hidden=x, labels=labels)


def _table(name: str) -> str:
    return f"embeddings.{name}_embeddings"


def _attention(to: Description, layer: int, x: Value, at: str) -> Value:
    arch = to.arch
    spec = AttentionSpec(
        layer, arch.heads, arch.heads, arch.head_dim, arch.scale, bidirectional=True
    )
    names = [f"{at}.self.{part}" for part in ("query", "key", "value")]
    qkv = to.linear(x, *names, outputs=[arch.hidden] * 3, bias=True, purpose="qkv")
    mixed = to.node("attend", (qkv,), spec.queries, spec=spec)
    return to.linear(mixed, f"{at}.output.dense", outputs=arch.hidden, bias=True, purpose="output")
