"""Draft heads, and the outputs that they want of the model that they draft for: see
`base.arch_head`."""

from __future__ import annotations

from ..base.arch_head import HeadArch
from ..base.errors import UnsupportedModel
from ..base.graph import TOKENS, EmbedSpec, Graph, LinearSpec, Node, Value
from ..base.verify import verify
from ..layers.attention import attention
from ..layers.description import Description, matrix
from ..layers.embedding import HEAD, embedding, head
from ..layers.feed_forward import feed_forward
from ..layers.mixing import mixing

STATES = "states"
"""Table whose row n is the hidden state that is given with token n of a step."""


def describe_head(wanted: HeadArch, rows: int) -> Graph:
    """Describe the step graph of a head whose steps have at most `rows` tokens.

    Hidden states are given as a table that is read by "types". Its output `hidden` serves as the
    state of the next place if the target has not computed that yet.
    """
    to = Description(wanted.arch)
    tokens = embedding(to)
    given = to.embed(STATES, rows, EmbedSpec("types"))
    hidden, said = _KINDS[wanted.kind](to, wanted, tokens, given)
    if wanted.own_head:
        logits = to.linear(said, HEAD, outputs=wanted.vocab, role="logits")
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
    x = _behind(to, x, mixing(to, 0, normed, "mtp"), "mtp")
    return x, to.rms_norm(x, "mtp.shared_head.norm")


_KINDS = {"eagle": _eagle, "eagle3": _eagle3, "mtp": _mtp}


def _behind(to: Description, x: Value, mixed: Value, at: str) -> Value:
    """Return the layer's result: the residual, attention, and the feed-forward of both."""
    x = to.add(x, mixed)
    normed = to.rms_norm(x, f"{at}.post_attention_layernorm")
    return to.add(x, feed_forward(to, 0, normed, f"{at}.mlp"))


def tapped(graph: Graph, layers: tuple[int, ...], name: str) -> Graph:
    """Return `graph` with a further output `states` [N, D]: the sum of a product, `name.0`,
    `name.1` …, of the residual that each of `layers` reads. The number after the last layer stands
    for the last residual.

    Raises `UnsupportedModel` for a family whose layers do not begin with a norm of a residual.
    """
    nodes, total = list(graph.nodes), None
    inserted: list[tuple[int, list[Node]]] = []
    for place, layer in enumerate(layers):
        at, residual = _residual(graph, layer)
        weight = matrix([f"{name}.{place}"], [residual.width], residual.width, "linear")
        part = Value(TOKENS, residual.width)
        new = [Node("linear", (residual,), (part,), (weight,), LinearSpec())]
        inserted.append((at, new))
    # The sum comes after the last of them, whatever order they were named in.
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
