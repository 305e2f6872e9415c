"""`AsyncEngine`: one served model, for an event loop; the engine runs in a process of its own.

Everything here belongs to one event loop and nothing imports torch. Requests are tokenised here
and go to the engine process as ids; what it says after each step is detokenised here and handed
to the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from pathlib import Path
from typing import Any

from ..base import environment
from ..base.config import Decision, EngineOptions
from ..base.errors import (
    ContextOverflow,
    EngineDead,
    EngineFault,
    HeadraceError,
    InvalidRequest,
    Overloaded,
)
from ..base.modelfiles import ModelFiles
from ..base.request import EmbeddingOutput, OutputDelta, RequestOutput, SequenceDelta, StepStats
from ..base.sampling import SamplingParams
from ..loader import open_model
from ..loader.adapters import open_adapter, within
from ..obs.life import RequestLife
from ..obs.metrics import EngineMetrics
from ..obs.trace import CURRENT
from ..text import ChatTemplate, Tokenizer, chat_template, load_tokenizer
from . import messages
from .adapters import AdapterBook
from .face import Health, Prompt
from .input import InputProcessor
from .output import Answer, RequestOutputs
from .real import REAL_WORKER
from .stream import Stream
from .supervisor import State, Supervision, Supervisor

log = logging.getLogger("headrace.engine")


class _InWork:
    """A request that has not ended: its reader, its text, its times."""

    __slots__ = ("latest", "life", "outputs", "stream")

    def __init__(self, stream: Stream, outputs: RequestOutputs, life: RequestLife) -> None:
        self.stream = stream
        self.outputs = outputs
        self.life = life
        self.latest = [0.0] * life.choices
        """Per choice: when its latest tokens came."""


class AsyncEngine:
    """See `face.ServingEngine`, which this is, for the meaning of the public names."""

    def __init__(
        self,
        options: EngineOptions,
        files: ModelFiles,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        supervisor: Supervisor,
    ) -> None:
        """Use `start`."""
        self.options = options
        self.files = files
        self.tokenizer = tokenizer
        self.template = template
        local = Path(options.model).expanduser()
        self.model_name = local.resolve().name if local.exists() else options.model
        self.max_context = options.max_context or files.arch.max_context
        self.features: frozenset[str] = frozenset()
        self.decisions: list[Decision] = []
        self.phases: dict[str, float] = {}
        self.stats = StepStats()
        self.metrics = EngineMetrics(self.model_name, max_context=files.arch.max_context)
        self.registry = self.metrics.registry
        self.metrics.heartbeat = lambda: supervisor.heartbeat_age
        self._supervisor = supervisor
        self._input = InputProcessor(files, tokenizer, self.max_context)
        self._in_work: dict[str, _InWork] = {}
        self._sequences = 0
        """Choices of the requests in work."""
        self._most = options.max_sequences + options.max_waiting
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._subscribers: list[Callable[[StepStats], None]] = []
        self.on_end: Callable[[str, RequestLife], None] | None = None
        self._reports: list[asyncio.Future[messages.Report]] = []
        self.adapters = AdapterBook()
        self._adapter_work: dict[str, asyncio.Future[None]] = {}
        """Adapters of which the engine has not said yet that it loaded or unloaded them."""
        self._own_phases: dict[str, float] = {}

    @classmethod
    async def start(
        cls,
        options: EngineOptions | None = None,
        *,
        supervision: Supervision | None = None,
        worker: str = REAL_WORKER,
        progress: Any = None,
        wait: bool = True,
        **fields: Any,
    ) -> AsyncEngine:
        """Open the model and start its engine process, at the same time.

        `fields` are those of `EngineOptions` where none is given. `wait=False` returns when the
        model's files are open and lets the engine get ready behind: until then `health` says so
        and requests get `Overloaded`. `progress` is handed to `loader.open_model`. `worker` names
        the function that loads a worker (see `engine.real`).

        Raises what the start raises: `OptionError`, `ModelNotFound`, `DownloadError`,
        `ModelFileError`, `UnsupportedModel`, `DoesNotFit`, `EngineDead`.
        """
        begin = time.monotonic()
        options = options if options is not None else EngineOptions(**fields)
        options.verify()
        if supervision is None:
            supervision = Supervision(dumps=environment.cache_root() / "flight")
        early: list[Any] = []
        handlers: list[AsyncEngine] = []

        def on_message(message: Any) -> None:
            if handlers:
                handlers[0]._receive(message)
            else:
                early.append(message)

        def on_down(kind: str, error: EngineDead) -> None:
            if handlers:
                handlers[0]._down(kind, error)

        supervisor = Supervisor(
            options, supervision, worker=worker, on_message=on_message, on_down=on_down
        )
        own: dict[str, float] = {}
        try:
            files = await asyncio.to_thread(
                open_model,
                options.model,
                cache_dir=Path(options.cache_dir) if options.cache_dir else None,
                offline=options.offline,
                progress=progress,
            )
            own["open_files"] = time.monotonic() - begin
            supervisor.configure(files)
            _read_ahead(files)
            opened = time.monotonic()
            tokenizer = await asyncio.to_thread(load_tokenizer, files.tokenizer)
            own["tokenizer"] = time.monotonic() - opened
            template = (
                chat_template(files.chat_template, files.special) if files.chat_template else None
            )
            engine = cls(options, files, tokenizer, template, supervisor)
            engine._own_phases = own
            handlers.append(engine)
            for message in early:
                engine._receive(message)
            if wait:
                await supervisor.started()
        except BaseException:
            await supervisor.close()
            raise
        own["total"] = time.monotonic() - begin
        engine._note_phases()
        return engine

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # Requests

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        grammar: str | None = None,
        keep_ids: Collection[int] = (),
        pooling: bool = False,
        second_at: int = 0,
    ) -> Stream:
        request_id = request_id or uuid.uuid4().hex
        try:
            self._check_open(sampling)
            if request_id in self._in_work:
                raise InvalidRequest(
                    f"a request with id {request_id!r:.80} is in work", param="request_id"
                )
            request = self._input.request(
                prompt,
                sampling,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
                adapter=None if adapter is None else self.adapters.find(adapter).id,
                grammar=grammar,
                keep_ids=keep_ids,
                pooling=pooling,
                second_at=second_at,
            )
            self._supervisor.send(messages.Submit(request))
        except HeadraceError as error:
            self.metrics.refused(_refusal(error))
            raise
        choices = request.sampling.n
        stream = Stream(request.id, request.prompt, choices, self._cancel)
        life = RequestLife(
            request.arrival,
            len(request.prompt),
            choices=choices,
            max_tokens=request.sampling.max_tokens or 0,
            adapter=adapter,
            trace=CURRENT.get(),
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
        )
        self._in_work[request.id] = _InWork(stream, RequestOutputs(request, self.tokenizer), life)
        self._sequences += choices
        self._idle.clear()
        return stream

    def _check_open(self, sampling: SamplingParams) -> None:
        if self._draining:
            raise Overloaded("the server is shutting down", retry_after=2.0)
        if self._supervisor.state is not State.READY:
            raise self._supervisor.dead()
        wanted = sampling.n if type(sampling.n) is int else 1
        if self._sequences + wanted > self._most:
            raise Overloaded(
                f"{self._sequences} sequences are in work or wait, of at most {self._most}",
                retry_after=1.0,
            )

    async def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        grammar: str | None = None,
        keep_ids: Collection[int] = (),
    ) -> AsyncGenerator[OutputDelta, None]:
        stream = self.submit(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            grammar=grammar,
            keep_ids=keep_ids,
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        grammar: str | None = None,
        keep_ids: Collection[int] = (),
    ) -> RequestOutput:
        stream = self.submit(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            grammar=grammar,
            keep_ids=keep_ids,
        )
        work = self._in_work[stream.request_id]
        answer = Answer(work.outputs.request, prompt if isinstance(prompt, str) else None)
        try:
            async for delta in stream:
                answer.add(delta)
        finally:
            stream.cancel()
        return answer.output

    async def embed(
        self, prompt: Prompt, *, request_id: str | None = None, priority: int = 0
    ) -> EmbeddingOutput:
        stream = self.submit(
            prompt, SamplingParams(), request_id=request_id, priority=priority, pooling=True
        )
        try:
            async for delta in stream:
                if delta.vector is not None:
                    return EmbeddingOutput(stream.request_id, stream.prompt_ids, delta.vector)
        finally:
            stream.cancel()
        raise EngineFault("the request ended without a vector")

    def abort(self, request_id: str) -> bool:
        if request_id not in self._in_work:
            return False
        with contextlib.suppress(EngineDead):
            self._supervisor.send(messages.Abort(request_id))
        return True

    def _cancel(self, request_id: str) -> None:
        """The reader has left: stop the work and forget it at once."""
        work = self._in_work.get(request_id)
        if work is not None:
            self.abort(request_id)
            self._end(work, "abort")

    # What the engine process says

    def _receive(self, message: Any) -> None:
        match message:
            case messages.News(deltas, stats):
                now = time.monotonic()
                for delta in deltas:
                    self._deliver(delta, now)
                self._observe(stats)
            case messages.Refused(request_id, error):
                work = self._in_work.get(request_id)
                if work is not None:
                    typed = error.error()
                    self.metrics.refused(_refusal(typed))
                    self._forget(work)
                    work.stream.fail(typed)
            case messages.Ready():
                self._ready(message)
            case messages.AdapterDone():
                self._adapter_done(message)
            case messages.Report():
                for waiting in self._reports:
                    if not waiting.done():
                        waiting.set_result(message)
                self._reports.clear()

    def _deliver(self, delta: SequenceDelta, now: float) -> None:
        work = self._in_work.get(delta.request_id)
        if work is None:
            return  # Its reader has left.
        life = work.life
        if delta.tokens:
            if not life.generated:
                life.scheduled, life.cached = delta.scheduled, delta.cached
            latest = work.latest[delta.choice]
            if latest:
                self.metrics.between_tokens(now - latest, len(delta.tokens))
            work.latest[delta.choice] = now
            self.metrics.tokens(life, len(delta.tokens), now)
        elif delta.vector is not None:
            life.scheduled = delta.scheduled
        life.preemptions = max(life.preemptions, delta.preemptions)
        if delta.finish == "error":
            self._fail(work, delta)
            return
        out = work.outputs.feed(delta)
        if out is None:
            return
        if out.finish_reason is not None and delta.finish is None:
            with contextlib.suppress(EngineDead):
                self._supervisor.send(messages.AbortChoice(delta.request_id, delta.choice))
        work.stream.push(out)
        if work.outputs.finished:
            self._end(work, out.finish_reason or "stop")

    def _fail(self, work: _InWork, delta: SequenceDelta) -> None:
        """One choice ended with an error: so does the request."""
        self.metrics.failed("step")
        if not work.outputs.finished:
            with contextlib.suppress(EngineDead):
                self._supervisor.send(messages.Abort(delta.request_id))
        message = delta.error or "the step failed"
        kind = InvalidRequest if delta.error_status == 400 else EngineFault
        self._end(work, "error")
        work.stream.fail(kind(message))

    def _end(self, work: _InWork, reason: str) -> None:
        work.life.longest = work.outputs.longest
        work.life.ended = time.monotonic()
        self.metrics.ended(work.life, reason, work.life.ended)
        self._forget(work)
        if self.on_end is not None:
            try:
                self.on_end(work.stream.request_id, work.life)
            except Exception:  # observing must not disturb: a named border
                self.metrics.failed("observer")
                log.exception("the observer of ended requests failed")

    def _forget(self, work: _InWork) -> None:
        if self._in_work.pop(work.stream.request_id, None) is not None:
            self._sequences -= work.life.choices
            if not self._in_work:
                self._idle.set()

    def _observe(self, stats: StepStats) -> None:
        # News of an abort may come without a step: what runs has changed, nothing was computed.
        stepped = stats.step != self.stats.step
        self.stats = stats
        if stepped:
            self.metrics.step(stats)
        else:
            self.metrics.stats = stats
        for callback in self._subscribers:
            try:
                callback(stats)
            except Exception:  # observing must not disturb: a named border
                self.metrics.failed("observer")
                log.exception("a subscriber to step statistics failed")

    def _ready(self, ready: messages.Ready) -> None:
        self.max_context = ready.max_context
        self.decisions = ready.decisions
        self._most = ready.rows + self.options.max_waiting
        self.features = frozenset(ready.features)
        self._input = InputProcessor(self.files, self.tokenizer, ready.max_context, self.features)
        self.metrics.rows = ready.rows
        self.metrics.cache_config = {
            "block_size": str(self.options.block_size),
            "num_gpu_blocks": str(int(ready.facts["kv_tokens"]) // self.options.block_size),
            "enable_prefix_caching": str(self.options.prefix_cache),
        }
        self.metrics.up = 1.0
        if self._supervisor.restarts:
            self.metrics.restarted()
        for adapter in self.adapters:
            # A new engine process: it gets them before any request.
            self._supervisor.send(messages.LoadAdapter(adapter.id, adapter.path))
        self._note_phases()

    def _note_phases(self) -> None:
        own = dict(self._own_phases)
        total = own.pop("total", None)
        self.phases = {**own, **self._supervisor.phases}
        if total is not None:
            self.phases["total"] = total
        self.metrics.phases = self.phases

    def _down(self, kind: str, error: EngineDead) -> None:
        """The engine process is gone; whoever was in it ends with an error."""
        self.metrics.failed(kind)
        self._end_all(error)

    def _end_all(self, error: EngineDead) -> None:
        self.metrics.up = 0.0
        self.stats = StepStats()
        self.metrics.stats = self.stats
        for work in list(self._in_work.values()):
            self._end(work, "error")
            work.stream.fail(error)
        for waiting in self._reports:
            if not waiting.done():
                waiting.set_exception(error)
        self._reports.clear()
        for adapter in self._adapter_work.values():
            if not adapter.done():
                adapter.set_exception(error)
        self._adapter_work.clear()

    # Adapters

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in a folder below one of `adapter_roots`.

        From then on requests can have it by its name. Raises `InvalidRequest` (no adapters are
        served, the name is in use), `Forbidden` (the folder), `ModelFileError` and
        `UnsupportedModel` (what lies in it).
        """
        if "adapter" not in self.features:
            raise InvalidRequest(
                "this engine serves no adapters (option max_adapters)", param="lora_name"
            )
        roots = [root for root in (self.options.adapter_roots or "").split(os.pathsep) if root]
        folder = within(path, roots)
        self.adapters.new(name, str(folder), self.model_name)
        rank = self.options.adapter_rank
        await asyncio.to_thread(open_adapter, folder, self.files.arch, max_rank=rank)
        adapter = self.adapters.new(name, str(folder), self.model_name)
        await self._about_adapter(messages.LoadAdapter(adapter.id, adapter.path))
        try:
            self.adapters.new(name, adapter.path, self.model_name)
        except InvalidRequest:
            # Another call loaded one of this name meanwhile: that one stays.
            await self._about_adapter(messages.UnloadAdapter(adapter.id))
            raise
        self.adapters.add(adapter)

    async def unload_adapter(self, name: str) -> None:
        """New requests cannot have it any more; those that have it end as ever. `NotFound`."""
        adapter = self.adapters.remove(name)
        await self._about_adapter(messages.UnloadAdapter(adapter.id))

    async def _about_adapter(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisor.send(message)
        self._adapter_work[message.name] = waiting
        await waiting

    def _adapter_done(self, done: messages.AdapterDone) -> None:
        waiting = self._adapter_work.pop(done.name, None)
        error = None if done.error is None else done.error.error()
        if waiting is not None and not waiting.done():
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)
        elif waiting is not None and error is None:
            # Who asked has left, so nobody knows the adapter.
            self._supervisor.send(messages.UnloadAdapter(done.name))
        elif error is not None:
            # After a restart: the files are not what they were.
            log.error("an adapter could not be loaded again: %s", error)
            for adapter in self.adapters:
                if adapter.id == done.name:
                    self.adapters.remove(adapter.name)

    # The engine as a whole

    def health(self) -> Health:
        supervisor = self._supervisor
        ready = supervisor.state is State.READY and not self._draining
        reason = ""
        if self._draining:
            reason = "shutting down"
        elif not ready:
            reason = f"{supervisor.state.value}: {supervisor.reason or 'the model is being loaded'}"
        return Health(
            ready=ready,
            alive=supervisor.alive,
            reason=reason,
            retry_after=None if ready else supervisor.retry_after,
            heartbeat_age=supervisor.heartbeat_age,
            restarts=supervisor.restarts,
        )

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def in_work(self) -> list[tuple[str, RequestLife]]:
        """(id, life so far) of every request that has not ended, oldest first."""
        return [(name, work.life) for name, work in self._in_work.items()]

    async def inspect(self) -> messages.Report:
        """Ask the engine how much it holds and whether its books are right."""
        waiting: asyncio.Future[messages.Report] = asyncio.get_running_loop().create_future()
        self._supervisor.send(messages.Inspect())
        self._reports.append(waiting)
        return await waiting

    @property
    def engine_pid(self) -> int | None:
        return self._supervisor.pid

    @property
    def last_dump(self) -> Path | None:
        """What the flight recorder saw of the latest failure."""
        return self._supervisor.last_dump

    async def close(self, drain_seconds: float = 0.0) -> None:
        self._draining = True
        with contextlib.suppress(TimeoutError):
            if drain_seconds > 0:
                await asyncio.wait_for(self._idle.wait(), drain_seconds)
        for request_id in list(self._in_work):
            self.abort(request_id)
        if self._in_work:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), 1.0)
        await self._supervisor.close()
        self._end_all(EngineDead("the engine was closed", retry_after=2.0))


def _read_ahead(files: ModelFiles) -> None:
    """Have the system read the weights while the engine process still imports."""
    if hasattr(os, "posix_fadvise"):
        for path in files.weights:
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _refusal(error: HeadraceError) -> str:
    """The label under which a refusal is counted."""
    if isinstance(error, EngineDead):
        return "unavailable"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "context" if isinstance(error, ContextOverflow) else "invalid"
