"""The supervisor of one engine process: starts and watches it, explains its end, starts it
again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...base.config import EngineOptions
from ...base.errors import EngineDead, HeadraceError
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...dist.channel import AsyncChannel, PeerGone, PrivateFolder, address
from ...obs.flight import read_flight, write_dump
from ...obs.logs import logs_as_configured
from ...obs.tasks import TaskWatch
from .. import messages
from ..loop.real import REAL_WORKER
from ..messages import WireError, WireFiles
from ..preload import wants_torch
from ..spawn import STACKS, Child
from .supervision import State, Supervision

log = logging.getLogger("headrace.engine")
ENGINE = "headrace.engine.process"


class Supervisor:
    """One engine process at a time, always a fresh one after a failure."""

    def __init__(
        self,
        options: EngineOptions,
        rules: Supervision,
        *,
        worker: str,
        on_message: Callable[[Any], None],
        on_down: Callable[[str, EngineDead], None],
        tasks: TaskWatch,
        imports: Sequence[str] = (),
    ) -> None:
        """`on_message`: gets a ready engine's messages. `on_down`: called with the kind of failure
        (death, hang, start) and the error when the engine and its work are gone. `tasks`: runs the
        supervision. `imports`: further modules that the process imports before it is configured."""
        self.state = State.STARTING
        self.phases: dict[str, float] = {}
        self.restarts = 0
        self.reason = ""
        self.last_dump: Path | None = None
        self.details: dict[str, str] = {}
        """Further details for every dump."""
        self._options = options
        self._rules = rules
        self._worker = worker
        self._on_message = on_message
        self._on_down = on_down
        self._imports = imports
        self._configuration: Callable[[str], Any] | None = None
        """Makes the first message to a process from the path of its flight recorder."""
        self._private = PrivateFolder()
        self._folder = self._private.path
        self._number = 0
        self._child: Child | None = None
        self._channel: AsyncChannel | None = None
        self._hello = False
        self._configured = False
        self._failed: WireError | None = None
        self._in_a_row = 0
        self._start_seconds = 5.0
        self._changed = asyncio.Event()
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._started.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._allowed = 0.0
        """Seconds allowed for the current step, if it may take long."""
        self._tasks = tasks
        self._task = tasks.keep("supervisor", self._supervise)

    # For the engine's front end

    def configure(self, files: ModelFiles) -> None:
        """Send the opened model to the process, which has been importing, and let it load."""
        wire = WireFiles.of(files)
        self.configure_by(lambda flight: messages.Configure(self._options, wire, flight))

    def configure_by(self, make: Callable[[str], Any]) -> None:
        """Do as `configure`, with the message that `make` gives each process."""
        self._configuration = make
        self._configure()

    @property
    def folder(self) -> Path:
        """The folder to which only both processes may write."""
        return self._folder

    async def started(self) -> None:
        """Wait until the first start is done. Raises its error."""
        await asyncio.shield(self._started)

    def send(self, message: Any) -> None:
        """Send a message. Raises `EngineDead` if there is no engine to take it."""
        if self.state is not State.READY or self._channel is None:
            raise self.dead()
        try:
            self._channel.send(message)
        except PeerGone:
            raise self.dead() from None

    def dead(self) -> EngineDead:
        return EngineDead(
            f"the engine is {self.state.value}: {self.reason or 'its model is being loaded'}",
            retry_after=self.retry_after,
        )

    @property
    def retry_after(self) -> float:
        """Seconds until a start is expected to be done."""
        return max(1.0, self._pause() + self._start_seconds)

    @property
    def alive(self) -> bool:
        if self.state is State.CLOSED:
            return False
        if self.state is not State.ASLEEP and self._task.done():
            return False  # Otherwise its end would go unnoticed.
        return self.state is State.READY or self._in_a_row < self._rules.give_up

    @property
    def late(self) -> float:
        """Seconds by which a sign of life is overdue; 0 if it is not."""
        if self.state is not State.READY:
            return 0.0
        return max(0.0, self.heartbeat_age - self._allowed - self._rules.late)

    @property
    def heartbeat_age(self) -> float:
        return 0.0 if self._channel is None else time.monotonic() - self._channel.received_at

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    async def close(self) -> None:
        """Stop the process; kill it after two seconds."""
        if self.state is State.CLOSED:
            return
        self.state, self.reason = State.CLOSED, "closed"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if not self._started.done():
            self._started.set_exception(EngineDead("the engine was closed while it started"))
        await self._end_process()
        self._private.close()

    async def sleep(self) -> None:
        """Stop the process until `wake`; kill it after two seconds. Raises `EngineDead` if it is
        not ready."""
        if self.state is not State.READY:
            raise self.dead()
        self.state, self.reason = State.ASLEEP, "asleep"
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._end_process()

    def wake(self) -> None:
        """Start a process again, watched like the first; `state` says when it is ready."""
        if self.state is State.ASLEEP:
            self.state, self.reason = State.STARTING, ""
            self._task = self._tasks.keep("supervisor", self._supervise)

    async def _end_process(self) -> None:
        channel, child = self._channel, self._child
        if channel is not None and child is not None:
            with contextlib.suppress(PeerGone):
                channel.send(messages.Stop())
            await _gone(child, 2.0)
        # `close` may have been called and finished while `sleep` waited here.
        self._bury()
        self._channel = self._child = None
        if child is not None:
            # A caller may rely on its memory being free: a killed process takes a moment.
            await _gone(child, 10.0)

    # The life of one process after the other

    async def _supervise(self) -> None:
        while True:
            begin = time.monotonic()
            if self.state is State.DOWN:
                self.restarts += 1
                self.state = State.STARTING
            try:
                self._spawn(aside=self.reason != "")
                kind, reason = await self._until_it_ends()
            except Exception as fault:  # no thread, descriptor or folder: an end like any other
                log.exception("the engine process cannot be started or watched")
                kind = "death" if self.state is State.READY else "start"
                reason = f"could not be started or watched: {fault}"
            if self._channel is not None:
                self._channel.flush()  # Its last messages before the end are still valid.
            was_ready = self.state is State.READY
            if not was_ready and not self._started.done():
                self._give_up_starting(reason)
                return
            if was_ready and time.monotonic() - begin > self._rules.healthy:
                self._in_a_row = 0
            self._in_a_row += 1
            self.reason = reason
            self.state = State.DOWN
            log.error("engine process %s", reason)
            self._on_down(kind, EngineDead(f"the engine {reason}", retry_after=self.retry_after))
            self._bury()
            self.last_dump = self._dump(kind, reason)
            log.error("its last steps: %s", self.last_dump or "not kept")
            await asyncio.sleep(self._pause())
            if self._child is not None:
                await self._reap()  # It may have been killed without a wait for its end.

    def _pause(self) -> float:
        rules = self._rules
        return min(rules.back_off_most, rules.back_off * 2.0 ** max(0, self._in_a_row - 1))

    def _spawn(self, *, aside: bool) -> None:
        self._number += 1
        loop = asyncio.get_running_loop()
        self._child = self._channel = None
        self._private.ensure()  # A cleaner of temporary files may have removed it.
        where = address(self._folder, f"engine-{self._number}")
        self._hello = self._configured = False
        self._failed, self._allowed = None, 0.0
        self.phases = {}
        self._begin = time.monotonic()
        channel = AsyncChannel(where, messages.FromEngine, on_message=self._receive, loop=loop)
        self._channel = channel
        level, form = logs_as_configured()
        arguments = [where, str(self._folder), "--worker", self._worker]
        arguments += ["--log-level", level, "--log-format", form]
        here = self._worker == REAL_WORKER and self._options.executor == "inline"
        if here and wants_torch(self._options):
            arguments.append("--torch")
        arguments += [word for module in self._imports for word in ("--import", module)]
        layout = Layout.parse(self._options.layout)
        if self._options.launcher == "local":
            arguments += ["--ranks", str(layout.devices)]
        silent = None if layout == ONE else self._rules.silent

        def soon(call: Callable[..., object], *given: Any) -> None:
            with contextlib.suppress(RuntimeError):  # The loop may be gone by now.
                loop.call_soon_threadsafe(call, *given)

        def failed(word: str) -> None:
            if self._channel is channel and self._failed is None:
                self._failed = WireError.of(EngineDead(word))
                self._changed.set()

        words = partial(soon, failed)
        self._child = Child(ENGINE, arguments, silent=silent, on_word=words, aside=aside)
        self._child.watch(lambda code: soon(self._changed.set))

    def _receive(self, message: Any) -> None:
        match message:
            case messages.Hello():
                self._hello = True
                self._configure()
            case messages.News() | messages.Beat() | messages.OfModel():
                self._allowed = 0.0
                self._on_message(message)
            case messages.Busy(seconds):
                self._allowed = seconds
            case messages.Phase(name, seconds):
                self.phases[name] = self.phases.get(name, 0.0) + seconds
            case messages.Failed(error):
                self._failed = error
                self._changed.set()
            case messages.Started():
                self._start_seconds = time.monotonic() - self._begin
                self.phases["engine_total"] = self._start_seconds
                self.reason = ""
                self.state = State.READY
                self._on_message(message)
                if not self._started.done():
                    self._started.set_result(None)
            case _:
                self._on_message(message)

    def _configure(self) -> None:
        make = self._configuration
        if self._hello and make is not None and not self._configured:
            assert self._channel is not None
            self._configured = True
            flight = str(self._folder / f"flight-{self._number}")
            with contextlib.suppress(PeerGone):
                self._channel.send(make(flight))

    async def _until_it_ends(self) -> tuple[str, str]:
        """Return (kind of failure, reason in words); by then the process is dead, or has been
        killed."""
        assert self._child is not None
        assert self._channel is not None
        patience = min(self._rules.hang, self._rules.start)
        while True:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.05, min(1.0, patience / 4)))
            code = self._child.exit_code
            ready = self.state is State.READY
            if code is not None or self._failed is not None:
                how = "ended"
                if code is None and ready:
                    self._child.kill()  # It has sent the reason; clients wait for it.
                else:
                    how = self._child.how(max(await self._reap(), 1) if code is None else code)
                said = f": {self._failed.message}" if self._failed else ""
                kind = "hang" if self._child.silence else "death"
                return kind if ready else "start", how + said
            limit = self._rules.hang + self._allowed if ready else self._rules.start
            if not self._configured and self._hello:
                continue  # It waits for us: the model's files are still being downloaded.
            if time.monotonic() - self._channel.received_at > limit:
                # Perhaps this loop was blocked: read the messages that arrived meanwhile.
                self._channel.flush()
                await asyncio.sleep(0)
            silence = time.monotonic() - self._channel.received_at
            if silence > limit:
                self._child.ask_for_stacks()
                await _gone(self._child, self._rules.stacks)
                self._child.kill()
                await self._reap()
                return "hang", f"was silent for {silence:.1f} seconds and was ended"

    async def _reap(self) -> int:
        """Wait for the end of a process that is ending; kill it after two seconds."""
        assert self._child is not None
        for wait in range(200):
            code = self._child.exit_code
            if code is not None:
                return code
            if wait == 100:
                self._child.kill()
            await asyncio.sleep(0.02)
        return -9

    def _give_up_starting(self, reason: str) -> None:
        error: HeadraceError
        if self._failed is not None:
            error = self._failed.error()
        else:
            error = EngineDead(f"the engine process {reason} before it was ready")
            self.last_dump = self._dump("start", reason)
        self.state, self.reason = State.CLOSED, error.message
        self._bury()
        self._private.close()
        self._started.set_exception(error)

    def _dump(self, kind: str, reason: str) -> Path | None:
        if self._rules.dumps is None:
            return None
        stacks = ""
        with contextlib.suppress(OSError):
            stacks = (self._folder / STACKS).read_text(errors="replace")
        return write_dump(
            self._rules.dumps,
            kind=kind,
            reason=reason,
            stacks=stacks,
            steps=read_flight(self._folder / f"flight-{self._number}"),
            details={"restarts": self.restarts, "phases": self.phases, **self.details},
        )

    def _bury(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.release()
        if self._channel is not None:
            self._channel.close()


async def _gone(child: Child, seconds: float) -> None:
    """Wait until the process has ended, `seconds` at most."""
    end = time.monotonic() + seconds
    while child.exit_code is None and time.monotonic() < end:
        await asyncio.sleep(0.02)
