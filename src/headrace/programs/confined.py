"""A program in a child process of its own, which may compute and nothing else.

A file may make the library allocate or compute without end, or crash it: that ends the child, and
no other program. `ConfinedProgram` starts and kills the child and exchanges runs with it, a lane
for each run at a time: arrays through shared memory, eight bytes through a pipe. It has no thread
and no loop: the owner of it waits for `answers` and calls `finish`. `tried` is a first load alone.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from ..base.errors import (
    DoesNotFit,
    EngineDead,
    EngineFault,
    InvalidRequest,
    ModelFileError,
    RunStopped,
    UnsupportedModel,
)
from ..base.foreign import Undecodable, json_reader
from .drawn import random_nodes
from .inspection import LIMITS, Inspection, ProgramLimits
from .library import library
from .measured import MeasuredProgram
from .region import Region, RunHead, copied, unnamed_file
from .rows import Array, Feed, fitting

MESSAGE = struct.Struct("<II")
"""Length of a head, or the lane, and the number of a run."""
MOST_REGION = 1 << 30
"""Bytes of the inputs and outputs of a run."""
SPARE = 256 << 20
"""Bytes of address space that a child has beside its program's."""
GRACE_SECONDS = 1.0
"""Time after its limit in which a stopped run must end, before its process is killed."""
_MOST_ANSWER = 4096
_ERRORS = {one.__name__: one for one in (InvalidRequest, RunStopped)}


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a first load."""

    memory: int
    """Bytes by which the process grew, at most."""
    seconds: float


class LaneFiles(msgspec.Struct):
    """Files of a lane, by number, as the child inherits them."""

    region: int
    orders: int
    answers: int


class ChildOrder(msgspec.Struct):
    """Order to the child, on the line before the parts of its file."""

    name: str
    parts: dict[str, int]
    """Sizes of the file ("") and of its external data, in their order."""
    lanes: list[LaneFiles]
    region: int
    memory: int
    """Bytes of address space."""
    limit: int
    """Bytes of weights, and of values in a run."""
    seconds: float
    """Time limit of a run."""
    run: bool
    """Whether to run once with zeros."""


class ChildSaid(msgspec.Struct):
    """Answer of the child when it has loaded."""

    memory: int = 0
    seconds: float = 0.0
    refused: str | None = None


_answer = json_reader(ChildSaid)


def receive(file: int) -> tuple[int, int] | None:
    """Read a message; None at the end."""
    data = os.read(file, MESSAGE.size)
    return MESSAGE.unpack(data) if len(data) == MESSAGE.size else None


class _LaneEnds:
    """The parent's side of a lane: its region and its ends of the two pipes."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.answers = self.told = -1
        self.theirs, self.orders = os.pipe()
        try:
            self.answers, self.told = os.pipe()
            os.set_blocking(self.orders, False)
        except BaseException:
            self.close()
            raise

    def files(self) -> LaneFiles:
        return LaneFiles(self.region.file, self.theirs, self.told)

    def started(self) -> None:
        """Close the child's ends."""
        os.close(self.theirs)
        os.close(self.told)
        self.theirs = self.told = -1

    def close(self) -> None:
        for end in (self.orders, self.answers, self.theirs, self.told):
            if end >= 0:
                os.close(end)


class ConfinedProgram(MeasuredProgram):
    """One program and its child. Its methods belong to one thread; `start` may take long."""

    def __init__(
        self, inspection: Inspection, limits: ProgramLimits = LIMITS, *, lanes: int = 1
    ) -> None:
        """Prepare; `lanes`: runs at a time. Raises `UnsupportedModel`, `PackageAbsent`."""
        library()  # Its absence is this process's error.
        random_nodes(inspection.described)
        super().__init__(inspection)
        self.limits = limits
        self._processor_ns = 0
        self._size = min(MOST_REGION, limits.memory)
        self._regions: list[Region] = []
        self._lanes: list[_LaneEnds] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._outputs = {one.name for one in inspection.described.graph.outputs}
        try:
            for _ in range(lanes):
                self._regions.append(Region.make(self._size))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> Trial:
        """Start the child and load the program, which is run once with zeros if every size is known
        or may be 1.

        Raises `DoesNotFit`, `ModelFileError` with the library's reason, `UnsupportedModel` if it
        crashes or takes too long. The child is then gone.
        """
        told = -1
        try:
            for region in self._regions:
                self._lanes.append(_LaneEnds(region))
            order = self._ordered()
            files = [number for one in order.lanes for number in msgspec.structs.astuple(one)]
            told = unnamed_file(msgspec.json.encode(order) + b"\n", *self._parts().values())
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-m", "headrace.programs.child", str(told)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[told, *files],
                env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PATH": os.defpath},
            )
            assert self._child.stdin is not None
            os.set_blocking(self._child.stdin.fileno(), False)
            for lane in self._lanes:
                lane.started()
            return self._loaded(self._child)
        except BaseException:
            self.kill()
            self.reap()
            raise
        finally:
            if told >= 0:
                os.close(told)

    def _parts(self) -> dict[str, bytes]:
        return {"": self.inspection.data, **self.inspection.outside}

    def _ordered(self) -> ChildOrder:
        sizes = {name: len(one) for name, one in self._parts().items()}
        return ChildOrder(
            self.inspection.name,
            sizes,
            [lane.files() for lane in self._lanes],
            self._regions[0].size if self._regions else 0,
            self.limits.memory + 2 * sum(sizes.values()) + SPARE,
            self.limits.memory,
            self.limits.seconds,
            not self.inspection.loops,
        )

    def _loaded(self, child: subprocess.Popen[bytes]) -> Trial:
        assert child.stdout is not None
        waiting = select.poll()
        waiting.register(child.stdout, select.POLLIN)
        seconds = 2 * self.limits.load_seconds
        line = b""
        if waiting.poll(min(1e3 * seconds, 2**31 - 1)):
            line = os.read(child.stdout.fileno(), _MOST_ANSWER)
        try:
            said = _answer(line)
        except Undecodable:
            self.kill()
            child.wait()
            raise UnsupportedModel(
                f"{self.inspection.name} ends the process that loads it, or did not load within "
                f"{seconds:.0f} s (status {child.returncode})"
            ) from None
        name = self.inspection.name
        if said.refused == "memory":
            raise DoesNotFit(f"{name} needs more than {self.limits.memory:,} bytes to load")
        if said.refused is not None:
            raise ModelFileError(f"{name} does not load: {said.refused:.400}")
        return Trial(said.memory, said.seconds)

    def answers(self, lane: int) -> int:
        """Return the file that can be read when the lane's run has ended, or the child has."""
        return self._lanes[lane].answers

    def begin(self, lane: int, number: int, feed: Feed, *, seed: int, seconds: float) -> None:
        """Begin a run in a lane that is free. Raises `InvalidRequest`, and `EngineDead` if the
        child is, or reads no more: no write waits for it."""
        own = self._lanes[lane]
        length = own.region.put(feed, RunHead([], seed=seed, seconds=seconds))
        self._write(own.orders, length, number)

    def finish(self, lane: int, *, keep: bool = False) -> dict[str, Array]:
        """Return the outputs of a run that has ended. `keep`: the region keeps its memory, however
        large, for the next run. Raises the run's error, and `EngineDead` if the child has ended, or
        answers what no program does."""
        own = self._lanes[lane]
        message = receive(own.answers)
        if message is None:
            raise EngineDead(f"the process of {self.inspection.name} has ended", retry_after=1.0)
        try:
            head, found = own.region.get(message[0])
            self._processor_ns += max(0, head.processor_ns)
            if head.error is None and found.keys() != self._outputs:
                raise ModelFileError(f"{self.inspection.name} answers other outputs than it has")
        except ModelFileError as error:
            raise EngineDead(error.message, retry_after=1.0) from None
        try:
            if head.error is None:
                return copied(found)
            name, text, param, code = (f"{one:.2000}" for one in (head.error + [""] * 4)[:4])
            raise _ERRORS.get(name, EngineFault)(text, param=param or None, code=code or None)
        finally:
            if not keep:
                own.region.clear(head.end)

    def relieve(self, lane: int) -> None:
        """Give back the memory of a lane without a run."""
        self._lanes[lane].region.clear(self._size)

    def processor_ns(self) -> int:
        return self._processor_ns

    def run(self, inputs: Feed, *, seed: int = 0) -> dict[str, Array]:
        """Run once and wait for the end; for an owner without a loop.

        A run that does not stop at its limit is killed with its process. Raises as `finish`, and
        `InvalidRequest` for inputs that do not fit.
        """
        seconds = self.limits.seconds
        self.begin(0, 1, fitting(self.inputs, inputs), seed=seed, seconds=seconds)
        waiting = select.poll()
        waiting.register(self.answers(0), select.POLLIN)
        if waiting.poll(min(1e3 * (seconds + GRACE_SECONDS), 2**31 - 1)):
            return self.finish(0)
        self.kill()
        name = self.inspection.name
        why = f"{name} did not stop within {seconds:g} s, its time limit, and was killed"
        raise RunStopped(why, code="time")

    def stop(self, lane: int, number: int) -> None:
        """Have a run stopped before its next node."""
        if self._child is not None and self._child.stdin is not None:
            with suppress(EngineDead):
                self._write(self._child.stdin.fileno(), lane, number)

    def _write(self, file: int, first: int, number: int) -> None:
        try:
            os.write(file, MESSAGE.pack(first, number))
        except OSError as error:
            name = self.inspection.name
            raise EngineDead(f"the process of {name} has ended", retry_after=1.0) from error

    def kill(self) -> None:
        """Have the child killed at once, whatever it does."""
        if self._child is not None:
            self._child.kill()

    def reap(self) -> None:
        """Wait for the end of a killed child and close its pipes; the regions stay, empty."""
        child, self._child = self._child, None
        lanes, self._lanes = self._lanes, []
        if child is not None:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()
        for lane in lanes:
            lane.region.clear(lane.region.size)
            lane.close()

    def close(self) -> None:
        """End the child and give the regions back."""
        self.kill()
        self.reap()
        regions, self._regions = self._regions, []
        for region in regions:
            region.close()


def tried(inspection: Inspection, limits: ProgramLimits) -> Trial:
    """Load a program in a child and end that. Raises as `ConfinedProgram.start`."""
    program = ConfinedProgram(inspection, limits, lanes=0)
    try:
        return program.start()
    finally:
        program.close()
