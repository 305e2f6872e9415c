"""What requests and histories say of reasoning in other services' words."""

from __future__ import annotations

from typing import Any

from .schema import ChatBody, ContentPart


def with_wishes(body: ChatBody, *, counts_reasoning: bool) -> ChatBody:
    """The same request with `thinking` and `reasoning` as the fields that stand for them here.

    A field that is set itself is left as it is. `counts_reasoning`: the model's reasoning can be
    limited to a number of tokens; where it cannot, a number is without effect.
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
    """Is this part of an earlier answer its reasoning?"""
    return part.type in ("thinking", "redacted_thinking", "reasoning")


def thoughts(parts: list[ContentPart]) -> str:
    """The reasoning among the parts of an earlier answer; "" where there is none to read."""
    return "".join(part.thinking or part.text or "" for part in parts if is_thought(part))
