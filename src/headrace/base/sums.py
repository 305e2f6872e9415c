"""A model shared by ranks that add up partial sums: the pass by which the roofline prices layouts.

Products before a place where a rank has columns (heads, gates) are cut by outputs, those after it
along the summed axis; an all-reduce (`reduce`) then adds up the ranks' results (Shoeybi et al.
2019, arXiv 1909.08053). GPUs are served so. `base.cut` exchanges values instead, and changes no
bit. The graph has the sizes of the rank with most to do; it does not say which rows are its own.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from .cut import GRAIN, head_shares
from .exchange import ExchangeSpec, ReduceSpec
from .graph import (
    RECURRENT,
    AttentionSpec,
    ExpertsSpec,
    Graph,
    LatentSpec,
    LinearSpec,
    Node,
    PartSpec,
    Value,
    WeightRef,
)
from .recurrent import DeltaSpec, SsmSpec
from .verify import verify

S = TypeVar("S", bound=AttentionSpec | LatentSpec | DeltaSpec | SsmSpec)


def summed(graph: Graph, ranks: int, *, spread: bool = False, sent: bool = False) -> Graph:
    """Return a rank's part of `graph`, as described; all of it for one rank.

    `spread`: whole experts are spread over ranks; this graph has all of them. `sent`:
    their results come back with the tokens, and not as partial sums.
    """
    if ranks == 1:
        return graph
    made = _Summing(graph, ranks, spread=spread, sent=sent).run()
    verify(made)
    return made


class _Summing:
    def __init__(self, graph: Graph, ranks: int, *, spread: bool, sent: bool) -> None:
        self._graph, self._ranks, self._spread, self._sent = graph, ranks, spread, sent
        self._nodes: list[Node] = []
        self._mine: dict[Value, Value] = {}
        """Values of the whole graph → this rank's columns, or its partial sums."""
        self._partial: set[Value] = set()
        """Values of the whole graph of which it has partial sums."""
        self._full: dict[Value, Value] = {}
        """Values after their collective."""
        ends = [graph.maker(graph.outputs["hidden"])] if "labels" in graph.outputs else []
        self._last = max(ends, default=len(graph.nodes))
        """Last node that is shared: a head over labels is small."""

    def run(self) -> Graph:
        for index, node in enumerate(self._graph.nodes):
            self._cut(node, shared=index <= self._last)
        outputs = {
            # Ranks compare the best of their tokens: two numbers a row.
            name: self._mine.get(value, value) if name == "logits" else self._all(value)
            for name, value in self._graph.outputs.items()
        }
        return Graph(tuple(self._nodes), outputs, self._graph.inputs)

    def _share(self, width: int) -> int:
        """Return the most columns that a rank has."""
        grains = -(-width // GRAIN)
        return min(width, -(-grains // self._ranks) * GRAIN)

    def _columns(self, value: Value) -> int | None:
        """Return this rank's columns of a value, if all its readers want no others."""
        readers = [self._graph.nodes[index] for index in self._graph.readers(value)]
        if value is self._graph.outputs.get("logits"):
            return self._share(value.width)
        if readers and all(node.kind == "part" for node in readers):
            parts = [self._columns(node.out[0]) for node in readers]
            return sum(part or 0 for part in parts) if None not in parts else None
        wanted = {self._wanted(node, node.reads.index(value)) for node in readers}
        return wanted.pop() if len(wanted) == 1 else None

    def _wanted(self, node: Node, place: int) -> int | None:
        """Return the columns of its input that a node reads for those that it makes."""
        spec = node.spec
        match node.kind, spec:
            case "linear", _:
                return self._share(node.reads[0].width)
            case "write" | "attend", AttentionSpec():
                mine = self._heads(spec)
                return (
                    mine.queries
                    if node.kind == "attend" and not spec.bidirectional
                    else mine.stacked
                )
            case "write" | "attend", LatentSpec():
                return self._heads(spec).queries if place == 0 else None
            case "delta_rule" | "ssm", DeltaSpec() | SsmSpec():
                less = self._heads(spec)
                gates = [less.value_heads] * (len(node.reads) - 2)
                return [less.mixed, less.values, *gates][place]
            case "multiply", _:
                other = node.reads[1 - place]
                maker = self._graph.nodes[self._graph.maker(other)]
                if maker.kind == "attend" and isinstance(maker.spec, AttentionSpec):
                    return self._heads(maker.spec).queries
        if node.kind not in ("gated", "activate", "multiply", "add", "select", "short_conv"):
            return None
        columns = self._columns(node.out[0])
        times = node.reads[0].width // node.out[0].width
        return None if columns is None else columns * times

    def _heads(self, spec: S) -> S:
        """Return a spec with this rank's heads."""
        ranks, fewer = self._ranks, dict[str, Any]()
        if isinstance(spec, AttentionSpec):
            most = max(head_shares(spec.heads, spec.kv_heads, ranks), key=lambda one: one.queries)
            fewer = {"heads": most.queries, "kv_heads": most.kv_heads}
        elif isinstance(spec, LatentSpec):
            fewer = {"heads": -(-spec.heads // ranks)}
        else:
            heads = {"key_heads": spec.key_heads, "value_heads": spec.value_heads}
            fewer = {name: -(-count // ranks) for name, count in heads.items()}
        return cast(S, spec._replace(**fewer))

    def _all(self, value: Value) -> Value:
        """Return a whole value, after a collective if this rank has a part of it."""
        if value not in self._mine:
            return value
        if value not in self._full:
            mine, full = self._mine[value], Value(value.rows, value.width, value.dtype)
            made = Node("reduce", (mine,), (full,), (), ReduceSpec(self._ranks))
            if value not in self._partial:
                bounds = 0, mine.width, *[value.width] * (self._ranks - 1)
                made = Node("exchange", (mine,), (full,), (), ExchangeSpec(bounds, 0))
            self._nodes.append(made)
            self._full[value] = full
        return self._full[value]

    def _add(self, node: Node, width: int, spec: object, *weights: WeightRef) -> None:
        """Add a node that makes this rank's columns of what `node` makes."""
        (out,) = node.out
        mine = self._mine[out] = Value(out.rows, width, out.dtype)
        reads = tuple(self._mine.get(value, value) for value in node.reads)
        self._nodes.append(Node(node.kind, reads, (mine,), weights, spec))

    def _cut(self, node: Node, *, shared: bool) -> None:
        cut = {value for value in node.reads if value in self._mine} - self._partial
        if node.kind == "linear" and shared:
            self._linear(node, bool(cut))
        elif node.kind == "experts" and shared:
            self._experts(node)
        elif node.kind == "add" and self._partial.issuperset(node.reads):
            self._add(node, node.out[0].width, node.spec)
            self._partial.add(node.out[0])
        elif cut and shared and self._keeps(node):
            self._columns_of(node)
        else:
            reads = tuple(map(self._all, node.reads))
            self._nodes.append(Node(node.kind, reads, node.out, node.weights, node.spec))

    def _keeps(self, node: Node) -> bool:
        """Return whether a node that reads this rank's columns makes some."""
        kinds = ("gated", "activate", "multiply", "add", "select", "part", *RECURRENT)
        elsewise = node.kind in ("write", "attend")
        return elsewise or (node.kind in kinds and self._mine.keys() >= {*node.reads})

    def _columns_of(self, node: Node) -> None:
        spec, weights, (out,) = node.spec, node.weights, node.out
        first = self._mine[node.reads[0]].width
        width = first * out.width // node.reads[0].width
        if isinstance(spec, AttentionSpec | LatentSpec):
            spec = self._heads(spec)
            width = spec.queries
            if isinstance(spec, LatentSpec) and node.kind == "attend":
                width = spec.heads * spec.value_size
                weights = tuple(ref._replace(copies=spec.heads) for ref in weights)
            elif node.kind == "attend":
                weights = tuple(_rows(ref, spec.heads) for ref in weights)
            elif isinstance(spec, AttentionSpec) and spec.whole_norm:
                norms = spec.queries, spec.kv_heads * spec.size
                weights = tuple(map(_rows, weights, norms))
        elif isinstance(spec, DeltaSpec | SsmSpec):
            before, spec = spec, self._heads(spec)
            width = spec.values
            sizes = {before.value_heads: spec.value_heads, before.values: width}
            weights = tuple(_rows(ref, sizes.get(ref.out, ref.out)) for ref in weights)
        elif isinstance(spec, PartSpec):
            width, spec = self._part(node, spec)
        else:
            weights = tuple(_rows(ref, width) for ref in weights)
        self._add(node, width, spec, *weights)

    def _part(self, node: Node, spec: PartSpec) -> tuple[int, PartSpec]:
        """Return the columns of a part, after those of the parts before it."""
        readers = [self._graph.nodes[index] for index in self._graph.readers(node.reads[0])]
        columns = {each.spec: self._columns(each.out[0]) or 0 for each in readers}
        before = [count for other, count in columns.items() if cast(PartSpec, other) < spec]
        return columns[spec], PartSpec(sum(before))

    def _linear(self, node: Node, inner: bool) -> None:
        """Cut a product along the summed axis, by its outputs, or not."""
        (x,), (out,), (matrix, *bias) = node.reads, node.out, node.weights
        assert isinstance(node.spec, LinearSpec)
        if inner:
            less = matrix._replace(width=self._mine[x].width)
            self._add(node, out.width, node.spec, less, *bias)
            self._partial.add(out)
            return
        columns = self._columns(out)
        x = self._all(x)
        if columns is None:
            self._nodes.append(Node("linear", (x,), node.out, node.weights, node.spec))
            return
        mine = self._mine[out] = Value(out.rows, columns, out.dtype)
        weights = tuple(_rows(ref, columns) for ref in node.weights)
        self._nodes.append(Node("linear", (x,), (mine,), weights, node.spec))

    def _experts(self, node: Node) -> None:
        (up, down, *biases), (out,) = node.weights, node.out
        assert isinstance(node.spec, ExpertsSpec)
        spread = self._spread and up.copies > 1
        if not spread:
            inner = self._share(down.width)
            up, down = _rows(up, 2 * inner), down._replace(width=inner)
            biases = [_rows(bias, 2 * inner) for bias in biases[:1]] + biases[1:]
        reads = tuple(map(self._all, node.reads))
        made = out
        if not (spread and self._sent):
            made = self._mine[out] = Value(out.rows, out.width, out.dtype)
            self._partial.add(out)
        self._nodes.append(Node("experts", reads, (made,), (up, down, *biases), node.spec))


def _rows(ref: WeightRef, count: int) -> WeightRef:
    """Return a weight with this number of rows."""
    return ref if count == ref.out else ref._replace(cut=((0, 0, count),))
