"""The operators one by one: each call builds its records and runs them at once.

The model's step uses `program` instead. Prompt log-probabilities, tests and steps beyond a
program's limits use these. Inputs are arrays of either kind; results are of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.config import Decision
from ...base.graph import AttentionSpec, Role, RouteSpec
from ...base.recurrent import ConvSpec, DeltaSpec, SsmSpec
from .. import latent
from ..arrays import Array, address, floats_like, stride
from ..attention_plan import Planner
from ..backend import Shelf
from ..operators import Dequantise, KvCache, KvLayer, StateLayer, StepBatch, StepLimits
from ..prepared import RopeTable
from ..program import CallByCall, Program
from ..ranks import ExpertShare
from ..weights import BlockWeight, StackedWeight, Weight
from . import bags, emit, mixture, states
from .drawing import drawing
from .emit import NOT_QUANTISED, Emitted, QuantisedRows, matrix
from .encode import Encoder
from .library import Team
from .panels import Packer, in_order
from .pieces import compile_entries
from .program import compile_program
from .records import ROWS_N, HrStep
from .sources import PanelSources, table
from .step import fill_step


class CpuOperators:
    """The operators on the CPU's kernels; `Operators` gives the meaning and shapes of each method.
    Activations are fp32."""

    name = "cpu"
    host = True
    joined = None

    def __init__(
        self,
        threads: int,
        level: str | None = None,
        shelf: Shelf | None = None,
        team: Team | None = None,
        quantise: str = "auto",
    ) -> None:
        """`team`: a thread pool to use in place of a new one; `quantise`: "int8" or "int4", the
        target kind of dense matrices."""
        self.team = team or Team(threads, level)
        self._packer = Packer(self.team, shelf)
        self.drawing = drawing(self.team)
        self._sources = PanelSources(quantise, Encoder(self.team), self._expand, shelf)

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        if role == "embed":
            return table(weight)
        if role == "bag":
            return bags.table(weight)
        sources, planes = self._sources.of(weight, role), role == "logits"
        packed = tuple(self._packer.pack(source, planes=planes) for source in sources)
        return StackedWeight(packed) if isinstance(weight, StackedWeight) else packed[0]

    @property
    def told(self) -> list[Decision]:
        """Decisions made while loading the weights."""
        return self._sources.told

    def _expand(self, blocks: BlockWeight) -> Array:
        return self.embed(np.arange(blocks.shape[0]), blocks, 1.0)

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        if any(node.kind == "conv" for node in plain.model.graph.nodes):
            return compile_entries(self.team, plain, limits)
        return compile_program(self, plain, limits)

    def compile_kernels(self, plain: CallByCall, limits: StepLimits) -> None:
        """The library has them."""

    def planner(self, cache: KvCache, drafts: int = 0) -> Planner | None:
        return None

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        return 0

    def embed(self, tokens: Array, weight: Weight, scale: float) -> Array:
        y = floats_like(tokens, len(tokens), weight.shape[1])
        tokens = in_order(tokens)
        step = HrStep(n=len(tokens), tokens=address(tokens))
        self._run([emit.embed(weight, scale, matrix(y))], step)
        return y

    def rms_norm(self, x: Array, weight: Array, eps: float, offset: float) -> Array:
        y = floats_like(x, *x.shape)
        op = emit.norm(matrix(x), None, weight, eps, offset, matrix(y), NOT_QUANTISED, ROWS_N)
        self._run([op], HrStep(n=len(x)))
        return y

    def add_rms_norm(
        self, x: Array, residual: Array, weight: Array, eps: float, offset: float
    ) -> tuple[Array, Array]:
        y = floats_like(x, *x.shape)
        op = emit.norm(
            matrix(x), matrix(residual), weight, eps, offset, matrix(y), NOT_QUANTISED, ROWS_N
        )
        self._run([op], HrStep(n=len(x)))
        return y, residual

    def add(self, x: Array, residual: Array, factor: float = 1.0) -> Array:
        x = x if stride(x, 1) == 1 else in_order(x)
        op = emit.add(matrix(x), matrix(residual), x.shape[1], ROWS_N, factor)
        self._run([op], HrStep(n=len(x)))
        return residual

    def linear(self, x: Array, weight: Weight, bias: Array | None) -> Array:
        x = x if stride(x, 1) == 1 else in_order(x)
        rows, width = x.shape
        y = floats_like(x, rows, weight.shape[0])
        ops: list[Emitted] = []
        codes = NOT_QUANTISED
        order = emit.order_of(weight)
        if emit.needs_codes(weight) or order is not None:
            room = QuantisedRows(rows, width)
            codes = room.struct
            ops.append(emit.quantise(matrix(x), codes, width, ROWS_N, order))
        ops.append(emit.linear(codes, matrix(x), weight, bias, matrix(y), ROWS_N))
        self._run(ops, HrStep(n=rows))
        return y

    def write(
        self,
        qkv: Array,
        spec: AttentionSpec,
        norms: Sequence[Array],
        rope: RopeTable | None,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
    ) -> Array:
        cache = emit.no_kv(spec)
        if kv is not None:
            cache = emit.kv(kv, spec.heads, spec.kv_heads, group)
        op = emit.rope(cache, matrix(qkv), spec, norms, rope)
        self._run([op], fill_step(HrStep(), batch))
        return qkv if kv is None else qkv[:, : spec.queries]

    def attend(
        self,
        q: Array,
        spec: AttentionSpec,
        kv: KvLayer | None,
        batch: StepBatch,
        group: int,
        sinks: Array | None = None,
    ) -> Array:
        q = q if stride(q, 1) == 1 else in_order(q)
        y = floats_like(q, len(q), spec.queries)
        if kv is None:
            given = matrix(q), spec.heads, spec.size, spec.scale, matrix(y)
            op = emit.bidirectional(*given, windowed=spec.windowed)
        else:
            op = emit.attention(
                emit.kv(kv, spec.heads, spec.kv_heads, group),
                matrix(q),
                matrix(y),
                NOT_QUANTISED,
                sinks,
                spec,
                ROWS_N,
            )
        self._run([op], fill_step(HrStep(), batch))
        return y

    def gated(self, gate_up: Array, activation: str) -> Array:
        rows, both = gate_up.shape
        y = floats_like(gate_up, rows, both // 2)
        self._run(
            [emit.gated(matrix(gate_up), both // 2, activation, matrix(y), NOT_QUANTISED, ROWS_N)],
            HrStep(n=rows),
        )
        return y

    absorb, unpack = latent.absorb, latent.unpack

    def multiply(self, x: Array, gate: Array, activation: str) -> Array:
        y = floats_like(x, *x.shape)
        op = states.multiply(
            matrix(x), matrix(gate), x.shape[1], activation, matrix(y), NOT_QUANTISED, ROWS_N
        )
        self._run([op], HrStep(n=len(x)))
        return y

    def short_conv(
        self,
        x: Array,
        spec: ConvSpec,
        taps: Array,
        bias: Array | None,
        layer: StateLayer,
        batch: StepBatch,
        group: int,
    ) -> Array:
        y = floats_like(x, len(x), x.shape[1] // (3 if spec.gated else 1))
        vectors = [taps] if bias is None else [taps, bias]
        op = states.short_conv(matrix(x), spec, vectors, layer, group, matrix(y))
        self._run([op], fill_step(HrStep(), batch))
        return y

    def recur(
        self,
        given: Sequence[Array],
        spec: DeltaSpec | SsmSpec,
        weights: Sequence[Array],
        layer: StateLayer,
        batch: StepBatch,
        group: int,
    ) -> Array:
        y = floats_like(given[0], len(given[0]), spec.values)
        ops = states.recurrence(list(map(matrix, given)), spec, weights, layer, group, matrix(y))
        self._run(list(ops), fill_step(HrStep(), batch))
        return y

    def route(
        self, logits: Array, spec: RouteSpec, bias: Array | None, gains: Array | None = None
    ) -> tuple[Array, Array]:
        """Route as `Operators.route` does. Experts are int32 in the memory of floats, as `experts`
        takes them."""
        rows, count = logits.shape
        made = [floats_like(logits, rows, spec.active) for _ in range(2)]
        routed = mixture.Routed(*map(matrix, made))
        vectors = bias, gains
        op = mixture.route(matrix(logits), count, vectors, spec, routed, ROWS_N)
        self._run([op], HrStep(n=rows))
        return made[0], made[1]

    def experts(
        self,
        x: Array,
        chosen: Array,
        shares: Array,
        gate_up: list[Weight],
        down: list[Weight],
        activation: str,
        biases: tuple[Array, Array] | None = None,
        inside: bool = False,
        share: ExpertShare | None = None,
    ) -> Array:
        x = x if stride(x, 1) == 1 else in_order(x)
        (rows, width), active = x.shape, chosen.shape[1]
        layer = mixture.Mixture(gate_up, down, biases)
        y, deal = floats_like(x, rows, down[0].shape[0]), None
        dealing = None if share is None else share.dealing
        take = None if share is None else share.ranks.rooms()
        placed = mixture.Placed(layer, rows, active, take, dealt=dealing is not None)
        if share is not None and dealing is not None:
            deal = mixture.deal_of(dealing, share.mixture, placed)
        room = QuantisedRows(rows, width if layer.codes else 0)
        ops = [emit.quantise(matrix(x), room.struct, width, ROWS_N)] if layer.codes else []
        routed, spec = mixture.Routed(matrix(chosen), matrix(shares)), (activation, inside)
        inner = None if share is None else share.inner
        given = layer, placed, spec, matrix(y), ROWS_N, inner, deal
        made = mixture.experts(room.struct, matrix(x), routed, *given)
        if share is not None:
            # Ranks meet between up and down, or after down.
            met = emit.exchange(share.ranks.memory, 0, mixture.pieces(placed, inner, deal))
            made.insert(2 if deal is None else 3, met)
        self._run([*ops, *made], HrStep(n=rows))
        return y

    def scatter(self, x: Array, rows: Array, places: Array) -> Array:
        rows, places = in_order(rows), in_order(places)
        code, op = emit.scatter(matrix(x), x.shape[1])
        emit.fill_scatter(op, rows, places)
        self._run([(code, op)], HrStep())
        return x

    def select(self, x: Array, rows: Array) -> Array:
        return x if len(rows) == len(x) else x[rows]

    def logits(self, x: Array, weight: Weight, softcap: float | None) -> Array:
        y = self.linear(x, weight, None)
        if softcap is not None:
            self._run([emit.softcap(matrix(y), y.shape[1], softcap)], HrStep(r=len(y)))
        return y

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
        y = floats_like(x, *x.shape)
        op = emit.layer_norm(matrix(x), None, weight, bias, eps, matrix(y), NOT_QUANTISED, ROWS_N)
        self._run([op], HrStep(n=len(x)))
        return y

    def activate(self, x: Array, activation: str) -> Array:
        y = floats_like(x, *x.shape)
        op = emit.activate(matrix(x), x.shape[1], activation, matrix(y), NOT_QUANTISED, ROWS_N)
        self._run([op], HrStep(n=len(x)))
        return y

    def _run(self, ops: list[Emitted], step: HrStep) -> None:
        self.team.run(emit.program(ops), len(ops), step)
