"""A model shared by ranks: the pass that cuts a graph and inserts an all-gather (`exchange`).

Products are cut by their outputs, never along the summed dimension: a rank computes whole sums, and
ranks exchange values. So every number is bit for bit that of a single rank, however many ranks
there are and however uneven their shares. Values read column by column stay cut (heads, gates,
activations). A node that reads a whole row gets it by an `exchange`. Every rank computes for itself
nodes that are not worth cutting (norms, sums, small products), and nodes that go on from a state.

In attention, a rank has whole KV heads with the queries that read them. If there are more ranks
than KV heads, several ranks have the same head and share its queries. Of every expert a rank has
rows of each matrix, so that ranks have equal work for any choice of experts. Or whole experts are
placed on ranks, which exchange the experts' outputs, unsummed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from .errors import OptionError
from .exchange import ExchangeSpec
from .graph import AttentionSpec, ExpertsSpec, Graph, LatentSpec, LinearSpec, Node, Value, WeightRef
from .verify import verify

GRAIN = 32
"""Columns that stay together: a unit of quantised activations, two panels of outputs."""
PANEL = 16
"""Outputs that lie together; heads begin at a panel's start."""
HEADS = frozenset(("write", "attend", "absorb", "unpack"))
"""Kinds that are cut by heads."""
COLUMN_WISE = frozenset(("gated", "activate", "multiply", "add"))
"""Kinds whose output column depends on that column of the inputs alone (a gate: of both halves)."""


class HeadShare(NamedTuple):
    """A rank's heads of an attention."""

    first: int
    queries: int
    """Number of query heads from `first` on."""
    kv_first: int
    kv_heads: int


def even(size: int, ranks: int, grain: int = 1) -> tuple[int, ...]:
    """Return bounds [ranks + 1] of shares that are multiples of `grain` and differ by one grain at
    most. The last share takes the remainder."""
    grains = -(-size // grain)
    return tuple(min(size, grains * rank // ranks * grain) for rank in range(ranks + 1))


def head_shares(heads: int, kv_heads: int, ranks: int) -> list[HeadShare]:
    """Return the share of each rank, with the same number of queries per KV head within it."""
    queries = heads // kv_heads
    if ranks <= kv_heads:
        bounds = even(kv_heads, ranks)
        return [HeadShare(a * queries, (b - a) * queries, a, b - a) for a, b in pairwise(bounds)]
    shares = []
    holders = even(ranks, kv_heads)
    for kv, (first, last) in enumerate(pairwise(holders)):
        for a, b in pairwise(even(queries, last - first)):
            shares.append(HeadShare(kv * queries + a, b - a, kv, 1))
    return shares


def refusal(graph: Graph, ranks: int, *, dealt: bool = False) -> str | None:
    """Return the reason why this number of ranks cannot share the model, with its latents absorbed,
    as a clause; None if they can."""
    fewest = min(mixtures(graph), default=0)
    if dealt and fewest < ranks:
        return f"its layers have {fewest or 'no'} experts to deal out"
    for node in graph.nodes:
        spec = node.spec
        if node.kind == "write":
            maker = graph.nodes[graph.maker(node.reads[0])].kind
            if maker not in ("linear", "absorb"):
                return "its q, k and v are not of one product"
        if node.kind != "attend":
            continue
        assert isinstance(spec, AttentionSpec)
        if spec.bidirectional:
            return "it reads both ways, and is one step for each input"
        if min(share.queries for share in head_shares(spec.heads, spec.kv_heads, ranks)) < 1:
            return f"{spec.heads} heads are too few: a rank would have none"
    return None


def mixtures(graph: Graph) -> list[int]:
    """Return the number of experts of each mixture, in order, without the expert that all rows
    share."""
    found = (node.weights[0].copies for node in graph.nodes if node.kind == "experts")
    return [count for count in found if count > 1]


def cut(graph: Graph, ranks: int, rank: int, *, dealt: bool = False) -> Graph:
    """Return the part of `graph`, described for all rows, that `rank` of `ranks` computes; all
    of it for one rank. With `dealt`, whole experts by a map (`kernels.dealing`). Raises
    `OptionError`."""
    if ranks == 1:
        return graph
    why = refusal(graph, ranks, dealt=dealt)
    if why is not None:
        raise OptionError(f"the model cannot be shared by {ranks} ranks: {why}", param="layout")
    made = _Cutting(graph, ranks, rank, dealt=dealt).run()
    verify(made)
    return made


class _Cutting:
    def __init__(self, graph: Graph, ranks: int, rank: int, *, dealt: bool) -> None:
        self._graph, self._ranks, self._rank = graph, ranks, rank
        self._dealt, self._mixtures = dealt, 0
        self._nodes: list[Node] = []
        self._mine: dict[Value, Value] = {}
        """Values of the whole graph → this rank's columns, unless it has all of them."""
        self._bounds: dict[Value, tuple[int, ...]] = {}
        """Bounds of each rank's columns, if they are contiguous."""
        self._full: dict[Value, Value] = {}
        """Values after their exchange."""

    def run(self) -> Graph:
        for node in self._graph.nodes:
            self._cut(node)
        outputs = {name: self._all(value) for name, value in self._graph.outputs.items()}
        return Graph(tuple(self._nodes), outputs, self._graph.inputs)

    def _cut(self, node: Node) -> None:
        if node.kind == "linear":
            self._linear(node)
        elif node.kind in HEADS and node.reads[0] in self._mine:
            getattr(self, f"_{node.kind}")(node)
        elif node.kind == "experts" and self._dealt and node.weights[0].copies > 1:
            assert isinstance(node.spec, ExpertsSpec)
            spec = node.spec._replace(dealt=self._mixtures)
            reads = tuple(map(self._all, node.reads))
            self._nodes.append(Node("experts", reads, node.out, node.weights, spec))
            self._mixtures += 1
        elif node.kind == "experts" and self._even(node.out[0])[1]:
            self._experts(node)
        elif node.kind in COLUMN_WISE and self._mine.keys() >= {*node.reads}:
            (out,) = node.out
            gated = node.kind == "gated"
            bounds = self._even(out) if gated else self._bounds[node.reads[0]]
            self._add(node, bounds, node.spec)
        else:
            reads = tuple(map(self._all, node.reads))
            self._nodes.append(Node(node.kind, reads, node.out, node.weights, node.spec))

    def _even(self, value: Value) -> tuple[int, ...]:
        return even(value.width, self._ranks, GRAIN)

    def _add(
        self, node: Node, bounds: tuple[int, ...], spec: object, weights: tuple[WeightRef, ...] = ()
    ) -> None:
        """Add a node that reads columns of this rank and makes some."""
        (out,) = node.out
        mine = Value(out.rows, bounds[self._rank + 1] - bounds[self._rank], out.dtype)
        reads = tuple(self._mine[each] for each in node.reads)
        self._nodes.append(Node(node.kind, reads, (mine,), weights, spec))
        self._mine[out], self._bounds[out] = mine, bounds

    def _all(self, value: Value) -> Value:
        """Return all columns of a value, after an exchange if ranks have some each."""
        if value not in self._mine:
            return value
        if value not in self._full:
            full = Value(value.rows, value.width, value.dtype)
            spec = ExchangeSpec(self._bounds[value], self._rank)
            self._nodes.append(Node("exchange", (self._mine[value],), (full,), (), spec))
            self._full[value] = full
        return self._full[value]

    def _linear(self, node: Node) -> None:
        (x,), (out,) = map(self._all, node.reads), node.out
        readers = [self._graph.nodes[index] for index in self._graph.readers(out)]
        rows = self._rows(node, readers)
        if rows is None:
            self._nodes.append(Node("linear", (x,), node.out, node.weights, node.spec))
            return
        weights = tuple(_cut(ref, rows) for ref in node.weights)
        mine = Value(out.rows, sum(count for _, count in rows), out.dtype)
        self._nodes.append(Node("linear", (x,), (mine,), weights, node.spec))
        self._mine[out] = mine

    def _rows(self, node: Node, readers: list[Node]) -> list[tuple[int, int]] | None:
        """Return (first, count) of a product's outputs that this rank computes; None for all."""
        (out,) = node.out
        assert isinstance(node.spec, LinearSpec)
        if len(readers) == 1 and readers[0].kind == "write":
            spec = readers[0].spec
            assert isinstance(spec, AttentionSpec)
            if spec.whole_norm or spec.size % PANEL:
                return None  # A norm over all heads needs all of them: every rank computes them.
            mine, size = self._heads(spec), spec.size
            first, each = spec.queries + mine.kv_first * size, spec.kv_heads * size
            kept = [(first + at * each, mine.kv_heads * size) for at in range(spec.kept)]
            return [(mine.first * size, mine.queries * size), *kept]
        bounds = self._even(out)
        if len(readers) == 1 and readers[0].kind == "absorb":
            assert isinstance(readers[0].spec, LatentSpec)
            mine, size = self._latent_heads(readers[0].spec), out.width // readers[0].spec.heads
            return [(mine.first * size, mine.queries * size)] if size % PANEL == 0 else None
        if len(readers) == 1 and readers[0].kind == "gated":
            (inner,) = readers[0].out
            share = ExchangeSpec(self._even(inner), self._rank)
            return _halves(inner.width, share) if share.bounds[1] else None
        if len(readers) == 1 and readers[0].kind == "multiply":
            # A gate is cut like the value that it multiplies.
            multiplied = [self._bounds[each] for each in readers[0].reads if each in self._bounds]
            bounds = multiplied[0] if multiplied else bounds
        if bounds[1] == 0:
            return None
        self._bounds[out] = bounds
        return [ExchangeSpec(bounds, self._rank).mine]

    def _heads(self, spec: AttentionSpec) -> HeadShare:
        return head_shares(spec.heads, spec.kv_heads, self._ranks)[self._rank]

    def _write(self, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, AttentionSpec)
        shares = head_shares(spec.heads, spec.kv_heads, self._ranks)
        mine = shares[self._rank]
        ends = [share.first * spec.size for share in shares]
        reduced = spec._replace(heads=mine.queries, kv_heads=mine.kv_heads)
        weights = node.weights
        if node.kind == "attend":
            # Sinks belong to heads; the norms of `write` are the same for each.
            rows = [(mine.first, mine.queries)]
            weights = tuple(_cut(ref, rows) for ref in weights)
        self._add(node, (*ends, spec.queries), reduced, weights)

    _attend = _write

    def _latent_heads(self, spec: LatentSpec) -> HeadShare:
        return head_shares(spec.heads, 1, self._ranks)[self._rank]

    def _absorb(self, node: Node) -> None:
        (q, *shared), (out,), (packing,), spec = node.reads, node.out, node.weights, node.spec
        assert isinstance(spec, LatentSpec)
        mine = self._latent_heads(spec)
        packed = Value(out.rows, (mine.queries + 1) * spec.size, out.dtype)
        reads = (self._mine[q], *map(self._all, shared))
        packing = packing._replace(first=mine.first, copies=mine.queries)
        of = spec._replace(heads=mine.queries)
        self._nodes.append(Node("absorb", reads, (packed,), (packing,), of))
        self._mine[out] = packed

    def _unpack(self, node: Node) -> None:
        (unpacking,), spec = node.weights, node.spec
        assert isinstance(spec, LatentSpec)
        shares = head_shares(spec.heads, 1, self._ranks)
        mine = shares[self._rank]
        bounds = *(share.first * spec.value_size for share in shares), node.out[0].width
        unpacking = unpacking._replace(first=mine.first, copies=mine.queries)
        self._add(node, bounds, spec._replace(heads=mine.queries), (unpacking,))

    def _experts(self, node: Node) -> None:
        (out,), spec, weights = node.out, node.spec, list(node.weights)
        assert isinstance(spec, ExpertsSpec)
        share, width = ExchangeSpec(self._even(out), self._rank), weights[1].width
        inner = ExchangeSpec(even(width, self._ranks, GRAIN), self._rank)
        if inner.bounds[1]:
            spec = spec._replace(inner=inner)
            weights[::2] = [_cut(ref, _halves(width, inner)) for ref in weights[::2]]
        weights[1::2] = [_cut(ref, [share.mine]) for ref in weights[1::2]]
        mine = Value(out.rows, share.mine[1], out.dtype)
        reads = tuple(map(self._all, node.reads))
        self._nodes.append(Node("experts", reads, (mine,), tuple(weights), spec))
        self._mine[out], self._bounds[out] = mine, share.bounds


def _halves(inner: int, share: ExchangeSpec) -> list[tuple[int, int]]:
    """Return (first, count) of the rows of gate above up that make these columns."""
    first, count = share.mine
    return [(first, count), (inner + first, count)]


def _cut(ref: WeightRef, rows: Iterable[tuple[int, int]]) -> WeightRef:
    """Cut these rows (first, count) out of its tensors, which lie one below the other."""
    found = []
    for first, count in rows:
        begin = 0
        for index, size in enumerate(ref.rows):
            low, high = max(first, begin), min(first + count, begin + size)
            if low < high:
                found.append((index, low - begin, high - low))
            begin += size
    return ref._replace(cut=tuple(found))
