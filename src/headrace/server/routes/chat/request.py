"""A chat request: messages → template → tokens → one stream."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ....base.errors import ContextOverflow, InvalidRequest
from ....base.request import Retained
from ....base.sampling import MAX_LOGPROBS, SamplingParams
from ....base.spec import InputSpan
from ....text import open_end
from ....text.foreign import CUT
from ....text.template import SMALL_CHARACTERS
from ...caller import CALLER, PREFIXES, engine_id
from ...generation import Usage
from .demand import expected_of, grammar_of, tools_of
from .legacy import is_legacy, modern, tool_calls
from .parts import Parts
from .pictures import PARTS, UNNAMED, with_pictures
from .reasoning import is_thought, thoughts, with_wishes
from .schema import ChatBody, Message
from .sounds import PART as SOUND
from .sounds import with_sounds

if TYPE_CHECKING:
    from ....dist.payloads import SealedInput
    from ....engine.clients.face import OutputStream
    from ...service import Service

SHORT = 256
"""Messages and parts up to which a conversation is processed in the event loop."""


class Chat:
    """State of one chat request that all parts of its answer need."""

    def __init__(self, service: Service, body: ChatBody, request_id: str) -> None:
        self.service = service
        new = modern(body)
        self.tools, self.choice = tools_of(new)
        self.speech = service.speech_for(tools=bool(self.tools), documents=bool(body.documents))
        """Form of the answer."""
        self.body = with_wishes(new, counts_reasoning=self.speech.counts_reasoning)
        self.id = f"chatcmpl-{body.request_id or request_id}"
        self.created = int(time.time())
        self.adapter = service.adapter(body.model)
        self.model = self.adapter or service.name
        self.n = 1 if body.n is None else body.n
        self.top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self.prompt: list[int] = []
        self.text = ""
        """The rendered prompt."""
        self.echoed = ""
        """Text of the prompt that the answer repeats (`echo`)."""
        self.opened = False
        """Whether the prompt ends inside reasoning."""
        self.legacy = is_legacy(body)
        self.hidden = self.speech.hidden(tools=bool(self.tools))
        self.grammar: str | None = None
        self.usage = Usage(self.model)
        self.retained: tuple[Retained, ...] = ()
        self.inputs: list[InputSpan] = []
        """Sounds and tiles of pictures in the prompt."""
        self.held: list[SealedInput] = []
        """Objects that keep these in memory, released with the request."""

    def sampling(self) -> SamplingParams:
        body = self.body
        if body.top_logprobs and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be from 0 to {MAX_LOGPROBS}, not {body.top_logprobs}",
                param="top_logprobs",
            )
        body.verify_stream_options()
        return body.sampling(
            defaults=self.service.defaults,
            max_tokens=body.limit,
            logprobs=self.top_logprobs,
            vocab_size=self.service.vocab_size,
        )

    async def tokenise(self, *, counts: bool = False) -> None:
        """Render the messages and fill `prompt`; `counts`: it is only counted, so it need not
        fit."""
        body = self.body
        self.service.check_generates()
        template = self.service.engine.template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        final = bool(body.continue_final_message)
        variables = dict(body.chat_template_kwargs or {})
        if body.enable_thinking is not None:
            variables.setdefault("enable_thinking", body.enable_thinking)
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        reserved = variables.keys() & _RESERVED
        if reserved:
            raise InvalidRequest(
                f"{min(reserved)} cannot be set here", param="chat_template_kwargs"
            )
        arguments: dict[str, Any] = {
            "tools": self._offered(),
            "add_generation_prompt": (
                not final if body.add_generation_prompt is None else body.add_generation_prompt
            ),
            "continue_final_message": final,
            "documents": body.documents,
            "variables": variables,
        }
        small = None
        if _is_short(body.messages):
            small = template.render_small(self._messages(), **arguments)

        def whole() -> str:
            text: str = template.render(self._messages(), **arguments)
            return text

        self.text = await self.service.hands.run(whole) if small is None else small
        marks = self.speech.marks
        if marks is not None:
            end = open_end(_plain_messages(body.messages[-1:])) if final else ""
            self.opened = marks.open_in(self.text, end)
        self.prompt = await self.service.encode(
            self.text,
            raw=bool(body.add_special_tokens),
            cut=CUT in self.text,
            must_fit=body.truncate_prompt_tokens is None,
            counts=counts,
        )
        self.prompt = body.cut(self.prompt, self.service.engine.max_context - (body.limit or 1))
        if self.service.sounds is not None:
            self.prompt, self.inputs, self.held = await with_sounds(
                self.service, body.messages, self.prompt, counts=counts
            )
        if self.service.pictures is not None:
            self.prompt, self.inputs, self.held = await with_pictures(
                self.service, body.messages, self.prompt, counts=counts
            )
        if body.echo and final:
            self.echoed = open_end(_plain_messages(body.messages[-1:]))

    def _messages(self) -> list[Mapping[str, Any]]:
        takes = {"audio": "input_audio", "image": "image_url", "video": "video_url"}
        seen = self.service.pictures
        parts: dict[str, list[dict[str, str]]] = {"input_audio": [SOUND]}
        parts |= UNNAMED if seen is not None and seen.place == seen.film_place else PARTS
        kinds = (takes[one] for one in self.service.modalities if one in takes)
        allowed = {kind: parts[kind] for kind in kinds}
        messages = self.speech.foreign.cut(_plain_messages(self.body.messages, allowed))
        return self.service.places.cut(messages) if allowed else messages

    async def demand(self) -> None:
        """Set `grammar`; compiling it may take long, so a thread does it."""
        body = self.body
        if not (self.tools or body.form_wanted):
            return
        self.grammar = await self.service.hands.run(
            grammar_of, body, self.speech, self.tools, self.choice, self.opened
        )
        self.service.check_grammar(self.grammar)

    def _offered(self) -> list[dict[str, Any]] | None:
        if not self.tools:
            return None
        names = {tool.name for tool in self.tools}
        return [
            tool.model_dump(exclude_none=True)
            for tool in self.body.tools or ()
            if tool.function.name in names
        ]

    def parts(self) -> list[Parts]:
        """Create the state of each choice."""
        return [self.part() for _ in range(self.n)]

    def part(self) -> Parts:
        """Create the initial state of a choice."""
        router = self.speech.router(
            opened=self.opened,
            tools={tool.name: tool for tool in self.tools} if self.tools else None,
            hidden=self.hidden,
            held=self.grammar is not None,
        )
        return Parts(
            router,
            show_reasoning=self.body.include_reasoning is not False,
            echoed=self.echoed,
            legacy=self.legacy,
            parallel=self.body.parallel_tool_calls is not False,
        )

    def submit(self, sampling: SamplingParams, *, whole: bool) -> OutputStream:
        """Submit the request to the engine. `whole`: nothing of the answer is sent before its
        end."""
        stream = self.service.engine.submit(
            self.prompt,
            sampling,
            whole=whole,
            request_id=engine_id(self.id),
            priority=self.body.priority or 0,
            cache_salt=CALLER.get().salt(self.body.cache_salt),
            adapter=self.adapter,
            grammar=self.grammar,
            # Markers that are special tokens must reach the router, which hides them from the user.
            keep_ids=self.speech.ids(self.hidden),
            expected=self.usage.expected,
            retained=self.retained,
            prefixes=PREFIXES.get(),
            inputs=self.inputs,
        )
        self.usage.known_prompt(0, len(self.prompt))
        self.usage.pictures = sum(one.length for one in self.inputs if one.kind == "picture")
        self.usage.videos = sum(one.length for one in self.inputs if one.kind == "video")
        return stream

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
        }


_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}


def _is_short(messages: list[Message]) -> bool:
    parts = sum(len(each.content) for each in messages if isinstance(each.content, list))
    texts = sum(len(each.content) for each in messages if isinstance(each.content, str))
    return len(messages) + parts <= SHORT and texts <= SMALL_CHARACTERS


Takes = Mapping[str, list[dict[str, str]]]
"""Client's part that a model takes → message parts of templates."""


def _plain_messages(
    messages: list[Message], takes: Takes = MappingProxyType({})
) -> list[dict[str, Any]]:
    return [_plain(index, message, takes) for index, message in enumerate(messages)]


def _plain(index: int, message: Message, takes: Takes) -> dict[str, Any]:
    """Convert a message to the form that templates read; refuse parts that the model does not
    take."""
    allowed = ("text", "refusal", *takes)
    for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
        if part.type not in allowed and not (is_thought(part) and message.role == "assistant"):
            raise InvalidRequest(
                f"this model takes no {part.type} parts; allowed: {', '.join(['text', *takes])}",
                param=f"messages.{index}.content.{place}",
                code="unsupported_content",
            )
        if part.type == "text" and part.text is None:
            raise InvalidRequest(
                "a text part needs text", param=f"messages.{index}.content.{place}.text"
            )
    if message.function_call is not None and not message.tool_calls:
        message = message.model_copy(update={"tool_calls": tool_calls(message.function_call)})
    plain = message.model_dump(
        exclude_none=True, exclude={"refusal", "annotations", "audio", "function_call"}
    )
    if message.role == "function":
        plain["role"] = "tool"
    if isinstance(message.content, list):
        plain["content"] = [
            one
            for part in message.content
            if not is_thought(part)
            for one in takes.get(part.type)
            or [{"type": "text", "text": part.text or part.refusal or ""}]
        ]
        if thought := thoughts(message.content):
            plain.setdefault("reasoning_content", thought)
    if "reasoning" in plain:
        plain.setdefault("reasoning_content", plain.pop("reasoning"))
    if message.role == "assistant":
        plain.setdefault("content", None)
    return plain


async def begin(
    service: Service,
    body: ChatBody,
    request_id: str,
    *,
    whole: bool,
    where: str = "messages",
    tokenised: Callable[[Chat], Awaitable[None]] | None = None,
) -> tuple[Chat, OutputStream]:
    """Do everything up to the first token: check, render, tokenise, submit.

    `whole`: nothing of the answer is sent before its end. `where`: the field that held the
    conversation. `tokenised`: callback of a protocol once the prompt is tokenised.
    """
    service.check_model(body.model, adapters=True)
    chat = Chat(service, body, request_id)
    sampling = chat.sampling()
    try:
        await chat.tokenise()
        chat.retained = body.retained(len(chat.prompt))
        if tokenised is not None:
            await tokenised(chat)
        await chat.demand()
        chat.usage.expected = await expected_of(service, chat.body, len(chat.prompt))
        return chat, chat.submit(sampling, whole=whole)
    except ContextOverflow as error:
        if error.param == "prompt":
            error.param = where
        raise
