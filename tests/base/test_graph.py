"""The step graph's specification, and which rows of it are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.base.demand import demand, head
from headrace.base.errors import EngineFault
from headrace.base.graph import (
    SAMPLED,
    TOKENS,
    ActivationSpec,
    AttentionSpec,
    EmbedSpec,
    Graph,
    LinearSpec,
    Node,
    NormSpec,
    Value,
    WeightRef,
)
from headrace.base.verify import verify

D, INNER, V = 8, 12, 30
NORM = NormSpec("rms", 1e-5)


def vector(name: str) -> WeightRef:
    return WeightRef((name,), (D,), 0, "vector")


def value(width: int = D) -> Value:
    return Value(TOKENS, width)


def decoder(layers: int = 2) -> Graph:
    """Pre-norm layers of the plainest kind, written out by hand."""
    nodes = []

    def add(
        kind: str,
        reads: tuple[Value, ...],
        width: int,
        weights: tuple[WeightRef, ...] = (),
        spec: object = None,
    ) -> Value:
        out = value(width)
        nodes.append(Node(kind, reads, (out,), weights, spec))
        return out

    def linear(x: Value, name: str, rows: int, width: int) -> Value:
        return add(
            "linear", (x,), rows, (WeightRef((name,), (rows,), width, "linear"),), LinearSpec()
        )

    x = add("embed", (), D, (WeightRef(("table",), (V,), D, "embed"),), EmbedSpec())
    for layer in range(layers):
        spec = AttentionSpec(layer, heads=2, kv_heads=1, size=4, scale=0.5)
        normed = add("norm", (x,), D, (vector(f"{layer}.a"),), NORM)
        qkv = linear(normed, f"{layer}.qkv", spec.stacked, D)
        q = add("write", (qkv,), spec.queries, (), spec)
        mixed = add("attend", (q,), spec.queries, (), spec)
        x = add("add", (x, linear(mixed, f"{layer}.o", D, spec.queries)), D)
        normed = add("norm", (x,), D, (vector(f"{layer}.f"),), NORM)
        inner = add(
            "gated",
            (linear(normed, f"{layer}.gu", 2 * INNER, D),),
            INNER,
            (),
            ActivationSpec("silu"),
        )
        x = add("add", (x, linear(inner, f"{layer}.d", D, INNER)), D)
    hidden = add("norm", (x,), D, (vector("n"),), NORM)
    logits = Value(TOKENS, V, "f32")
    table = WeightRef(("table",), (V,), D, "logits")
    nodes.append(Node("linear", (hidden,), (logits,), (table,), LinearSpec()))
    return Graph(tuple(nodes), {"hidden": hidden, "logits": logits})


def kinds(graph: Graph) -> list[str]:
    return [f"{node.kind}:{node.out[0].rows.name}" for node in graph.nodes]


def test_a_decoder_is_a_graph() -> None:
    graph = decoder()
    verify(graph)
    assert graph.tensors()["0.qkv"] == (16, D)
    assert graph.tensors()["table"] == (V, D)
    assert [ref.role for ref in graph.weights() if ref.names == ("table",)] == ["embed", "logits"]


def test_every_row_of_hidden() -> None:
    graph = demand(decoder(), "every")
    verify(graph)
    assert {line for line in kinds(graph) if line.endswith("R")} == {"select:R", "linear:R"}
    assert graph.outputs["hidden"].rows == TOKENS


def test_sampled_rows_behind_the_last_kv() -> None:
    graph = demand(decoder(), "sampled")
    verify(graph)
    found = kinds(graph)
    last = found.index("select:R")
    # The residual, behind the norm that may be joined with the sum; then what attention gave.
    assert found[last - 2 : last + 5] == [
        "add:N",
        "norm:N",
        "select:R",
        "linear:N",
        "write:N",
        "attend:N",
        "select:R",
    ]
    assert {line[-1] for line in found[last + 5 :]} == {"R"}
    assert graph.outputs["hidden"].rows == graph.outputs["logits"].rows == SAMPLED


def test_nobody_samples() -> None:
    graph = demand(decoder(), "none", logits=False)
    verify(graph)
    assert kinds(graph)[-1] == "write:N"
    assert kinds(graph).count("attend:N") == 1
    assert not graph.outputs


def test_the_head_alone() -> None:
    graph = head(decoder())
    assert graph is not None
    verify(graph)
    assert [node.kind for node in graph.nodes] == ["linear"]
    assert graph.inputs[0].width == D


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda nodes: nodes[1:], "nobody has made"),
        (lambda nodes: [node for node in nodes if node.kind != "write"], "nobody has made"),
        (lambda nodes: [*nodes, nodes[-1]], "makes a value again"),
        (lambda nodes: [replace(nodes[0], kind="scan"), *nodes[1:]], "no such kind"),
        (
            lambda nodes: [*nodes, Node("embed", (), (value(),), nodes[0].weights, EmbedSpec())],
            "nobody reads",
        ),
        (
            lambda nodes: [nodes[0], replace(nodes[1], weights=()), *nodes[2:]],
            r"node 1 \(norm\) has weights \[\]",
        ),
        (lambda nodes: [replace(nodes[0], out=(Value(SAMPLED, D),)), *nodes[1:]], "all tokens"),
    ],
)
def test_what_is_no_graph(change: Callable[[list[Node]], list[Node]], why: str) -> None:
    graph = decoder()
    with pytest.raises(EngineFault, match=why):
        verify(Graph(tuple(change(list(graph.nodes))), graph.outputs))


def test_one_name_one_shape() -> None:
    graph = decoder(1)
    wrong = tuple(
        replace(node, weights=(node.weights[0]._replace(names=("0.o",)),))
        if node.weights and node.weights[0].names == ("0.gu",)
        else node
        for node in graph.nodes
    )
    with pytest.raises(EngineFault, match=r"0\.o has two shapes"):
        verify(Graph(wrong, graph.outputs))
