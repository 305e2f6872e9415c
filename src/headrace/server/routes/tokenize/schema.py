"""Bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field
from typing_extensions import TypedDict

from ...fields import Body, TokenId
from ..chat.schema import Message, Tool


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = Field(None, description="This, or messages.")
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Put the model's begin-of-text before a prompt (default true)."
    )
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    IDS: ClassVar = "tokens"
    tokens: list[TokenId]


class TokenizeReply(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(TypedDict):
    prompt: str
