"""Lowering of a graph's nodes to records: `fusion` has found the joins and the places of values,
`placement` gives these memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ...base.exchange import ExchangeSpec
from ...base.graph import (
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    BagsSpec,
    EmbedSpec,
    ExpertsSpec,
    GivenSpec,
    Graph,
    LinearSpec,
    Node,
    NormSpec,
    PartSpec,
    RouteSpec,
    ScaleSpec,
    ScatterSpec,
    Value,
    WeightRef,
    WindowSpec,
)
from ...base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from ..operators import KvCache
from ..weights import LoraWeight
from . import bags, emit, latent, mixture, pictures, states
from .emit import NOT_QUANTISED, Emitted, Matrix
from .fusion import Unrecordable, rows_of
from .placement import Placement
from .records import ROWS_N, HrKv, HrLinear, HrPiece, HrQuantised


class Lowering(Placement):
    """Lowering of one graph, once; its results are in its attributes."""

    def run(self) -> list[Emitted]:
        """Emit all records. Raises `Unrecordable`."""
        for value in self._graph.inputs:
            self._make_floats(value)
        for index, node in enumerate(self._nodes):
            lower: Callable[[int, Node], None] | None = getattr(self, f"_{node.kind}", None)
            if lower is None:
                raise Unrecordable(f"there is no record of {node.kind}")
            lower(index, node)
            for place in self._dying[index]:
                if place not in self._before:
                    self._bury(place)
            self.ends.append(len(self.emitted))
        self._find_head()
        return self.emitted

    def _find_head(self) -> None:
        node, (_, op) = self._nodes[-1], self.emitted[-1]
        share = node.spec if isinstance(node.spec, ExchangeSpec) else None
        if share is not None:
            _, op = self.emitted[-2]
        if (
            node.out[0] is self._graph.outputs.get("logits")
            and isinstance(op, HrLinear)  # No addition and no cap follows it.
            and op.count == 1
        ):
            self.head, self.share = op, share

    def _exchange(self, index: int, node: Node) -> None:
        (whole,), spec = node.out, node.spec
        assert isinstance(spec, ExchangeSpec)
        rooms = [self._floats.get(self._places[whole]), self._codes.get(whole)]
        self._meet(
            emit.piece(room, spec.bounds, rows_of(whole)) for room in rooms if room is not None
        )

    def _meet(self, pieces: Iterable[HrPiece]) -> None:
        commons = self._arena.commons
        assert commons is not None
        self._emit("exchange", emit.exchange(commons, self.meetings, list(pieces)))
        self.meetings += 1
        # A rank that gets here has read all values that died before.
        for back in self._idle:
            back()
        self._idle.clear()

    def _receive(self, index: int, node: Node) -> None:
        self._hand_over(self._make_floats(node.out[0]), node.out[0], -1)

    def hand_on(self, value: Value) -> None:
        """End by handing the rows of an output to the next stage."""
        self._hand_over(self._matrix(value), value, 1)

    def _hand_over(self, rows: Matrix, value: Value, step: int) -> None:
        commons, most = self._arena.commons, self._arena.most(ROWS_N)
        assert commons is not None
        giver = commons.process - (commons.ranks if step < 0 else 0)
        link = self._arena.link(giver, value.width)
        given = commons, link, rows, value.width, most, step
        self._emit("receive" if step < 0 else "hand on", emit.handover(*given))

    def _embed(self, index: int, node: Node) -> None:
        spec = node.spec
        x, y = list(map(self._matrix, node.reads)), self._make_floats(node.out[0])
        if isinstance(spec, BagsSpec):
            self._emit("bags", bags.bags(node, spec, x, self._weights, y))
            return
        if isinstance(spec, GivenSpec):
            self._emit("given", bags.given(node, y))
            return
        assert isinstance(spec, EmbedSpec)
        given = self._weight(node), spec.scale, y, spec.index, rows_of(node.out[0])
        self._emit("embed", emit.embed(*given))

    def _scatter(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, ScatterSpec)
        emitted = emit.scatter(self._matrix(node.out[0]), node.out[0].width, adds=spec.adds)
        self.scattered.append((emitted[1], spec.first))
        self._emit("scatter", emitted)

    def _window(self, index: int, node: Node) -> None:
        assert isinstance(node.spec, WindowSpec)
        assert node.reads[0] not in self._windows, "windows of windows are not described"
        self._windows[node.out[0]] = node.spec

    def _norm(self, index: int, node: Node) -> None:
        (x, *adaptive), spec, residual = node.reads, node.spec, None
        assert isinstance(spec, NormSpec)
        if adaptive:
            y, q = self._outputs(node.out[0], grain=x.width)
            rows = list(map(self._matrix, node.reads))
            self._emit("norm", emit.adaptive_norm(rows[0], rows[1], rows[2], spec, y, q, x.width))
            return
        if index and self._norm_of(index - 1) is node and not self._is_summed(index - 1):
            residual, x = self._nodes[index - 1].reads
        (out,) = node.out
        y, q = self._outputs(out, grain=out.width)
        given = self._matrix(x), None if residual is None else self._matrix(residual)
        gain, *shift = (self._weights.vector(ref) for ref in node.weights)
        if spec.kind == "layer":
            shifted = shift[0] if shift else None
            emitted = emit.layer_norm(*given, gain, shifted, spec.eps, y, q, rows_of(out))
        else:
            emitted = emit.norm(*given, gain, spec.eps, spec.offset, y, q, rows_of(out))
        self._emit("norm", emitted)

    def _add(self, index: int, node: Node) -> None:
        residual, x = node.reads
        self._lies_as(node.out[0], residual)
        if self._norm_of(index) is None and not self._is_summed(index):
            given = self._matrix(x), self._matrix(residual), x.width, rows_of(x)
            factor = node.spec.scale if isinstance(node.spec, AddSpec) else 1.0
            self._emit("add", emit.add(*given, factor))

    def _modulate(self, index: int, node: Node) -> None:
        residual, *x, factors = map(self._matrix, node.reads)
        self._lies_as(node.out[0], node.reads[0])
        given = x[0] if x else emit.NOWHERE, factors, residual, node.out[0].width
        self._emit("modulate", emit.modulate(*given))

    def _scale(self, index: int, node: Node) -> None:
        (y,), spec = node.reads, node.spec
        self._lies_as(node.out[0], y)
        assert isinstance(spec, ScaleSpec)
        factor = math.prod(float(self._weights.vector(ref)[0]) for ref in node.weights)
        self._emit("scale", emit.scale(self._matrix(y), y.width, spec.factor * factor, rows_of(y)))

    def _linear(self, index: int, node: Node) -> None:
        (x,), (out,), spec = node.reads, node.out, node.spec
        assert isinstance(spec, LinearSpec)
        weight = self._weight(node)
        order = emit.order_of(weight)
        room = None if order is None else self._arena.codes(rows_of(x), x.width)
        codes = self._quantised(x, node) if room is None else room.struct
        if index in self._gates:
            return
        if room is not None:
            given = self._matrix(x), codes, x.width, rows_of(x), order
            self._emit("quantise", emit.quantise(*given))
            self._arena.give_back(rows_of(x), x.width, room)
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
                rows_of(x),
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
        """Return the codes of a node's input; make them here if the node needs them and there are
        none."""
        if self._reads_codes(node) and x not in self._codes:
            floats = self._matrix(x)
            self._emit("quantise", emit.quantise(floats, self._make_codes(x), x.width, rows_of(x)))
        return self._codes[x].struct if x in self._codes else NOT_QUANTISED

    def _conv(self, index: int, node: Node) -> None:
        x, y = self._matrix(node.reads[0]), self._make_floats(node.out[0])
        get = self._weights.weight, self._weights.vector
        prepared = [get[not ref.width](ref) for ref in node.weights]
        for name, emitted in pictures.records(node, x, y, prepared, self._arena):
            self._emit(name, emitted)

    _group_norm = _conv

    def _route(self, index: int, node: Node) -> None:
        (x,), spec = node.reads, node.spec
        assert isinstance(spec, RouteSpec)
        vectors = spec.split(map(self._weights.vector, node.weights))
        given = self._matrix(x), x.width, vectors, spec
        routed = mixture.Routed(*map(self._make_floats, node.out))
        self._emit("route", mixture.route(*given, routed, rows_of(x)))

    def _experts(self, index: int, node: Node) -> None:
        (x, *routed), spec, experts = node.reads, node.spec, self._mixture(node)
        assert isinstance(spec, ExpertsSpec)
        dealt, active = spec.dealt is not None, routed[0].width
        placed = self._arena.placed(experts, active, shared=spec.inner is not None, dealt=dealt)
        deal = None
        if self._dealing is not None and spec.dealt is not None:
            deal = mixture.deal_of(self._dealing, spec.dealt, placed)
        given = self._quantised(x, node), self._matrix(x) if experts.floats else None
        to = mixture.Routed(*map(self._matrix, routed))
        y = self._make_floats(node.out[0])
        place, up, down, *sums = mixture.experts(
            *given, to, experts, placed, spec[:2], y, rows_of(x), spec.inner, deal
        )
        self._emit("place", place)
        if spec.inner is not None or deal is not None:
            assert self._met.get(placed, -1) < self.meetings, "another rank may still read this"
        self._emit("experts_up", up)
        if spec.inner is not None:
            self._meet(mixture.pieces(placed, spec.inner, None))
            self._met[placed] = self.meetings
        self._emit("experts_down", down)
        if deal is not None:
            self._meet(mixture.pieces(placed, None, deal))
            self._met[placed] = self.meetings
            self._emit("experts_sum", sums[0])

    def _lora(self, x: Value, addition: LoraWeight, y: Matrix) -> None:
        width = len(addition.up) * addition.room
        inner = self._arena.floats(rows_of(x), width)
        made = emit.lora(self._matrix(x), addition, emit.matrix(inner), y, rows_of(x))
        for name, emitted in zip(("lora_down", "lora_up"), made, strict=True):
            self._emit(name, emitted)
        self._arena.give_back(rows_of(x), width, inner)

    def _write(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, AttentionSpec)
        norms = [self._weights.vector(ref) for ref in node.weights]
        table = self._weights.rope(spec)
        cache = emit.no_kv(spec) if spec.bidirectional else self._kv(spec)
        self._emit("rope", emit.rope(cache, self._matrix(node.reads[0]), spec, norms, table))

    def _kv(self, spec: AttentionSpec) -> HrKv:
        layer, group = self._cache.layers[spec.layer], self._cache.groups[spec.layer]
        return emit.kv(layer, spec.heads, spec.kv_heads, group)

    def _attend(self, index: int, node: Node) -> None:
        spec = node.spec
        assert isinstance(spec, AttentionSpec)
        if spec.bidirectional and _is_kept(self._cache, spec):
            # Products with quantised K and V take less than half the time of fp32.
            qkv, made = self._matrix(node.reads[0]), self._outputs(node.out[0], grain=spec.size)
            self._emit("rope", emit.rope(self._kv(spec), qkv, spec, (), None))
            given = self._kv(spec), qkv, *made, None
            how = spec, rows_of(node.out[0]), True, True  # Coarse, across.
            self._emit("attention", emit.attention(*given, *how))
            return
        if spec.bidirectional:
            sizes, y = (spec.heads, spec.size, spec.scale), self._make_floats(node.out[0])
            qkv, *kv = map(self._matrix, node.reads)
            bias = self._weights.vector(node.weights[0]) if spec.reach else None
            more = kv[0] if kv else emit.NOWHERE, bias, spec.reach
            op = emit.bidirectional(qkv, *sizes, y, *more, windowed=spec.windowed)
            self._emit("attention", op)
            return
        (out,) = self._nodes[self._picked.get(index, index)].out
        made = self._outputs(out, grain=spec.size)
        sinks = self._weights.vector(node.weights[0]) if node.weights else None
        given = self._kv(spec), self._matrix(node.reads[0]), *made, sinks
        self._emit("attention", emit.attention(*given, spec, rows_of(out), across=spec.across))

    def _absorb(self, index: int, node: Node) -> None:
        given, y = list(map(self._matrix, node.reads)), self._make_floats(node.out[0])
        for name, emitted in latent.absorb(node, given, self._heads(node), y, self._arena):
            self._emit(name, emitted)

    def _unpack(self, index: int, node: Node) -> None:
        (mixed,), weights = node.reads, self._heads(node)
        given = self._matrix(mixed) if self._reads_floats(node) else None
        codes, y = self._quantised(mixed, node), self._make_floats(node.out[0])
        self._emit(*latent.unpack(node, given, codes, weights, y, rows_of(mixed)))

    def _part(self, index: int, node: Node) -> None:
        assert isinstance(node.spec, PartSpec)
        self._lies_as(node.out[0], node.reads[0])
        self._first[node.out[0]] = self._first.get(node.reads[0], 0) + node.spec.first

    def _beside(self, index: int, node: Node) -> None:
        at, stride = self._make_floats(node.out[0])
        for value in node.reads:
            to = Matrix(at, stride)
            self._emit("beside", emit.columns(self._matrix(value), to, value.width, rows_of(value)))
            at += 4 * value.width

    def _gated(self, index: int, node: Node) -> None:
        (out,), spec = node.out, node.spec
        assert isinstance(spec, ActivationSpec)
        if index - 1 in self._gates:
            product = self._nodes[index - 1]
            weight, x = self._weight(product), self._codes[product.reads[0]].struct
            name = f"gate_up {weight.shape[0]}×{weight.shape[1]} {emit.parts_of(weight)[0].kind}"
            made = emit.gate_up(x, weight, spec.name, self._make_codes(out), rows_of(out))
            self._emit(name, made)
            return
        y, q = self._outputs(out, grain=self._full(out).width)
        given = self._matrix(node.reads[0]), out.width, spec.name, y, q
        self._emit("gated", emit.gated(*given, rows_of(out)))

    def _activate(self, index: int, node: Node) -> None:
        if node in self._activated.values():
            return
        (out,) = node.out
        y, q = self._outputs(out, grain=self._full(out).width)
        name = _activation(node)
        assert name is not None
        given = self._matrix(node.reads[0]), out.width, name, y, q
        self._emit("activate", emit.activate(*given, rows_of(out)))

    def _multiply(self, index: int, node: Node) -> None:
        (out,), name = node.out, _activation(node)
        assert name is not None
        y, q = self._outputs(out, grain=self._full(out).width)
        x, gate = map(self._matrix, node.reads)
        self._emit("multiply", states.multiply(x, gate, out.width, name, y, q, rows_of(out)))

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


def _is_kept(cache: KvCache, spec: AttentionSpec) -> bool:
    """Return whether a cache has room for K and V of bidirectional attention, which only the step's
    own tokens read."""
    return isinstance(cache.layers, Mapping) and spec.layer in cache.layers


def _activation(node: Node | None) -> str | None:
    return node.spec.name if node is not None and isinstance(node.spec, ActivationSpec) else None


def tables(graph: Graph) -> list[WeightRef]:
    """Return the tables that are read row by row, except those of bags, which are read often."""
    return [node.weights[0] for node in graph.nodes if isinstance(node.spec, EmbedSpec)]
