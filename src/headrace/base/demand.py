"""The rows of a graph that are computed: the pass that inserts `select`.

A family describes all rows of everything. This pass reduces them to the rows that a step needs,
once per kind of question. After the KV of the last layer only the sampled tokens are computed,
unless hidden states of others are requested. Without sampling nothing is computed there.
"""

from __future__ import annotations

from typing import Literal

from .graph import RECURRENT, ROW_WISE, SAMPLED, Graph, Node, Value

Hidden = Literal["none", "sampled", "every"]
"""Tokens whose hidden states are requested."""


def demand(graph: Graph, hidden: Hidden, *, logits: bool = True) -> Graph:
    """Reduce `graph`, described for all rows, to the requested outputs.

    `logits` are those of the sampled rows. With `hidden` "none" and no logits only the inputs of
    later steps are left: writes. Outputs of other names are there with hidden states of all tokens.
    """
    wanted: dict[Value, bool] = {}
    if hidden != "none":
        # Input of a head that drafts after this model: needed whenever hidden states are.
        for name in {"hidden", "states"} & graph.outputs.keys():
            wanted[graph.outputs[name]] = hidden == "every"
    if hidden == "every":
        more = graph.outputs.keys() - {"hidden", "states", "logits", "labels"}
        wanted |= {graph.outputs[name]: True for name in more}
    if logits and "logits" in graph.outputs:
        wanted.setdefault(graph.outputs["logits"], False)
    return _Rewriting(graph, wanted).run()


def head(graph: Graph) -> Graph | None:
    """Return the graph from hidden rows, its input, to `logits` or `labels`; None without a
    head."""
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


def _needs(graph: Graph, wanted: dict[Value, bool]) -> dict[Value, bool]:
    """Return the needed values; True if all tokens are needed (even by one reader alone), False for
    the sampled ones."""
    needs = dict(wanted)
    for node in reversed(graph.nodes):
        found = [needs[value] for value in node.out if value in needs]
        if node.kind == "write" or node.kind in RECURRENT:
            # It acts on every token; `write`'s output lies in the place of its input.
            for value in (*node.reads, *node.out):
                needs[value] = True
        elif found and node.kind in ROW_WISE:
            every = True in found
            for value in (*node.reads, *node.out):
                needs[value] = every or needs.get(value, False)
        elif found:
            # It reads more than its row. A backend may compute only the rows selected later.
            for value in node.reads:
                needs[value] = True
    return needs


class _Rewriting:
    """The needed nodes, in their order. Those of all tokens stay the same nodes."""

    def __init__(self, graph: Graph, wanted: dict[Value, bool]) -> None:
        """Find the needed values. `wanted`: outputs, with True for all tokens."""
        self._graph, self._wanted = graph, wanted
        self._needs = _needs(graph, wanted)
        self._picked: dict[Value, Value] = {}
        self._nodes: list[Node] = []
        self._pending: dict[int, list[Value]] = {}
        """Index of a node → values to select from after it."""

    def run(self) -> Graph:
        for index, node in enumerate(self._graph.nodes):
            kept = [value for value in node.out if value in self._needs]
            if kept and self._of_all_tokens(node):
                self._nodes.append(node)
                for value in kept:
                    self._plan_select(index, node, value)
            elif kept:
                self._reduce(node)
            for value in self._pending.pop(index, ()):
                self._select(value)
        outputs = {
            name: value if self._wanted[value] else self._of(value)
            for name, value in self._graph.outputs.items()
            if value in self._wanted
        }
        return Graph(tuple(self._nodes), outputs, self._graph.inputs)

    def _of_all_tokens(self, node: Node) -> bool:
        """Return whether a needed node is computed for all tokens."""
        return node.kind not in ROW_WISE or self._needs[node.out[0]]

    def _reduce(self, node: Node) -> None:
        """Add the node for the sampled rows."""
        reads = tuple(self._of(value) for value in node.reads)
        out = tuple(Value(SAMPLED, value.width, value.dtype) for value in node.out)
        self._picked.update(zip(node.out, out, strict=True))
        self._nodes.append(Node(node.kind, reads, out, node.weights, node.spec))

    def _plan_select(self, index: int, node: Node, value: Value) -> None:
        """Plan the selection of rows of `value`: after the node that reads all of it, which may be
        fused with its maker; else at once."""
        nodes, needs = self._graph.nodes, self._needs
        readers = [
            reader
            for reader in self._graph.readers(value)
            if any(made in needs for made in nodes[reader].out)
        ]
        whole = [reader for reader in readers if self._of_all_tokens(nodes[reader])]
        if len(whole) < len(readers) or (
            node.kind not in ROW_WISE and self._wanted.get(value) is False
        ):
            self._pending.setdefault(whole[0] if whole else index, []).append(value)

    def _select(self, value: Value) -> None:
        picked = Value(SAMPLED, value.width, value.dtype)
        self._nodes.append(Node("select", (value,), (picked,)))
        self._picked[value] = picked

    def _of(self, value: Value) -> Value:
        """Return the sampled rows; all rows of an input are sampled."""
        return value if value in self._graph.inputs else self._picked[value]
