"""Conversion of Responses items to chat messages."""

from __future__ import annotations

import secrets
from typing import Any

from ....base.errors import InvalidRequest
from ...body import converted, needed
from ..chat.pictures import GivenPicture, given_url, is_small
from ..chat.schema import ChatBody
from .schema import InputItem, InputPart, NamedChoice, ResponseBody


def items_of(body: ResponseBody) -> list[dict[str, Any]]:
    """Return the input as plain items, as they are stored."""
    if isinstance(body.input, str):
        return [_stored(InputItem(role="user", content=body.input))]
    if not body.input:
        raise InvalidRequest("input must not be empty", param="input")
    return [_stored(item) for item in body.input]


def _stored(item: InputItem) -> dict[str, Any]:
    """Return the item as it is stored and sent: with its type, an id, and content in parts."""
    plain = item.model_dump(exclude_none=True)
    kind = plain.setdefault("type", "message")
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "fco")
    plain.setdefault("id", f"{prefix}_{secrets.token_hex(12)}")
    if kind == "message":
        plain.setdefault("status", "completed")
        if isinstance(plain.get("content"), str):
            part = "output_text" if plain.get("role") == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
            plain["content"] = [{"type": part, "text": plain["content"], **more}]
    return plain


def to_chat(body: ResponseBody, items: list[dict[str, Any]], sees: bool = False) -> ChatBody:
    """Convert a conversation to a chat body. `items`: all turns, earliest first; `sees`: the model
    takes pictures.

    Raises `InvalidRequest`.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for place, item in enumerate(items):
        _append(messages, converted(item, InputItem), f"input.{place}", sees)
    chat: dict[str, Any] = {
        "messages": messages,
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "parallel_tool_calls": body.parallel_tool_calls,
        "priority": body.priority,
    }
    if body.logprobs_wanted:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    chat |= {name: getattr(body, name) for name in _SAME}
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in body.tools
        ]
    choice: Any = body.tool_choice
    if isinstance(choice, NamedChoice):
        choice = {"type": "function", "function": {"name": choice.name}}
    chat["tool_choice"] = choice
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    form = body.text.format if body.text else None
    if form is not None and form.type != "text":
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            chat["response_format"]["json_schema"] = form.model_dump(
                exclude={"type"}, exclude_none=True, by_alias=True
            )
    return converted(chat, ChatBody)


_SAME = (
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop",
    "ignore_eos", "min_tokens", "skip_special_tokens", "include_stop_str_in_output", "cache_salt",
    "request_id", "chat_template_kwargs", "structured_outputs",
)  # fmt: skip
"""vLLM's additional fields, which chat has too."""


def _append(messages: list[dict[str, Any]], item: InputItem, where: str, sees: bool) -> None:
    """Append an item; consecutive assistant items become one message."""
    match item.type or "message":
        case "message":
            if item.role is None:
                raise InvalidRequest(f"{where}.role is required", param=f"{where}.role")
            if item.role == "assistant":
                text = _text(item.content, f"{where}.content")
                message = _assistant(messages)
                message["content"] = (message["content"] or "") + text
            else:
                take = _content if sees else _text
                content = take(item.content, f"{where}.content")
                messages.append({"role": item.role, "content": content})
        case "reasoning":
            text = _text(item.content or item.summary or "", f"{where}.content")
            message = _assistant(messages)
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        case "function_call":
            function = {
                "name": needed(item.name, f"{where}.name"),
                "arguments": needed(item.arguments, f"{where}.arguments"),
            }
            call = {"id": needed(item.call_id, f"{where}.call_id"), "type": "function"}
            _assistant(messages).setdefault("tool_calls", []).append(call | {"function": function})
        case "function_call_output":
            call_id = needed(item.call_id, f"{where}.call_id")
            text = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: str | list[InputPart] | None, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: a text, or parts if it has pictures."""
    if not isinstance(content, list) or all(part.type != "input_image" for part in content):
        return _text(content, where)
    return [
        {"type": "image_url", "image_url": _picture(part, f"{where}.{place}")}
        if part.type == "input_image"
        else {"type": "text", "text": _text([part], where, place)}
        for place, part in enumerate(content)
    ]


def _picture(part: InputPart, where: str) -> GivenPicture:
    small = is_small(part.detail, f"{where}.detail")
    if (part.image_url is None) == (part.file_id is None):
        raise InvalidRequest(f"{where} must have either image_url or file_id", param=where)
    name = "file_id" if part.image_url is None else "image_url"
    given, here = getattr(part, name), f"{where}.{name}"
    if not isinstance(given, str):
        raise InvalidRequest(f"{here} must be a string", param=here)
    if name == "file_id":
        return GivenPicture(here, small=small, file_id=given)
    return given_url(given, GivenPicture(here, small=small))


def _text(content: str | list[InputPart] | None, where: str, first: int = 0) -> str:
    """Return the text of parts; `first`: index of the first part in its message."""
    if content is None:
        raise InvalidRequest(f"{where} is required", param=where)
    if isinstance(content, str):
        return content
    for place, part in enumerate(content, first):
        if part.type in ("input_image", "input_file"):
            raise InvalidRequest(
                f"this model takes no {part.type} parts; allowed: text",
                param=f"{where}.{place}",
                code="unsupported_content",
            )
    return "".join(part.text or part.refusal or "" for part in content)
