"""Step time: each operator's time, its bottleneck, and its distance from the ceiling.

An operator takes the longer of its compute and its memory time, each at `Efficiency`'s share of the
ceiling. To this are added the part of the shorter time that is not overlapped, and a launch. A step
is the sum of its operators plus a fixed part.

No software can beat the limit next to it. Everything that can be fused is fused, so that
activations cost nothing, and computing overlaps with loading. A step takes at least all its
products and attention at the full rate, at least all its weights and KV at the full bandwidth, and
at least all its collectives at the full link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from .collectives import collective_seconds
from .composition import Composition
from .counts import Case, Count
from .efficiency import Curve
from .hardware import Hardware
from .operators import BY_STEP, PRICES, Group, after_graph, count_step, rows_of, split_groups
from .routing import padding
from .weights import PARTS

QUERY_TILE = 128
"""Queries that a prefill's attention works on at a time on a GPU (FlashAttention 2 and 3)."""

SHORT_QUERIES = 8
"""Most queries of an entry (a decode, or a verified draft) whose attention runs as decode: the
queries of all heads that share a KV head are one tile."""

FEW_ROWS, BOUNDED_ROWS = 12, 4
"""Rows of a product that our CPU kernels hold in registers and read the weights once for; greedy
rows up to which they bound the logits first and spare a head's low bits."""


KEPT = 200_000
"""Estimates that a `StepModel` remembers, at most."""


class Floor(NamedTuple):
    """Seconds of work on each resource at its full rate."""

    compute: float
    memory: float
    network: float


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator's predicted time (all its calls) next to its limit."""

    count: Count
    seconds: float
    floor: Floor
    bound: str
    """Largest part of the predicted time: compute, memory, network or launch."""

    @property
    def limit_seconds(self) -> float:
        """Least seconds of this operator alone."""
        return max(self.floor)


class Estimate(NamedTuple):
    """A step in four numbers."""

    seconds: float
    flops: float
    bytes: float
    """Bytes read and written."""
    launch: float = 0.0
    """The part of `seconds` in which calls begin and end, with the fixed part of a step."""


class CallTerms(NamedTuple):
    """The part of an operator's time that all calls of its class share."""

    curve: Curve
    rate: float
    """FLOP/s of the type that it computes in."""


class CallTime(NamedTuple):
    """One call of an operator, in seconds."""

    start: float
    """Time before and in addition to its work."""
    work: float
    bound: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """The predicted time of one step."""

    operators: list[OperatorTime]
    overhead_seconds: float
    tokens: int

    @property
    def seconds(self) -> float:
        return self.overhead_seconds + sum(operator.seconds for operator in self.operators)

    @property
    def limit_seconds(self) -> float:
        """Least seconds of any software on this hardware."""
        return max(self.floor)

    @property
    def floor(self) -> Floor:
        """Floor of all operators together."""
        return Floor(*map(sum, zip(*(operator.floor for operator in self.operators), strict=True)))

    @property
    def flops(self) -> float:
        return sum(operator.count.flops * operator.count.calls for operator in self.operators)

    @property
    def bytes(self) -> float:
        """Bytes of the device's memory; transfers over links are not included."""
        return sum(
            operator.count.bytes * operator.count.calls
            for operator in self.operators
            if operator.count.kind != "network"
        )

    @property
    def bound(self) -> str:
        """Bottleneck of most of the predicted time."""
        shares: dict[str, float] = {"overhead": self.overhead_seconds}
        for operator in self.operators:
            shares[operator.bound] = shares.get(operator.bound, 0.0) + operator.seconds
        return max(shares, key=lambda name: shares[name])


def step_time(case: Case, hardware: Hardware, step: Composition) -> StepTime:
    """Predict one step with the hardware's efficiencies."""
    terms = partial(terms_of, case, hardware)
    times = []
    for count in count_step(case, step):
        start, work, bound = call_time(case, hardware, terms, count)
        floor = Floor(*(each * count.calls for each in call_floor(case, hardware, count)))
        times.append(OperatorTime(count, (start + work) * count.calls, floor, bound))
    around = hardware.efficiency.around(step.tokens, step.samples)
    return StepTime(times, around, step.tokens)


def call_floor(case: Case, hardware: Hardware, count: Count) -> Floor:
    """Return the floor of one call at the ceilings.

    No tile is padded, and only weights and KV move. A head that bounds its logits reads only the
    bits that those bounds need. Other units compute the operators between the products at the same
    time.
    """
    if count.kind == "network":
        return Floor(0.0, 0.0, collective_seconds(hardware, count))
    compute = 0.0
    if count.kind != "vector":
        compute = compute_seconds(case, hardware, count, padded=False)
    moved = count.weight_bytes - count.spared_bytes + count.kv_bytes
    return Floor(compute, moved / hardware.bandwidth, 0.0)


def terms_of(case: Case, hardware: Hardware, count: Count) -> CallTerms:
    """Return the terms of an operator's class; of one that computes nothing with a rate of 0."""
    curve = hardware.efficiency.curve(count.kind, curve_names(case, hardware, count))
    return CallTerms(curve, _rate(case, hardware, count))


def call_time(
    case: Case, hardware: Hardware, terms: Callable[[Count], CallTerms], count: Count
) -> CallTime:
    """Time one call in its parts; an attention of two parts is bound by the longer one."""
    if count.parts:
        parts = [call_time(case, hardware, terms, part) for part in count.parts]
        longer = max(parts, key=lambda part: part.start + part.work)
        return CallTime(
            sum(part.start for part in parts), sum(part.work for part in parts), longer.bound
        )
    curve, rate = terms(count)
    if count.kind == "network":
        return CallTime(0.0, collective_seconds(hardware, count, curve), "network")
    compute = compute_seconds(case, hardware, count, padded=True, rate=rate) / curve.compute
    memory = memory_seconds(hardware, count) / curve.memory
    start = curve.floor_seconds
    start += (count.depth * curve.depth_seconds + count.pieces * curve.piece_seconds) / 1e3
    work = max(compute, memory) + (1 - curve.overlap) * min(compute, memory)
    if start > work:
        return CallTime(start, work, "launch")
    return CallTime(start, work, "compute" if compute > memory else "memory")


def curve_names(case: Case, hardware: Hardware, count: Count) -> tuple[str, ...]:
    """Return the classes of `Efficiency.curves` that an operator may belong to, narrowest first.

    product/fp8, experts/bfloat16: by the type that it computes in; experts before it by their
    weights' format, unpacked on the way (experts/int4); else product/few and product/many by its
    rows (a fit on whole steps can tell these apart); attention/decode and attention/prefill
    (latent/… for MLA): by whether entries have few queries, and before it the same with the head's
    size (attention/decode/64); all_reduce.
    """
    if count.kind in ("product", "experts"):
        size = "few" if count.rows <= FEW_ROWS else "many"
        names = f"{count.kind}/{product_type(case, hardware, count)}", f"product/{size}"
        if count.kind == "product":
            return names
        format = case.weights.format_of("experts")
        # Without units for it mxfp4 is unpacked on the way, as int4 is.
        unpacked = format == "mxfp4" and names[0] == f"experts/{case.dtype}"
        return (f"experts/{'int4' if unpacked else format}", *names)
    if count.kind == "attention":
        kind = "latent" if count.label == "latent" else "attention"
        short = count.rows <= SHORT_QUERIES * count.entries
        name = f"{kind}/{'decode' if short else 'prefill'}"
        short_name = name.replace("latent", "attention")
        return f"{name}/{case.arch.head_dim}", name, short_name
    return (count.operator,)


def product_type(case: Case, hardware: Hardware, count: Count) -> str:
    """Return the type that a product runs in, by the format of its weights."""
    label = count.label.partition("/")[0]
    role = "shared" if label.startswith("shared_") else "head" if label == "pooler" else label
    if role not in PARTS:
        role = "qkv"  # One part of it: q_a, kv_b …
    return hardware.compute_type(case.weights.format_of(role), case.dtype)


def _rate(case: Case, hardware: Hardware, count: Count) -> float:
    """Return the FLOP/s of the type that an operator computes in; 0 of a collective."""
    if count.kind in ("product", "experts"):
        return hardware.rate(product_type(case, hardware, count))
    if count.kind == "attention":
        return hardware.rate(case.dtype)
    return 0.0 if count.kind == "network" else hardware.rate("float32")


def compute_seconds(
    case: Case, hardware: Hardware, count: Count, *, padded: bool, rate: float | None = None
) -> float:
    """Return FLOPs over the full rate of the type; `padded` rounds up to whole tiles.

    Tiles hold a product's rows, or the queries of a prefill. A prefill's last tile also computes
    entries that the causal mask then hides: half a tile per query. `rate`: if it is known.
    """
    rate = _rate(case, hardware, count) if rate is None else rate
    if count.kind in ("product", "experts"):
        if padded and count.rows:
            tile, moe = hardware.tile_rows, case.arch.moe
            if count.everyone and moe is not None:
                more = padding(moe.experts, moe.active, count.everyone, case.skew, tile)
            else:
                more = -(-count.rows // tile) * tile / count.rows
            return count.flops / rate * more
        return count.flops / rate
    if count.kind == "attention":
        flops = count.flops
        if padded and hardware.tile_rows > 1 and count.rows > SHORT_QUERIES * count.entries:
            flops *= _tiled(count)
        return flops / rate
    return count.flops / rate


def _tiled(count: Count) -> float:
    """Return a prefill's work in whole tiles of queries, over its work."""
    length = count.rows / count.entries
    tiles = math.ceil(length / QUERY_TILE) * QUERY_TILE / length
    seen = max(1.0, count.depth - length / 2)
    return tiles * (seen + QUERY_TILE / 2) / seen


def memory_seconds(hardware: Hardware, count: Count) -> float:
    """Return bytes over the full bandwidth; activations within half the cache at its own."""
    spared = count.spared_bytes * (hardware.kind == "cpu" and count.rows <= BOUNDED_ROWS)
    from_memory = count.weight_bytes - spared + count.kv_bytes
    activations = count.read_bytes + count.write_bytes
    if hardware.cache_bandwidth and activations <= hardware.cache / 2:
        return from_memory / hardware.bandwidth + activations / hardware.cache_bandwidth
    return (from_memory + activations) / hardware.bandwidth


class StepModel:
    """Predictor of the steps of one model on one device, for the engine and the simulator.

    Only attention depends on the lengths of the sequences, so the rest is remembered by (tokens,
    samples), and of it each operator by its rows.
    """

    def __init__(self, case: Case, hardware: Hardware) -> None:
        self.case = case
        self.hardware = hardware
        self._rest: dict[tuple[int, int], Estimate] = {}
        self._parts: dict[tuple[int, int, str], Estimate] = {}
        """By group (the identity of what `_groups` keeps), its rows and mark."""
        self._terms: dict[tuple[str, str, bool, bool], CallTerms] = {}
        self._groups = {samples: split_groups(case, samples=samples) for samples in (False, True)}

    def time(self, step: Composition) -> StepTime:
        return step_time(self.case, self.hardware, step)

    def seconds(self, step: Composition) -> float:
        """Return only the predicted time; see `estimate`."""
        return self.estimate(step).seconds

    def estimate(self, step: Composition) -> Estimate:
        """Estimate time and work of a step, cheaply enough to ask for each one that runs.

        All but attention depends only on the numbers of tokens and samples, and is kept. With
        pipeline stages a micro-batch passes every stage in turn, so its latency is the whole sum.
        `pp` of them in flight each take that time, which the executor overlaps.
        """
        attending, others = self._groups[step.samples > 0]
        key = step.tokens, step.samples
        rest = self._rest.get(key)
        if rest is None:
            if len(self._rest) + len(self._parts) > KEPT:
                self._rest.clear()
                self._parts.clear()
            fixed = self.hardware.efficiency.around(*key)
            rest = _sum(self._others(step, others), Estimate(fixed, 0.0, 0.0, fixed))
            self._rest[key] = rest
        attention = _sum(self._of(step, attending), Estimate(0.0, 0.0, 0.0))
        return Estimate(*(mine + more for mine, more in zip(rest, attention, strict=True)))

    def _others(self, step: Composition, groups: tuple[Group, ...]) -> Iterator[Estimate]:
        for group in groups:
            rows, mark = rows_of(self.case, step, group)
            if (found := self._parts.get((id(group), rows, mark))) is not None:
                yield found
                continue
            for found in self._of(step, (group,)):
                if group.node.kind not in BY_STEP:
                    self._parts[id(group), rows, mark] = found
                yield found
        for count in after_graph(self.case, step):
            yield self._all_calls(count)

    def _of(self, step: Composition, groups: tuple[Group, ...]) -> Iterator[Estimate]:
        for group in groups:
            rows, mark = rows_of(self.case, step, group)
            count = PRICES[group.node.kind](self.case, step, group, rows, mark)
            if count is not None:
                yield self._all_calls(count)

    def _all_calls(self, count: Count) -> Estimate:
        calls = count.calls
        start, work, _ = call_time(self.case, self.hardware, self._terms_of, count)
        moved = calls * count.bytes * (count.kind != "network")
        return Estimate(calls * (start + work), calls * count.flops, moved, calls * start)

    def _terms_of(self, count: Count) -> CallTerms:
        """Return the terms, kept by what their class depends on (`curve_names`)."""
        few, short = count.rows <= FEW_ROWS, count.rows <= SHORT_QUERIES * count.entries
        key = count.operator, count.label, few, short
        found = self._terms.get(key)
        if found is None:
            found = self._terms[key] = terms_of(self.case, self.hardware, count)
        return found


def _sum(parts: Iterator[Estimate], before: Estimate) -> Estimate:
    seconds, flops, moved, launch = before
    for part in parts:
        seconds += part.seconds
        flops += part.flops
        moved += part.bytes
        launch += part.launch
    return Estimate(seconds, flops, moved, launch)
