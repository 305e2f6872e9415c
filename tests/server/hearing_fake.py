"""An engine that hears without a process: each sound is heard at once, or when a test says so."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from headrace.base.config import EngineOptions
from headrace.engine.clients.supervision import State
from headrace.engine.clients.supervisor import Supervisor
from headrace.engine.hearing.engine import RATE, HearingEngine
from headrace.engine.hearing.records import SoundEnd
from headrace.engine.messages import Abort, Hear, HeardSoFar
from headrace.obs.tasks import TaskWatch


class FakeHearing(HearingEngine):
    """Keeps what is sent to its process in `asked`, with the samples in `heard`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers = True
        self.asked: list[Hear] = []
        self.heard: list[np.ndarray[Any, Any]] = []
        self.aborted: list[str] = []
        supervisor = SimpleNamespace(
            folder=folder, state=State.READY, send=self._sent, late=False, heartbeat_age=0.0
        )
        for name, value in (("alive", True), ("retry_after", 1.0), ("restarts", 0), ("pid", None)):
            setattr(supervisor, name, value)
        super().__init__(EngineOptions(model="ears"), cast(Supervisor, supervisor), TaskWatch())

    def _sent(self, message: Any) -> None:
        if isinstance(message, Abort):
            self.aborted.append(message.request_id)
        if isinstance(message, Hear):
            self.asked.append(message)
            self.heard.append(np.fromfile(message.path, np.float32))
            if self.answers:
                asyncio.get_running_loop().call_soon(self.end, message)

    def end(self, asked: Hear) -> None:
        seconds = asked.count / RATE
        end = SoundEnd("en", seconds, [])
        self.receive(HeardSoFar(asked.request_id, [], seconds, end))

    async def settled(self) -> None:
        """Wait until nothing is removed any more."""
        while self._removing:
            await asyncio.wait(self._removing)

    @property
    def payloads(self) -> list[Path]:
        return list(self.folder.glob("sound-*"))

    @property
    def samples(self) -> int:
        """Samples that are counted."""
        return self._samples.held
