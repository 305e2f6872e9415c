"""Engines on virtual time: the real scheduler and the real KV manager, steps timed by the roofline.

No device and no sleeping: a heap of events. One replica is what one engine would be (its loop is
that of `engine.core`: fill up to `depth`, land the oldest); a cluster is many of them behind a
router, all alike or split into a prefill and a decode pool. The same input gives the same output.

With a law of drafts (`draft_law`) steps verify as many as the real prices choose, which are the
roofline's and learn from the steps as in an engine.

What is not simulated: what HTTP and text cost beyond a constant, contention on the link between
pools, unevenly routed experts, failures.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from ..base.drafted import Verified
from ..base.errors import HeadraceError, OptionError
from ..base.request import Request, SequenceDelta
from ..base.sampling import SamplingParams
from ..base.spec import RequestSpec
from ..base.step import StepPlan, StepResult
from ..kv import KvManager
from ..roofline.composition import compose
from ..roofline.counts import Case, device_bytes, kv_share
from ..roofline.formats import kv_bytes_of_all
from ..roofline.hardware import Hardware
from ..roofline.memory import MemoryPlan, plan_memory
from ..roofline.step import StepModel
from ..sched import Limits, Scheduler, StepPrices
from .draft_law import LENGTHS, DraftLaw, verifying
from .routing import ROUTERS, LeastLoaded, PrefixAffinity

TOKEN = 1
"""What every simulated answer consists of, so that a next turn finds it in the prefix index."""

GRAIN = 128
"""Tokens between two names of a prompt's beginnings: about what 512 bytes are in a live router."""

DECODE_BUDGET = 1 << 20
"""Tokens per step of a decode pool: what arrives there is not computed but received."""


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
    """Cap of the KV pool, below what memory holds: the simulator keeps an object per block, which
    counts where hundreds of replicas never fill theirs."""

    def memory(self) -> MemoryPlan:
        """The plan of one rank; raises `DoesNotFit` as the engine would.

        A pipeline has a batch per stage in work, and each device 1 / pp of every token's KV: the
        pool of one batch is what a device would hold of the whole model's.
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
    """A request as the simulator takes it."""

    id: str
    prompt: list[int]
    output_tokens: int
    session: int = 0
    cancel_after: int | None = None

    @property
    def prefixes(self) -> list[int]:
        """A name for each of the prompt's beginnings in steps of `GRAIN` tokens."""
        keys, key = [], 0
        for end in range(GRAIN, len(self.prompt) + 1, GRAIN):
            key = hash((key, tuple(self.prompt[end - GRAIN : end])))
            keys.append(key)
        return keys


@dataclass(slots=True)
class SimAnswer:
    """What became of it; times in virtual seconds."""

    request: SimRequest
    arrived: float
    times: list[float] = field(default_factory=list)
    """When each token came."""
    end: float = 0.0
    cached: int = 0
    replica: int = -1
    error: str | None = None
    cancelled: bool = False


class Stages:
    """The devices of a pipeline: a step is in each for 1 / pp of its time, one after the other.

    Steps of other batches follow as soon as the first stage is free, so pp batches in work keep all
    stages busy. With one stage it is simply the device.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._free_at = 0.0

    def take(self, now: float, seconds: float) -> float:
        """When a step ends that is ready now and is in work for `seconds`."""
        begin = max(now, self._free_at)
        self._free_at = begin + seconds / self._stages
        return begin + seconds


class Replica:
    """One engine on virtual time: a batch of its own, on devices that a pipeline's others share."""

    def __init__(
        self,
        spec: ReplicaSpec,
        clock: Clock,
        number: int,
        role: str = "all",
        stages: Stages | None = None,
        draws: random.Random | None = None,
    ) -> None:
        self.spec, self.number, self.role = spec, number, role
        self._stages = stages or Stages(1)
        memory = spec.memory()
        budget = DECODE_BUDGET if role == "decode" else spec.step_tokens
        limits = Limits(
            memory.rows, budget, memory.max_context, spec.max_waiting, "fcfs", spec.depth
        )
        self.model = StepModel(spec.case, spec.hardware)
        prices = None
        if spec.drafts is not None and role != "prefill":
            limits = replace(limits, drafts=LENGTHS[-1])
            prices = StepPrices(partial(verifying, self.model))
        self.kv = KvManager(memory.pool, prefix_cache=spec.prefix_cache)
        self.scheduler = Scheduler(limits, self.kv, clock=clock, prices=prices)
        self.outstanding = 0
        """Requests given to it and not ended."""
        self.waiting_tokens = 0
        self.busy = 0.0
        """Seconds of device time used, of one of its stages."""
        self.steps = 0
        self._last_end = 0.0
        self._random = draws or random.Random(number)
        self._drawn: dict[int, tuple[int, int]] = {}
        """Row → drafts that are ready for it, and those that are right."""
        self._flying: deque[tuple[StepPlan, float]] = deque()
        self._received: dict[int, int] = {}
        """Row → tokens whose KV came from the prefill pool."""

    @property
    def load(self) -> int:
        """See `routing.Loaded`."""
        return self.outstanding

    def fill(self, now: float) -> list[float]:
        """Plan steps while fewer than `depth` fly; → when each ends."""
        ends = []
        while len(self._flying) < self.spec.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            seconds = self._seconds(plan)
            self.busy += seconds / self.spec.case.layout.pp
            self.steps += 1
            self._flying.append((plan, seconds))
            # The next token of a sequence needs the last one: a batch is in one stage at a time.
            self._last_end = self._stages.take(max(now, self._last_end), seconds)
            ends.append(self._last_end)
        return ends

    def land(self) -> list[SequenceDelta]:
        """The oldest step is done."""
        plan, seconds = self._flying.popleft()
        tokens = [[TOKEN] if sampled else [] for sampled in plan.samples]
        result = StepResult(plan.number, tokens, seconds=seconds)
        if self.scheduler.limits.drafts:
            self._speculate(plan, result)
        return self.scheduler.update(plan, result)

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
                result.tokens[entry] *= 1 + verified[entry].accepted
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
        """Interruptions of a step, in mean lengths: they come at any time, are of any length."""
        total = 0.0
        while expected > 0 and (expected := expected - self._random.expovariate(1.0)) > 0:
            total += self._random.expovariate(1.0)
        return total

    def _without_received(self, plan: StepPlan) -> tuple[list[int], list[int]]:
        """The plan's columns without the tokens whose KV is there already."""
        for admission in plan.admitted:
            self._received[admission.row] = admission.prompt_length - 1
        starts, counts = [], []
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            first = max(start, self._received.get(row, 0))
            if first < start + count:
                starts.append(first)
                counts.append(start + count - first)
        return starts, counts


class Chooser(Protocol):
    """Every policy of `routing`, and what goes by more of a simulated replica than they do."""

    def choose(self, request: SimRequest, replicas: Sequence[Replica]) -> Replica: ...


Follow = Callable[[SimAnswer], Iterable[tuple[float, SimRequest]]]
"""What an ended request is followed by: (time, request) of a user's next turn."""


class Cluster:
    """Replicas behind a router; with `prefill` > 0 the first so many only prefill."""

    def __init__(
        self,
        spec: ReplicaSpec,
        replicas: int,
        router: str | Chooser = "least-loaded",
        *,
        prefill: int = 0,
        decode_spec: ReplicaSpec | None = None,
        course: int = 0,
        told_after: float | None = None,
    ) -> None:
        """`course`: 0 gives each request the gateway's mean time, every other number times of its
        own, exponential with that mean, and interruptions of its own. `told_after`: seconds in
        which the router learns what a replica's cache gained and lost; None: it never does."""
        if not 0 <= prefill < replicas:
            raise OptionError(
                f"of {replicas} replicas {prefill} cannot be for prefill alone", param="prefill"
            )
        if isinstance(router, str) and router not in ROUTERS:
            raise HeadraceError(
                f"routing must be one of {', '.join(ROUTERS)}, not {router!r}", param="routing"
            )
        self.clock = Clock()
        self.spec = spec
        self._course = course
        self._random = random.Random(course)
        self.devices = 0
        self.replicas: list[Replica] = []
        """The engines: a replica of several stages or data-parallel groups has several."""
        for n in range(replicas):
            own = (decode_spec or spec) if prefill and n >= prefill else spec
            role = "all" if not prefill else "prefill" if n < prefill else "decode"
            self._add(own, role, course)
        self._prefill = [one for one in self.replicas if one.role != "decode"]
        self._decode = [one for one in self.replicas if one.role == "decode"]
        self._router: Chooser = ROUTERS[router]() if isinstance(router, str) else router
        self._second = LeastLoaded()
        self._told_after = told_after if isinstance(self._router, PrefixAffinity) else None
        self._answers: dict[str, SimAnswer] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._gateways = [0.0] * len(self._prefill)
        """When each is free."""
        self._dirty: dict[int, Replica] = {}
        self._follow: Follow = lambda _answer: ()
        self._ended: list[SimAnswer] = []

    def _add(self, spec: ReplicaSpec, role: str, course: int) -> None:
        layout = spec.case.layout
        layout.verify(spec.case.arch)
        self.devices += layout.devices
        for _ in range(layout.dp):
            stages = Stages(layout.pp)
            for _ in range(layout.pp):
                number = len(self.replicas)
                draws = random.Random(f"{course} {number}") if course else None
                self.replicas.append(Replica(spec, self.clock, number, role, stages, draws))

    def run(
        self,
        requests: Iterable[tuple[float, SimRequest]],
        follow: Follow = lambda _answer: (),
        until: float | None = None,
    ) -> list[SimAnswer]:
        """All answers, in the order in which they ended."""
        self._follow = follow
        for time, request in requests:
            self._submit(time, request)
        events = self._events
        while events:
            now = events[0][0]
            if until is not None and now > until:
                break
            self.clock.now = now
            while events and events[0][0] <= now:
                heapq.heappop(events)[2]()
            for replica in list(self._dirty.values()):
                for end in replica.fill(now):
                    self._at(end, lambda replica=replica: self._step_done(replica))  # type: ignore[misc]
                if self._told_after is not None:
                    self._tell(replica, self._told_after)
            self._dirty.clear()
        return self._ended

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _submit(self, time: float, request: SimRequest) -> None:
        answer = SimAnswer(request, time)
        self._answers[request.id] = answer
        self._at(time, lambda: self._enter(answer))

    def _enter(self, answer: SimAnswer) -> None:
        """Each replica has a gateway, which does one request after another."""
        seconds = self.spec.hardware.loop.gateway_seconds
        if self._course:
            seconds *= self._random.expovariate(1.0)
        ready = max(self._gateways[0], self.clock.now) + seconds
        heapq.heapreplace(self._gateways, ready)
        self._at(ready, lambda: self._arrive(answer))

    def _arrive(self, answer: SimAnswer) -> None:
        request = answer.request
        replica = self._router.choose(request, self._prefill)
        answer.replica = replica.number
        tokens = 1 if self._decode else request.output_tokens
        marks: tuple[tuple[int, int], ...] = ()
        if self._told_after is not None:
            marks = tuple((GRAIN * (n + 1), key) for n, key in enumerate(request.prefixes))[::-1]
        self._give(replica, answer, request.prompt, tokens, marks)

    def _give(
        self,
        replica: Replica,
        answer: SimAnswer,
        prompt: list[int],
        tokens: int,
        marks: tuple[tuple[int, int], ...] = (),
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        spec = RequestSpec(sampling, seed=0)
        try:
            now = self.clock.now
            replica.scheduler.add(
                Request(answer.request.id, prompt, spec, arrival=now, marks=marks)
            )
        except HeadraceError as error:
            answer.error = error.message
            self._end(answer)
            return
        replica.outstanding += 1
        self._dirty[replica.number] = replica

    def _tell(self, replica: Replica, after: float) -> None:
        """Let the router hear of what the replica's cache gained and lost."""
        news, router = replica.kv.holdings.take(), self._router
        if news is not None and isinstance(router, PrefixAffinity):
            told = (replica.number, news.held, news.gone)
            self._at(self.clock.now + after, lambda: router.told(*told))

    def _step_done(self, replica: Replica) -> None:
        now = self.clock.now
        self._dirty[replica.number] = replica
        for delta in replica.land():
            answer = self._answers.get(delta.request_id)
            if answer is None:
                continue  # Hung up in this very step.
            answer.times.extend(
                [now + replica.spec.hardware.loop.answer_seconds] * len(delta.tokens)
            )
            if replica.role != "decode":
                answer.cached = max(answer.cached, delta.cached)
            limit = answer.request.cancel_after
            if limit is not None and len(answer.times) >= limit and delta.finish is None:
                replica.scheduler.abort(delta.request_id)
                answer.cancelled = True
                replica.outstanding -= 1
                self._end(answer)
            elif delta.finish is not None:
                replica.outstanding -= 1
                if replica.role == "prefill" and answer.request.output_tokens > 1:
                    self._hand_over(answer)
                else:
                    self._end(answer)

    def _hand_over(self, answer: SimAnswer) -> None:
        """The KV of the prompt goes to the decode pool."""
        request, case, hardware = answer.request, self.spec.case, self.spec.hardware
        size = len(request.prompt) * kv_bytes_of_all(case.arch, case.kv_dtype)
        link = hardware.link_bandwidth or hardware.bandwidth
        seconds = size / (link * hardware.efficiency.network) + hardware.link_latency

        def receive() -> None:
            replica = self._second.choose(request, self._decode)
            answer.replica = replica.number
            self._give(replica, answer, [*request.prompt, TOKEN], request.output_tokens - 1)

        self._at(self.clock.now + seconds, receive)

    def _end(self, answer: SimAnswer) -> None:
        answer.end = self.clock.now + self.spec.hardware.loop.answer_seconds
        del self._answers[answer.request.id]
        self._ended.append(answer)
        for time, request in self._follow(answer):
            self._submit(max(time, answer.end), request)
