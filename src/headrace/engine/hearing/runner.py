"""Runner of transcription jobs: the engine's one loop schedules their requests like all others.

A sound's first window has a higher priority than later ones. Each sound has at most one window that
is not encoded, so the sounds' windows take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ...base.errors import EngineFault, InvalidRequest
from ...base.request import Request, SequenceDelta
from ...speech.conductor import RESERVED, WalkUnderWay
from ...speech.decoding import Ask, WindowAnswer
from ..loop.core import EngineCore

OLD = 1
"""Priority of a sound after its first window."""


@dataclass(slots=True)
class SoundShare:
    """One sound's use of the engine."""

    salt: str
    """Name of the sound, whose encodings and prefixes are not shared."""
    windows: int = 0
    """Windows that its jobs hold."""
    unread: int = 0
    """Windows that are not encoded yet, so without any answer."""
    old: bool = False
    """Whether it got an answer."""


@dataclass(slots=True)
class _Pending:
    """The requests of a job, in order, and their answers."""

    ids: list[str]
    priority: int
    said: dict[str, WindowAnswer] = field(default_factory=dict)
    left: int = 0
    """Requests that have not ended."""
    fresh: bool = True
    """Whether the job got no answer yet."""


class WalkRunner:
    """Walks over one model in the loop; not thread-safe. See `speech.conductor.Jobs`."""

    def __init__(
        self,
        core: EngineCore,
        windows: int,
        model: int = 0,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`windows`: most encodings at a time. `model`: its number in the loop. `on_close`: closes
        the engine, if no one else uses it."""
        self._core, self._model, self._on_close = core, model, on_close
        self._free = list(range(windows))[::-1]
        self._names, self._sounds = count(), count()
        self._jobs: dict[WalkUnderWay[Any], _Pending] = {}
        self._owners: dict[str, WalkUnderWay[Any]] = {}
        """Jobs by the names of their requests under way."""
        self._lent = [False, False]
        """Whether a first and whether a later window of a sound was given out since the last step.
        A window's features take 20 ms of the loop, so further ones wait for the next step: other
        models' texts do not wait for all of them, nor a new sound for a long one."""

    @property
    def free_windows(self) -> int:
        return len(self._free)

    @property
    def idle(self) -> bool:
        return not self._jobs

    def share(self) -> SoundShare:
        return SoundShare(f"{next(self._sounds)}")

    def lend(self, share: SoundShare) -> int | None:
        another = share.windows > 0
        later = another or share.old
        if self._lent[later] or share.unread or len(self._free) <= RESERVED * another:
            return None
        self._lent[later] = True
        share.windows += 1
        share.unread += 1
        return self._free.pop()

    def take_back(self, share: SoundShare, window: int) -> None:
        share.windows -= 1
        self._free.append(window)

    def add(self, job: WalkUnderWay[Any]) -> None:
        self._jobs[job] = _Pending([], OLD * job.share.old)
        self._send(job, None)

    def drop(self, job: WalkUnderWay[Any]) -> None:
        if job.done:
            return
        self._forget(job)
        job.walk.close()
        self._end(job)

    def turn(self) -> None:
        """Run one step of the loop; resume the jobs that have all their answers."""
        self.take(self._core.turn())

    def take(self, deltas: list[SequenceDelta]) -> None:
        self._lent = [False, False]
        for delta in deltas:
            self._take(delta)

    def close(self) -> None:
        self._on_close()

    def _take(self, delta: SequenceDelta) -> None:
        job = self._owners.get(delta.request_id)
        if job is None:
            return  # It was dropped meanwhile.
        pending = self._jobs[job]
        said = pending.said[delta.request_id]
        said.tokens.extend(delta.tokens)
        said.logprobs.extend(delta.logprobs or [])
        said.scores.extend(delta.prompt_logprobs or [])
        if delta.output is not None:
            pending.said[delta.request_id] = said._replace(output=delta.output)
        if pending.fresh:
            pending.fresh = False
            job.share.unread -= 1
            job.share.old = True
        if delta.finish is None:
            return
        del self._owners[delta.request_id]
        pending.left -= 1
        if delta.finish in ("error", "abort"):
            kind = InvalidRequest if delta.error_status == InvalidRequest.status else EngineFault
            self._fail(job, kind(delta.error or "the request was aborted"))
        elif not pending.left:
            self._send(job, [pending.said[name] for name in pending.ids])

    def _send(self, job: WalkUnderWay[Any], answers: list[WindowAnswer] | None) -> None:
        """Give a job its answers, and submit its next requests."""
        try:
            asks = next(job.walk) if answers is None else job.walk.send(answers)
            self._submit(job, asks)
        except StopIteration as end:
            job.result = end.value
            self._end(job)
        except Exception as error:  # noqa: BLE001 - one walk's error leaves the others alone
            self._fail(job, error)

    def _submit(self, job: WalkUnderWay[Any], asks: list[Ask]) -> None:
        pending = self._jobs[job]
        pending.ids, pending.said, pending.left = [], {}, len(asks)
        given = pending.priority, job.share.salt
        for ask in asks:
            name = f"{next(self._names)}"
            self._core.add(Request(name, ask.prompt, ask.spec, *given), self._model)
            pending.ids.append(name)
            pending.said[name] = WindowAnswer([], [], [])
            self._owners[name] = job

    def _fail(self, job: WalkUnderWay[Any], error: Exception) -> None:
        self._forget(job)
        job.walk.close()
        job.error = error
        self._end(job)

    def _forget(self, job: WalkUnderWay[Any]) -> None:
        """End the requests of a job that are under way."""
        for name in self._jobs[job].ids:
            if self._owners.pop(name, None) is not None:
                self._core.abort(name, self._model)

    def _end(self, job: WalkUnderWay[Any]) -> None:
        job.done, self._lent = True, [False, False]
        if self._jobs.pop(job).fresh:
            job.share.unread -= 1
