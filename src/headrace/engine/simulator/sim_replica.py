"""A replica on virtual time: the real scheduler and KV manager, steps timed by the roofline."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...base.drafted import Verified
from ...base.request import SequenceDelta
from ...base.step import StepPlan, StepResult
from ...kv import KvManager
from ...roofline.composition import compose
from ...roofline.counts import Case, device_bytes, kv_share
from ...roofline.hardware import Hardware
from ...roofline.memory import MemoryPlan, plan_memory
from ...roofline.step import StepModel
from ...sched import Limits, Scheduler, StepPrices, StepRoom
from ...sched.work import Work
from ..loop.draft_law import LENGTHS, DraftLaw, verifying

TOKEN = 1
"""The token of every simulated answer, so that a next turn finds it in the prefix index."""
ONE, NONE = [TOKEN], list[int]()
"""Shared, constant token lists of an entry: with a sample, and without."""

GRAIN = 128
"""Tokens between two names of a prompt's prefixes: about 512 bytes, as in a live router."""

DECODE_BUDGET = 1 << 20
"""Tokens per step of a decode pool, whose prompts are not computed but received."""
FILLING = 1 << 30
"""Tokens of the first step of an engine that starts with requests in work."""
COMPUTED, RECEIVED = 0, 1
"""Seeds, unused otherwise, that mark requests whose KV is computed here or received."""


class Clock:
    """Virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One engine: model, device, and the options that matter for time."""

    case: Case
    hardware: Hardware
    rows: int = 256
    step_tokens: int = 8192
    max_context: int | None = None
    block_size: int = 16
    depth: int = 1
    prefix_cache: bool = True
    max_waiting: int = 1 << 20
    drafts: DraftLaw | None = None
    kv_tokens: int | None = None
    """Cap of the KV pool, below the memory's capacity. It saves objects, one per block, when
    hundreds of replicas never fill their pools."""
    model: StepModel = field(init=False, compare=False, repr=False)
    """Predictor of its steps, with a memory; shared by all engines of this spec."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", StepModel(self.case, self.hardware))

    def memory(self) -> MemoryPlan:
        """Plan the memory of one rank; raises `DoesNotFit` as the engine would.

        A pipeline has one batch per stage in work, and each device has 1 / pp of every token's KV.
        So one batch's pool has the size that a device would have for the whole model.
        """
        plan = plan_memory(
            self.case.arch,
            weight_bytes=device_bytes(self.case),
            available=self.hardware.memory,
            rows=self.rows,
            step_tokens=self.step_tokens,
            max_context=self.max_context,
            block_size=self.block_size,
            kv_dtype=self.case.kv_dtype,
            dtype=self.case.dtype,
            device="cpu" if self.hardware.kind == "cpu" else "cuda",
            depth=self.depth,
            kv_share=kv_share(self.case),
        )
        plan.verify()
        if self.kv_tokens is None:
            return plan
        most = 1 + max(
            -(-plan.max_context // self.block_size), -(-self.kv_tokens // self.block_size)
        )
        groups = tuple(group._replace(blocks=min(group.blocks, most)) for group in plan.pool.groups)
        return replace(plan, pool=replace(plan.pool, groups=groups))


@dataclass(slots=True)
class SimRequest:
    """A request in the simulator."""

    id: str
    prompt: list[int]
    output_tokens: int
    session: int = 0
    cancel_after: int | None = None

    @property
    def prefixes(self) -> list[int]:
        """Names of the prompt's prefixes in steps of `GRAIN` tokens."""
        keys, key = [], 0
        for end in range(GRAIN, len(self.prompt) + 1, GRAIN):
            key = hash((key, tuple(self.prompt[end - GRAIN : end])))
            keys.append(key)
        return keys


@dataclass(slots=True)
class SimAnswer:
    """The outcome of a request; times in virtual seconds."""

    request: SimRequest
    arrived: float
    times: list[float] = field(default_factory=list)
    """Arrival times of the tokens."""
    end: float = 0.0
    cached: int = 0
    replica: int = -1
    deaths: int = 0
    """Number of replicas that died while working on it."""
    again: int = 0
    """Tokens computed again that the client already has."""
    error: str | None = None
    cancelled: bool = False
    plain: bool = field(init=False)
    """Whether each token is new, and only their number ends the answer."""

    def __post_init__(self) -> None:
        self.plain = self.request.cancel_after is None


class Stages:
    """The devices of a pipeline: a step spends 1 / pp of its time in each, one after the other.

    Steps of other batches follow as soon as the first stage is free, so pp batches in work keep all
    stages busy. With one stage it is just the device.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._free_at = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Return the end of a step that is ready now and takes `seconds`."""
        begin = max(now, self._free_at)
        self._free_at = begin + seconds / self._stages
        return begin + seconds


class Replica:
    """One engine on virtual time: its own batch, on devices shared with its pipeline's others."""

    def __init__(
        self,
        spec: ReplicaSpec,
        clock: Clock,
        number: int,
        role: str = "all",
        stages: Stages | None = None,
        draws: random.Random | None = None,
        budget: int | None = None,
        *,
        warm: bool = False,
    ) -> None:
        """`budget`: tokens of a step, if not those of `spec`. `warm`: `begin` is called before its
        first step."""
        self.spec, self.number, self.role = spec, number, role
        self._stages = stages or Stages(1)
        memory = spec.memory()
        limits = Limits(
            memory.rows,
            budget or spec.step_tokens,
            memory.max_context,
            spec.max_waiting,
            "fcfs",
            spec.depth,
        )
        self.model = spec.model
        prices = None
        if spec.drafts is not None and role != "prefill":
            limits = replace(limits, drafts=LENGTHS[-1])
            prices = StepPrices(partial(verifying, self.model))
        self.kv = KvManager(memory.pool, prefix_cache=spec.prefix_cache)
        self._limits = limits
        if warm and limits.rows <= limits.step_tokens:
            limits = replace(limits, step_tokens=FILLING)
        self.scheduler = Scheduler(limits, self.kv, clock=clock, prices=prices)
        self.outstanding = 0
        """Requests submitted to it and not ended."""
        self.lives, self.life = True, 0
        """Whether it may get requests, and its number of deaths."""
        self.busy = 0.0
        """Seconds of device time used by one of its stages."""
        self.steps = 0
        self._last_end = 0.0
        self._random = draws or random.Random(number)
        self._drawn: dict[int, tuple[int, int]] = {}
        """Row → (drafts ready for it, drafts of these that are right)."""
        self._flying: deque[tuple[StepPlan, float]] = deque()
        self._received: dict[int, int] = {}
        """Row → tokens whose KV came from the prefill pool."""

    @property
    def load(self) -> int:
        """See `routing.Loaded`."""
        return self.outstanding

    def computing(self, tokens: int) -> float:
        """Return the seconds to compute `tokens` of a prompt alone."""
        return self.model.seconds(compose(self.spec.case.arch, [0], [tokens], 1)) if tokens else 0.0

    @property
    def ahead(self) -> float:
        """Seconds to compute the prompts of its unfinished requests."""
        return self.computing(sum(len(one.prompt) for one in self.scheduler.requests()))

    def begin(self) -> Sequence[SequenceDelta | Work]:
        """Admit its requests in one step of zero time; later steps have the usual budget.

        Their prompts enter the KV cache at once, as if they had come before the start.
        """
        deltas: Sequence[SequenceDelta | Work] = ()
        if (plan := self.scheduler.schedule()) is not None:
            self._flying.append((plan, 0.0))
            deltas = self.land()
        self.scheduler.limits = self._limits
        self.scheduler.room = StepRoom.of(self._limits, keeps=True)
        return deltas

    def fill(self, now: float) -> list[float]:
        """Plan steps while fewer than `depth` are in flight; return the end of each."""
        ends = []
        while len(self._flying) < self.spec.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            seconds = self._seconds(plan)
            self.busy += seconds / self.spec.case.layout.pp
            self.steps += 1
            self._flying.append((plan, seconds))
            # The next token of a sequence needs the last one, so a batch is in one stage at a time.
            self._last_end = self._stages.take(max(now, self._last_end), seconds)
            ends.append(self._last_end)
        return ends

    def land(self) -> Sequence[SequenceDelta | Work]:
        """Finish the oldest step. A decode that only gained a token is returned as its work."""
        plan, seconds = self._flying.popleft()
        tokens = [ONE] * len(plan.samples)
        if not all(plan.samples):
            tokens = [ONE if sampled else NONE for sampled in plan.samples]
        result = StepResult(plan.number, tokens, seconds=seconds)
        if self.scheduler.limits.drafts:
            self._speculate(plan, result)
        return self.scheduler.book(plan, result, bare=True)

    def die(self) -> list[str]:
        """Lose all requests in work and the cache; return the requests' names."""
        lost = [one.id for one in self.scheduler.requests()]
        for one in lost:
            self.scheduler.abort(one)
        while self._flying:
            self.land()
        self.kv.reset()
        self.kv.holdings.take()
        self._received.clear()
        self.outstanding, self.lives = 0, False
        self.life += 1
        return lost

    def _speculate(self, plan: StepPlan, result: StepResult) -> None:
        """Accept drafts, and propose those of the next step."""
        law, fresh = self.spec.drafts, {one.row for one in plan.admitted}
        assert law is not None
        verified, proposed = {}, []
        for entry, (row, count) in enumerate(zip(plan.rows, plan.counts, strict=True)):
            ready, right = (0, 0) if row in fresh else self._drawn.get(row, (0, 0))
            tried = min(count - 1, ready)
            if tried:
                verified[entry] = Verified(law.name, tried, min(tried, right))
                result.tokens[entry] = ONE * (1 + verified[entry].accepted)
            self._drawn[row] = law.draw(self._random) if plan.samples[entry] else (0, 0)
            alive = law.survival(self._drawn[row][0])
            proposed.append(bytes(round(255 * one) for one in alive))
        result.verified, result.proposed = verified or None, proposed

    def _seconds(self, plan: StepPlan) -> float:
        starts, counts = plan.starts, plan.counts
        if self.role == "decode":
            starts, counts = self._without_received(plan)
        arch = self.spec.case.arch
        loop = self.spec.hardware.loop
        samples = sum(plan.samples) + plan.drafts
        between = loop.around(len(plan.rows)) if self.spec.depth == 1 else 0.0
        seconds = between + self.model.seconds(compose(arch, starts, counts, samples))
        return seconds + self._hitches(seconds * loop.hitch_rate) * loop.hitch_seconds

    def _hitches(self, expected: float) -> float:
        """Draw a step's interruptions, in mean lengths: Poisson arrivals, exponential lengths."""
        total = 0.0
        while expected > 0 and (expected := expected - self._random.expovariate(1.0)) > 0:
            total += self._random.expovariate(1.0)
        return total

    def _without_received(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """Return the plan's columns without the tokens whose KV is there already."""
        for admission in plan.admitted:
            received = admission.spec.seed == RECEIVED
            self._received[admission.row] = admission.prompt_length - 1 if received else 0
        starts, counts = [], []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            first = max(start, self._received.get(row, 0))
            if first < start + count:
                starts.append(first)
                counts.append(start + count - first)
        return starts, counts
