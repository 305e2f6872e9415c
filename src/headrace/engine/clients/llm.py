"""`LLM`: the blocking front end, for scripts and notebooks. The engine runs in the caller's
thread."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.config import Decision, EngineOptions
from ...base.errors import EngineDead, EngineFault, InvalidRequest
from ...base.outputs import Scores, Vector
from ...base.request import (
    EmbeddingOutput,
    OutputDelta,
    Request,
    RequestOutput,
    ScoreOutput,
    StepStats,
)
from ...base.sampling import SamplingParams
from ...base.spec import Task
from ...dist.wake import wait
from ...loader import open_model
from ...obs.progress import TokenProgress
from ...text import ChatTemplate, ChatTemplates, Foreign, Tokenizer, encode_between, load_tokenizer
from ...text.foreign import CUT
from ..loop.adapters import AdapterBook
from ..loop.real import REAL_WORKER
from ..preload import collector_paused, give_back, preload_torch, wants_torch
from .given import OneOrEach, TextOrIds, as_list, for_each, placed, text_or_ids
from .input import InputProcessor, default_sampling
from .output import Answer, RequestOutputs
from .pairs import cut_limit, pairs_of, score_inputs
from .recorded import recorder_of

if TYPE_CHECKING:
    from ..loop.build import Built
    from ..loop.core import EngineCore

Messages = Sequence[Mapping[str, Any]]
_AHEAD = 256
"""Most sequences in the scheduler's queue; further prompts wait here, where they cost less."""

_LOOK_UP = 0.5
"""Seconds between checks, while waiting for a grammar, whether another thread closed the LLM."""


class LLM:
    """A loaded model. Close it, or use it as a context manager, to give its memory back.

    One call at a time: a second thread waits. Results come in the order of the prompts. A prompt
    that cannot be served raises before any work starts; the error names its index.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        worker: str = REAL_WORKER,
        **options: Any,
    ) -> None:
        """`options` are the fields of `EngineOptions`; text fields also take a path."""
        if model is not None:
            options["model"] = model
        paths = {key: os.fspath(it) for key, it in options.items() if isinstance(it, os.PathLike)}
        self.options = EngineOptions(**options | paths)
        self.options.verify()
        self.phases: dict[str, float] = {}
        """Seconds of each start phase."""
        here = worker == REAL_WORKER and self.options.executor == "inline"
        if here and wants_torch(self.options):
            preload_torch()
        with collector_paused():
            self._start(worker)
        give_back()
        self._ids = itertools.count()
        self.adapters = AdapterBook()
        self._lock = threading.Lock()
        self._worker_thread: int | None = None
        """The thread of the current call."""
        self._closing = False
        self._process = os.getpid()
        self._recorder = recorder_of(self.options)

    def _start(self, worker: str) -> None:
        begin = time.monotonic()
        self.files = open_model(
            self.options.model,
            cache_dir=Path(self.options.cache_dir) if self.options.cache_dir else None,
            offline=self.options.offline,
        )
        opened = time.monotonic()
        self.phases["open_files"] = opened - begin
        with ThreadPoolExecutor(1, "headrace-tokenizer") as thread:
            # Another core hashes the vocabulary while this one imports the worker.
            reading = thread.submit(self._read_tokenizer)
            from ..loop.build import build

            self.phases["import_engine"] = time.monotonic() - opened
            self._template: ChatTemplates | None = None
            # There are no other callers, so prompts are never refused for their number.
            options = replace(self.options, max_waiting=max(self.options.max_waiting, 2 * _AHEAD))
            built = build(
                options,
                self.files,
                worker=worker,
                on_phase=lambda name, seconds: self.phases.__setitem__(name, seconds),
            )
            try:
                self.tokenizer: Tokenizer = reading.result()
            except BaseException:
                built.close()
                raise
        self._built: Built | None = built
        self._input = InputProcessor(
            self.files, self.tokenizer, built.core.max_context, built.facts.features
        )
        self.phases["total"] = time.monotonic() - begin

    def _read_tokenizer(self) -> Tokenizer:
        begin = time.monotonic()
        tokenizer = load_tokenizer(self.files.tokenizer, self.files.arch.vocab_size)
        self.phases["tokenizer"] = time.monotonic() - begin
        return tokenizer

    @property
    def max_context(self) -> int:
        return self._engine.core.max_context

    @property
    def decisions(self) -> list[Decision]:
        return self._engine.decisions

    @property
    def stats(self) -> StepStats:
        return self._engine.core.stats

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling that the model's authors recommend."""
        return default_sampling(self.files)

    def generate(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
        grammar: OneOrEach = None,
        adapter: OneOrEach = None,
        prediction: OneOrEach = None,
        on_delta: Callable[[OutputDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Most arguments are one for all prompts or one for each. `use_tqdm` shows a progress bar (the
        name is vLLM's). `grammar` is the form that an answer must match; `text.grammar` makes it
        from a schema, a pattern or choices. `adapter` is the name of a loaded adapter. `prediction`
        is the expected text: with `speculate` it makes the answer faster, never different.
        `on_delta` is called with every delta as it comes.
        """
        wanted = as_list(prompts)
        params = self._params(sampling_params, len(wanted))
        if priority is not None and len(priority) != len(wanted):
            raise InvalidRequest(
                f"{len(priority)} priorities for {len(wanted)} prompts", param="priority"
            )
        grammar = for_each(grammar, "grammar", len(wanted))
        adapter = for_each(adapter, "adapter", len(wanted))
        prediction = for_each(prediction, "prediction", len(wanted))
        requests = []
        with self._working():
            for place, (prompt, sampling) in enumerate(zip(wanted, params, strict=True)):
                with placed("prompts", place, len(wanted)):
                    text, ids = text_or_ids(prompt)
                    request = self._input.request(
                        ids if ids is not None else text or "",
                        sampling,
                        request_id=str(next(self._ids)),
                        priority=priority[place] if priority is not None else 0,
                        grammar=grammar[place],
                        adapter=self._adapter_id(adapter[place]),
                        expected=self.tokenizer.encode(prediction[place] or ""),
                    )
                requests.append((request, text))
            return self._run(requests, use_tqdm, on_delta)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        grammar: OneOrEach = None,
        adapter: OneOrEach = None,
        prediction: OneOrEach = None,
        on_delta: Callable[[OutputDelta], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template or `template`: a
        template's text, or the name of one of the model's. Other arguments: see `generate`."""
        conversations: Sequence[Messages]
        one = messages and isinstance(messages[0], Mapping)
        conversations = [messages] if one else messages  # type: ignore[list-item,assignment]
        compiled = self._compiled(template)
        prompts: list[TextOrIds] = []
        for place, conversation in enumerate(conversations):
            with placed("messages", place, len(conversations)):
                text = compiled.render(
                    self._foreign.cut(conversation),
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    variables=chat_template_kwargs,
                )
            ids = encode_between(self.tokenizer, text)
            prompts.append({"prompt": text.replace(CUT, ""), "prompt_token_ids": ids})
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            priority=priority,
            grammar=grammar,
            adapter=adapter,
            prediction=prediction,
            on_delta=on_delta,
        )

    @cached_property
    def _foreign(self) -> Foreign:
        return Foreign(self.tokenizer.special_tokens)

    def embed(
        self,
        prompts: TextOrIds | Sequence[TextOrIds],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Return the vector of each prompt: an embedding model's own pooling, a generating model's
        last token (`ModelFiles.pooling`).

        `truncate_prompt_tokens` cuts texts and ids at their end to this number of tokens (-1: to
        the most that fits); otherwise one that is too long raises `ContextOverflow`.
        """
        if "score" in self._engine.facts.features:
            raise InvalidRequest("this model scores pairs of texts; use score()", param="model")
        limit = cut_limit(truncate_prompt_tokens, self.max_context)
        inputs = []
        for prompt in as_list(prompts):
            text, ids = text_or_ids(prompt)
            if ids is None:
                ids = self.tokenizer.encode_with_specials(text or "", limit=limit) if text else []
            inputs.append((ids[:limit], 0))
        return self._vectors(inputs, "vector", use_tqdm)

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = False,
    ) -> list[ScoreOutput]:
        """Score how well pairs of texts fit: one with each of the others, or each with its own."""
        pairs = pairs_of(first, second)
        limit = cut_limit(truncate_prompt_tokens, self.max_context)
        inputs = score_inputs(
            self.tokenizer, pairs, cross="score" in self._engine.facts.features, limit=limit
        )
        outputs = self._vectors(inputs.inputs, inputs.task, use_tqdm)
        return inputs.scores([output.vector for output in outputs])

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in a folder (with `max_adapters` above 0)."""
        with self._working():
            adapter = self.adapters.new(name, str(path), self.options.model)
            self._engine.core.load_adapter(adapter.id, adapter.path)
            self.adapters.add(adapter)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Raises `NotFound`."""
        with self._working():
            self._engine.core.unload_adapter(self.adapters.remove(name).id)

    def _adapter_id(self, name: str | None) -> str | None:
        return None if name is None else self.adapters.find(name).id

    def _adapter_folder(self, request: Request) -> str | None:
        held = (each.path for each in self.adapters if each.id == request.spec.adapter)
        return next(held, None)

    def close(self) -> None:
        """Give everything back. May be called twice, and while another thread is in a call, which
        then ends with `EngineDead`."""
        if os.getpid() != self._process:
            return  # It belongs to the process that was forked.
        self._closing = True
        if self._worker_thread != threading.get_ident():  # Otherwise the current call frees it.
            with self._lock:
                self._close()

    def _close(self) -> None:
        built, self._built = self._built, None
        if built is not None:
            built.close()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Allow one call at a time. Raises `InvalidRequest` if waiting would never end."""
        if os.getpid() != self._process:
            raise InvalidRequest(
                "this LLM was loaded before the process forked, and its threads are in the other "
                "one; load it after the fork, or start processes with the method spawn"
            )
        if self._worker_thread == threading.get_ident():
            raise InvalidRequest("this LLM is in a call, and on_delta cannot make another")
        with self._lock:
            self._worker_thread = threading.get_ident()
            try:
                yield
            finally:
                self._worker_thread = None
                if self._closing:
                    self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _engine(self) -> Built:
        if self._built is None:
            raise InvalidRequest("this LLM is closed")
        return self._built

    def _compiled(self, template: str | None) -> ChatTemplate | ChatTemplates:
        if template is not None:
            source = self.files.named_templates.get(template, template)
            return ChatTemplate(source, special=self.files.special)
        if self._template is None:
            self._template = ChatTemplates(self.files)
        return self._template

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest(
                f"{len(given)} sampling_params for {count} prompts", param="sampling_params"
            )
        return list(given)

    def _vectors(
        self, inputs: list[tuple[list[int], int]], task: Task, show: bool
    ) -> list[EmbeddingOutput]:
        """Return the vector or the scores of each (ids, start of the second text)."""
        requests: list[Request] = []
        with self._working():
            for place, (ids, second_at) in enumerate(inputs):
                with placed("prompts", place, len(inputs)):
                    request = self._input.request(
                        ids,
                        SamplingParams(),
                        request_id=str(next(self._ids)),
                        task=task,
                        second_at=second_at,
                    )
                requests.append(request)
            vectors: dict[str, list[float]] = {}

            def keep(delta: OutputDelta) -> None:
                if isinstance(delta.output, Vector | Scores):
                    vectors[delta.request_id] = delta.output.values

            answers = self._run([(request, None) for request in requests], show, keep)
        for answer in answers:
            if answer.request_id not in vectors:
                raise EngineFault(answer.outputs[0].error or "a request ended without a vector")
        return [EmbeddingOutput(r.id, r.prompt, vectors[r.id]) for r in requests]

    def _run(
        self,
        requests: list[tuple[Request, str | None]],
        show: bool,
        on_delta: Callable[[OutputDelta], None] | None,
    ) -> list[RequestOutput]:
        core = self._engine.core
        answers = {request.id: Answer(request, text) for request, text in requests}
        texts = {request.id: RequestOutputs(request, self.tokenizer) for request, _ in requests}
        waiting = deque(request for request, _ in requests)
        open_ = len(requests)
        recorder = self._recorder
        if recorder is not None:
            recorder.identity = self._engine.identity
            for request, _ in requests:
                recorder.begin(request, self._adapter_folder(request))
        with TokenProgress(len(requests), enabled=show) as progress:
            try:
                while open_:
                    if self._closing:
                        raise EngineDead("the LLM was closed while it worked")
                    while waiting and core.scheduler.waiting <= _AHEAD:
                        core.add(waiting.popleft())
                    if core.stalled:
                        wait(core.executor.wake, _LOOK_UP)
                    for delta in core.turn():
                        outputs = texts[delta.request_id]
                        out = outputs.feed(delta)
                        if out is None:
                            continue
                        answer = answers[delta.request_id]
                        answer.add(out)
                        if recorder is not None:
                            recorder.take(out)
                        if delta.error is not None:
                            answer.fail(delta.choice, delta.error)
                        if out.finish_reason is not None and delta.finish is None:
                            core.abort_choice(delta.request_id, delta.choice)
                        if on_delta is not None:
                            on_delta(out)
                        progress.tokens(len(delta.tokens))
                        if outputs.finished:
                            open_ -= 1
                            progress.done()
            finally:
                if open_ or core.has_work:
                    _settle(core, answers)
                if recorder is not None:
                    for request, _ in requests:
                        recorder.forget(request.id)
        return [answers[request.id].output for request, _ in requests]


def _settle(core: EngineCore, requests: Iterable[str]) -> None:
    """End all that is still in work (after an exception, Ctrl-C, a stop string) and free it."""
    for request_id in requests:
        core.abort(request_id)
    with contextlib.suppress(EngineDead):  # Then there is nothing left to settle.
        while core.has_work:
            core.turn()
