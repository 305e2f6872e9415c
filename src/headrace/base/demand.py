"""Which rows of a graph are computed: the pass that inserts `select`.

A family describes all rows of everything. What a step wants of them is asked here, once per kind
of question: behind the KV of the last layer only the sampled tokens are computed where nobody
wants the hidden states of others, and nothing at all where nobody samples.
"""

from __future__ import annotations

from typing import Literal

from .graph import ROW_WISE, SAMPLED, TOKENS, Graph, Node, Rows, Value

Hidden = Literal["none", "sampled", "every"]
"""Whose hidden states are wanted."""


def demand(graph: Graph, hidden: Hidden, *, logits: bool = True) -> Graph:
    """`graph`, described for all rows, with no more than is asked.

    `logits` are those of the sampled rows; with `hidden` "none" and no logits only what later steps
    need is left: what is written.
    """
    wanted: dict[Value, Rows] = {}
    if hidden != "none":
        wanted[graph.outputs["hidden"]] = SAMPLED if hidden == "sampled" else TOKENS
    if logits and "logits" in graph.outputs:
        wanted.setdefault(graph.outputs["logits"], SAMPLED)
    needs = _needs(graph, wanted)
    return _Rewriting(graph, needs, wanted).run(
        {name: graph.outputs[name] for name in graph.outputs if graph.outputs[name] in wanted}
    )


def head(graph: Graph) -> Graph | None:
    """What makes `logits` or `labels` of hidden rows, which become its input; None where there is
    no head."""
    name = next((name for name in ("logits", "labels") if name in graph.outputs), None)
    if name is None:
        return None
    hidden, logits = graph.outputs["hidden"], graph.outputs[name]
    nodes: list[Node] = []
    wanted = {logits}
    for node in reversed(graph.nodes):
        if wanted.intersection(node.out) and hidden not in node.out:
            nodes.insert(0, node)
            wanted.update(node.reads)
    return Graph(tuple(nodes), {name: logits}, (hidden,))


def _needs(graph: Graph, wanted: dict[Value, Rows]) -> dict[Value, Rows]:
    """The rows of each value that somebody needs: all of them where one reader needs all."""
    needs = dict(wanted)

    def need(value: Value, rows: Rows) -> None:
        if needs.get(value) != TOKENS:
            needs[value] = rows

    for node in reversed(graph.nodes):
        found = [needs[value] for value in node.out if value in needs]
        if node.kind == "write":
            # Its effect is of every token, and what it gives lies where its input lay.
            for value in (*node.reads, *node.out):
                need(value, TOKENS)
        elif found and node.kind in ROW_WISE:
            rows = TOKENS if TOKENS in found else SAMPLED
            for value in (*node.reads, *node.out):
                need(value, rows)
        elif found:
            # It reads more than its row. Whoever can computes no more than what is selected of it.
            for value in node.reads:
                need(value, TOKENS)
    return needs


class _Rewriting:
    """The nodes that are needed, in their order, with values of the rows that they have now."""

    def __init__(self, graph: Graph, needs: dict[Value, Rows], wanted: dict[Value, Rows]) -> None:
        self._graph, self._needs, self._wanted = graph, needs, wanted
        self._full: dict[Value, Value] = {value: value for value in graph.inputs}
        self._picked: dict[Value, Value] = {}
        self._nodes: list[Node] = []
        self._pending: dict[Value, int] = {}
        """Values to be selected from: behind which node."""

    def run(self, outputs: dict[str, Value]) -> Graph:
        for index, node in enumerate(self._graph.nodes):
            kept = [value for value in node.out if value in self._needs]
            if kept:
                self._node(node)
                for value in kept:
                    self._plan_select(index, node, value)
            for value in [v for v, after in self._pending.items() if after == index]:
                del self._pending[value]
                self._select(value)
        found = {
            name: self._of(value, self._wanted[value]) for name, value in outputs.items()
        }  # fmt: skip
        return Graph(tuple(self._nodes), found, self._graph.inputs)

    def _node(self, node: Node) -> None:
        whole = node.kind not in ROW_WISE
        rows = TOKENS if whole else self._needs[node.out[0]]
        reads = tuple(self._of(value, rows) for value in node.reads)
        out = tuple(Value(rows, value.width, value.dtype) for value in node.out)
        target = self._full if rows == TOKENS else self._picked
        target.update(zip(node.out, out, strict=True))
        self._nodes.append(Node(node.kind, reads, out, node.weights, node.spec))

    def _plan_select(self, index: int, node: Node, value: Value) -> None:
        """Where rows of `value` are selected: behind the node that reads all of it, which may be
        joined with the one that makes it; else at once."""
        if value not in self._full:
            return
        readers = self._graph.readers(value)
        nodes = self._graph.nodes
        rows = {i: self._rows_read(nodes[i]) for i in readers}
        if SAMPLED in rows.values() or (
            node.kind not in ROW_WISE and self._wanted.get(value) == SAMPLED
        ):
            whole = [i for i in readers if rows[i] == TOKENS]
            self._pending[value] = whole[0] if whole else index

    def _rows_read(self, node: Node) -> Rows | None:
        """The rows that a node reads of its inputs; None: it is not needed itself."""
        if not any(value in self._needs for value in node.out):
            return None
        return TOKENS if node.kind not in ROW_WISE else self._needs[node.out[0]]

    def _select(self, value: Value) -> None:
        x = self._full[value]
        y = Value(SAMPLED, x.width, x.dtype)
        self._nodes.append(Node("select", (x,), (y,)))
        self._picked[value] = y

    def _of(self, value: Value, rows: Rows) -> Value:
        if rows == TOKENS or value in self._graph.inputs:
            return self._full[value]
        return self._picked[value]
