"""Execution of a graph's nodes one by one over a backend's operators.

It knows only the lengths of arrays. It drops each value after its last reader: otherwise a prompt
of 8,000 tokens would keep every layer's values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ..base.exchange import ExchangeSpec
from ..base.graph import (
    TOKENS,
    ActivationSpec,
    AddSpec,
    AttentionSpec,
    BagsSpec,
    EmbedSpec,
    ExpertsSpec,
    GivenSpec,
    GroupNormSpec,
    LatentSpec,
    LinearSpec,
    Node,
    NormSpec,
    PartSpec,
    PictureConvSpec,
    RouteSpec,
    Rows,
    ScaleSpec,
    ScatterSpec,
    Value,
    WeightRef,
    WindowSpec,
)
from ..base.joins import AroundSpec, CodesSpec
from ..base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from .arrays import Array, floats, host, joined, tensor
from .dealing import Dealing
from .fuse import Joining, Norm
from .operators import KvCache, KvLayer, Operators, StepBatch
from .pictured import attend, convolve, group_norm
from .ranked import bags
from .ranks import ExpertShare, Ranks
from .timing import OperatorTimes
from .windows import windows

if TYPE_CHECKING:
    from .prepared import Prepared

Adding = Callable[[WeightRef, Array, Array], None]
"""Function that adds to a product: its weight, x, y."""
TIMED_AS = {
    "add_norm": "norm",
    "norm_codes": "norm",
    "gated_codes": "gated",
    "route": "experts",
    "absorb": "attend",
    "unpack": "attend",
}
"""Joined kinds of node → the operator under which they are counted."""


class Interpreter:
    """Nodes in order, with all their inputs looked up once."""

    def __init__(
        self,
        nodes: Sequence[Node],
        weights: Prepared,
        outputs: Sequence[Value],
        ranks: Ranks | None = None,
        dealing: Dealing | None = None,
    ) -> None:
        """`ranks`, `dealing`: exchanges and expert placement, if the nodes are a rank's part."""
        self._weights, self._outputs = weights, outputs
        self._ranks, self._dealing = ranks, dealing
        last: dict[Value, int] = {}
        for index, node in enumerate(nodes):
            for value in (*node.out, *node.reads):
                last[value] = index
        ends: dict[int, list[Value]] = {}
        for value, index in last.items():
            if value not in outputs:
                ends.setdefault(index, []).append(value)
        self._steps = [
            (node, getattr(_Run, f"_{node.kind}"), ends.get(index, ()))
            for index, node in enumerate(nodes)
        ]

    def run(
        self,
        ops: Operators,
        batch: StepBatch | None,
        cache: KvCache | None,
        given: Mapping[Value, Array],
        adding: Adding | None = None,
        times: OperatorTimes | None = None,
    ) -> list[Array]:
        """Run the nodes and return the outputs. `given`: arrays of the graph's inputs. `times`
        takes each node's time."""
        values = dict(given)
        self.go_on(ops, batch, cache, values, adding=adding, times=times)
        return [values[value] for value in self._outputs]

    def go_on(
        self,
        ops: Operators,
        batch: StepBatch | None,
        cache: KvCache | None,
        values: dict[Value, Array],
        first: int = 0,
        last: int | None = None,
        *,
        adding: Adding | None = None,
        times: OperatorTimes | None = None,
    ) -> None:
        """Run the nodes from `first` to before `last`. `values`: the live values; those of earlier
        nodes come in, those of these nodes go out."""
        run = _Run(ops, batch, cache, self._weights, values, adding)
        run.ranks, run.dealing = self._ranks, self._dealing
        for node, function, ends in self._steps[first:last]:
            run.ends = ends
            if times is None:
                function(run, node)
            else:
                times.run(*_named(node), partial(function, run, node))
            for value in ends:
                del values[value]


def _named(node: Node) -> tuple[str, tuple[int, int] | None]:
    """Return (a node's name in the roofline, (out, in) of the weight that it multiplies by)."""
    if node.kind not in ("linear", "linear_codes", "around"):
        return TIMED_AS.get(node.kind, node.kind), None
    gated = isinstance(node.spec, AroundSpec) and node.spec.gate is not None
    return "gate_up" if gated else "linear", (node.weights[0].out, node.weights[0].width)


class _Run:
    """One run: a method for each kind of node."""

    def __init__(
        self,
        ops: Operators,
        batch: StepBatch | None,
        cache: KvCache | None,
        weights: Prepared,
        values: dict[Value, Array],
        adding: Adding | None,
    ) -> None:
        self.ops, self.weights, self.values, self.adding = ops, weights, values, adding
        self._batch, self._cache = batch, cache
        self.ends: Sequence[Value] = ()
        """Values that no node reads after this one."""
        self.ranks: Ranks | None = None
        self.dealing: Dealing | None = None

    @property
    def batch(self) -> StepBatch:
        assert self._batch is not None, "a head reads nothing of a step"
        return self._batch

    @property
    def cache(self) -> KvCache:
        assert self._cache is not None, "a head reads nothing of a cache"
        return self._cache

    def _spent(self, value: Value) -> Array:
        """Return a value's array for an operator to overwrite: a copy if it is read again."""
        array = self.values[value]
        if value in self.ends:
            return array
        return array.clone() if hasattr(array, "clone") else array.copy()

    def _embed(self, node: Node) -> None:
        if isinstance(node.spec, BagsSpec):
            assert self.batch.ranked is not None, "the step has no features"
            x = self.values[node.reads[0]] if node.reads else None
            given = x, self.batch.ranked, node.spec, list(map(self.weights.weight, node.weights))
            self.values[node.out[0]] = bags(*given, host=self.ops.host)
            return
        if isinstance(node.spec, GivenSpec):
            assert self.batch.pictured is not None, "the step has no pictures"
            self.values[node.out[0]] = self._of_host(getattr(self.batch.pictured, node.spec.of))
            return
        spec = cast(EmbedSpec, node.spec)
        index = getattr(self.batch, spec.index)
        assert index is not None, f"the step has no {spec.index}"
        table = self.weights.weight(node.weights[0])
        index = self._of_host(index) if isinstance(index, np.ndarray) else index
        self.values[node.out[0]] = self.ops.embed(index, table, spec.scale)

    def _of_host(self, numbers: npt.NDArray[np.generic]) -> Array:
        """Return numbers of the host in the form that operators take."""
        return numbers if self.ops.host else tensor(numbers)

    def _scatter(self, node: Node) -> None:
        encoded = self.batch.encoded
        assert encoded is not None, "the step has no rows of other parts"
        x, spec = self._spent(node.reads[0]), cast(ScatterSpec, node.spec)
        rows = encoded.rows[:, spec.first : spec.first + node.out[0].width]
        if spec.adds:
            rows = x[encoded.places] + rows
        self.values[node.out[0]] = self.ops.scatter(x, rows, encoded.places)

    def _window(self, node: Node) -> None:
        spec = cast(WindowSpec, node.spec)
        self.values[node.out[0]] = windows(self.values[node.reads[0]], spec)

    def _conv(self, node: Node) -> None:
        weight, bias = self.weights.weight(node.weights[0]), self.weights.vector(node.weights[1])
        x, spec = self.values[node.reads[0]], cast(PictureConvSpec, node.spec)
        strips = convolve(x, spec, lambda rows: self.ops.linear(rows, weight, bias))
        self.values[node.out[0]] = joined(strips, 0)

    def _group_norm(self, node: Node) -> None:
        spec, (gain, shift) = cast(GroupNormSpec, node.spec), map(self.weights.vector, node.weights)
        y = group_norm(self.values[node.reads[0]], spec, gain, shift, len(self.batch.lengths))
        self.values[node.out[0]] = self.ops.activate(y, "silu") if spec.silu else y

    def _beside(self, node: Node) -> None:
        self.values[node.out[0]] = joined([self.values[value] for value in node.reads], 1)

    def _norm(self, node: Node) -> None:
        spec, x = cast(NormSpec, node.spec), self.values[node.reads[0]]
        if len(node.reads) > 1:
            gains, shifts = map(self._by_token, node.reads[1:])
            ones = self._of_host(np.ones(node.out[0].width, np.float32))
            plain = self.ops.layer_norm(x, ones, None, spec.eps)
            self.values[node.out[0]] = plain * (gains + spec.offset) + shifts
            return
        gain, *shift = map(self.weights.vector, node.weights)
        if spec.kind == "layer":
            shifted = shift[0] if shift else None
            self.values[node.out[0]] = self.ops.layer_norm(x, gain, shifted, spec.eps)
        else:
            self.values[node.out[0]] = self.ops.rms_norm(x, gain, spec.eps, spec.offset)

    def _add(self, node: Node) -> None:
        residual, x = node.reads
        factor = node.spec.scale if isinstance(node.spec, AddSpec) else 1.0
        self.values[node.out[0]] = self.ops.add(self.values[x], self._spent(residual), factor)

    def _modulate(self, node: Node) -> None:
        residual, *x = (self.values[value] for value in node.reads[:-1])
        factors = self._by_token(node.reads[-1], node.out[0].rows)
        self.values[node.out[0]] = residual + (factors * x[0] if x else factors)

    def _bounds(self, rows: Rows) -> npt.NDArray[np.int32]:
        """Return the bounds of the entries in a value of so many rows."""
        starts = host(self.batch.query_starts)
        return starts if rows == TOKENS else starts * rows.times // rows.over

    def _by_token(self, value: Value, rows: Rows = TOKENS) -> Array:
        """Return rows [B, ·] of entries repeated for each of their tokens [N, ·]."""
        starts = self._bounds(rows)
        owners = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        return self.values[value][owners]

    def _add_norm(self, node: Node) -> None:
        residual, x = node.reads
        spec, gain = cast(NormSpec, node.spec), self.weights.vector(node.weights[0])
        normed, total = self.ops.add_rms_norm(
            self.values[x], self._spent(residual), gain, spec.eps, spec.offset
        )
        self.values.update(zip(node.out, (normed, total), strict=True))

    def _scale(self, node: Node) -> None:
        x, factor = self.values[node.reads[0]], cast(ScaleSpec, node.spec).factor
        for one in map(self.weights.vector, node.weights):
            x = x * (float(one[0]) if self.ops.host else one)
        self.values[node.out[0]] = x if factor == 1.0 else x * factor

    def _linear(self, node: Node) -> None:
        matrix, *bias = node.weights
        x, weight = self.values[node.reads[0]], self.weights.weight(matrix)
        if matrix.role == "logits":
            spec = cast(LinearSpec, node.spec)
            home = None if self._batch is None else self._batch.logits
            if home is None or self.ops.joined is None:
                logits = self.ops.logits(x, weight, spec.softcap)
            else:
                logits = self.ops.joined.logits(x, weight, spec.softcap, home)
            self.values[node.out[0]] = logits if spec.scale == 1.0 else logits * spec.scale
            return
        y = self.ops.linear(x, weight, self.weights.vector(bias[0]) if bias else None)
        if self.adding is not None:
            self.adding(matrix, x, y)
        self.values[node.out[0]] = y

    def _write(self, node: Node) -> None:
        spec, qkv = cast(AttentionSpec, node.spec), self.values[node.reads[0]]
        norms = tuple(map(self.weights.vector, node.weights))
        rope = self.weights.rope(spec)
        kept = (None, self.batch, 0) if spec.bidirectional else self._kv(spec)
        self.values[node.out[0]] = self.ops.write(qkv, spec, norms, rope, *kept)

    def _attend(self, node: Node) -> None:
        spec, x = cast(AttentionSpec, node.spec), self.values[node.reads[0]]
        kv, batch, group = (None, self.batch, 0) if spec.bidirectional else self._kv(spec)
        if spec.bidirectional and (spec.across or spec.reach or node.out[0].rows != TOKENS):
            self._attend_apart(node, spec)
            return
        if spec.across:
            assert batch.across is not None, "the step reads no inputs"
            batch = batch.across
        sinks = self.weights.vector(node.weights[0]) if node.weights else None
        self.values[node.out[0]] = self.ops.attend(x, spec, kv, batch, group, sinks)

    def _attend_apart(self, node: Node, spec: AttentionSpec) -> None:
        """Attend to rows of texts, or to the own entry with biases or at another size."""
        q, *others = (floats(self.values[value]) for value in node.reads)
        bounds = keys = self._bounds(node.out[0].rows)
        if others:
            assert self.batch.pictured is not None, "the step has no texts"
            keys = self.batch.pictured.text_starts
        kv = others[0] if others else q[:, spec.queries :]
        bias = floats(self.weights.vector(node.weights[0])) if node.weights else None
        self.values[node.out[0]] = self._of_host(attend(q, kv, spec, bounds, keys, bias))

    def _absorb(self, node: Node) -> None:
        q, own, rotary = (self.values[value] for value in node.reads)
        spec, packing = cast(LatentSpec, node.spec), self.weights.copies(node.weights[0])
        self.values[node.out[0]] = self.ops.absorb(q, own, rotary, spec, packing)

    def _unpack(self, node: Node) -> None:
        spec, mixed = cast(LatentSpec, node.spec), self.values[node.reads[0]]
        unpacking = self.weights.copies(node.weights[0])
        self.values[node.out[0]] = self.ops.unpack(mixed, spec, unpacking)

    def _kv(self, spec: AttentionSpec) -> tuple[KvLayer, StepBatch, int]:
        """Return the layer's KV, the step, and the layer's group in it."""
        return self.cache.layers[spec.layer], self.batch, self.cache.groups[spec.layer]

    def _gated(self, node: Node) -> None:
        name = cast(ActivationSpec, node.spec).name
        self.values[node.out[0]] = self.ops.gated(self.values[node.reads[0]], name)

    def _activate(self, node: Node) -> None:
        name = cast(ActivationSpec, node.spec).name
        self.values[node.out[0]] = self.ops.activate(self.values[node.reads[0]], name)

    def _multiply(self, node: Node) -> None:
        name = cast(ActivationSpec, node.spec).name
        x, gate = (self.values[value] for value in node.reads)
        self.values[node.out[0]] = self.ops.multiply(x, gate, name)

    def _short_conv(self, node: Node) -> None:
        spec = cast(ConvSpec, node.spec)
        taps, *bias = map(self.weights.vector, node.weights)
        state = self.cache.states[spec.layer], self.batch, self.cache.groups[spec.layer]
        x = self.values[node.reads[0]]
        found = self.ops.short_conv(x, spec, taps, bias[0] if bias else None, *state)
        self.values[node.out[0]] = found

    def _delta_rule(self, node: Node) -> None:
        spec = cast(DeltaSpec | SsmSpec, node.spec)
        given = [self.values[value] for value in node.reads]
        vectors = list(map(self.weights.vector, node.weights))
        state = self.cache.states[spec.layer], self.batch, self.cache.groups[spec.layer]
        self.values[node.out[0]] = self.ops.recur(given, spec, vectors, *state)

    _ssm = _delta_rule

    def _route(self, node: Node) -> None:
        spec, vectors = cast(RouteSpec, node.spec), map(self.weights.vector, node.weights)
        found = self.ops.route(self.values[node.reads[0]], spec, *spec.split(vectors))
        self.values.update(zip(node.out, found, strict=True))

    def _experts(self, node: Node) -> None:
        spec = cast(ExpertsSpec, node.spec)
        x, chosen, shares = (self.values[value] for value in node.reads)
        gate_up, down = map(self.weights.copies, node.weights[:2])
        biases = self.weights.biases(node.weights[2:])
        share = None
        if spec.dealt is not None or spec.inner is not None:
            placed = (self.dealing, spec.dealt) if spec.dealt is not None else ()
            share = ExpertShare(self._together, spec.inner, *placed)
        how = spec.activation, biases, spec.inside, share
        found = self.ops.experts(x, chosen, shares, gate_up, down, *how)
        self.values[node.out[0]] = found

    def _part(self, node: Node) -> None:
        first, (out,) = cast(PartSpec, node.spec).first, node.out
        self.values[out] = self.values[node.reads[0]][:, first : first + out.width]

    @property
    def _together(self) -> Ranks:
        assert self.ranks is not None, "a part of a model runs among its ranks"
        return self.ranks

    def _exchange(self, node: Node) -> None:
        bounds = cast(ExchangeSpec, node.spec).bounds
        self.values[node.out[0]] = self._together.gather(self.values[node.reads[0]], bounds)

    def _receive(self, node: Node) -> None:
        (out,), tokens = node.out, self.batch.tokens
        self.values[out] = self._together.receive(len(tokens), out.width, like=tokens)

    def _select(self, node: Node) -> None:
        x = self.values[node.reads[0]]
        self.values[node.out[0]] = self.ops.select(x, self.batch.sample_rows)

    @property
    def joined(self) -> Joining:
        assert self.ops.joined is not None, "nodes are joined for those who compute joined ones"
        return self.ops.joined

    def _around(self, node: Node) -> None:
        spec = cast(AroundSpec, node.spec)
        x, *residual = (self.values[value] for value in node.reads)
        norm = None
        if spec.norm is not None and spec.gain is not None:
            norm = Norm(self.weights.vector(spec.gain), spec.norm.eps, spec.norm.offset)
        self.values[node.out[0]] = self.joined.linear_around(
            x,
            self.weights.weight(node.weights[0]),
            None if spec.bias is None else self.weights.vector(spec.bias),
            norm,
            "" if spec.gate is None else spec.gate.name,
            residual[0] if residual else None,
        )

    def _norm_codes(self, node: Node) -> None:
        """Write a norm as codes; with two inputs, the norm of their sum, which is a result too."""
        spec = cast(CodesSpec, node.spec)
        of, consumer = cast(NormSpec, spec.of), self.weights.weight(spec.consumer)
        norm = Norm(self.weights.vector(node.weights[0]), of.eps, of.offset)
        *residual, x = node.reads
        spent = self._spent(residual[0]) if residual else None
        found = self.joined.norm_codes(self.values[x], spent, norm, consumer)
        self.values.update(zip(node.out, found[: len(node.out)], strict=True))

    def _gated_codes(self, node: Node) -> None:
        spec = cast(CodesSpec, node.spec)
        name, consumer = cast(ActivationSpec, spec.of).name, self.weights.weight(spec.consumer)
        found = self.joined.gated_codes(self.values[node.reads[0]], name, consumer)
        self.values.update(zip(node.out, found, strict=True))

    def _linear_codes(self, node: Node) -> None:
        matrix, *bias = node.weights
        codes, scales = (self.values[value] for value in node.reads)
        added = self.weights.vector(bias[0]) if bias else None
        self.values[node.out[0]] = self.joined.linear_codes(
            codes, scales, self.weights.weight(matrix), added
        )
