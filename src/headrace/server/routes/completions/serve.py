"""A completions request: prompts → streams → one JSON or many events."""

from __future__ import annotations

import asyncio
import time
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import ContextOverflow, InvalidRequest
from ....base.request import OutputDelta
from ....base.sampling import SamplingParams
from ....base.text_prefixes import NOTHING
from ...caller import CALLER, PREFIXES, engine_id
from ...connection import EventStream, while_connected
from ...frames import Frames
from ...generation import Usage, deltas
from ...infill import infill_prompt
from ...logprobs import CompletionLogprobs, prompt_logprobs
from ...wire import DONE, Large, Many, frame, json_response, large_response
from .schema import CompletionBody

if TYPE_CHECKING:
    from ....engine.clients.face import OutputStream
    from ...service import Service

MAX_PROMPTS = 512
"""Maximum prompts of one request."""


class Completion:
    """State of one request that every chunk of its answer needs."""

    def __init__(self, service: Service, body: CompletionBody, request_id: str) -> None:
        self.service = service
        self.body = body
        self.id = f"cmpl-{body.request_id or request_id}"
        self.created = int(time.time())
        self.adapter = service.adapter(body.model)
        self.model = self.adapter or service.name
        self.n = 1 if body.n is None else body.n
        self.echo = bool(body.echo)
        self.only_prompt = self.echo and body.max_tokens == 0
        """Whether only the prompt is scored (`echo` without new tokens), as evaluation harnesses
        request."""
        scored = body.prompt_logprobs is not None
        self.large = scored or (self.echo and body.logprobs is not None)
        """Whether the answer has the prompt's logprobs; then it is encoded piece by piece."""
        self.prompts: list[list[int]] = []
        self.texts: list[str] = []
        self.ends: tuple[int, ...] = ()
        """Additional tokens that end an answer."""
        self.grammar: str | None = None
        self.usage = Usage(self.model)

    def sampling(self) -> SamplingParams:
        body = self.body
        if body.best_of not in (None, self.n):
            raise InvalidRequest(
                f"best_of is only supported where it equals n ({self.n})", param="best_of"
            )
        body.verify_stream_options()
        params = body.sampling(
            defaults=self.service.defaults,
            max_tokens=1 if self.only_prompt else body.limit,
            logprobs=body.logprobs,
            vocab_size=self.service.vocab_size,
        )
        if self.echo and body.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = body.logprobs
        return params

    async def tokenise(self) -> None:
        """Fill `prompts` and, if the answer repeats them, `texts`."""
        given = self.body.prompt
        items: list[Any] = [given] if isinstance(given, str) or _is_ids(given) else list(given)
        if not items:
            raise InvalidRequest("prompt must not be empty", param="prompt")
        if len(items) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are allowed", param="prompt")
        raw = self.body.add_special_tokens is not False
        if self.body.suffix:
            await self._fill(items, self.body.suffix)
            return
        beside = len(items) > 1
        whole = self.body.truncate_prompt_tokens is None
        decode = self.service.engine.tokenizer.decode
        for item in items:
            if isinstance(item, str):
                ids = await self.service.encode(item, raw=raw, must_fit=whole, beside=beside)
                self.prompts.append(self._cut(ids))
                if whole:
                    self.texts.append(item)
                    continue
            else:
                ids, most = self._cut(item), self.service.engine.max_context
                if len(ids) > most:  # Checked before each id is examined.
                    raise ContextOverflow(
                        f"the prompt has {len(ids)} tokens; at most {most} fit in the context",
                        param="prompt",
                    )
                self.service.check_ids(item, "prompt")
                self.prompts.append(list(ids))
            if self.echo:
                cut = self.prompts[-1]
                self.texts.append(await self.service.hands.run(decode, cut, skip_special=False))

    async def _fill(self, items: list[Any], suffix: str) -> None:
        """Prepare prompts whose answer fills the gap before `suffix`."""
        if self.only_prompt or self.body.prompt_logprobs is not None:
            raise InvalidRequest("a gap's prompt has no scores", param="suffix")
        if self.body.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens and suffix cannot be set together",
                param="truncate_prompt_tokens",
            )
        for item in items:
            if not isinstance(item, str):
                raise InvalidRequest("with suffix the prompt must be text", param="prompt")
            ids, self.ends = await infill_prompt(
                self.service, item, suffix, param="suffix", output=self.body.limit
            )
            self.prompts.append(ids)
            self.texts.append(item)

    def _cut(self, prompt: list[int]) -> list[int]:
        return self.body.cut(prompt, self.service.engine.max_context - (self.body.limit or 1))

    async def demand(self) -> None:
        """Set `grammar`; compiling it may take long, so a thread does it."""
        if self.body.form_wanted:
            self.grammar = await self.service.hands.run(self.body.form)
            self.service.check_grammar(self.grammar)

    async def submit(self, sampling: SamplingParams) -> list[OutputStream]:
        """Submit one stream per prompt; if one is refused, cancel the others."""
        sampling.stop_token_ids = [*sampling.stop_token_ids, *self.ends]
        streams: list[OutputStream] = []
        try:
            for index, prompt in enumerate(self.prompts):
                streams.append(
                    self.service.engine.submit(
                        prompt,
                        sampling,
                        whole=not self.body.stream,
                        request_id=engine_id(f"{self.id}-{index}"),
                        priority=self.body.priority or 0,
                        cache_salt=CALLER.get().salt(self.body.cache_salt),
                        adapter=self.adapter,
                        grammar=self.grammar,
                        retained=self.body.retained(len(prompt)),
                        prefixes=PREFIXES.get() if len(self.prompts) == 1 else NOTHING,
                    )
                )
                self.usage.known_prompt(index, len(prompt))
                if index % 8 == 7:  # Each request may have thousands of parameters.
                    await asyncio.sleep(0)
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return streams

    def reply(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": choices,
        }


class ChoiceState:
    """State of one answer to one prompt: turns deltas into the fields of a choice."""

    def __init__(self, work: Completion, prompt: int, choice: int) -> None:
        self._work = work
        self._prompt = prompt
        self._first = True
        self.index = prompt * work.n + choice
        top = work.body.logprobs
        self._logprobs = (
            None
            if top is None
            else CompletionLogprobs(
                work.service.engine.tokenizer,
                top,
                as_ids=bool(work.body.return_tokens_as_token_ids),
                many=work.large,
            )
        )

    def fields(self, delta: OutputDelta) -> dict[str, Any]:
        work = self._work
        text, tokens = delta.text, delta.token_ids
        infos: list[Any] = list(delta.logprobs or ())
        if work.only_prompt:
            text, tokens, infos = "", [], []
        fields: dict[str, Any] = {"index": self.index}
        if self._first and work.echo:
            text = work.texts[self._prompt] + text
            prompt = work.prompts[self._prompt]
            tokens = prompt + tokens
            if self._logprobs is not None:
                infos = list(delta.prompt_logprobs or [None] * len(prompt)) + infos
        fields["text"] = text
        fields["logprobs"] = (
            self._logprobs.feed(tokens, infos) if self._logprobs is not None else None
        )
        finish = delta.finish_reason
        fields["finish_reason"] = "length" if work.only_prompt and finish else finish
        fields["stop_reason"] = delta.stop_reason
        if work.body.return_token_ids:
            fields["token_ids"] = tokens
        if self._first and work.body.prompt_logprobs is not None and delta.prompt_logprobs:
            fields["prompt_logprobs"] = prompt_logprobs(
                work.service.engine.tokenizer, work.prompts[self._prompt], delta.prompt_logprobs
            )
        self._first = False
        return fields


async def serve(service: Service, request: Request, body: CompletionBody) -> Response:
    service.check_model(body.model, adapters=True)
    work = Completion(service, body, request.scope["headrace.request_id"])
    sampling = work.sampling()
    await work.tokenise()
    await work.demand()
    streams = await work.submit(sampling)
    request.scope["headrace.usage"] = work.usage
    if body.stream:
        return EventStream(_events(work, streams), keep_alive=service.keep_alive)
    return await while_connected(request.receive, _whole(work, streams))


def _states(work: Completion) -> dict[tuple[int, int], ChoiceState]:
    return {
        (prompt, choice): ChoiceState(work, prompt, choice)
        for prompt in range(len(work.prompts))
        for choice in range(work.n)
    }


def _count(work: Completion, prompt: int, delta: OutputDelta) -> None:
    work.usage.count(prompt, delta)
    if work.only_prompt:
        work.usage.completion = 0  # The engine had to sample one token; it is not an answer.


async def _whole(work: Completion, streams: list[OutputStream]) -> Response:
    states = _states(work)
    parts: dict[int, list[dict[str, Any]]] = {state.index: [] for state in states.values()}
    async for prompt, delta in deltas(streams):
        _count(work, prompt, delta)
        state = states[prompt, delta.index]
        if delta.void is not None:
            state = states[prompt, delta.index] = ChoiceState(work, prompt, delta.index)
            parts[state.index] = []
        parts[state.index].append(state.fields(delta))
        if work.body.logprobs is not None:
            await asyncio.sleep(0)  # All choices may arrive at once.
    reply = work.reply([_joined(parts[index]) for index in sorted(parts)])
    reply |= work.usage.told()
    if work.large or work.body.logprobs is not None:
        return await large_response(reply)
    return json_response(reply)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of one choice."""
    whole = {**parts[0], **parts[-1]}
    whole["text"] = "".join(part["text"] for part in parts)
    if whole["logprobs"] is not None:
        whole["logprobs"] = {
            name: None
            if first is None
            else Many(chain.from_iterable([part["logprobs"][name] for part in parts]))
            for name, first in parts[0]["logprobs"].items()
        }
    if "token_ids" in whole:
        whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return whole


def _events(work: Completion, streams: list[OutputStream]) -> Frames:
    states = _states(work)
    body = work.body

    def news(prompt: int, delta: OutputDelta) -> bytes | Large:
        _count(work, prompt, delta)
        chunk = work.reply([states[prompt, delta.index].fields(delta)])
        if body.continuous_usage:
            chunk["usage"] = work.usage.as_openai()
        return Large(chunk) if work.large else frame(chunk)

    def end() -> bytes:
        if not body.usage_wanted:
            return DONE
        return frame(work.reply([]) | work.usage.told()) + DONE

    return Frames(streams, news, end, straight=not work.large)


def _is_ids(given: Any) -> bool:
    return isinstance(given, list | array) and bool(given) and isinstance(given[0], int)
