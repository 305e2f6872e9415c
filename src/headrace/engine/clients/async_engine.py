"""`AsyncEngine`: one served model, for an event loop; the engine runs in a process of its own.

Everything here belongs to one event loop and nothing imports torch. Requests are tokenised here and
go to the engine process as ids. The tokens of each step come back, are detokenised here and go to
the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Unpack

from ...base import environment
from ...base.config import ROWS, Decision, EngineOptions
from ...base.errors import EngineDead, EngineFault, HeadraceError, InvalidRequest, Overloaded
from ...base.identity import Identity
from ...base.outputs import Vector
from ...base.request import EmbeddingOutput, OutputDelta, RequestOutput, StepStats
from ...base.sampling import SamplingParams
from ...base.several import own_name
from ...obs.life import RequestLife
from ...obs.metrics import EngineMetrics
from ...obs.tasks import TaskWatch
from .. import messages
from ..loop.adapters import AdapterBook
from ..loop.real import REAL_WORKER
from .adapter_loads import AdapterLoads
from .face import Prompt, RequestOptions
from .held import HeldPrefixes
from .in_work import RequestsInWork, refusal
from .input import InputProcessor
from .kv_events import published
from .opening import OpenModel, open_for_serving
from .operations import Operations
from .output import Answer
from .recorded import recorder_of
from .stream import Stream
from .supervised import SupervisedEngine
from .supervision import Supervision
from .supervisor import Supervisor

log = logging.getLogger("headrace.engine")
WAIT_FOR_NEXT = 30.0
"""Seconds that a request whose engine died waits for the next one."""


class AsyncEngine(SupervisedEngine):
    """The real `face.ServingEngine`, which documents the public names."""

    def __init__(
        self,
        options: EngineOptions,
        model: OpenModel,
        supervisor: Supervisor,
        tasks: TaskWatch,
        *,
        number: int = 0,
        name: str | None = None,
        operations: Operations | None = None,
    ) -> None:
        """Use `start`. `number`, `name`, `operations`: in a server of several models, the number in
        messages and the name in metrics of this one, and the server's operations."""
        super().__init__(supervisor, tasks, number)
        files = model.files
        self.options = options
        self.files = files
        self.tokenizer = model.tokenizer
        self.template = model.template
        self.items = model.items
        self.model_name = name or own_name(options.model)
        self.max_context = options.max_context or files.arch.max_context
        self.features: frozenset[str] = frozenset()
        self.decisions: list[Decision] = []
        self.identity: Identity | None = None
        self.memory: dict[str, float] = {}
        self.phases: dict[str, float] = {}
        self.stats = StepStats()
        self.metrics = EngineMetrics(self.model_name, max_context=files.arch.max_context)
        self.registry = self.metrics.registry
        self.metrics.heartbeat = lambda: supervisor.heartbeat_age
        self._input = InputProcessor(files, self.tokenizer, self.max_context)
        self._recorder = recorder_of(options)
        if self._recorder is not None:
            supervisor.details["records"] = str(self._recorder.path)
        self._work = RequestsInWork(
            self.tokenizer, self.metrics, self._send, recorder=self._recorder
        )
        self.rows = options.max_sequences or ROWS
        self._most = self.rows + options.max_waiting
        self._subscribers: list[Callable[[StepStats], None]] = []
        self._reports: list[asyncio.Future[messages.Report]] = []
        self.adapters = AdapterBook()
        self.held_prefixes = HeldPrefixes()
        self._events = published(options)
        self._loads = AdapterLoads(self.adapters, options, files, self.model_name, self._send)
        self._own_phases = model.phases
        self.operations = operations or Operations(supervisor, self._work, self.end_all, tasks)

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

        `fields` are those of `EngineOptions` if `options` is None. `wait=False` returns as soon as
        the model's files are open. The engine gets ready in the background; until then `health`
        says so and requests get `Overloaded`. `progress` is handed to `loader.open_model`. `worker`
        names the function that loads a worker (see `engine.loop.real`).

        Raises the errors of a start: `OptionError`, `ModelNotFound`, `DownloadError`,
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
                handlers[0].receive(message)
            else:
                early.append(message)

        def on_down(kind: str, error: EngineDead) -> None:
            if handlers:
                handlers[0].down(kind, error)

        def on_failure(name: str) -> None:
            if handlers:
                handlers[0].metrics.failed("task")

        tasks = TaskWatch(on_failure)
        supervisor = Supervisor(
            options, supervision, worker=worker, on_message=on_message, on_down=on_down, tasks=tasks
        )
        try:
            model = await open_for_serving(options, progress, supervisor.configure)
            engine = cls(options, model, supervisor, tasks)
            handlers.append(engine)
            for message in early:
                engine.receive(message)
            if wait:
                await supervisor.started()
        except BaseException:
            await supervisor.close()
            raise
        engine.note_total(time.monotonic() - begin)
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
        whole: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        request_id = options.setdefault("request_id", uuid.uuid4().hex)
        adapter = options.get("adapter")
        try:
            self._check_open(sampling)
            if request_id in self._work:
                raise InvalidRequest(
                    f"a request with id {request_id!r:.80} is in work", param="request_id"
                )
            if adapter is not None:
                options["adapter"] = self.adapters.find(adapter).id
            request = self._input.request(prompt, sampling, **options)
            self._send(messages.Submit(request))
        except HeadraceError as error:
            self.metrics.refused(refusal(error))
            raise
        if self._recorder is not None:
            folder = None if adapter is None else self.adapters.find(adapter).path
            self._recorder.begin(request, folder)
        return self._work.open(request, adapter, whole=whole)

    def _check_open(self, sampling: SamplingParams) -> None:
        self._check_ready()
        wanted = sampling.n if type(sampling.n) is int else 1
        if self._work.sequences + wanted > self._most:
            raise Overloaded(
                f"{self._work.sequences} sequences are in work or wait, of at most {self._most}",
                retry_after=1.0,
            )

    async def stream(
        self, prompt: Prompt, sampling: SamplingParams, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[OutputDelta, None]:
        stream = self.submit(prompt, sampling, **options)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, **options: Unpack[RequestOptions]
    ) -> RequestOutput:
        stream = self.submit(prompt, sampling, whole=True, **options)
        request = self._work.request(stream.request_id)
        answer = Answer(request, prompt if isinstance(prompt, str) else None)
        try:
            async for delta in stream:
                answer.add(delta)
        finally:
            stream.cancel()
        return answer.output

    async def embed(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> EmbeddingOutput:
        options["task"] = "vector"
        stream = self.submit(prompt, SamplingParams(), **options)
        try:
            async for delta in stream:
                if isinstance(delta.output, Vector):
                    values = delta.output.values
                    return EmbeddingOutput(stream.request_id, stream.prompt_ids, values)
        finally:
            stream.cancel()
        raise EngineFault("the request ended without a vector")

    def abort(self, request_id: str) -> bool:
        return self._work.abort(request_id)

    # Messages of the engine process

    def receive(self, message: Any) -> None:
        """Take a message of the engine process."""
        match message:
            case messages.News(deltas, stats):
                self._work.deliver(deltas, time.monotonic())
                self._observe(stats)
            case messages.PrefixNews(held, gone, blocks):
                self.held_prefixes.told(held, gone)
                if self._events is not None:
                    self._events.tell(blocks)
            case messages.ThreadNews(failed, down):
                self._threads_down = down
                for _ in failed:
                    self.metrics.failed("thread")
            case messages.Refused(request_id, error):
                self._work.refuse(request_id, error.error())
            case messages.Ready():
                self._ready(message)
            case messages.AdapterDone():
                self._loads.done(message)
            case messages.Operated():
                self.operations.done(message)
            case messages.Report():
                for waiting in self._reports:
                    if not waiting.done():
                        waiting.set_result(message)
                self._reports.clear()

    def _observe(self, stats: StepStats) -> None:
        # The delta of an abort may come without a step: the running set changed, but no result.
        stepped = stats.step != self.stats.step
        self.stats = stats
        if stepped:
            self.metrics.step(stats)
        else:
            self.metrics.stats = stats
        for callback in self._subscribers:
            try:
                callback(stats)
            except Exception:  # observing must not disturb: a named boundary
                self.metrics.failed("observer")
                log.exception("a subscriber to step statistics failed")

    def _ready(self, ready: messages.Ready) -> None:
        self.max_context = ready.max_context
        self.decisions = ready.decisions
        self.identity = ready.identity
        self.memory = ready.facts
        if self._events is not None:
            on_cpu = any(one.name == "device" and one.value == "cpu" for one in ready.decisions)
            self._events.medium = "CPU" if on_cpu else "GPU"
        if self._recorder is not None:
            self._recorder.identity = ready.identity
        self.rows = ready.rows
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
        restarts = self._supervisor.restarts  # Waking from deep sleep is not counted.
        self.metrics.begun(after_failure=restarts > self._restarts)
        self._restarts = restarts
        if not self._number:  # What is common to all models follows the first.
            self.operations.ready()
        self._loads.again()
        self._work.send_held()
        self._note_phases()

    def note_total(self, seconds: float) -> None:
        """Note how long the whole start took."""
        self._own_phases["total"] = seconds
        self._note_phases()

    def _note_phases(self) -> None:
        own = dict(self._own_phases)
        total = own.pop("total", None)
        self.phases = {**own, **self._supervisor.phases}
        if total is not None:
            self.phases["total"] = total
        self.metrics.phases = self.phases

    def down(self, kind: str, error: EngineDead) -> None:
        """Handle the end of the engine process. Requests without visible output wait once for the
        next process, if it comes soon; all others end with an error."""
        self.metrics.failed(kind)
        if self._recorder is not None:
            self._recorder.cut(kind)
        soon = self._supervisor.retry_after < WAIT_FOR_NEXT
        if kind != "start" and soon and not self._draining:
            self._work.hold(error, WAIT_FOR_NEXT)
            self._forget_process(error)
        elif kind != "start" or not self._supervisor.alive:
            self.end_all(error)

    def end_all(self, error: EngineDead) -> None:
        """End all requests: the engine process is gone."""
        self._work.end_all(error)
        self._forget_process(error)

    def _forget_process(self, error: EngineDead) -> None:
        self.metrics.up = 0.0
        self.held_prefixes.forget()
        self._threads_down = {}
        if self._events is not None:
            self._events.cleared()
        self.stats = StepStats()
        self.metrics.stats = self.stats
        for waiting in self._reports:
            if not waiting.done():
                waiting.set_exception(error)
        self._reports.clear()
        self._loads.fail(error)
        if not self._number:
            self.operations.fail(error)

    # Adapters

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in a folder below one of `adapter_roots`.

        From then on requests can have it by its name. Raises `InvalidRequest` (no adapters are
        served, the name is in use), `Forbidden` (the folder), `ModelFileError` and
        `UnsupportedModel` (its content).
        """
        if "adapter" not in self.features:
            raise InvalidRequest(
                "this engine serves no adapters (option max_adapters)", param="lora_name"
            )
        await self._loads.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Refuse the adapter to new requests; those that use it end as usual. Raises `NotFound`."""
        await self._loads.unload(name)

    # The engine as a whole

    def subscribe(self, callback: Callable[[StepStats], None]) -> Callable[[], None]:
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

        return unsubscribe

    def in_work(self) -> list[tuple[str, RequestLife]]:
        """Return (id, life so far) of every request that has not ended, oldest first."""
        return self._work.lives()

    @property
    def wanted(self) -> bool:
        """Whether a request has not ended."""
        return bool(len(self._work))

    @property
    def on_end(self) -> Callable[[str, RequestLife], None] | None:
        """Callback with id and life when a request has ended, for traces."""
        return self._work.on_end

    @on_end.setter
    def on_end(self, callback: Callable[[str, RequestLife], None] | None) -> None:
        self._work.on_end = callback

    async def inspect(self) -> messages.Report:
        """Return how much the engine holds and whether its accounting is consistent."""
        waiting: asyncio.Future[messages.Report] = asyncio.get_running_loop().create_future()
        self._send(messages.Inspect())
        self._reports.append(waiting)
        return await waiting

    @property
    def work(self) -> RequestsInWork:
        """The requests that have not ended."""
        return self._work

    async def close(self, drain_seconds: float = 0.0) -> None:
        await self.finish(drain_seconds)
        await self._supervisor.close()
        self.closed()

    async def finish(self, drain_seconds: float, why: str = "the server is shutting down") -> None:
        """Refuse new requests, wait for those in work, end the rest."""
        self._draining = why
        with contextlib.suppress(TimeoutError):
            if drain_seconds > 0:
                await asyncio.wait_for(self._work.idle.wait(), drain_seconds)
        self._work.abort_all()
        if len(self._work):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.idle.wait(), 1.0)

    def closed(self) -> None:
        """Release the rest, once the engine process has ended."""
        if self._events is not None:
            self._events.close()
        self.end_all(EngineDead("the engine was closed", retry_after=2.0))
