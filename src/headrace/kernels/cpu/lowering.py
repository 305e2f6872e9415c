"""From a graph's nodes to records: what is fused, and where every value lies.

Fused here, by looking at who reads what:

* a value that only quantised products read is never written in fp32: its producer (norm, gate,
  attention) leaves it as int8 with units;
* the product with gate and up and the activation after it become one kernel;
* a product whose result only goes to be added to a residual adds itself: y += x · wᵀ + b;
* a product and the activation that alone reads it are one record;
* a sum and the norm right behind it are one record;
* an attention of which only the sampled rows are read computes no others.

Values are never changed, memory is: a sum lies where its residual lay, queries lie where q lay in
qkv. Values of one place are one *storage*, which lives from its first value to the last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ...base.graph import (
    TOKENS,
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    EmbedSpec,
    ExpertsSpec,
    Graph,
    LinearSpec,
    Node,
    NormSpec,
    PartSpec,
    RouteSpec,
    Value,
    WeightRef,
)
from ...base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from ..operators import KvCache
from ..prepared import Prepared
from ..weights import LoraWeight, Weight
from . import emit, latent, mixture, states
from .arena import Arena
from .emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows
from .records import ROWS_N, ROWS_R, UNIT, HrKv, HrLinear, HrQuantised

Additions = Mapping[tuple[str, ...], LoraWeight]
"""What adapters add to products: by the names of the product's tensors."""


class Unrecordable(Exception):
    """This graph does something that no record does; the reason, as half a sentence."""


class Lowering:
    """The records of a graph, once; what is asked afterwards is in its attributes."""

    def __init__(
        self, graph: Graph, weights: Prepared, cache: KvCache, arena: Arena, additions: Additions
    ) -> None:
        self._graph, self._weights, self._cache = graph, weights, cache
        self._arena, self._additions = arena, additions
        self._nodes = graph.nodes
        self._results = set(graph.outputs.values())
        self.names: list[str] = []
        self.emitted: list[Emitted] = []
        self.head: HrLinear | None = None
        """The last record, where that is a product of one part which gives the logits."""
        self._floats: dict[Value, npt.NDArray[np.float32]] = {}
        """By storage."""
        self._codes: dict[Value, QuantisedRows] = {}
        """int8 codes by value, since other numbers in the same storage have other codes."""
        self._summed = self._find_sums()
        self._gates = self._find_gates()
        self._activated = self._find_activated()
        self._picked = self._find_picked()
        self._first: dict[Value, int] = {}  # First column in its storage, of a part of one.
        self._places = self._find_places()
        self._sharing: dict[Value, list[Value]] = {}
        for value, place in self._places.items():
            self._sharing.setdefault(place, []).append(value)
        self._dying: list[list[Value]] = [[] for _ in self._nodes]
        for place, last in self._last_readers().items():
            if last < len(self._nodes):
                self._dying[last].append(place)

    def floats(self, value: Value) -> npt.NDArray[np.float32]:
        """Where the numbers of an output lie."""
        return self._floats[self._places[value]]

    def _find_sums(self) -> dict[int, Value]:
        """Products that add themselves: node → the residual."""
        found = {}
        for index, node in enumerate(self._nodes):
            if node.kind != "linear" or node.out[0] in self._results:
                continue
            readers = self._graph.readers(node.out[0])
            if len(readers) != 1 or not _is_sum(self._nodes[readers[0]]):
                continue
            residual, x = self._nodes[readers[0]].reads
            between = any(index <= at < readers[0] for at in self._graph.readers(residual))
            if x is node.out[0] and not between and self._graph.maker(residual) < index:
                found[index] = residual
        return found

    def _find_gates(self) -> set[int]:
        """Products whose result only goes through a gate and is then wanted as codes."""
        found = set()
        for index, node in enumerate(self._nodes[:-1]):
            after = self._nodes[index + 1]
            if (
                node.kind == "linear"
                and after.kind == "gated"
                and len(node.weights) == 1
                and not self._is_added_to(node)
                and self._graph.readers(node.out[0]) == [index + 1]
                and emit.can_gate(self._weight(node))
                and not self._wants_floats(after.out[0])
            ):
                found.add(index)
        return found

    def _find_activated(self) -> dict[int, Node]:
        """Products that end with an activation: node → the activation. Where that is wanted as
        codes, it is a record of its own."""
        found = {}
        for index, node in enumerate(self._nodes):
            readers = self._graph.readers(node.out[0])
            if node.kind != "linear" or len(readers) != 1 or node.out[0] in self._results:
                continue
            after = self._nodes[readers[0]]
            if (
                after.kind == "activate"
                and node.spec == LinearSpec()
                and not self._is_added_to(node)
                and not self._wants_codes(after.out[0])
            ):
                found[index] = after
        return found

    def _find_picked(self) -> dict[int, int]:
        """Attentions whose result is only read where rows of it are selected: → by which node."""
        found = {}
        for index, node in enumerate(self._nodes):
            if node.kind != "attend" or node.out[0] in self._results or _both_ways(node):
                continue
            readers = self._graph.readers(node.out[0])
            if len(readers) == 1 and self._nodes[readers[0]].kind == "select":
                found[index] = readers[0]
        return found

    def _find_places(self) -> dict[Value, Value]:
        """The storage of each value, named by the first value that lies there."""
        places: dict[Value, Value] = {}
        for index, node in enumerate(self._nodes):
            for value in node.out:
                places[value] = value
            if node.kind == "add":
                residual = node.reads[0]
                again = any(at > index for at in self._graph.readers(residual))
                if again or residual in self._results:
                    raise Unrecordable("a residual is read again after something was added to it")
                places[node.out[0]] = places[residual]
            elif node.kind in ("write", "part"):
                places[node.out[0]] = places[node.reads[0]]
        return places

    def _last_readers(self) -> dict[Value, int]:
        """Storage → the node behind which it is free."""
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
        """Where the work of a node is emitted: a product before a gate, and a sum before a norm,
        with the node behind it."""
        joined = index in self._gates or self._norm_of(index) is not None
        return index + 1 if joined else index

    def _norm_of(self, index: int) -> Node | None:
        """The norm that is one record with the sum `index`."""
        node = self._nodes[index]
        if not _is_sum(node) or index + 1 == len(self._nodes):
            return None
        after = self._nodes[index + 1]
        return after if after.kind == "norm" and after.reads == node.out else None

    def _weight(self, node: Node) -> Weight:
        return self._weights.weight(node.weights[0])

    def _is_added_to(self, node: Node) -> bool:
        return node.weights[0].role == "linear" and node.weights[0].names in self._additions

    def _mixture(self, node: Node) -> mixture.Mixture:
        return mixture.of(node, self._weights)

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

    def _read_by(self, value: Value) -> list[Node]:
        return [self._nodes[index] for index in self._graph.readers(value)]

    def _wants_codes(self, value: Value) -> bool:
        return any(map(self._reads_codes, self._read_by(value)))

    def _wants_floats(self, value: Value) -> bool:
        return value in self._results or any(map(self._reads_floats, self._read_by(value)))

    def _matrix(self, value: Value) -> Matrix:
        at, stride = emit.matrix(self._floats[self._places[value]])
        return Matrix(at + 4 * self._first.get(value, 0), stride)

    def _make_floats(self, value: Value) -> Matrix:
        self._floats[value] = self._arena.floats(_rows(value), value.width)
        return self._matrix(value)

    def _make_codes(self, value: Value) -> HrQuantised:
        self._codes[value] = self._arena.codes(_rows(value), value.width)
        return self._codes[value].struct

    def _outputs(self, value: Value, *, grain: int) -> tuple[Matrix | None, HrQuantised]:
        """Where a producer that can quantise leaves its result."""
        codes = NOT_QUANTISED
        if self._wants_codes(value) and grain % UNIT == 0:
            codes = self._make_codes(value)
        floats = None
        if codes is NOT_QUANTISED or self._wants_floats(value):
            floats = self._make_floats(value)
        return floats, codes

    def _emit(self, name: str, emitted: Emitted) -> None:
        self.names.append(name)
        self.emitted.append(emitted)

    def run(self) -> list[Emitted]:
        """Raises `Unrecordable`."""
        for index, node in enumerate(self._nodes):
            lower: Callable[[int, Node], None] | None = getattr(self, f"_{node.kind}", None)
            if lower is None:
                raise Unrecordable(f"there is no record of {node.kind}")
            lower(index, node)
            for place in self._dying[index]:
                self._bury(place)
        self._find_head()
        return self.emitted

    def _find_head(self) -> None:
        node, (_, op) = self._nodes[-1], self.emitted[-1]
        if (
            node.out[0] is self._graph.outputs.get("logits")
            and isinstance(op, HrLinear)  # No addition and no cap follows it.
            and op.count == 1
        ):
            self.head = op

    def _bury(self, place: Value) -> None:
        if place in self._floats:
            self._arena.give_back(_rows(place), place.width, self._floats.pop(place))
        for value in self._sharing[place]:
            if value in self._codes:
                self._arena.give_back(_rows(value), value.width, self._codes.pop(value))

    def _embed(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, EmbedSpec)
        y = self._make_floats(node.out[0])
        self._emit("embed", emit.embed(self._weight(node), spec.scale, y, spec.index))

    def _norm(self, index: int, node: Node) -> None:
        (x,), spec, residual = node.reads, node.spec, None
        assert isinstance(spec, NormSpec)
        if index and self._norm_of(index - 1) is node and not self._is_summed(index - 1):
            residual, x = self._nodes[index - 1].reads
        (out,) = node.out
        y, q = self._outputs(out, grain=out.width)
        given = self._matrix(x), None if residual is None else self._matrix(residual)
        gain, *shift = (self._weights.vector(ref) for ref in node.weights)
        if spec.kind == "layer":
            shifted = shift[0] if shift else None
            emitted = emit.layer_norm(*given, gain, shifted, spec.eps, y, q, _rows(out))
        else:
            emitted = emit.norm(*given, gain, spec.eps, spec.offset, y, q, _rows(out))
        self._emit("norm", emitted)

    def _is_summed(self, index: int) -> bool:
        """Did the product whose result the sum `index` reads add itself?"""
        maker = self._graph.maker(self._nodes[index].reads[1])
        return maker in self._summed

    def _add(self, index: int, node: Node) -> None:
        residual, x = node.reads
        if self._norm_of(index) is None and not self._is_summed(index):
            given = self._matrix(x), self._matrix(residual), x.width, _rows(x)
            factor = node.spec.scale if isinstance(node.spec, AddSpec) else 1.0
            self._emit("add", emit.add(*given, factor))

    def _linear(self, index: int, node: Node) -> None:
        (x,), (out,), spec = node.reads, node.out, node.spec
        assert isinstance(spec, LinearSpec)
        weight = self._weight(node)
        order = emit.order_of(weight)
        room = None if order is None else self._arena.codes(_rows(x), x.width)
        codes = self._quantised(x, node) if room is None else room.struct
        if index in self._gates:
            return
        if room is not None:
            self._emit("quantise", emit.quantise(self._matrix(x), codes, x.width, _rows(x), order))
            self._arena.give_back(_rows(x), x.width, room)
        residual, after = self._summed.get(index), self._activated.get(index)
        made = out if after is None else after.out[0]
        y = self._make_floats(made) if residual is None else self._matrix(residual)
        self._emit(
            f"linear {weight.shape[0]}×{weight.shape[1]} "
            + "+".join(dict.fromkeys(part.kind for part in emit.parts_of(weight))),
            emit.linear(
                codes,
                self._matrix(x) if self._places[x] in self._floats else None,
                weight,
                self._weights.vector(node.weights[1]) if len(node.weights) > 1 else None,
                y,
                _rows(x),
                accumulate=residual is not None,
                activation=_activation(after),
            ),
        )
        if self._is_added_to(node):
            self._lora(x, self._additions[node.weights[0].names], y)
        if spec.softcap is not None:
            self._emit("softcap", emit.softcap(y, out.width, spec.softcap))
        if spec.scale != 1.0:
            self._emit("scale", emit.scale(y, out.width, spec.scale))

    def _quantised(self, x: Value, node: Node) -> HrQuantised:
        """The codes of what a node reads, made here where it wants some and nobody has."""
        if self._reads_codes(node) and x not in self._codes:
            floats = self._matrix(x)
            self._emit("quantise", emit.quantise(floats, self._make_codes(x), x.width, _rows(x)))
        return self._codes[x].struct if x in self._codes else NOT_QUANTISED

    def _route(self, index: int, node: Node) -> None:
        (x,), spec = node.reads, node.spec
        assert isinstance(spec, RouteSpec)
        bias = self._weights.vector(node.weights[0]) if node.weights else None
        given = self._matrix(x), x.width, bias, spec
        routed = mixture.Routed(*map(self._make_floats, node.out))
        self._emit("route", mixture.route(*given, routed, _rows(x)))

    def _experts(self, index: int, node: Node) -> None:
        (x, *routed), spec, experts = node.reads, node.spec, self._mixture(node)
        assert isinstance(spec, ExpertsSpec)
        placed = self._arena.placed(experts, routed[0].width)
        given = self._quantised(x, node), self._matrix(x) if experts.floats else None
        to = mixture.Routed(*map(self._matrix, routed))
        y = self._make_floats(node.out[0])
        made = mixture.experts(*given, to, experts, placed, spec.activation, y, _rows(x))
        self.names += ["place", "experts_up", "experts_down"]
        self.emitted += made

    def _lora(self, x: Value, addition: LoraWeight, y: Matrix) -> None:
        width = len(addition.up) * addition.room
        inner = self._arena.floats(_rows(x), width)
        made = emit.lora(self._matrix(x), addition, emit.matrix(inner), y, _rows(x))
        for name, emitted in zip(("lora_down", "lora_up"), made, strict=True):
            self._emit(name, emitted)
        self._arena.give_back(_rows(x), width, inner)

    def _write(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, AttentionSpec)
        of_q, of_k = [self._weights.vector(ref) for ref in node.weights] or [None, None]
        table = self._weights.rope(spec)
        given = self._kv(spec), self._matrix(node.reads[0]), spec
        self._emit("rope", emit.rope(*given, (of_q, of_k), table))

    def _kv(self, spec: AttentionSpec) -> HrKv:
        layer, group = self._cache.layers[spec.layer], self._cache.groups[spec.layer]
        return emit.kv(layer, spec.heads, spec.kv_heads, group)

    def _attend(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, AttentionSpec)
        if spec.bidirectional:
            sizes = spec.heads, spec.size, spec.scale
            y = self._make_floats(node.out[0])
            self._emit("attention", emit.bidirectional(self._matrix(node.reads[0]), *sizes, y))
            return
        (out,) = self._nodes[self._picked.get(index, index)].out
        made = self._outputs(out, grain=spec.size)
        sinks = self._weights.vector(node.weights[0]) if node.weights else None
        given = self._kv(spec), self._matrix(node.reads[0]), *made, sinks
        self._emit("attention", emit.attention(*given, spec.scale, spec.softcap, _rows(out)))

    def _absorb(self, index: int, node: Node) -> None:
        given, y = list(map(self._matrix, node.reads)), self._make_floats(node.out[0])
        for name, emitted in latent.absorb(node, given, self._heads(node), y, self._arena):
            self._emit(name, emitted)

    def _unpack(self, index: int, node: Node) -> None:
        (mixed,), weights = node.reads, self._heads(node)
        given = self._matrix(mixed) if self._reads_floats(node) else None
        codes, y = self._quantised(mixed, node), self._make_floats(node.out[0])
        self._emit(*latent.unpack(node, given, codes, weights, y, _rows(mixed)))

    def _part(self, index: int, node: Node) -> None:
        assert isinstance(node.spec, PartSpec)
        self._first[node.out[0]] = self._first.get(node.reads[0], 0) + node.spec.first

    def _gated(self, index: int, node: Node) -> None:
        (out,), spec = node.out, node.spec
        assert isinstance(spec, ActivationSpec)
        if index - 1 in self._gates:
            product = self._nodes[index - 1]
            weight, x = self._weight(product), self._codes[product.reads[0]].struct
            name = f"gate_up {weight.shape[0]}×{weight.shape[1]} {emit.parts_of(weight)[0].kind}"
            made = emit.gate_up(x, weight, spec.name, self._make_codes(out), _rows(out))
            self._emit(name, made)
            return
        y, q = self._outputs(out, grain=out.width)
        given = self._matrix(node.reads[0]), out.width, spec.name, y, q
        self._emit("gated", emit.gated(*given, _rows(out)))

    def _activate(self, index: int, node: Node) -> None:
        if node in self._activated.values():
            return
        (out,) = node.out
        y, q = self._outputs(out, grain=out.width)
        name = _activation(node)
        assert name is not None
        given = self._matrix(node.reads[0]), out.width, name, y, q
        self._emit("activate", emit.activate(*given, _rows(out)))

    def _multiply(self, index: int, node: Node) -> None:
        (out,), name = node.out, _activation(node)
        assert name is not None
        y, q = self._outputs(out, grain=out.width)
        x, gate = map(self._matrix, node.reads)
        self._emit("multiply", states.multiply(x, gate, out.width, name, y, q, _rows(out)))

    def _short_conv(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, ConvSpec)
        vectors = [self._weights.vector(ref) for ref in node.weights]
        layer, group = self._cache.states[spec.layer], self._cache.groups[spec.layer]
        x, y = self._matrix(node.reads[0]), self._make_floats(node.out[0])
        self._emit("short_conv", states.short_conv(x, spec, vectors, layer, group, y))

    def _delta_rule(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, DeltaSpec | SsmSpec)
        vectors = [self._weights.vector(ref) for ref in node.weights]
        layer, group = self._cache.states[spec.layer], self._cache.groups[spec.layer]
        given, y = list(map(self._matrix, node.reads)), self._make_floats(node.out[0])
        for emitted in states.recurrence(given, spec, vectors, layer, group, y):
            self._emit(node.kind, emitted)

    _ssm = _delta_rule

    def _select(self, index: int, node: Node) -> None:
        if index in self._picked.values():
            return
        (out,) = node.out
        y = self._make_floats(out)
        self._emit("select", emit.select(self._matrix(node.reads[0]), y, out.width))


def _rows(value: Value) -> int:
    return ROWS_N if value.rows == TOKENS else ROWS_R


def _is_sum(node: Node) -> bool:
    """Is this a sum that others may do, being one without a factor?"""
    return node.kind == "add" and node.spec is None


def _both_ways(node: Node) -> bool:
    """Is this attention to both sides, which has no record for some rows alone?"""
    return isinstance(node.spec, AttentionSpec) and node.spec.bidirectional


def _activation(node: Node | None) -> str | None:
    return node.spec.name if node is not None and isinstance(node.spec, ActivationSpec) else None


def tables(graph: Graph) -> list[WeightRef]:
    """The tables that are read row by row."""
    return [node.weights[0] for node in graph.nodes if node.kind == "embed"]
