"""Conversion of Ollama's bodies to chat bodies, so that every field has one meaning."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ....base.errors import InvalidRequest
from ...body import converted
from ..chat.pictures import GivenPicture
from ..chat.schema import ChatBody

if TYPE_CHECKING:
    from ...service import Service
    from .schema import GenerateBody, OllamaChatBody, OllamaMessage, Options, Spoken

TAG = ":latest"
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "typical_p",
)  # fmt: skip


def plain_name(name: str) -> str:
    """Remove the tag that Ollama's clients append to every name."""
    return name.removesuffix(TAG)


def chat_of(service: Service, body: OllamaChatBody) -> ChatBody:
    """Convert a chat. Raises `InvalidRequest`."""
    _check_images(service, (message.images for message in body.messages))
    given: dict[str, Any] = {**_shared(service, body), "messages": _messages(body.messages)}
    if body.tools:
        given["tools"] = body.tools
    return converted(given, ChatBody)


def generate_of(service: Service, body: GenerateBody) -> ChatBody:
    """Convert a prompt to a message. Raises `InvalidRequest`."""
    _check_images(service, [body.images])
    if body.images and (body.context or body.raw or body.suffix is not None):
        raise InvalidRequest("images are taken without context, raw and suffix", param="images")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": _content(body.prompt, body.images, "images")}
    ]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return converted({**_shared(service, body), "messages": messages}, ChatBody)


def _shared(service: Service, body: Spoken) -> dict[str, Any]:
    given: dict[str, Any] = {"model": plain_name(body.model), **_sampling(body.options)}
    if body.format == "json":
        given["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        schema = {"name": "format", "schema": body.format}
        given["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise InvalidRequest('format must be "json" or a JSON schema', param="format")
    if body.think is not None:
        given |= _thinking(service, body)
    return given


def _thinking(service: Service, body: Spoken) -> dict[str, Any]:
    if body.think and service.speech.marks is None:
        raise InvalidRequest(
            f"{body.model[:200]!r} does not support thinking",
            param="think",
            code="unsupported_parameter",
        )
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"chat_template_kwargs": {"enable_thinking": body.think}}


def _sampling(options: Options | None) -> dict[str, Any]:
    if options is None:
        return {}
    given = {name: value for name in _SAME if (value := getattr(options, name)) is not None}
    if options.repeat_penalty is not None:
        given["repetition_penalty"] = options.repeat_penalty
    if options.stop:
        given["stop"] = options.stop
    if options.num_predict is not None and options.num_predict not in (-1, -2):
        given["max_completion_tokens"] = options.num_predict
    return given


def _messages(given: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Convert messages: give every call an id, and match results to calls by id, by name, by
    order."""
    found: list[dict[str, Any]] = []
    waiting: deque[tuple[str, str]] = deque()
    for place, message in enumerate(given):
        new: dict[str, Any] = {
            "role": message.role,
            "content": _content(message.content, message.images, f"messages.{place}.images"),
        }
        if message.thinking:
            new["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                (call.id or f"call_{place}_{index}", call.function)
                for index, call in enumerate(message.tool_calls)
            ]
            waiting = deque((name, function.name) for name, function in calls)
            new["tool_calls"] = [
                {
                    "id": name,
                    "type": "function",
                    "function": {
                        "name": function.name,
                        "arguments": json.dumps(function.arguments, ensure_ascii=False),
                    },
                }
                for name, function in calls
            ]
        if message.role == "tool":
            name = message.tool_name or message.name
            match = next((pair for pair in waiting if pair[1] == name), None)
            match = match or (waiting[0] if waiting else None)
            if match is not None:
                waiting.remove(match)
            new["tool_call_id"] = message.tool_call_id or (match[0] if match else f"call_{place}")
            if name:
                new["name"] = name
        found.append(new)
    return found


def _content(text: str | None, images: list[Any] | None, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: pictures come before its text. `where`: the images' field.
    Raises `InvalidRequest`."""
    if not images:
        return text or ""
    parts: list[dict[str, Any]] = []
    for place, image in enumerate(images):
        if not isinstance(image, str):
            here = f"{where}.{place}"
            raise InvalidRequest(f"{here} must be a picture's file in base64", param=here)
        given = GivenPicture(f"{where}.{place}", image)
        parts.append({"type": "image_url", "image_url": given})
    return [*parts, {"type": "text", "text": text or ""}]


def _check_images(service: Service, given: Iterable[list[Any] | None]) -> None:
    if service.pictures is None and any(given):
        raise InvalidRequest(
            "this model takes no images", param="images", code="unsupported_content"
        )
