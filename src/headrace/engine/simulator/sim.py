"""Engines on virtual time: the real scheduler and the real KV manager, steps timed by the roofline.

No device and no sleeping: a heap of events. One replica is one engine (its loop is that of
`engine.loop.core`: fill up to `depth`, land the oldest). A cluster is many of them and a router,
all alike or split into a prefill and a decode pool. The same input gives the same output.

With a law of drafts (`draft_law`) steps verify as many drafts as the real prices choose. These
prices start as the roofline's and learn from the steps as in an engine.

Not simulated: the cost of HTTP and text beyond a constant, process groups that wait for each other,
deaths noticed late (open connections without an answer).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from ...base.errors import HeadraceError, OptionError
from ...base.request import Request, SequenceDelta
from ...base.sampling import SamplingParams
from ...base.spec import RequestSpec
from ...kv.split import SplitChoice
from ...roofline.formats import kv_bytes_of_all
from ...sched.work import Work
from .routing import ROUTERS, LeastLoaded, PrefixAffinity
from .sim_link import Ports, Transfer
from .sim_replica import (
    COMPUTED,
    DECODE_BUDGET,
    GRAIN,
    ONE,
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
"""Prompts that a prefill pool computes: all, or those that the live rule chooses."""


MIGRATIONS = 2
"""Deaths that a request survives, as at the gateway."""
NOBODY = "no server is ready for this request"


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of replicas, which die independently and come back with empty caches. A group dies
    as one."""

    between_seconds: float
    """Mean time from a replica's return to its next death, exponential."""
    restart_seconds: float

    def __post_init__(self) -> None:
        times = {"failures": self.between_seconds, "restart": self.restart_seconds}
        for name, seconds in times.items():
            if not 0 < seconds < math.inf:
                raise OptionError(f"{name} must be seconds above 0, not {seconds:g}", param=name)


@dataclass(slots=True)
class Losses:
    """The cost of failures."""

    down: list[tuple[float, float]] = field(default_factory=list)
    """Intervals without a replica, from its death to its return."""
    moved: int = 0
    """Times that a request continued at another replica."""
    repeated_tokens: int = 0
    """Output tokens computed again that clients already had."""
    failed: int = 0
    """Requests that ended with an error: too many deaths, or no replica left."""


class Chooser(Protocol):
    """A policy of `routing`, or one that reads more of a simulated replica."""

    def choose(self, request: SimRequest, replicas: Sequence[Replica]) -> Replica: ...


Requests = Iterable[tuple[float, SimRequest]]
"""(time, request), in the order of the times."""
Follow = Callable[[SimAnswer], Requests]
"""Returns the requests that follow an ended one: a user's next turn."""


class Cluster:
    """A router and its replicas; with `prefill` > 0 the first `prefill` replicas only prefill."""

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
        failures: Failures | None = None,
        warm: bool = False,
    ) -> None:
        """`warm`: it may start with requests in work (`run`).

        `course`: 0 gives each request the gateway's mean time. Any other number is a seed of
        exponential times with that mean, and of interruptions.

        `told_after`: seconds until the router learns the changes of a replica's cache; None: never.
        `handover`: one of `HANDOVERS`. If a replica dies (`failures`), its requests start again at
        another, without the tokens that the clients have.
        """
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
        self._warm, self._stopped = warm, False
        self.tokens = 0
        """Tokens that clients got."""
        self._course = course
        self._random = random.Random(course)
        self.devices = 0
        self.replicas: list[Replica] = []
        """The engines: a replica of several stages or data-parallel groups has several."""
        self._groups: list[list[Replica]] = []
        """The engines of each replica."""
        for n in range(replicas):
            own = (decode_spec or spec) if prefill and n >= prefill else spec
            role = "all" if not prefill else "prefill" if n < prefill else "decode"
            self._add(own, role, course)
        self.size, self._split = replicas, prefill > 0
        self.failures, self.losses = failures, Losses()
        self._deaths = random.Random(f"{course} deaths")
        self._living()
        self._router: Chooser = ROUTERS[router]() if isinstance(router, str) else router
        self._second = LeastLoaded()
        self._told_after = told_after if isinstance(self._router, PrefixAffinity) else None
        self.answers: dict[str, SimAnswer] = {}
        """Answers in work, by request name."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._gateways = [0.0] * len(self._prefill)
        """Times when each becomes free."""
        self._dirty: dict[int, Replica] = {}
        hardware = spec.hardware
        link = (hardware.link_bandwidth or hardware.bandwidth) * hardware.efficiency.network
        self._ports = Ports(link, hardware.link_latency, self.clock, self._at)
        self._coming: Iterator[tuple[float, SimRequest]] = iter(())
        self._ended: list[SimAnswer] = []
        self._follow: Follow = self._keep

    def _add(self, spec: ReplicaSpec, role: str, course: int) -> None:
        layout = spec.case.layout
        layout.verify(spec.case.arch)
        self.devices += layout.devices
        group: list[Replica] = []
        for _ in range(layout.dp):
            stages = Stages(layout.pp)
            for _ in range(layout.pp):
                number = len(self.replicas)
                draws = random.Random(f"{course} {number}") if course else None
                budget = DECODE_BUDGET if role == "decode" and not self._pays else None
                made = Replica(
                    spec, self.clock, number, role, stages, draws, budget, warm=self._warm
                )
                self.replicas.append(made)
                group.append(made)
        self._groups.append(group)

    def _living(self) -> None:
        """Update the replicas that may get requests."""
        self._prefill = [one for one in self.replicas if one.lives and one.role != "decode"]
        self._decode = [one for one in self.replicas if one.lives and one.role == "decode"]

    def stop(self) -> None:
        """End `run` after the events of this moment; requests in work stay unanswered."""
        self._stopped = True

    def run(
        self,
        requests: Requests,
        follow: Follow | None = None,
        until: float | None = None,
        started: Iterable[SimRequest] = (),
    ) -> list[SimAnswer]:
        """Run; return all answers in the order of their ends, or none if `follow` takes them. A
        request is taken when the one before it has arrived, so only those in work are kept.

        `started`: requests that arrived before the start, for a `warm` cluster. Their prompts and
        answers so far are in the KV cache, and their next tokens follow.
        """
        self._follow = follow or self._keep
        if self._warm:
            self._begin(started)
        self._coming = iter(requests)
        self._next()
        for group in self._groups:
            self._doom(group)
        events = self._events
        while events and not self._stopped:
            now = events[0][0]
            if until is not None and now > until:
                break
            self.clock.now = now
            while events and events[0][0] <= now:
                heapq.heappop(events)[2]()
            for replica in list(self._dirty.values()):
                for end in replica.fill(now):
                    self._at(end, partial(self._step_done, replica, replica.life))
                if self._told_after is not None:
                    self._tell(replica, self._told_after)
            self._dirty.clear()
        return self._ended

    def _begin(self, started: Iterable[SimRequest]) -> None:
        for request in started:
            answer = self.answers[request.id] = SimAnswer(request, self.clock.now)
            replica = self._second.choose(request, self._decode or self._prefill)
            self._give(replica, answer, request.prompt, request.output_tokens, seed=RECEIVED)
        for replica in self.replicas:
            self._deliver(replica, replica.begin())
        self._at(self.clock.now, lambda: None)  # The replicas plan their first steps.

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def _keep(self, answer: SimAnswer) -> Requests:
        self._ended.append(answer)
        return ()

    def _next(self) -> None:
        """Submit the next independent request."""
        for time, request in itertools.islice(self._coming, 1):
            if time < self.clock.now:
                raise HeadraceError(f"request {request.id} is older than the one before it")
            self._submit(time, request)
            self._at(time, self._next)

    def _submit(self, time: float, request: SimRequest) -> None:
        answer = SimAnswer(request, time)
        self.answers[request.id] = answer
        self._at(time, lambda: self._enter(answer))

    def _enter(self, answer: SimAnswer) -> None:
        """Pass a request through its gateway; each replica has one, which handles one request at a
        time."""
        seconds = self.spec.hardware.loop.gateway_seconds
        if self._course:
            seconds *= self._random.expovariate(1.0)
        ready = max(self._gateways[0], self.clock.now) + seconds
        heapq.heapreplace(self._gateways, ready)
        self._at(ready, lambda: self._arrive(answer))

    def _arrive(self, answer: SimAnswer) -> None:
        request = answer.request
        if not (self._decode if self._split else self._prefill):
            self._fail(answer, NOBODY)
            return
        if self._split and (self._pays or not self._prefill):
            replica = self._second.choose(request, self._decode)
            if not (self._prefill and self._choice(request, replica).pays):
                self._give(replica, answer, request.prompt, request.output_tokens)
                return
        replica = self._router.choose(request, self._prefill)
        tokens = 1 if self._split else request.output_tokens
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
        answer.replica = replica.number
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

    def _fail(self, answer: SimAnswer, error: str) -> None:
        self.losses.failed += 1
        answer.error = error
        self._end(answer)

    def _move(self, answer: SimAnswer) -> None:
        """Move a request whose replica died to another, which computes it from the start."""
        answer.deaths += 1
        if answer.deaths > MIGRATIONS:
            self._fail(answer, "its replica died, and so did others before")
            return
        self.losses.moved += 1
        self.losses.repeated_tokens += len(answer.times)
        answer.again, answer.plain = len(answer.times), False
        self._arrive(answer)

    def _doom(self, group: list[Replica]) -> None:
        if self.failures is not None:
            seconds = self._deaths.expovariate(1 / self.failures.between_seconds)
            self._at(self.clock.now + seconds, partial(self._die, group))

    def _die(self, group: list[Replica]) -> None:
        if self.failures is None or not self.answers:
            return  # The run has ended.
        now, router = self.clock.now, self._router
        back = now + self.failures.restart_seconds
        self.losses.down.append((now, back))
        self._at(back, partial(self._revive, group))
        lost = [request for one in group for request in one.die()]
        self._living()
        for one in group:
            self._ports.drop(one.number)
            if self._told_after is not None and isinstance(router, PrefixAffinity):
                self._at(now + self._told_after, partial(router.silent, one.number))
        for request in lost:
            self._move(self.answers[request])

    def _revive(self, group: list[Replica]) -> None:
        for one in group:
            one.lives = True
        self._living()
        self._doom(group)

    def _tell(self, replica: Replica, after: float) -> None:
        """Report the changes of the replica's cache to the router."""
        news, router = replica.kv.holdings.take(), self._router
        if news is not None and isinstance(router, PrefixAffinity):
            change = (replica.number, news.held, news.gone)
            self._at(self.clock.now + after, lambda: router.told(*change))

    def _step_done(self, replica: Replica, life: int) -> None:
        if life != replica.life:
            return  # It died within this step.
        self._dirty[replica.number] = replica
        self._deliver(replica, replica.land())

    def _deliver(self, replica: Replica, deltas: Iterable[SequenceDelta | Work]) -> None:
        """Give clients a step's tokens; a `Work` stands for one token of its own."""
        now = self.clock.now + replica.spec.hardware.loop.answer_seconds
        answers, decodes, bare = self.answers, replica.role == "decode", 0
        for one in deltas:
            if isinstance(one, SequenceDelta):
                delta = one
            else:
                answer = answers.get(one.request.id)
                if answer is not None and answer.plain:
                    answer.times.append(now)
                    bare += 1
                    continue
                delta = one.news()
                delta.tokens = ONE
            self.tokens += bare  # Before any callback looks.
            bare = 0
            answer = answers.get(delta.request_id)
            if answer is None:
                continue  # Its client hung up in this very step.
            new = len(delta.tokens)
            if answer.again:
                again = min(answer.again, new)
                answer.again -= again
                new -= again
            self.tokens += new
            if new == 1:
                answer.times.append(now)
            else:
                answer.times.extend([now] * new)
            if not decodes and delta.cached:
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
                    self._hand_over(answer, replica)
                else:
                    self._end(answer)
        self.tokens += bare

    def _hand_over(self, answer: SimAnswer, source: Replica) -> None:
        """Send the KV of the prompt to the decode pool."""
        request = answer.request
        if not self._decode:
            self._fail(answer, NOBODY)
            return
        target = self._second.choose(request, self._decode)
        target.outstanding += 1  # So that simultaneous requests go elsewhere.
        life = target.life

        def receive(whole: bool) -> None:
            if lives := target.life == life:
                target.outstanding -= 1
            if whole and lives:
                prompt, tokens = [*request.prompt, TOKEN], request.output_tokens - 1
                self._give(target, answer, prompt, tokens, seed=RECEIVED)
            else:
                self._move(answer)

        self._ports.send(Transfer(source.number, target.number, self._size(request), receive))

    def _size(self, request: SimRequest) -> float:
        """Bytes of its prompt's KV."""
        case = self.spec.case
        return len(request.prompt) * kv_bytes_of_all(case.arch, case.kv_dtype)

    def _choice(self, request: SimRequest, replica: Replica) -> SplitChoice:
        """Return the costs of computing its prompt on a decode replica or in the prefill pool; like
        `kv.handover`, but nothing counts as cached."""
        decoding, admitted = replica.scheduler.pressure
        computing = replica.computing(len(request.prompt))
        return SplitChoice(
            computing,
            computing,
            self._ports.seconds(self._size(request)),
            replica.computing(admitted),
            min(one.ahead for one in self._prefill),
            decoding,
        )

    def _end(self, answer: SimAnswer) -> None:
        answer.end = self.clock.now + self.spec.hardware.loop.answer_seconds
        del self.answers[answer.request.id]
        for time, request in self._follow(answer):
            self._submit(max(time, answer.end), request)
