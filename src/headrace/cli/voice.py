"""Sources of answers in the terminal: an engine in this process, or a server somewhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from ..base.config import option
from ..base.errors import HeadraceError, InvalidRequest
from ..base.foreign import Undecodable, any_json
from ..base.request import OutputDelta
from ..base.sampling import SamplingParams
from ..engine.clients.face import ServingEngine
from ..engine.clients.input import default_sampling
from .pictures import LocalPictures
from .remote import unreachable

if TYPE_CHECKING:
    from ..base.spec import InputSpan
    from ..engine.clients.kept_pictures import SealedPicture

Message = dict[str, Any]


_WHOLE = ("max_tokens", "top_k", "seed", "thinking_token_budget")


@dataclass(slots=True)
class SamplingOptions:
    """The terminal's sampling flags; None leaves it to the model's authors."""

    max_tokens: int | None = option(None, "Longest answer, in tokens; none: to the context's end.")
    temperature: float | None = option(None, "0 takes the most likely token each time.")
    top_p: float | None = option(None, "Sample from the most likely tokens of this total.")
    top_k: int | None = option(None, "Sample from this many most likely tokens.")
    min_p: float | None = option(None, "Least probability, as a share of the most likely's.")
    repetition_penalty: float | None = option(None, "Above 1: less of what is there already.")
    seed: int | None = option(None, "Same seed, same text.")
    thinking_token_budget: int | None = option(None, "Longest reasoning, in tokens.")

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def verify(self) -> None:
        SamplingParams(**self.given()).verify()

    def set(self, name: str, text: str) -> None:
        """Set one field from the user's text; "none" unsets it. Raises `InvalidRequest`."""
        kinds: dict[str, type] = {
            spec.name: int if spec.name in _WHOLE else float for spec in fields(self)
        }
        if name not in kinds:
            raise InvalidRequest(f"there is no {name}; there are {', '.join(kinds)}", param=name)
        before = getattr(self, name)
        try:
            setattr(self, name, None if text == "none" else kinds[name](text))
            self.verify()
        except ValueError:
            raise InvalidRequest(f"{name} must be a number, not {text!r}", param=name) from None
        except InvalidRequest:
            setattr(self, name, before)
            raise


@dataclass(slots=True)
class Piece:
    """A part of an answer; the last one with text has the finish reason."""

    text: str
    tokens: int = 0
    """Tokens of this part; 0 if a server reports only the sum at the end, in `usage`."""
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Voice(Protocol):
    name: str

    async def sees(self, kind: str = "image") -> bool:
        """Return whether the model may take pictures, or videos ("video")."""
        ...

    def chat(self, messages: list[Message], options: SamplingOptions) -> AsyncGenerator[Piece]: ...
    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[Piece]: ...


class LocalVoice:
    """An engine that this process started."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self.name = engine.model_name
        self._pictures: LocalPictures | None = None
        """Opened when first needed."""

    async def sees(self, kind: str = "image") -> bool:
        if self._pictures is None:
            self._pictures = LocalPictures(self._engine)
        return bool(self._pictures) if kind == "image" else self._pictures.films

    def _sampling(self, options: SamplingOptions) -> SamplingParams:
        params = default_sampling(self._engine.files)
        params.max_tokens = None
        for name, value in options.given().items():
            setattr(params, name, value)
        params.verify()
        return params

    async def chat(
        self, messages: list[Message], options: SamplingOptions
    ) -> AsyncGenerator[Piece]:
        template = self._engine.template
        if template is None:
            raise InvalidRequest(
                f"{self.name} has no chat template: use headrace generate", param="model"
            )
        inputs: list[InputSpan] = []
        held: list[SealedPicture] = []
        if any(isinstance(message["content"], list) for message in messages):
            if not await self.sees() or self._pictures is None:
                raise InvalidRequest(f"{self.name} takes no pictures")
            ids, inputs, held = await self._pictures.prompt(messages)
        else:
            ids = self._engine.tokenizer.encode(template.render(messages))
        async with aclosing(self._pieces(ids, options, inputs)) as pieces:
            async for piece in pieces:
                yield piece
        del held  # Held until now, since the engine reads them.

    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[Piece]:
        return self._pieces(prompt, options)

    async def _pieces(
        self,
        prompt: str | list[int],
        options: SamplingOptions,
        inputs: Sequence[InputSpan] = (),
    ) -> AsyncGenerator[Piece]:
        stream = self._engine.submit(prompt, self._sampling(options), inputs=inputs)
        try:
            async for delta in stream:
                yield _piece(delta)
        finally:
            stream.cancel()


def _piece(delta: OutputDelta) -> Piece:
    return Piece(
        delta.text,
        len(delta.token_ids),
        delta.finish_reason,
        delta.prompt_tokens,
        delta.cached_tokens,
    )


class RemoteError(HeadraceError):
    """Error message of a server, in its own words."""


class RemoteVoice:
    """A running server with OpenAI's interface, ours or a foreign one."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.AsyncClient(
            headers=headers, timeout=httpx.Timeout(10.0, read=600.0), trust_env=False
        )
        self.name = model or ""

    async def open(self) -> None:
        """Query the served model's name. Raises `RemoteError`."""
        if self.name:
            return
        try:
            reply = await self._client.get(f"{self._base}/models")
        except httpx.HTTPError as error:
            raise unreachable(self._base, error) from None
        if reply.status_code != 200:
            raise RemoteError(f"{self._base}: {_words(reply.status_code, reply.text)}")
        try:
            self.name = str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise RemoteError(f"{self._base}/models has no list of models") from None

    async def sees(self, kind: str = "image") -> bool:
        """Return False if the server says what its model takes, and `kind` is not among it."""
        try:
            listed = (await self._client.get(f"{self._base}/models")).json()["data"]
            takes = next(one["input_modalities"] for one in listed if one["id"] == self.name)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, StopIteration):
            return True  # The server itself will refuse them.
        return kind in takes

    async def close(self) -> None:
        await self._client.aclose()

    def chat(self, messages: list[Message], options: SamplingOptions) -> AsyncGenerator[Piece]:
        return self._stream("chat/completions", {"messages": messages}, options)

    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[Piece]:
        given = {"prompt": prompt, **({} if options.max_tokens else {"max_tokens": 512})}
        return self._stream("completions", given, options)

    async def _stream(
        self, path: str, body: dict[str, Any], options: SamplingOptions
    ) -> AsyncGenerator[Piece]:
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**body, **options.given(), "model": self.name, **asked}
        try:
            async with self._client.stream("POST", f"{self._base}/{path}", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode("utf-8", "replace")
                    raise RemoteError(_words(reply.status_code, text))
                async for line in reply.aiter_lines():
                    if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                        continue
                    event = any_json(line[5:])
                    if "error" in event:
                        raise RemoteError(_words(500, line[5:]))
                    for choice in event.get("choices", ())[:1]:
                        yield _spoken(choice)
                    if event.get("usage"):
                        yield _counted(event["usage"])
        except httpx.HTTPError as error:
            raise unreachable(self._base, error) from None
        except Undecodable:
            raise RemoteError(f"{self._base} sent an event that is not JSON") from None


def _spoken(choice: dict[str, Any]) -> Piece:
    """Return the text of a choice, of chat or completions."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or ""
    return Piece((delta.get("reasoning_content") or "") + text, finish=choice.get("finish_reason"))


def _counted(usage: dict[str, Any]) -> Piece:
    """Return a server's counts without text."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return Piece(
        "",
        tokens=usage.get("completion_tokens") or 0,
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=cached or 0,
    )


def _words(status: int, text: str) -> str:
    try:
        return str(any_json(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {status}: {' '.join(text.split())[:200]}"
