"""Reasoning fields of other services, in requests and in earlier answers."""

from __future__ import annotations

from typing import Any

from .schema import ChatBody, ContentPart


def with_wishes(body: ChatBody, *, counts_reasoning: bool) -> ChatBody:
    """Translate `thinking` and `reasoning` to the corresponding fields.

    A field that is set explicitly is kept. `counts_reasoning`: the model's reasoning can be limited
    to a number of tokens; otherwise a number has no effect.
    """
    wishes: dict[str, Any] = {}
    if (thinking := body.thinking) is not None:
        wishes["enable_thinking"] = thinking.type != "disabled"
        wishes["thinking_token_budget"] = thinking.budget_tokens
    if (reasoning := body.reasoning) is not None:
        wishes["enable_thinking"] = reasoning.enabled
        wishes["reasoning_effort"] = reasoning.effort
        wishes["thinking_token_budget"] = reasoning.max_tokens
        wishes["include_reasoning"] = False if reasoning.exclude else None
    if not counts_reasoning or wishes.get("enable_thinking") is False:
        wishes.pop("thinking_token_budget", None)
    new = {
        name: value
        for name, value in wishes.items()
        if value is not None and getattr(body, name) is None
    }
    return body.model_copy(update=new) if new else body


def is_thought(part: ContentPart) -> bool:
    """Whether this part of an earlier answer is reasoning."""
    return part.type in ("thinking", "redacted_thinking", "reasoning")


def thoughts(parts: list[ContentPart]) -> str:
    """Join the readable reasoning among the parts of an earlier answer."""
    return "".join(part.thinking or part.text or "" for part in parts if is_thought(part))
