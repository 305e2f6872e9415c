"""The messages of a conversation as templates expect them: checked, bounded, parts joined."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.base.errors import InvalidRequest, TooLarge
from headrace.base.foreign import Undecodable, any_json

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
"""Largest number of parts of one message's content."""


def clean_messages(
    messages: Sequence[Mapping[str, Any]], *, absent: str | None = ""
) -> list[dict[str, Any]]:
    """Copy the messages into a form that a template can take.

    `absent`: the content of an assistant's message without content. Most templates concatenate it
    and fail with None; some recognise a tool call by it.

    Content in parts becomes one text. The arguments of tool calls, which OpenAI carries as a JSON
    string, become the object that templates write out. Raises `InvalidRequest` naming the message
    and the field.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    if not messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise TooLarge(
            f"{len(messages)} messages; at most {MAX_MESSAGES} are allowed", param="messages"
        )
    return [
        _message(message, f"messages.{index}", absent) for index, message in enumerate(messages)
    ]


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose text, if it is one, is a list of one part."""
    content = message.get("content")
    return {**message, "content": _texts([content])} if isinstance(content, str) else message


def _message(message: Mapping[str, Any], where: str, absent: str | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a non-empty string", param=f"{where}.role")
    clean = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "content" in clean:
        clean["content"] = _content(clean["content"], f"{where}.content")
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{where}.tool_calls")
        if not clean["tool_calls"]:
            del clean["tool_calls"]
    thought = clean.get("reasoning_content")
    if isinstance(thought, str) and not ("tool_calls" in clean and clean.get("content")):
        clean.setdefault("thinking", thought)  # As gpt-oss's template names it; with calls alone.
    if clean.get("content") is None:
        if role not in ("assistant", "tool", "function"):
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        clean["content"] = absent if "tool_calls" in clean else ""  # A tool may return nothing.
    return clean


def _content(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    """Join the parts to one text; return a list of parts if one is a sound, a picture or a video,
    which templates place among texts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be text or a list of parts", param=where)
    if len(content) > MAX_PARTS:
        raise TooLarge(f"{where} has {len(content)} parts; at most {MAX_PARTS}", param=where)
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        here = f"{where}.{index}"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("audio", "image", "video"):
            parts += [*_texts(texts), dict(part)]
            texts = []
            continue
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise InvalidRequest(
                f"{here} is of type {kind!r}; this model takes only text parts", param=here
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{here} must have its text as a string", param=here)
        texts.append(text)
    return [*parts, *_texts(texts)] if parts else "".join(texts)


def _texts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": "".join(texts)}] if texts else []


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list", param=where)
    clean = []
    for index, call in enumerate(calls):
        here = f"{where}.{index}"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{here}.function.name must be a string", param=here)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            # A model may have written invalid JSON: then its text is passed on unchanged.
            with contextlib.suppress(Undecodable):
                arguments = any_json(arguments) if arguments.strip() else {}
        clean.append({**call, "function": {**function, "arguments": arguments}})
    return clean
