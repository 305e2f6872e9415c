"""Chat, generate and embed of Ollama's interface: the server's own functions, in its formats."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.foreign import Undecodable, any_json
from ....base.sampling import SamplingParams
from ....engine.clients.pairs import cut_limit
from ...connection import while_connected
from ...generation import Usage, deltas
from ...infill import infill_prompt
from ...residents import kept_seconds
from ...vectors import check_vectors, vectors
from ...wire import json_response
from ..chat.request import Chat
from ..embeddings import dimensions_of, shortened
from .convert import chat_of, generate_of, plain_name
from .reply import Clock, LineStream, line, now

if TYPE_CHECKING:
    from ....engine.clients.face import OutputStream
    from ...service import Service
    from ..chat.schema import ChatBody
    from .schema import EmbedBody, EmbeddingsBody, GenerateBody, OllamaChatBody


class Talk:
    """One chat or generate request in work. `kind`: "chat" or "generate"."""

    def __init__(self, service: Service, request: Request, kind: str, model: str) -> None:
        self.service = service
        self.kind = kind
        self.model = model
        """Model name as the client wrote it."""
        self.clock = Clock()
        self._request = request
        self.chat: Chat
        self.keep_context = False

    def start(self, body: ChatBody) -> None:
        self.service.check_model(body.model, adapters=True)
        self.service.check_generates()
        self.chat = Chat(self.service, body, self._request.scope["headrace.request_id"])
        self._request.scope["headrace.usage"] = self.chat.usage

    async def finish(self, stream: bool, sampling: SamplingParams) -> Response:
        """Submit the prepared prompt and answer, as lines or as one object."""
        await self.chat.demand()
        output = self.chat.submit(sampling, whole=not stream)
        if stream:
            return LineStream(self._lines(output))
        return await while_connected(self._request.receive, self._whole(output))

    def opened(self, keep_alive: float | str | None) -> Response:
        """Answer a request without a message, which asks to load the model, or to let it rest."""
        rests = keep_alive is not None and not kept_seconds(keep_alive)
        reason = "unload" if rests else "load"
        return json_response({**self._part("", ""), "done": True, "done_reason": reason})

    async def _lines(self, output: OutputStream) -> AsyncIterator[bytes]:
        async for part in self._parts(output):
            yield line(part)

    async def _whole(self, output: OutputStream) -> Response:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        last: dict[str, Any] = {}

        def restart() -> None:
            texts.clear()
            thoughts.clear()
            calls.clear()

        async for part in self._parts(output, restart):
            message = part["message"] if self.kind == "chat" else part
            texts.append(message["content" if self.kind == "chat" else "response"])
            thoughts.append(message.get("thinking", ""))
            calls += message.get("tool_calls", ())
            last = part
        return json_response({**last, **self._content("".join(texts), "".join(thoughts), calls)})

    async def _parts(
        self, output: OutputStream, restart: Callable[[], None] = lambda: None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the parts of the answer. `restart` is called when the parts so far become void."""
        parts = self.chat.part()
        tokens: list[int] = []
        async for _, delta in deltas([output]):
            self.chat.usage.count(0, delta)
            self.clock.token()
            if delta.void is not None:
                parts, tokens = self.chat.part(), []
                restart()
            if self.keep_context:
                tokens += delta.token_ids
            chunks = parts.take(delta)
            text = "".join(chunk.get("content", "") for chunk in chunks)
            thought = "".join(chunk.get("reasoning_content", "") for chunk in chunks)
            if text or thought:
                yield self._part(text, thought)
        calls = _calls(parts.calls)
        if calls:
            yield self._part("", "", calls)
        usage = self.chat.usage
        end: dict[str, Any] = {
            **self._part("", ""),
            "done": True,
            "done_reason": "length" if parts.finish == "length" else "stop",
            **self.clock.durations(usage.prompt, usage.completion),
        }
        if self.keep_context:
            end["context"] = [*self.chat.prompt, *tokens]
        yield end

    def _part(
        self, text: str, thought: str, calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now(), "done": False}
        return {**head, **self._content(text, thought, calls or [])}

    def _content(self, text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if self.kind == "generate":
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}


def _calls(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parse the calls' arguments to objects; drop a call whose arguments were cut off."""
    found = []
    for index, call in enumerate(given):
        try:
            arguments = any_json(call["function"]["arguments"] or "{}")
        except Undecodable:
            continue
        function = {"index": index, "name": call["function"]["name"], "arguments": arguments}
        found.append({"id": call["id"], "function": function})
    return found


async def chat(service: Service, request: Request, body: OllamaChatBody) -> Response:
    talk = Talk(service, request, "chat", body.model)
    if not body.messages:
        service.check_model(plain_name(body.model), adapters=True)
        return talk.opened(body.keep_alive)
    talk.start(await service.hands.beside(chat_of, service, body))
    sampling = talk.chat.sampling()
    await talk.chat.tokenise()
    return await talk.finish(body.stream is not False, sampling)


async def generate(service: Service, request: Request, body: GenerateBody) -> Response:
    talk = Talk(service, request, "generate", body.model)
    if not (body.prompt or body.context or body.images) and body.suffix is None:
        service.check_model(plain_name(body.model), adapters=True)
        return talk.opened(body.keep_alive)
    talk.start(generate_of(service, body))
    sampling = talk.chat.sampling()
    prompt = body.prompt or ""
    if body.suffix is not None:
        ids, ends = await infill_prompt(
            service, prompt, body.suffix, param="suffix", output=sampling.max_tokens
        )
        talk.chat.prompt = ids
        sampling.stop_token_ids = [*sampling.stop_token_ids, *ends]
    elif body.raw or service.engine.template is None:
        talk.chat.prompt = await service.encode(prompt, raw=True)
    else:
        await talk.chat.tokenise()
    talk.keep_context = not body.raw and not talk.chat.inputs
    if body.context:
        service.check_ids(body.context, "context")
        talk.chat.prompt = [*body.context, *talk.chat.prompt]
    return await talk.finish(body.stream is not False, sampling)


async def embed(
    service: Service, request: Request, body: EmbedBody | EmbeddingsBody, texts: list[str]
) -> tuple[list[list[float]], dict[str, int]]:
    """Embed the texts; return (vectors, durations)."""
    service.check_model(plain_name(body.model))
    check_vectors(service, pairs=False)
    clock = Clock()
    size = dimensions_of(service, getattr(body, "dimensions", None))
    cut = getattr(body, "truncate", None) is not False
    limit = cut_limit(-1 if cut else None, service.engine.max_context)
    usage = Usage(service.name)
    request.scope["headrace.usage"] = usage
    encode = service.engine.tokenizer.encode_with_specials
    # In a thread: a long list would delay the streams.
    inputs = await service.hands.run(lambda: [(encode(text, limit=limit), 0) for text in texts])
    found = await while_connected(
        request.receive,
        vectors(
            service,
            inputs,
            "vector",
            request_id=f"embd-{request.scope['headrace.request_id']}",
            priority=0,
            usage=usage,
            param="input",
        ),
    )
    return [shortened(vector, size) for vector in found], clock.durations(usage.prompt, 0)
