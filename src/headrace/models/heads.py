"""Heads that draft: one decoder layer that continues from the hidden states of a larger model.

At each place its input is the token there and the target's result at the preceding place. It
predicts the next token: EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-3 (Li et al. 2025, arXiv
2503.01840), and the layers of checkpoints that predict further tokens (DeepSeek-V3, section 2.2).
This module has their configs, their graphs, and the outputs that they need from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..base.arch import Caps, ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import TOKENS, EmbedSpec, Graph, LinearSpec, Node, Value
from ..base.verify import verify
from ..layers.attention import attention, latent_attention
from ..layers.description import Description, matrix
from ..layers.embedding import HEAD, embedding, head
from ..layers.feed_forward import feed_forward
from .reader import from_hf

HeadKind = Literal["eagle", "eagle3", "mtp"]
PREDICTING = ("deepseek_v3", "glm4_moe")
"""Families whose checkpoints have a layer that predicts the token after the next."""
STATED = "speculators_model_type"
"""Key that marks a config as a head's."""


@dataclass(frozen=True, slots=True)
class HeadArch:
    """The parts of a head. `arch` describes its one layer, embedding and head."""

    kind: HeadKind
    arch: ModelArch
    vocab: int
    """Tokens of its vocabulary; fewer than the target's if a file lists them."""
    reads: tuple[int, ...] = ()
    """Layers of the target whose inputs it reads, combined into one vector; empty: it reads the
    input of the target's head."""
    bias: bool = False
    """Whether the product that combines token and state has a bias."""
    norms: bool = False
    """EAGLE only: whether there are norms after the embedding, before the layer and before the
    head."""
    normed_residual: bool = False
    """EAGLE-3 only: whether the residual is the state after its norm."""
    own_head: bool = False
    """Whether it has its own logits matrix; otherwise the target's is used."""


def head_of(config: Mapping[str, Any], target: ModelArch, *, own_head: bool) -> HeadArch:
    """Read a head for `target` from a `config.json` in the format of "speculators".

    Raises `UnsupportedModel` or `ModelFileError`, naming the key.
    """
    fields = Fields(config, "config.json")
    kind = fields.word(STATED, ("eagle", "eagle3"))
    layer = fields.mapping("transformer_layer_config")
    if layer is None:
        raise ModelFileError(
            "config.json lacks transformer_layer_config", param="transformer_layer_config"
        )
    arch = from_hf({"model_type": "llama", **layer, "num_hidden_layers": 1, "architectures": None})
    if arch.moe is not None or arch.mla is not None or arch.encoder is not None or arch.windows:
        raise UnsupportedModel(
            "config.json: transformer_layer_config describes no plain layer; supported: a layer "
            "like that of llama or qwen3",
            param="transformer_layer_config",
        )
    for key, ours, its in (
        ("hidden_size", target.hidden, arch.hidden),
        ("vocab_size", target.vocab_size, arch.vocab_size),
    ):
        if ours != its:
            raise UnsupportedModel(
                f"config.json: {key} is {its}; must be {ours}, as the model's that it drafts for",
                param=key,
            )
    arch = replace(
        arch,
        tied_embedding=not own_head and target.tied_embedding,
        embedding_scale=target.embedding_scale,
        caps=Caps(logits=None if own_head else target.caps.logits),
        logits_scale=1.0 if own_head else target.logits_scale,
    )
    if kind == "eagle":
        return HeadArch(
            "eagle",
            arch,
            arch.vocab_size,
            bias=fields.flag("fusion_bias", False),
            norms=fields.flag("layernorms", False),
            own_head=own_head,
        )
    fields.expect("norm_before_fc", False)
    fields.expect("target_hidden_size", target.hidden)
    if not own_head:
        raise ModelFileError("a head of the kind eagle3 needs lm_head.weight", param="lm_head")
    return HeadArch(
        "eagle3",
        arch,
        fields.integer("draft_vocab_size", 1, target.vocab_size, target.vocab_size),
        reads=_read_layers(fields, target.layers),
        normed_residual=fields.flag("norm_before_residual", False),
        own_head=True,
    )


def predictor_of(config: Mapping[str, Any], target: ModelArch) -> HeadArch:
    """Read the layer after the last one of a checkpoint, which predicts the token after the next.
    Raises `UnsupportedModel` if there is no supported one."""
    fields = Fields(config, "config.json")
    if target.family not in PREDICTING:
        raise UnsupportedModel(
            f"layers of a {target.family} model that predict further tokens are not read; "
            f"supported: {', '.join(PREDICTING)}"
        )
    if not fields.integer("num_nextn_predict_layers", 0, 2**10, 0):
        raise UnsupportedModel(
            "config.json: num_nextn_predict_layers is 0; to draft the model needs one such layer",
            param="num_nextn_predict_layers",
        )
    assert target.moe is not None
    moe = replace(target.moe, dense_layers=0, dense_at=())
    return HeadArch("mtp", replace(target, layers=1, moe=moe), target.vocab_size)


def _read_layers(fields: Fields, count: int) -> tuple[int, ...]:
    """Return the layers that EAGLE-3 reads: those in its config, or 2, the middle one and the third
    last (paper, section 3.1; its checkpoints were trained with these)."""
    key = "eagle_aux_hidden_state_layer_ids"
    named = fields.raw(key)
    if named is None:
        named = [2, count // 2, count - 3]
    right = isinstance(named, list) and all(type(one) is int for one in named)
    if not right or not 1 <= len(named) <= 8 or not all(0 <= one <= count for one in named):
        raise UnsupportedModel(
            f"config.json: {key} is {named!r:.80}; must be one to eight numbers from 0 to {count}",
            param=key,
        )
    return tuple(named)


STATES = "states"
"""Table whose row n is the hidden state for token n of a step."""


def describe_head(wanted: HeadArch, rows: int) -> Graph:
    """Describe the step graph of a head whose steps have at most `rows` tokens.

    Hidden states are a table indexed by "types". The output `hidden` serves as the state of the
    next place if the target has not computed it yet.
    """
    to = Description(wanted.arch)
    tokens = embedding(to)
    given = to.embed(STATES, rows, EmbedSpec("types"))
    hidden, said = _KINDS[wanted.kind](to, wanted, tokens, given)
    if wanted.own_head:
        logits = to.linear(said, HEAD, outputs=wanted.vocab, role="logits", purpose="head")
    else:
        logits = head(to, said)
    graph = to.graph(hidden=hidden, logits=logits)
    verify(graph)
    return graph


def _beside(to: Description, name: str, tokens: Value, states: Value, *, bias: bool) -> Value:
    """Apply a linear over concat(tokens, states); the file's one matrix is split in two."""
    width = to.arch.hidden
    first = to.linear(tokens, f"{name}.tokens", outputs=width, bias=bias)
    return to.add(first, to.linear(states, f"{name}.states", outputs=width))


def _eagle(to: Description, wanted: HeadArch, tokens: Value, states: Value) -> tuple[Value, Value]:
    if wanted.norms:
        tokens = to.rms_norm(tokens, "embedding_layernorm")
    x = _beside(to, "fusion_fc", tokens, states, bias=wanted.bias)
    normed = to.rms_norm(x, "transformer.input_layernorm") if wanted.norms else x
    x = _behind(to, x, attention(to, 0, normed, "transformer.self_attn"), "transformer")
    return x, to.rms_norm(x, "pre_lm_head_layernorm") if wanted.norms else x


def _eagle3(to: Description, wanted: HeadArch, tokens: Value, states: Value) -> tuple[Value, Value]:
    at = "layers.0"
    tokens, normed = (
        to.rms_norm(tokens, f"{at}.input_layernorm"),
        to.rms_norm(states, f"{at}.hidden_norm"),
    )
    residual = normed if wanted.normed_residual else states
    x = _behind(to, residual, attention(to, 0, normed, f"{at}.self_attn", tokens), at)
    return x, to.rms_norm(x, "norm")


def _mtp(to: Description, wanted: HeadArch, tokens: Value, states: Value) -> tuple[Value, Value]:
    tokens, states = to.rms_norm(tokens, "mtp.enorm"), to.rms_norm(states, "mtp.hnorm")
    x = _beside(to, "mtp.eh_proj", tokens, states, bias=False)
    normed = to.rms_norm(x, "mtp.input_layernorm")
    mla, at = wanted.arch.mla, "mtp.self_attn"
    mixed = latent_attention(to, 0, normed, at, mla) if mla else attention(to, 0, normed, at)
    x = _behind(to, x, mixed, "mtp")
    return x, to.rms_norm(x, "mtp.shared_head.norm")


_KINDS = {"eagle": _eagle, "eagle3": _eagle3, "mtp": _mtp}


def _behind(to: Description, x: Value, mixed: Value, at: str) -> Value:
    """Return the layer's result: the residual, attention, and the feed-forward of both."""
    x = to.add(x, mixed)
    normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
    return to.add(x, feed_forward(to, 0, normed, f"{at}.mlp"))


def tapped(graph: Graph, layers: tuple[int, ...], name: str) -> Graph:
    """Return `graph` with a further output `states` [N, D]: the sum over `layers` of the products
    `name.0`, `name.1` … of the residuals that they read. The number after the last layer stands for
    the last residual.

    Raises `UnsupportedModel` for a family whose layers do not start with a norm of a residual.
    """
    nodes, total = list(graph.nodes), None
    inserted: list[tuple[int, list[Node]]] = []
    for place, layer in enumerate(layers):
        at, residual = _residual(graph, layer)
        weight = matrix([f"{name}.{place}"], [residual.width], residual.width, "linear")
        part = Value(TOKENS, residual.width)
        new = [Node("linear", (residual,), (part,), (weight,), LinearSpec())]
        inserted.append((at, new))
    # The sum comes after the last of them, in any order of `layers`.
    inserted.sort(key=lambda one: one[0])
    for _, new in inserted:
        part = new[0].out[0]
        if total is not None:
            both = Value(TOKENS, part.width)
            new.append(Node("add", (total, part), (both,)))
            part = both
        total = part
    for at, new in reversed(inserted):
        nodes[at:at] = new
    assert total is not None
    found = Graph(tuple(nodes), {**graph.outputs, "states": total}, graph.inputs)
    verify(found)
    return found


def _residual(graph: Graph, layer: int) -> tuple[int, Value]:
    """Return (index at which a reader can be inserted, the residual that the layer reads)."""
    writes = [index for index, node in enumerate(graph.nodes) if node.kind == "write"]
    if layer == len(writes):
        at = graph.maker(graph.outputs["hidden"])
    else:
        product = graph.nodes[graph.maker(graph.nodes[writes[layer]].reads[0])]
        at = graph.maker(product.reads[0])
    if at < 0 or graph.nodes[at].kind != "norm":
        raise UnsupportedModel(
            "draft_model reads residuals that a layer's norm reads, and layers of this family do "
            "not begin with one",
            param="draft_model",
        )
    return at + 1, graph.nodes[at].reads[0]
