"""Which hardware, how many, how laid out: the cheapest that the arithmetic says keeps an SLO.

For each device, weight format and number of ranks: the largest batch whose steady state keeps the
limits, the requests a second that one replica then serves, and so the replicas and their price.
An estimate of means with a margin; whoever asks should let the simulator check it (`headrace plan`
does before it prints anything).

Steady state of a replica with batch B, at R requests a second: each request costs its prefill t_p
and its share of `output` decode steps t_d(B), so R ≤ 1 / (t_p + output · t_d(B) / B). A decoded
token also waits for the prefills that come meanwhile: TPOT = t_d / (1 - R · t_p). A first token
waits for the step that runs, and for prompts before it as in a queue with fixed service times:
TTFT p99 ≈ t_d + t_p · (1 + ln(100) · ρ / (2 · (1 - ρ))) with ρ = R · t_p.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..base.arch import ModelArch
from ..base.errors import DoesNotFit, InvalidRequest
from .composition import decode_step, prefill_step
from .counts import Case, Layout
from .hardware import DEVICES, Hardware
from .memory import plan_memory
from .step import StepModel
from .weights import WeightBytes, total_bytes

PRICES = {
    "A100": 1.8, "H100": 3.0, "H200": 3.8, "B200": 5.5, "L40S": 1.1, "RTX4090": 0.45,
    "RTX5090": 0.7, "THOR": 0.15,
}  # fmt: skip
"""Per device and hour. Of the order of on-demand offers of 2026, to be replaced by one's own
(`--prices FILE`): a plan is as good as its prices."""

HEADROOM = 0.85
"""Share of the steady rate that is planned: arrivals come in bursts."""
RANKS = (1, 2, 4, 8)
FORMATS = ("bfloat16", "fp8", "int4")
MAX_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked, in means."""

    rate: float
    """Requests a second."""
    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """Prompt tokens that are expected from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Limits in seconds, meant for the 99th percentile."""

    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout that should keep the goal."""

    hardware: Hardware
    case: Case
    batch: int
    replica_rate: float
    """Requests a second of one replica, headroom taken off."""
    replicas: int
    ttft: float
    tpot: float
    price_per_hour: float

    @property
    def devices(self) -> int:
        return self.replicas * self.case.layout.tp

    def cost_per_million(self, demand: Demand) -> float:
        """Per million output tokens, at the rate that is asked."""
        return self.price_per_hour / (demand.rate * demand.output_tokens * 3600) * 1e6


def read_prices(path: Path | None) -> dict[str, float]:
    """The table, or a JSON file of the same form laid over it."""
    if path is None:
        return dict(PRICES)
    try:
        given = {str(key): float(value) for key, value in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequest(
            f'{path} is no price table ({error}); it looks like {{"H200": 3.8}}', param="prices"
        ) from None
    wrong = [name for name, value in given.items() if name not in DEVICES or not value > 0]
    if wrong:
        raise InvalidRequest(
            f"{path}: {wrong[0]!r} must be one of {', '.join(DEVICES)} with a price above 0",
            param="prices",
        )
    return {**PRICES, **given}


def search(
    arch: ModelArch,
    demand: Demand,
    goal: Goal,
    prices: dict[str, float],
    *,
    devices: Iterable[str] = DEVICES,
    formats: Iterable[str] = FORMATS,
) -> list[Candidate]:
    """All layouts that should keep the goal, the cheapest first."""
    for name, value in (
        ("rate", demand.rate), ("input", demand.input_tokens), ("output", demand.output_tokens),
        ("ttft", goal.ttft), ("tpot", goal.tpot),
    ):  # fmt: skip
        if not (math.isfinite(value) and value > 0):
            raise InvalidRequest(f"{name} must be above 0, not {value}", param=name)
    found = []
    for device in devices:
        for format in formats:
            for tp in RANKS:
                case = make_case(arch, format, DEVICES[device], tp)
                made = best_batch(case, DEVICES[device], demand, goal, prices[device])
                if made is not None:
                    found.append(made)
    return sorted(found, key=lambda candidate: (candidate.price_per_hour, candidate.devices))


def make_case(arch: ModelArch, format: str, hardware: Hardware, tp: int) -> Case:
    """fp8 also for the cache where the device computes in fp8; embedding and head stay wide."""
    kv = "fp8" if format == "fp8" and "fp8" in hardware.rates else "bfloat16"
    weights = WeightBytes(format, head_format="bfloat16")
    return Case(arch, weights, "bfloat16", kv, Layout(tp))


def best_batch(
    case: Case, hardware: Hardware, demand: Demand, goal: Goal, price: float
) -> Candidate | None:
    """The batch with which one replica serves most within the goal; None if none does."""
    if case.layout.tp > case.arch.heads or (case.layout.tp > 1 and not hardware.link_bandwidth):
        return None
    room = batch_room(case, hardware, demand)
    model = StepModel(case, hardware)
    fresh = max(1, demand.input_tokens - demand.shared_tokens)
    prefill = model.seconds(prefill_step(case.arch, [fresh], demand.shared_tokens))
    context = demand.input_tokens + demand.output_tokens // 2
    best: Candidate | None = None
    batch = 1
    while batch <= min(room, MAX_BATCH):
        step = model.seconds(decode_step(case.arch, batch, context))
        rate = HEADROOM / (prefill + demand.output_tokens * step / batch)
        busy = rate * prefill
        tpot = step / (1 - busy)
        ttft = step + prefill * (1 + math.log(100) * busy / (2 * (1 - busy)))
        if tpot <= goal.tpot and ttft <= goal.ttft and (best is None or rate > best.replica_rate):
            replicas = math.ceil(demand.rate / rate)
            hourly = replicas * case.layout.tp * price
            best = Candidate(hardware, case, batch, rate, replicas, ttft, tpot, hourly)
        batch = max(batch + 1, batch * 5 // 4)
    return best


def batch_room(case: Case, hardware: Hardware, demand: Demand) -> int:
    """Sequences of the asked length that the memory holds; 0 where the weights do not fit."""
    length = demand.input_tokens + demand.output_tokens
    if length > case.arch.max_context:
        return 0
    try:
        plan = plan_memory(
            case.arch,
            weight_bytes=int(total_bytes(case.arch, case.weights) / case.layout.tp),
            available=hardware.memory,
            rows=MAX_BATCH,
            step_tokens=8192,
            max_context=length,
            kv_dtype=case.kv_dtype,
            dtype=case.dtype,
            device="cuda" if hardware.kind == "cuda" else "cpu",
            kv_share=min(case.layout.tp, case.arch.kv_heads) if case.arch.mla is None else 1,
        )
    except DoesNotFit:
        return 0
    return min(plan.rows, int(plan.full_sequences))


def frontier(candidates: list[Candidate]) -> list[Candidate]:
    """Those that no cheaper one beats in TPOT: what more money buys."""
    front: list[Candidate] = []
    for candidate in candidates:
        if not front or candidate.tpot < front[-1].tpot:
            front.append(candidate)
    return front
