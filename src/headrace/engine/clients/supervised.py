"""Common parts of the engines for text and for sounds in a supervised process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.errors import ShuttingDown
from ...obs.tasks import TaskWatch, ended
from .. import messages
from .face import Health
from .operations import Operations
from .supervision import State
from .supervisor import Supervisor


class SupervisedEngine:
    """One served model, as far as its process and the server are concerned."""

    operations: Operations

    def __init__(self, supervisor: Supervisor, tasks: TaskWatch, number: int) -> None:
        """`number`: the model's number in messages, in a server of several models."""
        self.tasks = tasks
        self._supervisor = supervisor
        self._number = number
        self._draining = ""
        """Reason why new requests are refused for good."""
        self._restarts = supervisor.restarts
        """The supervisor's restarts when the current engine process became ready."""
        self._threads_down: dict[str, str] = {}
        """Threads of the engine process that should run and do not, with the reason."""

    def _send(self, message: Any) -> None:
        wrapped = messages.ToModel(self._number, message) if self._number else message
        self._supervisor.send(wrapped)

    def _check_ready(self) -> None:
        """Raise `ShuttingDown` or `EngineDead` if no request would be taken now."""
        if self._draining:
            raise ShuttingDown(self._draining, retry_after=2.0)
        self.operations.check_awake()
        if self._supervisor.state is not State.READY:
            raise self._supervisor.dead()

    def health(self) -> Health:
        supervisor = self._supervisor
        asleep = self.operations.asleep
        late = supervisor.late
        down = ended(self.tasks.down, self._threads_down)
        ready = supervisor.state is State.READY and not (self._draining or asleep or late or down)
        reason, retry_after = "", None if ready else supervisor.retry_after
        if self._draining:
            reason = "shutting down"
        elif asleep:
            reason, retry_after = f"asleep (level {asleep})", messages.ASLEEP_RETRY
        elif late:
            reason = f"the step loop has been silent for {supervisor.heartbeat_age:.1f} seconds"
        elif down and supervisor.state is State.READY:
            reason = down
        elif not ready:
            reason = f"{supervisor.state.value}: {supervisor.reason or 'the model is being loaded'}"
        return Health(
            ready=ready,
            alive=supervisor.alive,
            reason=reason,
            retry_after=retry_after,
            heartbeat_age=supervisor.heartbeat_age,
            restarts=supervisor.restarts,
        )

    @property
    def engine_pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def last_dump(self) -> Path | None:
        """The flight recorder's dump of the latest failure."""
        return self._supervisor.last_dump
