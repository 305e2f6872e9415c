"""Fusion of a graph's nodes, and the place of every value: found before a record is made.

The rules follow from each value's readers:

* a value that only quantised products read is never written in fp32: its producer (norm, gate,
  attention) leaves it as int8 with units;
* the product with gate and up and the activation after it become one kernel;
* a product whose result is only added to a residual adds itself: y += x · wᵀ + b;
* a product and an activation that is its only reader are one record;
* a scaled value, and one with rows of other parts, stay in place;
* a sum and the norm right after it are one record;
* an attention whose sampled rows alone are read computes no others;
* rows side by side (`window`) are a view of rows that lie one after the other, without gaps.

Values never change, memory does: a sum overwrites its residual, and queries overwrite q in qkv.
Values in one place form a *storage*, which lives from its first value to its last reader.

If ranks share a model, an `exchange` completes a value. The complete value is in memory of all
ranks, and each rank writes its part to its own columns.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.exchange import ExchangeSpec
from ...base.graph import SAMPLED, TEXTS, AttentionSpec, Graph, LinearSpec, Node, Value, WindowSpec
from ...base.joins import norm_after, only_reader, reader_of_kind, sum_after
from ..prepared import Prepared
from ..weights import LoraWeight, Weight
from . import emit, latent, mixture
from .records import ROWS_N, ROWS_R, ROWS_T

Additions = Mapping[tuple[str, ...], LoraWeight]
"""LoRA weights that adapters add to products, by the names of the product's tensors."""


class Unrecordable(Exception):
    """Error for a graph with something that no record does; the reason, as half a sentence."""


class Fusion:
    """Analysis of a graph and its weights; `Lowering` makes the records."""

    def __init__(self, graph: Graph, weights: Prepared, additions: Additions) -> None:
        self._graph, self._weights, self._additions = graph, weights, additions
        self._nodes = graph.nodes
        self._results = set(graph.outputs.values())
        self._mixtures: dict[Node, mixture.Mixture] = {}
        self._summed = self._find_sums()
        self._gates = self._find_gates()
        self._activated = self._find_activated()
        self._picked = self._find_picked()
        self._exchanged = {node.out[0] for node in self._nodes if node.kind == "exchange"}
        """Values in memory of all ranks."""
        self._first: dict[Value, int] = {}
        """First column of a value in its storage, if it is a part of one."""
        self._before: dict[Value, int] = {}
        """Storages that windows read → rows of zeros before each."""
        self._places = self._find_places()
        self._sharing: dict[Value, list[Value]] = {}
        for value, place in self._places.items():
            self._sharing.setdefault(place, []).append(value)
        self._dying: list[list[Value]] = [[] for _ in self._nodes]
        """Storages that are free after each node."""
        for place, last in self._last_readers().items():
            if last < len(self._nodes):
                self._dying[last].append(place)

    def _find_sums(self) -> dict[int, Value]:
        """Find products that add to a residual directly: node → the residual. With adapters this is
        not possible, since these add to the product first."""
        found = {}
        for index, node in enumerate(self._nodes):
            if node.kind != "linear" or self._is_added_to(node):
                continue
            after = sum_after(self._graph, index)
            if after >= 0:
                found[index] = self._nodes[after].reads[0]
        return found

    def _find_gates(self) -> set[int]:
        """Find products whose result only goes through a gate and is then needed as codes."""
        found = set()
        for index, node in enumerate(self._nodes[:-1]):
            after = self._nodes[index + 1]
            if (
                node.kind == "linear"
                and after.kind == "gated"
                and len(node.weights) == 1
                and not self._is_added_to(node)
                and only_reader(self._graph, node.out[0]) == index + 1
                and emit.can_gate(self._weight(node))
                and not self._wants_floats(after.out[0])
            ):
                found.add(index)
        return found

    def _find_activated(self) -> dict[int, Node]:
        """Find products that end with an activation: node → the activation. An activation whose
        result is needed as codes is a separate record."""
        found = {}
        for index, node in enumerate(self._nodes):
            reader = reader_of_kind(self._graph, index, "activate")
            if node.kind != "linear" or reader < 0:
                continue
            after = self._nodes[reader]
            if (
                node.spec == LinearSpec()
                and not self._is_added_to(node)
                and not self._wants_codes(after.out[0])
            ):
                found[index] = after
        return found

    def _find_picked(self) -> dict[int, int]:
        """Find attentions that only a selection of rows reads: node → the selecting node."""
        found = {}
        for index, node in enumerate(self._nodes):
            reader = reader_of_kind(self._graph, index, "select")
            if node.kind == "attend" and reader >= 0 and not _both_ways(node):
                found[index] = reader
        return found

    def _find_places(self) -> dict[Value, Value]:
        """Return the storage of each value, named by the first value in it."""
        places: dict[Value, Value] = {value: value for value in self._graph.inputs}
        for index, node in enumerate(self._nodes):
            for value in node.out:
                places[value] = value
            if node.kind in ("add", "modulate"):
                residual = node.reads[0]
                again = any(at > index for at in self._graph.readers(residual))
                if again or residual in self._results:
                    raise Unrecordable("a residual is read again after something was added to it")
                if places[residual] in self._exchanged:
                    raise Unrecordable("ranks would add to what they share")
                places[node.out[0]] = places[residual]
            elif node.kind in ("scale", "scatter"):
                (x,) = node.reads
                if x in self._results or any(at > index for at in self._graph.readers(x)):
                    raise Unrecordable(f"what a {node.kind} changes is read again as it was")
                places[node.out[0]] = places[x]
            elif node.kind in ("write", "part"):
                places[node.out[0]] = places[node.reads[0]]
            elif isinstance(node.spec, WindowSpec):
                place = places[node.out[0]] = places[node.reads[0]]
                self._before[place] = max(self._before.get(place, 0), node.spec.before)
            elif node.kind == "exchange":
                (mine,), (whole,), spec = node.reads, node.out, node.spec
                assert isinstance(spec, ExchangeSpec)
                # This value and its partial sums are columns of the complete value from the start.
                for value in [value for value in places if places[value] is places[mine]]:
                    if value.width != mine.width:
                        raise Unrecordable("what ranks exchange lies in something else")
                    places[value], self._first[value] = whole, spec.mine[0]
        return places

    def _last_readers(self) -> dict[Value, int]:
        """Return for each storage the node after which it is free."""
        last: dict[Value, int] = {}
        for value, place in self._places.items():
            readers = self._graph.readers(value)
            at = len(self._nodes)
            if value not in self._results:
                at = max(
                    (self._done_at(index) for index in readers), default=self._graph.maker(value)
                )
            last[place] = max(last.get(place, 0), at)
        return last

    def _done_at(self, index: int) -> int:
        """Return the index at which a node's work is emitted. A product before a gate, and a sum
        before a norm, are emitted with the next node."""
        joined = index in self._gates or self._norm_of(index) is not None
        return index + 1 if joined else index

    def _norm_of(self, index: int) -> Node | None:
        """Return the norm that shares a record with the sum `index`."""
        after = norm_after(self._graph, index)
        return self._nodes[after] if after >= 0 else None

    def _weight(self, node: Node) -> Weight:
        return self._weights.weight(node.weights[0])

    def _is_added_to(self, node: Node) -> bool:
        return node.weights[0].role == "linear" and node.weights[0].names in self._additions

    def _mixture(self, node: Node) -> mixture.Mixture:
        if node not in self._mixtures:
            self._mixtures[node] = mixture.of(node, self._weights)
        return self._mixtures[node]

    def _heads(self, node: Node) -> list[Weight]:
        return self._weights.copies(node.weights[0])

    def _reads_codes(self, node: Node) -> bool:
        if node.kind == "experts":
            return self._mixture(node).codes
        if node.kind == "unpack":
            return latent.reads_codes(self._heads(node))
        return node.kind == "linear" and emit.needs_codes(self._weight(node))

    def _reads_floats(self, node: Node) -> bool:
        if node.kind == "experts":
            return self._mixture(node).floats
        if node.kind == "unpack":
            return any(map(emit.needs_floats, self._heads(node)))
        linear = node.kind == "linear"
        return not linear or emit.needs_floats(self._weight(node)) or self._is_added_to(node)

    def _full(self, value: Value) -> Value:
        """Return the complete value that an exchange makes of a rank's columns; any other value
        itself."""
        readers = self._read_by(value)
        exchanged = readers and readers[0].kind == "exchange"
        return readers[0].out[0] if exchanged else value

    def _read_by(self, value: Value) -> list[Node]:
        return [self._nodes[index] for index in self._graph.readers(value)]

    def _wants_codes(self, value: Value) -> bool:
        return any(map(self._reads_codes, self._read_by(self._full(value))))

    def _wants_floats(self, value: Value) -> bool:
        value = self._full(value)
        return value in self._results or any(map(self._reads_floats, self._read_by(value)))

    def _is_summed(self, index: int) -> bool:
        """Return whether the product that the sum `index` reads adds to the residual directly."""
        maker = self._graph.maker(self._nodes[index].reads[1])
        return maker in self._summed


def rows_of(value: Value) -> int:
    return _ROWS.get(value.rows.name, ROWS_N)


_ROWS = {SAMPLED.name: ROWS_R, TEXTS.name: ROWS_T}


def _both_ways(node: Node) -> bool:
    """Return whether this is bidirectional attention, which has no record for some of its rows."""
    return isinstance(node.spec, AttentionSpec) and node.spec.bidirectional
