"""Several models in one engine process: one supervisor, and an `AsyncEngine` for each model.

Messages of the first model are sent bare, those of the others in an envelope with the number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from ...base import environment
from ...base.errors import EngineDead, InvalidRequest, Overloaded
from ...base.modelfiles import ModelFiles
from ...base.several import ModelChoice, check_together
from ...obs.tasks import TaskWatch
from ...speech.finding import find, hears
from .. import messages
from ..hearing.engine import HANG_SECONDS, HearingEngine, samples_held
from ..hearing.options import own_options
from ..loop.real import REAL_WORKER
from ..messages import Configure, WireFiles, WireModel
from .async_engine import AsyncEngine
from .opening import OpenModel, open_for_serving
from .operations import Operations
from .supervision import State, Supervision
from .supervisor import Supervisor

Member = AsyncEngine | HearingEngine
OnFiles = Callable[[WireFiles], None]


class _MemberFiles(NamedTuple):
    """An opened model of a server."""

    choice: ModelChoice
    files: WireFiles
    model: OpenModel | None
    """None: it transcribes, and the engine process opens its files."""


class EngineGroup:
    """The models of one server. Belongs to one event loop; imports no torch."""

    def __init__(self, supervisor: Supervisor, tasks: TaskWatch) -> None:
        """Use `start`."""
        self.members: dict[int, Member] = {}
        """By number; 0 is the first, which requests without a model's name get."""
        self.chosen: dict[int, ModelChoice] = {}
        self.operations = Operations(supervisor, self, self._end_all, tasks)
        self._supervisor = supervisor
        self._tasks = tasks
        self._early: list[Any] = []
        self._numbers = count(1)
        self._opened: dict[int, _MemberFiles] = {}
        self._coming: dict[int, _MemberFiles] = {}
        """Models that the engine process is loading."""
        self._samples = samples_held()
        self._asked: dict[int, asyncio.Future[None]] = {}
        """Questions about models that the engine process has not answered yet."""

    @classmethod
    async def start(
        cls,
        chosen: Sequence[ModelChoice],
        *,
        supervision: Supervision | None = None,
        worker: str = REAL_WORKER,
        progress: Any = None,
    ) -> EngineGroup:
        """Open the models and start their engine process, at the same time. Arguments and errors:
        see `AsyncEngine.start`."""
        begin = time.monotonic()
        chosen = await asyncio.to_thread(_heard, chosen, shared=len(chosen) > 1)
        if supervision is None:
            supervision = Supervision(dumps=environment.cache_root() / "flight")
            if all(one.hears for one in chosen):
                supervision = replace(supervision, hang=HANG_SECONDS)
        groups: list[EngineGroup] = []

        def task_failed(name: str) -> None:
            if groups and groups[0].members:
                groups[0].first.metrics.failed("task")

        tasks = TaskWatch(task_failed)
        supervisor = Supervisor(
            chosen[0].options,
            supervision,
            worker=worker,
            on_message=lambda message: groups[0]._receive(message),
            on_down=lambda kind, error: groups[0]._down(kind, error),
            tasks=tasks,
            imports=("headrace.engine.hearing.opening",)
            if any(one.hears for one in chosen)
            else (),
        )
        group = cls(supervisor, tasks)
        groups.append(group)
        try:
            await group._open(chosen, progress)
            await supervisor.started()
        except BaseException:
            await supervisor.close()
            raise
        for member in group.members.values():
            member.note_total(time.monotonic() - begin)
        return group

    async def _open(self, chosen: Sequence[ModelChoice], progress: Any) -> None:
        files: dict[int, WireFiles] = {}

        def opened(number: int, found: WireFiles) -> None:
            files[number] = found
            if len(files) == len(chosen):
                self._supervisor.configure_by(
                    partial(self._configure, dict(enumerate(chosen)), files)
                )

        opening = [
            asyncio.ensure_future(_opened(choice, progress, partial(opened, number)))
            for number, choice in enumerate(chosen)
        ]
        try:
            models = await asyncio.gather(*opening)
        except BaseException:
            for one in opening:
                one.cancel()
            raise
        for number, model in enumerate(models):
            self._join(number if not number else next(self._numbers), model)
        early, self._early = self._early, []
        for message in early:
            self._receive(message)

    def _join(self, number: int, opened: _MemberFiles) -> Member:
        choice, _, model = opened
        name = choice.names[0] if choice.names else None
        common = self._supervisor, self._tasks
        own: dict[str, Any] = {"number": number, "name": name, "operations": self.operations}
        if model is None:
            member: Member = HearingEngine(choice.options, *common, **own, samples=self._samples)
        else:
            member = AsyncEngine(choice.options, model, *common, **own)
        self.chosen[number], self._opened[number] = choice, opened
        self.members[number] = member
        return member

    def _configure(
        self, chosen: dict[int, ModelChoice], files: dict[int, WireFiles], flight: str
    ) -> Configure:
        """Return the first message to an engine process."""
        if self.members:
            chosen = self.chosen
            files = {number: one.files for number, one in self._opened.items()}
        others = [
            WireModel(number, choice.options, files[number], choice.weight)
            for number, choice in chosen.items()
            if number
        ]
        return Configure(chosen[0].options, files[0], flight, chosen[0].weight, others)

    @property
    def first(self) -> Member:
        """The first model."""
        return self.members[0]

    @property
    def phases(self) -> dict[str, float]:
        """See `ServingEngine`: sums over all models."""
        return self.first.phases

    @property
    def files(self) -> ModelFiles | None:
        """Files of the first model; None if it transcribes."""
        return self.first.files if isinstance(self.first, AsyncEngine) else None

    @property
    def model_name(self) -> str:
        """The models' names between commas."""
        return ", ".join(self.names(number)[0] for number in self.members)

    @property
    def shares(self) -> list[str]:
        """A line for each model: its KV, and by which rule it has that."""
        return [
            f"model {self.names(number)[0]}: {one.value} of KV ({one.reason})"
            for number, member in self.members.items()
            for one in member.decisions
            if one.name == "kv_memory"
        ]

    def names(self, number: int) -> list[str]:
        """Return the names under which a model is served, the one of its answers first."""
        return list(self.chosen[number].served)

    # Messages of the engine process

    def _receive(self, message: Any) -> None:
        if not self.members:
            self._early.append(message)
            return
        match message:
            case messages.OfModel(number, inner):
                if (member := self.members.get(number)) is not None:
                    member.receive(inner)
            case messages.Ready():
                for number, ready in {0: message, **message.beside}.items():
                    if (member := self.members.get(number)) is not None:
                        member.receive(ready)
            case messages.ThreadNews():
                for member in self.members.values():
                    member.receive(message)
            case messages.ModelDone():
                self._done(message)
            case _:
                self.first.receive(message)

    def _done(self, done: messages.ModelDone) -> None:
        """Take the engine process's answer about a model."""
        coming = self._coming.pop(done.number, None)
        if coming is not None and done.ready is not None:
            self._join(done.number, coming).receive(done.ready)
        waiting = self._asked.pop(done.number, None)
        if waiting is not None and not waiting.done():
            if done.error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(done.error.error())

    def _forget_questions(self, error: EngineDead) -> None:
        """End the open questions about models: the process that should answer is gone."""
        self._coming.clear()
        asked, self._asked = self._asked, {}
        for waiting in asked.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _down(self, kind: str, error: EngineDead) -> None:
        self._forget_questions(error)
        for member in self.members.values():
            member.down(kind, error)

    def _end_all(self, error: EngineDead) -> None:
        self._forget_questions(error)
        for member in self.members.values():
            member.end_all(error)

    # Models that come and go

    async def load(self, choice: ModelChoice, *, progress: Any = None) -> int:
        """Load a further model; return its number.

        Raises the errors of a start: `DoesNotFit` with the missing bytes, `OptionError` for a name
        in use, `Asleep`, and `EngineDead`.
        """
        self.operations.check_awake()
        choice.options.verify()
        check_together([*self._whole(), choice])
        (choice,) = await asyncio.to_thread(_heard, [choice], shared=True)
        opened = await _opened(choice, progress, lambda files: None)
        check_together([*self._whole(), choice])
        self.operations.check_awake()
        number = next(self._numbers)
        wire = WireModel(number, choice.options, opened.files, choice.weight)
        self._coming[number] = opened
        await self._ask(number, messages.LoadModel(wire))
        return number

    def _whole(self) -> list[ModelChoice]:
        """Return the choices whose names are in use."""
        return [*self.chosen.values(), *(one.choice for one in self._coming.values())]

    async def unload(self, number: int, drain_seconds: float = 30.0) -> None:
        """Finish a model's requests, refuse new ones, and give its memory back. Raises
        `InvalidRequest` for the first model, which stays."""
        if not number:
            raise InvalidRequest(
                f"{self.names(0)[0]} is the server's first model, which stays", param="model"
            )
        member = self.members[number]
        await member.finish(drain_seconds, "the model is being unloaded")
        if self.members.get(number) is not member:
            return  # Another caller has unloaded it.
        del self.members[number], self.chosen[number], self._opened[number]
        member.closed()
        while True:
            try:
                await self._ask(number, messages.UnloadModel(number))
            except InvalidRequest:
                return  # A new engine process does not have it.
            except EngineDead:
                if not self._supervisor.alive or self._supervisor.state is State.ASLEEP:
                    return  # The next engine process, if one comes, does not load it.
            except Overloaded:
                pass  # Its last request ends here a moment before it ends there.
            else:
                return
            await asyncio.sleep(0.05)

    async def _ask(self, number: int, message: messages.LoadModel | messages.UnloadModel) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._supervisor.send(message)
        except EngineDead:
            self._coming.pop(number, None)
            raise
        self._asked[number] = waiting
        await waiting

    # All models

    async def until_idle(self) -> None:
        """Wait until no model has a request in work."""
        while any(len(member.work) for member in self.members.values()):
            for member in list(self.members.values()):
                await member.work.until_idle()

    def abort_all(self) -> None:
        """Abort the requests of all models."""
        for member in self.members.values():
            member.work.abort_all()

    async def close(self, drain_seconds: float = 0.0) -> None:
        """See `AsyncEngine.close`."""
        members = list(self.members.values())
        await asyncio.gather(*(member.finish(drain_seconds) for member in members))
        await self._supervisor.close()
        self._forget_questions(EngineDead("the engine was closed", retry_after=2.0))
        for member in members:
            member.closed()


def _heard(chosen: Sequence[ModelChoice], *, shared: bool) -> list[ModelChoice]:
    """Mark the models that transcribe, and give them their own options (`own_options`)."""
    found = []
    for one in chosen:
        options = one.options
        if hears(options.model, cache_dir=options.cache_dir, offline=options.offline):
            one = replace(one, options=own_options(one, shared=shared), hears=True)
        found.append(one)
    return found


async def _opened(choice: ModelChoice, progress: Any, on_files: OnFiles) -> _MemberFiles:
    """Open a model: see `open_for_serving`."""
    options = choice.options
    if not choice.hears:
        model = await open_for_serving(
            options, progress, lambda files: on_files(WireFiles.of(files))
        )
        return _MemberFiles(choice, WireFiles.of(model.files), model)
    folder = await asyncio.to_thread(
        find,
        options.model,
        cache_dir=options.cache_dir,
        offline=options.offline,
        progress=progress,
    )
    files = WireFiles(options.model, "", str(folder))
    on_files(files)
    return _MemberFiles(choice, files, None)
