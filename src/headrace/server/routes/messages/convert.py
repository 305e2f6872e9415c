"""Conversion of Anthropic's messages to OpenAI's: both share templates, tools and sampling."""

from __future__ import annotations

import json
from typing import Any

from ....base.errors import InvalidRequest
from ...body import converted, needed
from ..chat.pictures import GivenPicture, given_url
from ..chat.schema import ChatBody
from .schema import Block, CountBody, MessagesBody, Turn


def to_chat(
    body: CountBody,
    *,
    counts_reasoning: bool = False,
    beginning: bool = False,
    sees: bool = False,
) -> ChatBody:
    """Convert a conversation into a chat body. Raises `InvalidRequest` naming the block.

    If the last message is the assistant's, the answer continues it. `counts_reasoning`: the model's
    reasoning can be limited to a number of tokens. `beginning`: the conversation goes on after
    these messages, so no answer follows them. `sees`: the model takes pictures.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else _texts(body.system, "system")
        messages.append({"role": "system", "content": text})
    for place, turn in enumerate(body.messages):
        messages += _turn(turn, f"messages.{place}", sees)
    chat: dict[str, Any] = {"messages": messages, "model": body.model}
    if body.messages[-1].role == "assistant" and not beginning:
        chat |= _continued(body, messages, f"messages.{len(body.messages) - 1}")
    if body.tools:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    chat |= _choice(body)
    if body.thinking is not None:
        wanted = body.thinking.type != "disabled"
        chat["chat_template_kwargs"] = {"enable_thinking": wanted}
        chat["include_reasoning"] = wanted and body.thinking.display != "omitted"
        if wanted and counts_reasoning:
            chat["thinking_token_budget"] = body.thinking.budget_tokens
    config = body.output_config
    form = (config and config.format) or body.output_format
    if form is not None:
        schema = {"name": "answer", "schema": form.schema_}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None and config.effort is not None:
        chat["reasoning_effort"] = {"max": "xhigh"}.get(config.effort, config.effort)
    if isinstance(body, MessagesBody):
        chat |= {
            "max_completion_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    return converted(chat, ChatBody)


def _continued(body: CountBody, messages: list[dict[str, Any]], where: str) -> dict[str, Any]:
    """Return the chat fields by which the answer continues the last message.

    Removes that message if it is empty. Raises `InvalidRequest` if it cannot be continued.
    """
    last = messages[-1]
    text = last["content"] or ""
    if "tool_calls" in last:
        raise InvalidRequest(
            f"{where} has a tool_use block: a message with its tool_result must come after it",
            param=where,
        )
    if text != text.rstrip():
        raise InvalidRequest(
            f"{where} is continued by the answer, so it must not end with white space", param=where
        )
    if text:
        config = body.output_config
        if body.output_format or (config and config.format):
            raise InvalidRequest(
                f"{where} is continued by the answer, which cannot begin the form that "
                "output_config demands: end with a message of the user",
                param=where,
            )
        return {"continue_final_message": True}
    if "reasoning_content" in last:
        raise InvalidRequest(
            f"{where} is continued by the answer, so it must not end with a thinking block",
            param=where,
        )
    messages.pop()
    return {}


def _choice(body: CountBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and not choice.name:
        raise InvalidRequest("tool_choice of type tool needs a name", param="tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    chosen: Any = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": chosen, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _turn(turn: Turn, where: str, sees: bool) -> list[dict[str, Any]]:
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role != "assistant":
        return _user(turn, where, sees)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(turn.content):
        here = f"{where}.content.{place}"
        match block.type:
            case "text":
                texts.append(needed(block.text, f"{here}.text"))
            case "thinking":
                thoughts.append(needed(block.thinking, f"{here}.thinking"))
            case "redacted_thinking":
                continue  # made by another service, and readable only there
            case "tool_use":
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": needed(block.name, f"{here}.name"), "arguments": arguments}
                call_id = needed(block.id, f"{here}.id")
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _refused(block, here)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _user(turn: Turn, where: str, sees: bool) -> list[dict[str, Any]]:
    """Convert a user's turn; tool results become messages of their own, in place among the texts
    and pictures."""
    messages: list[dict[str, Any]] = []
    assert isinstance(turn.content, list)
    for place, block in enumerate(turn.content):
        here = f"{where}.content.{place}"
        if block.type == "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else _texts(content, f"{here}.content")
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": needed(block.tool_use_id, f"{here}.tool_use_id"),
                    "content": f"Error: {text}" if block.is_error else text,
                }
            )
        elif block.type in ("text", "document", "search_result") or (
            block.type == "image" and sees
        ):
            part = _picture(block, here) if block.type == "image" else _text(block, here)
            if not messages or messages[-1]["role"] != turn.role:
                messages.append({"role": turn.role, "content": ""})
            messages[-1]["content"] = _joined(messages[-1]["content"], part)
        else:
            raise _refused(block, here)
    return messages or [{"role": turn.role, "content": ""}]


def _joined(content: str | list[dict[str, Any]], part: str | GivenPicture) -> Any:
    """Return the content with `part` appended; it stays a text while it has no picture."""
    if isinstance(content, str) and isinstance(part, str):
        return f"{content}\n\n{part}" if content else part
    parts = ([_said(content)] if content else []) if isinstance(content, str) else content
    if isinstance(part, GivenPicture):
        parts.append({"type": "image_url", "image_url": part})
    elif parts[-1]["type"] == "text":
        parts[-1]["text"] += "\n\n" + part
    else:
        parts.append(_said(part))
    return parts


def _said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _picture(block: Block, where: str) -> GivenPicture:
    source = block.source if isinstance(block.source, dict) else {}
    kind, data = source.get("type"), source.get("data")
    if kind == "url" and isinstance(source.get("url"), str):
        return given_url(source["url"], GivenPicture(f"{where}.source.url"))
    if kind in ("url", "file"):
        why = "its url must be a string" if kind == "url" else "files are not taken here"
        raise InvalidRequest(
            f"{where}.source.type must be base64, not {kind}: {why}",
            param=f"{where}.source.type",
            code="unsupported_content",
        )
    if kind != "base64":
        words = f"{where}.source must be an object of type base64 with the picture's data"
        raise InvalidRequest(words, param=f"{where}.source")
    if not isinstance(data, str):
        here = f"{where}.source.data"
        raise InvalidRequest(f"{here} must be a picture's file in base64", param=here)
    return GivenPicture(f"{where}.source.data", data)


def _texts(blocks: list[Block], where: str) -> str:
    return "\n\n".join(_text(block, f"{where}.{place}") for place, block in enumerate(blocks))


def _text(block: Block, where: str) -> str:
    """Convert a text, a plain document or a search result to text. Raises `InvalidRequest`."""
    if block.type == "text":
        return needed(block.text, f"{where}.text")
    head = [part for part in (block.title, block.context) if part]
    if block.type == "search_result":
        found = block.content if isinstance(block.content, list) else []
        head += [block.source] if isinstance(block.source, str) else []
        return "\n".join([*head, _texts(found, f"{where}.content")])
    source = block.source if isinstance(block.source, dict) else {}
    kind = source.get("type")
    if block.type == "document" and kind == "text" and isinstance(source.get("data"), str):
        return "\n".join([*head, source["data"]])
    if block.type == "document" and kind == "content":
        content = source.get("content")
        if isinstance(content, list):
            here = f"{where}.source.content"
            content = _texts(
                [converted(part, Block) for part in content if isinstance(part, dict)], here
            )
        if isinstance(content, str):
            return "\n".join([*head, content])
    raise _refused(block, where)


def _refused(block: Block, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"this model takes no {block.type} block here; allowed: text",
        param=where,
        code="unsupported_content",
    )
