"""Serving of llama.cpp's native requests: prompt → one stream → its format, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.request import OutputDelta
from ...body import converted
from ...caller import CALLER, engine_id
from ...connection import EventStream, while_connected
from ...form import FormFields
from ...generation import Usage, deltas
from ...wire import frame, json_response
from .schema import NativeFields

if TYPE_CHECKING:
    from ....base.sampling import SamplingParams
    from ....engine.clients.face import OutputStream
    from ...service import Service

_SAME = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "typical_p", "top_n_sigma", "repeat_penalty",
)  # fmt: skip


class Native:
    """State of one request."""

    def __init__(self, service: Service, body: NativeFields, request: Request) -> None:
        self.service = service
        self.body = body
        self.usage = Usage(service.adapter(body.model) or service.name)
        self.prompt: list[int] = []
        self.ends: tuple[int, ...] = ()
        """Additional tokens that end the answer."""
        self.indent = Indent(body.n_indent or 0)
        self._request = request
        self._begin = time.perf_counter()
        service.check_model(body.model, adapters=True)
        service.check_generates()
        self._form = converted(self._fields(), FormFields)
        wanted = body.n_predict if body.n_predict is not None else body.max_tokens
        self.most = None if wanted in (None, -1, -2) else wanted
        self.sampling: SamplingParams = self._form.sampling(
            defaults=service.defaults,
            max_tokens=self.most,
            logprobs=None,
            vocab_size=service.vocab_size,
        )

    def _fields(self) -> dict[str, Any]:
        body = self.body
        given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        if body.seed is not None and body.seed >= 0:
            given["seed"] = body.seed
        if body.json_schema:
            schema = {"name": "json_schema", "schema": body.json_schema}
            given["response_format"] = {"type": "json_schema", "json_schema": schema}
        return given

    async def answer(self) -> Response:
        scope = self._request.scope
        scope["headrace.usage"] = self.usage
        grammar = None
        if self._form.form_wanted:
            grammar = await self.service.hands.run(self._form.form)
        self.service.check_grammar(grammar)
        self.sampling.stop_token_ids = [*self.sampling.stop_token_ids, *self.ends]
        stream = self.service.engine.submit(
            self.prompt,
            self.sampling,
            whole=not self.body.stream,
            request_id=engine_id(f"native-{scope['headrace.request_id']}"),
            cache_salt=CALLER.get().salt(None),
            adapter=self.service.adapter(self.body.model),
            grammar=grammar,
        )
        self.usage.known_prompt(0, len(self.prompt))
        if self.body.stream:
            return EventStream(self._events(stream), keep_alive=self.service.keep_alive)
        return await while_connected(self._request.receive, self._whole(stream))

    async def _events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        async for part in self._parts(stream):
            yield frame(part)

    async def _whole(self, stream: OutputStream) -> Response:
        texts: list[str] = []
        tokens: list[int] = []
        last: dict[str, Any] = {}

        def restart() -> None:
            texts.clear()
            tokens.clear()

        async for last in self._parts(stream, restart):
            texts.append(last["content"])
            tokens += last["tokens"]
        reply = {**last, "content": "".join(texts), "tokens": tokens}
        if self.body.response_fields:
            reply = _only(reply, self.body.response_fields)
        return json_response(reply)

    async def _parts(
        self, stream: OutputStream, restart: Callable[[], None] = lambda: None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of the answer. `restart` is called when the parts so far become void."""
        first = 0.0
        finish: OutputDelta | None = None
        async for _, delta in deltas([stream]):
            self.usage.count(0, delta)
            if delta.void is not None:
                self.indent = Indent(self.body.n_indent or 0)
                restart()
            first = first or time.perf_counter()
            finish = delta
            text = self.indent.take(delta.text, last=delta.finish_reason is not None)
            if text:
                yield self._part(text, delta.token_ids)
            if self.indent.over:
                break
        yield {**self._part("", []), **self._end(finish, first or time.perf_counter())}

    def _part(self, text: str, tokens: list[int]) -> dict[str, Any]:
        shown = list(tokens) if self.body.return_tokens else []
        return {"index": 0, "content": text, "tokens": shown, "id_slot": 0, "stop": False}

    def _end(self, last: OutputDelta | None, first: float) -> dict[str, Any]:
        usage = self.usage
        ended, word = "limit", ""
        if last is not None and last.finish_reason == "stop":
            ended = "word" if isinstance(last.stop_reason, str) else "eos"
            word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        done = time.perf_counter()
        reading, writing = first - self._begin, done - first
        new = usage.prompt - usage.cached
        return {
            "stop": True,
            "model": self.service.name,
            "tokens_predicted": usage.completion,
            "tokens_evaluated": usage.prompt,
            "tokens_cached": usage.cached,
            "truncated": False,
            "stop_type": ended,
            "stopping_word": word,
            "timings": {
                "prompt_n": new,
                "prompt_ms": reading * 1e3,
                "prompt_per_second": new / max(reading, 1e-9),
                "predicted_n": usage.completion,
                "predicted_ms": writing * 1e3,
                "predicted_per_second": usage.completion / max(writing, 1e-9),
            },
        }


class Indent:
    """Filter that ends a text before the first line indented by less than `least` characters.

    The line in which the text begins and empty lines are not checked.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._held = ""
        """Line break and whitespace after it, held until the next character is known."""
        self.over = False

    def take(self, text: str, *, last: bool) -> str:
        """Return the text that may be shown now."""
        if not self._least or self.over:
            return "" if self.over else text
        out: list[str] = []
        for char in text:
            if char == "\n" or (self._held and char in " \t"):
                if char == "\n" and self._held:
                    out.append(self._held)
                    self._held = ""
                self._held += char
                continue
            if self._held and len(self._held) - 1 < self._least:
                self.over = True
                self._held = ""
                break
            out.append(self._held + char)
            self._held = ""
        if last:
            out.append(self._held)
            self._held = ""
        return "".join(out)


def _only(reply: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """Select the requested fields; a nested one is returned under its own name."""
    found: dict[str, Any] = {}
    for path in wanted:
        value: Any = reply
        *_, name = path.split("/")
        for part in path.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
