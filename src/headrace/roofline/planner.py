"""Planner of hardware, count and layout: the cheapest that is computed to keep an SLO.

For each device, weight format and layout (tensor, pipeline, expert and data parallelism), it finds
the batch, step token budget and load with which one replica serves most within the limits. The
replica works alone or as a prefill or a decode pool. This gives the replicas and their price. It is
an estimate of means with a margin (`steady` has the formulas); the simulator should check it
(`headrace plan` does before it prints anything).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ..base.arch import ModelArch
from ..base.errors import DoesNotFit, InvalidRequest
from ..base.layout import Layout
from ..models.registry import describe
from .counts import Case
from .hardware import DEVICES, Hardware
from .routing import typical_skew
from .steady import MAX_BATCH, Demand, Engine, Goal, State
from .weights import WeightBytes, parse_format

LOADS = (0.85, 0.6, 0.35)
"""Shares of the steady rate that are planned: arrivals come in bursts, and a low share keeps the
queue short."""
BUDGETS = (512, 2048, 8192)
"""Tokens of a step: a small one keeps ITL short, a large one prefills more cheaply."""
AS_GOOD = 0.95
"""Share of the best rate from which a larger step budget is preferred. By these formulas budgets
differ by a few percent; with spread lengths the simulator keeps a TTFT at up to a third more."""
FORMATS = ("bfloat16", "fp8")
"""Formats that answer as well as the published weights, as far as a benchmark can tell. Four bits
(int4, nvfp4) can cost quality: they are planned with only if asked for, or published."""
MAX_DEVICES = 32
"""Most devices of one replica."""
Role = Literal["all", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that are alike."""

    role: Role
    case: Case
    state: State
    """State of each engine; a replica has `Layout.engines` of them."""
    replicas: int

    @property
    def devices(self) -> int:
        return self.replicas * self.case.layout.devices


@dataclass(frozen=True, slots=True)
class Candidate:
    """One arrangement with its expected latency and price."""

    hardware: Hardware
    pools: tuple[Pool, ...]
    ttft: float
    tpot: float
    itl: float
    price_per_hour: float
    rate: float
    """Requests per second: those demanded or, of given devices, those that they should do."""

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def case(self) -> Case:
        return self.pools[-1].case

    def miss(self, goal: Goal) -> float:
        """See `Goal.miss`."""
        return goal.miss(self.ttft, self.tpot, self.itl)

    def cost_per_million(self, demand: Demand) -> float:
        """Return the price per million output tokens, at its rate."""
        return self.price_per_hour / (self.rate * demand.output_tokens * 3600) * 1e6

    @property
    def layout(self) -> str:
        """Replicas and their layouts, of each pool."""
        parts = []
        for pool in self.pools:
            layout = "" if pool.case.layout.devices == 1 else f" of {pool.case.layout}"
            role = "" if pool.role == "all" else f" {pool.role}"
            parts.append(f"{pool.replicas}{role}{layout}")
        return " + ".join(parts)

    def __str__(self) -> str:
        return f"{self.hardware.name}: {self.layout}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A layout that is impossible, or cannot keep the limits, and why."""

    device: str
    format: str
    layout: Layout
    reason: str
    fits: bool
    """Whether it would run, but not within the limits."""


@dataclass(slots=True)
class Found:
    """Result of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    """All that should keep the goal, the cheapest first."""
    rejected: list[Rejected] = field(default_factory=list)
    nearest: Candidate | None = None
    """The candidate whose worst limit is missed by least, if all miss one."""
    given: bool = False
    """Whether the devices were given, and the most requests per second are looked for."""
    settings: int = 0
    """Number of engine settings that were computed."""

    def sort(self) -> None:
        """Put the best first."""
        if self.given:
            self.candidates.sort(key=lambda one: (-one.rate, one.devices, len(one.pools)))
        else:
            self.candidates.sort(key=lambda one: (one.price_per_hour, one.devices, len(one.pools)))

    def keep_nearer(self, candidate: Candidate, goal: Goal) -> None:
        """Note a candidate that misses, if none missed by less."""
        held = self.nearest
        if held is None or candidate.miss(goal) < held.miss(goal):
            self.nearest = candidate


def search(
    arch: ModelArch,
    demand: Demand,
    goal: Goal,
    prices: dict[str, float],
    *,
    devices: Iterable[Hardware] = tuple(DEVICES.values()),
    formats: Iterable[str] = FORMATS,
    kv_dtype: str = "auto",
    pools: bool = True,
    max_devices: int = MAX_DEVICES,
    counts: Mapping[str, int] | None = None,
) -> Found:
    """Find all arrangements that should keep the goal, those that cannot, and the nearest to it.

    `prices` has one for each of `devices` (`read_prices`). With `counts`, the number of each device
    by its name, arrangements are of so many, and the best do most requests per second; the demanded
    rate does not matter. Else the best are the cheapest at the demanded rate.
    """
    verify(arch, demand, goal)
    found = Found(given=counts is not None)
    for hardware in devices:
        device = hardware.name
        for format in formats:
            parse_format(format)
            prefills: list[Pool] = []
            decodes: list[Pool] = []
            own = counts[device] if counts is not None else None
            for layout in layouts(arch, max_devices if own is None else min(own, max_devices)):
                case = make_case(arch, format, hardware, layout, kv_dtype)
                try:
                    engine, room = _engine(case, hardware, demand)
                except DoesNotFit as error:
                    found.rejected.append(
                        Rejected(device, format, layout, error.message, fits=False)
                    )
                    continue
                best = _together(engine, room, goal, prices[device], found, own)
                if best is not None:
                    found.candidates.append(best)
                if pools and hardware.link_bandwidth:
                    prefills += _best_pool("prefill", engine, room, goal, found)
                    decodes += _best_pool("decode", engine, room, goal, found)
            if prefills and decodes and own is None:
                found.candidates.append(
                    _apart(hardware, prefills, decodes, prices[device], demand.rate)
                )
            elif prefills and decodes and own is not None:
                pair = _pair(prefills, decodes, own)
                if pair is not None:
                    found.candidates.append(_apart(hardware, *pair, prices[device], None))
    found.sort()
    return found


def search_each(
    pool: Executor,
    arch: ModelArch,
    demand: Demand,
    goal: Goal,
    prices: dict[str, float],
    *,
    devices: Sequence[Hardware],
    **options: Any,
) -> Found:
    """`search` each device by a job of a pool; the result is that of one search."""
    if len(devices) == 1:
        return search(arch, demand, goal, prices, devices=devices, **options)
    verify(arch, demand, goal)
    found = Found(given=options.get("counts") is not None)
    one = partial(search, arch, demand, goal, prices, **options)
    for job in [pool.submit(one, devices=(device,)) for device in devices]:
        part = job.result()
        found.candidates += part.candidates
        found.rejected += part.rejected
        found.settings += part.settings
        if part.nearest is not None:
            found.keep_nearer(part.nearest, goal)
    found.sort()
    return found


def verify(arch: ModelArch, demand: Demand, goal: Goal) -> None:
    """Raise `InvalidRequest` for questions that no search can answer."""
    limits = [("ttft", goal.ttft), ("tpot", goal.tpot)]
    if goal.itl is not None:
        limits.append(("itl", goal.itl))
    for name, value in (
        ("rate", demand.rate),
        ("input", demand.input_tokens),
        ("output", demand.output_tokens),
        *limits,
    ):
        if not (math.isfinite(value) and value > 0):
            raise InvalidRequest(f"{name} must be above 0, not {value}", param=name)
    if "logits" not in describe(arch).outputs:
        raise InvalidRequest("an encoder has no TTFT and TPOT to plan for", param="model")
    length = demand.input_tokens + demand.output_tokens
    if length > arch.max_context:
        raise InvalidRequest(
            f"input and output together are {length:,} tokens, the model was made for "
            f"{arch.max_context:,}",
            param="input",
        )


def layouts(arch: ModelArch, most: int = MAX_DEVICES) -> Iterator[Layout]:
    """Yield layouts worth a try, small ones first; `Layout.refusal` says what the model forbids."""
    sizes = (1, 2, 4, 8)
    plain = [Layout(tp, pp) for pp in (1, 2, 4) for tp in sizes]
    if arch.moe is not None:
        plain += [Layout(tp, ep=True) for tp in sizes[1:]]
        plain += [
            Layout(tp, 1, True, dp) for tp in (1, 2, 4) for dp in (2, 4, 8, 16, 32) if tp * dp >= 2
        ]
    yield from sorted(
        (one for one in plain if one.devices <= most), key=lambda one: (one.devices, one.pp)
    )


def formats_of(published: WeightBytes) -> tuple[str, ...]:
    """Return weight formats to choose from: a model that is published narrow has its own alone."""
    wide = published.name in ("bfloat16", "float16", "float32")
    return FORMATS if wide else (published.name,)


def make_case(
    arch: ModelArch, format: str, hardware: Hardware, layout: Layout, kv_dtype: str = "auto"
) -> Case:
    """Make a case; KV "auto" is fp8 if weights are narrow and the device has fp8, else bfloat16."""
    weights = parse_format(format)
    if kv_dtype == "auto":
        narrow = weights.format in ("fp8", "nvfp4") and "fp8" in hardware.rates
        kv_dtype = "fp8" if narrow else "bfloat16"
    return Case(arch, weights, "bfloat16", kv_dtype, layout, typical_skew(arch))


def _engine(case: Case, hardware: Hardware, demand: Demand) -> tuple[Engine, int]:
    """Return (engine, sequences that it holds); raise `DoesNotFit` with the reason."""
    layout = case.layout
    reason = layout.refusal(case.arch)
    if reason is None and layout.devices > 1 and not hardware.link_bandwidth:
        reason = f"{hardware.name} has no link to others"
    if reason is None and layout.devices > hardware.node_devices and not hardware.fabric_bandwidth:
        reason = f"{layout.devices} devices are more than a node's {hardware.node_devices}"
    if reason is None and case.weights.format == "nvfp4" and "fp4" not in hardware.rates:
        reason = f"{hardware.name} does not compute in FP4"
    if reason is not None:
        raise DoesNotFit(reason)
    engine = Engine(case, hardware, demand)
    return engine, engine.room()


def batches(room: int) -> Iterator[int]:
    batch = 1
    while batch <= min(room, MAX_BATCH):
        yield batch
        batch = max(batch + 1, batch * 4 // 3)


def _together(
    engine: Engine, room: int, goal: Goal, price: float, found: Found, devices: int | None
) -> Candidate | None:
    """Find the setting with which one replica serves most within the goal; None if none does.

    `devices`: their number, if it is given.
    """
    kept: list[State] = []
    near: tuple[float, State] | None = None
    for batch in batches(room):
        if near is not None and engine.decode(batch) > goal.tpot:
            break  # More sequences never make a step shorter.
        for budget in BUDGETS:
            for load in LOADS:
                state = engine.together(batch, budget, load)
                if state is None:
                    continue
                found.settings += 1
                miss = goal.miss(state.ttft, state.tpot, state.itl)
                if miss <= 1:
                    kept.append(state)
                if near is None or miss < near[0]:
                    near = miss, state
    case, hardware, demand = engine.case, engine.hardware, engine.demand

    def candidate(state: State) -> Candidate:
        each, rate = state.rate * case.layout.engines, demand.rate
        replicas = math.ceil(rate / each)
        if devices is not None:
            replicas = devices // case.layout.devices
            rate = replicas * each
        hourly = replicas * case.layout.devices * price
        pool = Pool("all", case, state, replicas)
        return Candidate(hardware, (pool,), state.ttft, state.tpot, state.itl, hourly, rate)

    if kept:
        enough = AS_GOOD * max(state.rate for state in kept)
        good = (state for state in kept if state.rate >= enough)
        return candidate(max(good, key=lambda state: (state.step_tokens, state.rate)))
    if near is not None:
        state = near[1]
        found.rejected.append(
            Rejected(
                hardware.name,
                case.weights.name,
                case.layout,
                f"at best TTFT {state.ttft * 1e3:.0f} ms, TPOT {state.tpot * 1e3:.1f} ms, ITL "
                f"{state.itl * 1e3:.1f} ms",
                fits=True,
            )
        )
        found.keep_nearer(candidate(state), goal)
    return None


def _best_pool(role: Role, engine: Engine, room: int, goal: Goal, found: Found) -> list[Pool]:
    """Return the pool of this layout for the whole demand; [] if it misses its part of the goal."""
    states: list[State] = []
    for load in LOADS:
        if role == "prefill":
            states += [engine.prefill_only(budget, load) for budget in BUDGETS]
        else:
            states += [engine.decode_only(batch, load) for batch in batches(room)]
    found.settings += len(states)
    if role == "prefill":
        # The transfer of the KV over the link counts, for the goal and in the reported figures.
        moved = engine.transfer()
        states = [replace(state, ttft=state.ttft + moved) for state in states]
    kept = [state for state in states if goal.miss(state.ttft, state.tpot, state.itl) <= 1]
    if not kept:
        return []
    best = max(kept, key=lambda state: state.rate)
    layout, rate = engine.case.layout, engine.demand.rate
    return [Pool(role, engine.case, best, math.ceil(rate / (best.rate * layout.engines)))]


def _apart(
    hardware: Hardware,
    prefills: list[Pool],
    decodes: list[Pool],
    price: float,
    rate: float | None,
) -> Candidate:
    """Pair the cheapest prefill and decode pools: they meet only over the link.

    `rate`: the demanded one; None: the most that they do.
    """
    prefill = min(prefills, key=lambda pool: pool.devices)
    decode = min(decodes, key=lambda pool: pool.devices)
    hourly = (prefill.devices + decode.devices) * price
    state = decode.state
    if rate is None:
        rate = min(_rate(prefill), _rate(decode))
    return Candidate(
        hardware, (prefill, decode), prefill.state.ttft, state.tpot, state.itl, hourly, rate
    )


def _rate(pool: Pool, replicas: int | None = None) -> float:
    """Return the requests per second of a pool, or of a number of its replicas."""
    count = pool.replicas if replicas is None else replicas
    return count * pool.case.layout.engines * pool.state.rate


def _pair(
    prefills: list[Pool], decodes: list[Pool], devices: int
) -> tuple[list[Pool], list[Pool]] | None:
    """Return the (prefill, decode) pools that do most with a number of devices; None if they do
    not fit."""
    best: tuple[float, Pool, Pool] | None = None
    for prefill in prefills:
        size = prefill.case.layout.devices
        for decode in decodes:
            for count in range(1, devices // size + 1):
                left = (devices - count * size) // decode.case.layout.devices
                rate = min(_rate(prefill, count), _rate(decode, left))
                if left and (best is None or rate > best[0]):
                    best = rate, replace(prefill, replicas=count), replace(decode, replicas=left)
    return None if best is None else ([best[1]], [best[2]])


def best_of_each(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each device."""
    found: dict[str, Candidate] = {}
    for one in candidates:
        found.setdefault(one.hardware.name, one)
    return list(found.values())


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Return candidates that no cheaper one beats in TPOT: the benefit of more money."""
    front: list[Candidate] = []
    for candidate in candidates:
        if not front or candidate.tpot < front[-1].tpot:
            front.append(candidate)
    return front
