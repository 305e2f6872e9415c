"""Conversion of Responses items to chat messages."""

from __future__ import annotations

import secrets
from typing import Any

from ....base.errors import InvalidRequest
from ...body import converted, needed
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


def to_chat(body: ResponseBody, items: list[dict[str, Any]]) -> ChatBody:
    """Convert a conversation to a chat body. `items`: all turns, earliest first.

    Raises `InvalidRequest`.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for place, item in enumerate(items):
        _append(messages, converted(item, InputItem), f"input.{place}")
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


def _append(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Append an item; consecutive assistant items become one message."""
    match item.type or "message":
        case "message":
            if item.role is None:
                raise InvalidRequest(f"{where}.role is required", param=f"{where}.role")
            text = _text(item.content, f"{where}.content")
            if item.role == "assistant":
                message = _assistant(messages)
                message["content"] = (message["content"] or "") + text
            else:
                messages.append({"role": item.role, "content": text})
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


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None:
        raise InvalidRequest(f"{where} is required", param=where)
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type in ("input_image", "input_file"):
            raise InvalidRequest(
                f"this model takes no {part.type} parts; allowed: text",
                param=f"{where}.{place}",
                code="unsupported_content",
            )
    return "".join(part.text or part.refusal or "" for part in content)
