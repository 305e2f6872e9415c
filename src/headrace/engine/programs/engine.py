"""`ProgramEngine`: the foreign programs of one server, for an event loop."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...base.config import Decision
from ...base.errors import (
    InvalidRequest,
    ModelNotFound,
    NotFound,
    OptionError,
)
from ...base.hardware import cpu
from ...base.names import nearest
from ...base.shares import Shares
from ...obs.tasks import TaskWatch
from ...programs.confined import MOST_REGION, ConfinedProgram
from ...programs.inspection import LIMITS, inspected
from ...programs.inspection import ProgramLimits as ProgramLimits
from ...programs.measured import Shapes, shapes_of
from ...programs.onnx import Port
from ...programs.rows import MOST_RANK, MOST_SIZE, Array, Feed, fitting
from ...sched.deadlines import BATCH, INTERACTIVE, REALTIME, AdmittedStream, PeriodicStream
from ...speech.program_voices import open_program_voice
from ..clients.face import Health
from ..clients.speaking import SpeakingMetrics
from .executor import SELF_TEST, ProgramExecutor, ProgramRun, ServedProgram
from .guard import ProgramGuard
from .jobs import ProgramJobs
from .metrics import ProgramMetrics
from .sequences import Key, ProgramSequence, Sequences, unknown

_Ran = Callable[[Feed], Awaitable[dict[str, Array]]]
WARM_RUNS = 5
"""Runs that measure a stream's shapes before its admission."""
MOST_STREAMS = 256
SILENT_PERIODS, SILENT_SECONDS = 10, 10.0
"""Periods, and seconds, without a run after which a stream counts as ended."""
TEST_LIMIT = 10.0
"""Seconds until a self-test's deadline."""
MARGIN = 1.1
"""Planned length of a stream's run, relative to the longest measured."""


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """A request's place in a sequence."""

    id: str
    start: bool = False
    end: bool = False


@dataclass(eq=False, slots=True)
class OpenStream:
    """An admitted stream of one owner."""

    id: str
    owner: str
    program: ServedProgram
    admitted: AdmittedStream
    shapes: Shapes
    """Shapes of every input of its runs."""
    last: float

    @property
    def silent_at(self) -> float:
        """Time at which it ends unless a run comes before."""
        return self.last + max(SILENT_SECONDS, SILENT_PERIODS * self.admitted.stream.period)


class ProgramEngine:
    """Programs by name. Its methods belong to the event loop that started it."""

    def __init__(self, lanes: int) -> None:
        """Use `start`."""
        self.tasks = TaskWatch()
        self.programs: dict[str, ServedProgram] = {}
        self.streams: dict[str, OpenStream] = {}
        self.sequences = Sequences()
        self.metrics = ProgramMetrics(self)
        self.registry = self.metrics.registry
        self.spoken = SpeakingMetrics(self.registry)
        self.executor = ProgramExecutor(lanes, self.tasks, self._ended)
        self.jobs = ProgramJobs(self.executor, self._job_ended)
        self.decisions: list[Decision] = []
        self.phases: dict[str, float] = {}
        self._shares = Shares(MOST_STREAMS, "as many streams are open as are allowed")
        self._loop = asyncio.get_running_loop()
        self._silence: asyncio.TimerHandle | None = None
        self._draining = False
        self._guards: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        files: Mapping[str, Path],
        limits: ProgramLimits = LIMITS,
        *,
        lanes: int | None = None,
        licences: Mapping[str, str] | None = None,
    ) -> ProgramEngine:
        """Load the programs of these files, by name, each in its own process.

        `lanes`: runs at a time; None: one per processor. `licences`: the known ones, by name.
        Raises as `programs.inspected`, `open_program_voice` and `ConfinedProgram.start`.
        """
        begin = time.monotonic()
        engine = cls(lanes or cpu().cores)
        try:
            for name, path in files.items():
                await engine.load(name, path, limits)
                engine.programs[name].licence = (licences or {}).get(name)
        except BaseException:
            await engine.close()
            raise
        engine.phases = {"total": time.monotonic() - begin}
        return engine

    async def load(self, name: str, path: Path, limits: ProgramLimits = LIMITS) -> None:
        """Load a further program. Raises as `start`."""
        if name in self.programs:
            raise OptionError(f"two programs have the name {name}", param="programs")
        count = self.executor.lanes.count
        confined = await asyncio.to_thread(
            lambda: ConfinedProgram(inspected(path, limits), limits, lanes=count)
        )
        try:
            voice = await asyncio.to_thread(open_program_voice, path, confined.inputs)
            await asyncio.to_thread(confined.start)
        except BaseException:
            confined.close()
            raise
        self.programs[name] = program = ServedProgram(name, confined, voice)
        self.executor.add(program)
        noted, tested = partial(self.metrics.guarded, name), partial(self._tested, program)
        program.guard = guard = ProgramGuard(program, tested, noted)
        await guard.test()
        self._guards.append(self.tasks.keep(f"guard of {name}", guard.keep))

    async def _tested(
        self, program: ServedProgram, feed: Feed, seconds: float | None
    ) -> dict[str, Array]:
        """Run a self-test, which is refused if the streams leave no time for it."""
        key, last = shapes_of(program.confined.inputs, feed), self._loop.time() + TEST_LIMIT
        return await self.executor.run(
            program,
            feed,
            key,
            seed=0,
            urgency=BATCH,
            deadline=last,
            owner=SELF_TEST,
            seconds=seconds,
        )

    async def test(self, program: ServedProgram) -> dict[str, object]:
        """Test a program and scrub its bytes; return the outcome."""
        guard: ProgramGuard = program.guard
        passed, whole = await guard.test(), await guard.scrub()
        return {"passed": passed, "whole": whole, "mode": guard.mode.name, "reason": guard.reason}

    @property
    def model_name(self) -> str:
        """Name of the first program."""
        return next(iter(self.programs), "")

    def find(self, name: str) -> ServedProgram:
        """Return a program. Raises `ModelNotFound`."""
        found = self.programs.get(name)
        if found is None:
            there = ", ".join(self.programs)
            raise ModelNotFound(
                f"no program {name!r:.200} is served here{nearest(name, self.programs)}; this "
                f"server has {there}",
                param="model",
            )
        return found

    def _ended(self, run: ProgramRun, outcome: str, waited: float, seconds: float) -> None:
        if run.owner == SELF_TEST:
            return
        if run.program.guard is not None:
            run.program.guard.note(run, outcome)
        slack = None
        if outcome == "run" and run.deadline < math.inf:
            slack = max(0.0, run.deadline - self._loop.time())
        self.metrics.ended(run.program.name, outcome, waited, seconds, slack)

    def _job_ended(self, name: str, outcome: str, seconds: float) -> None:
        self.metrics.jobs.labels(name, outcome).inc()
        self.metrics.job.labels(name).observe(seconds)

    # Runs

    async def run(
        self,
        program: ServedProgram,
        inputs: Feed,
        *,
        seed: int = 0,
        urgency: int = INTERACTIVE,
        timeout: float = math.inf,
        stream: str | None = None,
        step: SequenceStep | None = None,
        owner: str = "",
    ) -> dict[str, Array]:
        """Run a program once. `timeout`: seconds from now to the deadline; `stream`: id of the
        sender's stream, which sets class and deadline; `step`: the sequence whose states it uses.

        Raises `InvalidRequest` for inputs that do not fit, and the errors of the executor.
        """
        now = self._loop.time()
        opened = None if stream is None else self._stream(stream, owner, program)
        if opened is None and urgency == REALTIME:
            raise InvalidRequest(
                "the class realtime is for the runs of an admitted stream; open one first",
                param="parameters",
            )

        async def ran(feed: Feed) -> dict[str, Array]:
            fit = fitting(program.confined.inputs, feed)
            shapes, deadline = shapes_of(program.confined.inputs, fit), now + timeout
            release = now
            if opened is not None:
                if shapes != opened.shapes:
                    raise InvalidRequest("the shapes are not those of the stream", param="inputs")
                opened.last = now
                release, due = opened.admitted.released(now)
                deadline = min(deadline, due)
            return await self.executor.run(
                program,
                fit,
                shapes,
                seed=seed,
                urgency=urgency if opened is None else REALTIME,
                deadline=deadline,
                release=release,
                admitted=None if opened is None else opened.admitted,
                owner=owner,
            )

        if step is None:
            return await ran(inputs)
        key = owner, program.name, step.id
        states = program.confined.inspection.states
        sequence = (
            self.sequences.start(key, states, now) if step.start else self.sequences.find(key, now)
        )
        return await self._stepped(key, sequence, inputs, step, ran)

    async def _stepped(
        self, key: Key, sequence: ProgramSequence, inputs: Feed, step: SequenceStep, ran: _Ran
    ) -> dict[str, Array]:
        """Run once with a sequence's states. An error leaves the states unchanged; a sender that
        leaves during the run ends the sequence."""
        program = self.programs[key[1]]
        try:
            async with sequence.turn:
                if sequence.dropped:
                    raise unknown(key)
                found = await ran({**sequence.states, **inputs})
                states = program.confined.inspection.states
                kept = {one.input: found.pop(one.output) for one in states}
                if not step.end:
                    self.sequences.keep(key, sequence, kept)
                sequence.last = self._loop.time()
        except asyncio.CancelledError:
            self.sequences.drop(key, sequence)
            raise
        if step.end:
            self.sequences.drop(key, sequence)
        return found

    # Streams

    async def open_stream(
        self,
        program: ServedProgram,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        period: float,
        deadline: float,
        values: Mapping[str, float] | None = None,
        most: int = MOST_REGION,
        owner: str = "",
    ) -> OpenStream:
        """Measure runs with inputs of these shapes and admit a stream of them. `values`: by input,
        the value of all its elements in these runs, by default 0; `most`: most bytes of a request.
        Raises `InvalidRequest` for shapes and values that do not fit, `Overloaded` if it is not
        schedulable."""
        self._shares.take(owner, 1)
        try:
            feed = _filled(program, shapes, values or {}, most)
            key = shapes_of(program.confined.inputs, feed)
            for _ in range(WARM_RUNS):
                await self.executor.run(program, feed, key, seed=0, urgency=BATCH, owner=owner)
            worst = program.prices.worst(key)
            assert worst is not None, "it was measured"
            admitted = await self.executor.admit(PeriodicStream(MARGIN * worst, period, deadline))
        except BaseException:
            self._shares.give(owner, 1)
            raise
        made = OpenStream(secrets.token_hex(8), owner, program, admitted, key, self._loop.time())
        self.streams[made.id] = made
        self.expire()
        return made

    def _stream(self, name: str, owner: str, program: ServedProgram) -> OpenStream:
        found = self.streams.get(name)
        if found is None or found.owner != owner or found.program is not program:
            raise NotFound(
                f"no stream {name!r:.40} of {program.name} is open: it was closed, or silent for "
                f"{SILENT_SECONDS:.0f} s",
                param="parameters",
            )
        return found

    def close_stream(self, name: str, owner: str, program: ServedProgram) -> None:
        """End a stream. Raises `NotFound`."""
        self._drop(self._stream(name, owner, program))

    def _drop(self, stream: OpenStream) -> None:
        del self.streams[stream.id]
        self._shares.give(stream.owner, 1)
        self.executor.dismiss(stream.admitted, stream.program)

    def expire(self) -> None:
        """End the streams of silent senders, and schedule the next check."""
        if self._silence is not None:
            self._silence.cancel()
        now = self._loop.time()
        for stream in list(self.streams.values()):
            if stream.silent_at <= now:
                self._drop(stream)
        first = min((one.silent_at for one in self.streams.values()), default=None)
        self._silence = None if first is None else self._loop.call_at(first, self.expire)

    # The engine as a whole

    def in_work(self) -> list[tuple[str, object]]:
        """Return nothing: a client that leaves ends its runs."""
        return []

    def abort(self, request_id: str) -> int:
        return 0

    def health(self) -> Health:
        """Ready while any program is; an ended process is replaced, so the engine stays alive."""
        down = [one.name for one in self.programs.values() if not one.serves]
        ready = not self._draining and len(down) < len(self.programs)
        reason = (
            "shutting down"
            if self._draining
            else f"{', '.join(down)}: starting again, or in safe mode"
        )
        return Health(ready=ready, alive=True, reason="" if ready else reason, retry_after=2.0)

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Refuse new runs and end the processes."""
        self._draining = True
        for guard in self._guards:
            guard.cancel()
        if self._silence is not None:
            self._silence.cancel()
        self.jobs.close()
        await self.executor.close()


def _filled(
    program: ServedProgram,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, float],
    most: int,
) -> dict[str, Array]:
    """Make inputs of these shapes, at most `most` bytes in all. Inputs left out, such as states,
    get 1 for each free dimension. All elements have the input's value, or 0."""
    ports = program.confined.inputs
    for param, named in (("shapes", shapes), ("values", values)):
        if strange := sorted(named.keys() - ports.keys()):
            wrong = f"input {strange[0]!r:.80} is not known; the inputs are: {', '.join(ports)}"
            raise InvalidRequest(wrong, param=param)
    made, memory = {}, program.confined.limits.memory
    left = min(most, memory)
    for name, port in ports.items():
        free = tuple(dim if isinstance(dim, int) else 1 for dim in port.dims or ())
        shape, room = shapes.get(name, free), left if name in shapes else memory
        if (
            len(shape) > MOST_RANK
            or any(not 0 <= dim < MOST_SIZE for dim in shape)
            # numpy multiplies the sizes of empty arrays, too.
            or (size := math.prod(dim or 1 for dim in shape) * np.dtype(port.type).itemsize) > room
        ):
            wrong = f"input {name:.80} has the shape {list(shape[:MOST_RANK])!r:.80}"
            allowed = f"at most {MOST_RANK} sizes from 0 to 2^31 - 1, and {room:,} bytes"
            raise InvalidRequest(f"{wrong}; allowed are {allowed}", param="shapes")
        left -= size if name in shapes else 0
        made[name] = np.full(shape, _element(port, values.get(name, 0)))
    return fitting(ports, made)


def _element(port: Port, value: float) -> Array:
    """Return a number in an input's type. Raises `InvalidRequest` if the type cannot hold it."""
    kind = np.dtype(port.type)
    with np.errstate(over="ignore", invalid="ignore"):
        found: Array = np.asarray(value, np.float64).astype(kind)
    if np.isfinite(found) and (kind.kind == "f" or float(found) == value):
        return found
    wrong = f"input {port.name:.80} has the value {value!r:.40}, which is no finite {kind}"
    raise InvalidRequest(wrong, param="values")
