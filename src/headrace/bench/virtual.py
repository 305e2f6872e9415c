"""The bench's workloads on the simulator: same sessions, same records, same report.

Only this module and `offline` use the engine without HTTP. Each word becomes one token, always the
same, so shared prefixes stay shared.
"""

from __future__ import annotations

import gc
import itertools
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest
from ..engine.simulator.sim import Cluster
from ..engine.simulator.sim_replica import TOKEN, SimAnswer, SimRequest
from .material import Material
from .metrics import Run
from .options import RunOptions
from .record import RequestRecord
from .result import document
from .run import make_run, make_sessions
from .workload import PICTURES, Session

NS = 1_000_000_000
BANDS = ("ttft", "itl", "tpot", "e2e")
COURSES = 8


def bands(
    cluster: Callable[[int], Cluster], options: RunOptions, courses: int
) -> dict[str, tuple[float, float]]:
    """Return (lowest, highest) 99th percentile in seconds over `courses` courses of a run, by
    sample.

    Courses differ in the times at which requests reach the engine, and so in the prompts per step.
    """
    runs = [Simulation(cluster(one + 1), options).run()[0]["samples"] for one in range(courses)]
    tails = {
        name: [one[name]["percentiles"]["p99"] for one in runs if name in one] for name in BANDS
    }
    return {name: (min(values), max(values)) for name, values in tails.items() if values}


class WordIds(dict[str, int]):
    """One token id per word, always the same; remembered, since words repeat."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab

    def __missing__(self, word: str) -> int:
        self[word] = 2 + zlib.crc32(word.encode()) % (self._vocab - 2)
        return self[word]

    def of(self, text: str) -> list[int]:
        return [self[word] for word in text.split()]


@dataclass(slots=True)
class _User:
    """A session while it runs."""

    session: Session
    number: int
    history: list[int]
    turn: int = 0
    planned: float = 0.0


Enough = Callable[[], bool]
"""Whether a run may end now; called after every answer."""


class Simulation:
    """Simulated run of a workload against a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        options: RunOptions,
        *,
        started: int = 0,
        endless: bool = False,
        material: Material | None = None,
    ) -> None:
        """`started`: number of first sessions in work at the start, at random points of their
        answers (for a `warm` cluster). `endless`: further sessions follow until the run is stopped.
        `material`: its prompts; by default those that a real run would send."""
        options.verify()
        if options.workload == PICTURES and options.trace is None:
            raise InvalidRequest("pictures are not simulated", param="workload")
        self.cluster, self.options = cluster, options
        self._words = WordIds(cluster.spec.case.arch.vocab_size)
        self._started, self._endless = started, endless
        self._material = material or Material()
        self._sessions, arrivals = make_sessions(options, self._material)
        self._offsets: Iterable[float] | None = None
        if arrivals is not None:
            self._offsets = arrivals(random.Random(options.seed + 1))
        self._users: dict[str, _User] = {}
        self._queue: Iterator[_User] = iter(())
        self._enough: Enough = lambda: False
        self.records: list[RequestRecord] = []

    def waiting_since(self, tokens: int | None = None) -> float:
        """Return the planned time of the oldest request without its answer, or without this many
        tokens; now, if there is none."""
        waiting = [
            user.planned
            for name, user in self._users.items()
            if tokens is None or len(self.cluster.answers[name].times) < tokens
        ]
        return min(waiting, default=self.cluster.clock.now)

    def unfinished(self, tokens: int) -> list[RequestRecord]:
        """Return the records of the answers in work with at least this many tokens."""
        answers = self.cluster.answers
        return [
            self._record(user, answers[name])
            for name, user in self._users.items()
            if len(answers[name].times) >= tokens
        ]

    def came(self, begin: float, end: float) -> int:
        """Count the requests planned between two times, including those in work."""
        planned = [one.planned_ns / NS for one in self.records]
        planned += [user.planned for user in self._users.values()]
        return sum(begin <= one <= end for one in planned)

    @property
    def in_work(self) -> int:
        return len(self._users)

    def run(self, enough: Enough = lambda: False) -> tuple[dict[str, Any], Run]:
        """Return (result document, run)."""
        self.play(enough)
        run = make_run(self.options, self.records, 0, self._sessions)
        return self.document(run), run

    def run_of(self, records: list[RequestRecord], start_ns: int, end_ns: int) -> Run:
        """Return a part of the run."""
        run = make_run(self.options, records, start_ns, self._sessions)
        return replace(run, end_ns=end_ns)

    def mean_lengths(self) -> tuple[float, float]:
        """Return the mean (prompt, output) tokens of the first turns."""
        turns = [session.turns[0] for session in self._sessions]
        prompts = sum(turn.prompt_tokens for turn in turns)
        return prompts / len(turns), sum(turn.output_tokens for turn in turns) / len(turns)

    def play(self, enough: Enough) -> None:
        """Run until nothing is left or `enough` returns True; the answers are in `records`."""
        self._enough = enough
        self._queue = (
            _User(session, number, self._words.of(session.system))
            for number, session in enumerate(self._supply())
        )
        started = self._begin() if self._started else []
        # In a closed loop the first users arrive spread over some milliseconds, as from real
        # clients.
        users = self.options.concurrency - self._started
        begins = self._offsets or (n * 1e-4 for n in range(users))
        asked = (self._ask(user, begin) for begin, user in zip(begins, self._queue, strict=False))
        collects = gc.isenabled()
        gc.disable()  # Many objects, no cycles: it would take a fifth of the time.
        try:
            self.cluster.run(asked, self._follow, started=started)
        finally:
            if collects:
                gc.enable()

    def _supply(self) -> Iterator[Session]:
        """Yield sessions; an endless run makes more of them, from the same seed."""
        done = 0
        while True:
            yield from self._sessions[done:]
            done = len(self._sessions)
            if not self._endless:
                return
            more = replace(self.options, requests=2 * done)
            self._sessions = make_sessions(more, self._material)[0]

    def _begin(self) -> list[SimRequest]:
        """Return the first sessions' requests, in the middle of their answers."""
        draws = random.Random(self.options.seed + 2)
        shares = [(number + 0.5) / self._started for number in range(self._started)]
        draws.shuffle(shares)
        requests = []
        for share, user in zip(shares, self._queue, strict=False):
            _, request = self._ask(user, 0.0)
            there = int(share * request.output_tokens)
            request.prompt = [*request.prompt, *([TOKEN] * there)]
            request.output_tokens -= there
            requests.append(request)
        return requests

    def document(self, run: Run, rates: Run | None = None) -> dict[str, Any]:
        """Return the result of a run, or of a part; `rates`: requests that ended in its time."""
        spec = self.cluster.spec
        server = {
            "url": f"simulated: {len(self.cluster.replicas)} engines on "
            f"{self.cluster.devices} × {spec.hardware.name}",
            "model": spec.case.arch.family,
            "version": None,
        }
        result = document(
            run=run,
            options=self.options.public(),
            server=server,
            audits=[],
            findings=[],
            interrupted=False,
            rates=rates,
        )
        last = max((record.end_ns for record in self.records), default=NS)
        result["simulation"] = self._extra(last / NS)
        return result

    def _extra(self, seconds: float) -> dict[str, Any]:
        replicas = self.cluster.replicas
        queries = sum(replica.kv.prefix_queries for replica in replicas)
        found = {
            "replicas": len(replicas),
            "devices": self.cluster.devices,
            "steps": sum(replica.steps for replica in replicas),
            "busy": [replica.busy / seconds for replica in replicas],
            "prefix_hit_rate": sum(r.kv.prefix_hits for r in replicas) / queries if queries else 0,
            "preemptions": sum(r.scheduler.stats().preemptions for r in replicas),
        }
        if self.cluster.failures is not None:
            losses = self.cluster.losses
            down = [max(0.0, min(end, seconds) - begin) for begin, end in losses.down]
            found["failures"] = {
                "deaths": len(down),
                "down_share": sum(down) / seconds / self.cluster.size,
                "moved": losses.moved,
                "repeated_tokens": losses.repeated_tokens,
                "failed": losses.failed,
            }
        if (law := self.cluster.spec.drafts) is not None:
            stats = [replica.scheduler.stats() for replica in replicas]
            found["speculation"] = {
                "law": law.name,
                "synthetic": law.synthetic,
                "drafts": sum(one.drafts for one in stats),
                "draft_tokens": sum(one.draft_tokens for one in stats),
                "accepted_tokens": sum(one.accepted_tokens for one in stats),
            }
        return found

    def _ask(self, user: _User, at: float) -> tuple[float, SimRequest]:
        turn = user.session.turns[user.turn]
        new = turn.ids if turn.ids is not None else self._words.of(turn.text)
        user.history = [*user.history, *new]
        user.planned = at + turn.think_seconds
        name = f"{user.number}-{user.turn}"
        self._users[name] = user
        request = SimRequest(name, user.history, turn.output_tokens, user.number, turn.cancel_after)
        return user.planned, request

    def _follow(self, answer: SimAnswer) -> list[tuple[float, SimRequest]]:
        user = self._users.pop(answer.request.id)
        self.records.append(self._record(user, answer))
        user.history = [*user.history, *([TOKEN] * len(answer.times))]
        user.turn += 1
        if self._enough():
            self.cluster.stop()
            return []
        if answer.error is None and user.turn < len(user.session.turns):
            return [self._ask(user, answer.end)]
        if self._offsets is None:
            following = next(iter(itertools.islice(self._queue, 1)), None)
            if following is not None:
                return [self._ask(following, answer.end)]
        return []

    def _record(self, user: _User, answer: SimAnswer) -> RequestRecord:
        return RequestRecord(
            number=user.number * 1000 + user.turn,
            session=user.number,
            turn=user.turn,
            group=user.session.group,
            planned_ns=round(user.planned * NS),
            sent_ns=round(answer.arrived * NS),
            chunk_ns=np.rint(np.array(answer.times) * NS).astype(np.int64).tolist(),
            end_ns=round((answer.end or self.cluster.clock.now) * NS),
            status=503 if answer.error else 200,
            error=answer.error,
            error_kind="refused" if answer.error else None,
            cancelled=answer.cancelled,
            asked_tokens=user.session.turns[user.turn].output_tokens,
            prompt_tokens=len(answer.request.prompt),
            output_tokens=len(answer.times),
            cached_tokens=answer.cached,
            characters=4 * len(answer.times),
            process=answer.replica,
        )
