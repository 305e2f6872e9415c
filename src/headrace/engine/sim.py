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
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..base.errors import HeadraceError, OptionError
from ..base.request import Request
from ..base.sampling import SamplingParams
from ..base.spec import RequestSpec
from ..kv.split import SplitChoice
from ..roofline.formats import kv_bytes_of_all
from .routing import ROUTERS, LeastLoaded, PrefixAffinity
from .sim_replica import (
    COMPUTED,
    DECODE_BUDGET,
    GRAIN,
    RECEIVED,
    TOKEN,
    Clock,
    Replica,
    ReplicaSpec,
    SimAnswer,
    SimRequest,
    Stages,
)

HANDOVERS = ("always", "pays")
"""Which prompts a prefill pool computes: all, or those for which the live rule says so."""


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
        handover: str = "always",
    ) -> None:
        """`course`: 0 gives each request the gateway's mean time, every other number times of its
        own, exponential with that mean, and interruptions of its own. `told_after`: seconds in
        which the router learns what a replica's cache gained and lost; None: it never does.
        `handover`: one of `HANDOVERS`."""
        if not 0 <= prefill < replicas:
            raise OptionError(
                f"of {replicas} replicas {prefill} cannot be for prefill alone", param="prefill"
            )
        if isinstance(router, str) and router not in ROUTERS:
            raise HeadraceError(
                f"routing must be one of {', '.join(ROUTERS)}, not {router!r}", param="routing"
            )
        if handover not in HANDOVERS:
            raise OptionError(
                f"handover must be one of {', '.join(HANDOVERS)}, not {handover!r}",
                param="handover",
            )
        self.clock = Clock()
        self.spec = spec
        self._pays = handover == "pays"
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
                budget = DECODE_BUDGET if role == "decode" and not self._pays else None
                made = Replica(spec, self.clock, number, role, stages, draws, budget)
                self.replicas.append(made)

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
        if self._decode and self._pays:
            replica = self._second.choose(request, self._decode)
            if not self._choice(request, replica).pays:
                answer.replica = replica.number
                self._give(replica, answer, request.prompt, request.output_tokens)
                return
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
        seed: int = COMPUTED,
    ) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        spec = RequestSpec(sampling, seed=seed)
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
        request = answer.request

        def receive() -> None:
            replica = self._second.choose(request, self._decode)
            answer.replica = replica.number
            prompt, tokens = [*request.prompt, TOKEN], request.output_tokens - 1
            self._give(replica, answer, prompt, tokens, seed=RECEIVED)

        self._at(self.clock.now + self._moving(request), receive)

    def _moving(self, request: SimRequest) -> float:
        """Seconds in which the KV of its prompt is on the link."""
        case, hardware = self.spec.case, self.spec.hardware
        size = len(request.prompt) * kv_bytes_of_all(case.arch, case.kv_dtype)
        link = hardware.link_bandwidth or hardware.bandwidth
        return size / (link * hardware.efficiency.network) + hardware.link_latency

    def _choice(self, request: SimRequest, replica: Replica) -> SplitChoice:
        """What its prompt costs, computed by a decode replica or before it; as `kv.handover`, but
        that nothing is taken to be cached."""
        decoding, admitted = replica.scheduler.pressure
        computing = replica.computing(len(request.prompt))
        return SplitChoice(
            computing,
            computing,
            self._moving(request),
            replica.computing(admitted),
            min(one.ahead for one in self._prefill),
            decoding,
        )

    def _end(self, answer: SimAnswer) -> None:
        answer.end = self.clock.now + self.spec.hardware.loop.answer_seconds
        del self._answers[answer.request.id]
        self._ended.append(answer)
        for time, request in self._follow(answer):
            self._submit(max(time, answer.end), request)
