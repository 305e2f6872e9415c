"""Routes `/tokenize` and `/detokenize`: text and messages to ids, and back."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest
from ..body import converted
from ..entry import entered
from ..fields import Body, TokenId
from ..logprobs import token_text
from ..openapi import replies, takes
from ..service import Service
from ..wire import Many, json_response, large_response
from .chat.request import Chat
from .chat.schema import ChatBody, Message, Tool


class TokenizeBody(Body):
    model: str | None = None
    prompt: str | None = Field(None, description="Text; give either prompt or messages.")
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Put the model's begin-of-text token before a prompt (default true)."
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


router = APIRouter(tags=["tokens"])


@router.post("/tokenize", responses=replies(TokenizeReply))
@takes(TokenizeBody)
async def tokenize(request: Request) -> Response:
    """Tokenise a prompt, or messages through the chat template."""
    service, body = await entered(request, TokenizeBody)
    service.check_model(body.model)
    tokens = await ids_of(service, body)
    tokenizer = service.engine.tokenizer
    strings = Many(token_text(tokenizer, token) for token in tokens)
    return await large_response(
        {
            "count": len(tokens),
            "max_model_len": service.engine.max_context,
            "tokens": tokens,
            "token_strs": strings if body.return_token_strs else None,
        }
    )


async def ids_of(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        raw = body.add_special_tokens is not False
        return await service.encode(body.prompt, raw=raw, must_fit=False)
    given = body.model_dump(
        exclude_none=True,
        by_alias=True,
        exclude={"prompt", "add_special_tokens", "return_token_strs"},
    )
    chat = Chat(service, await service.hands.beside(converted, given, ChatBody), "")
    await chat.tokenise(counts=True)
    return chat.prompt


@router.post("/detokenize", responses=replies(DetokenizeReply))
@takes(DetokenizeBody)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    service, body = await entered(request, DetokenizeBody)
    service.check_model(body.model)
    service.check_ids(body.tokens, "tokens")
    decode = service.engine.tokenizer.decode
    text = await service.hands.run(decode, body.tokens, skip_special=False)
    return json_response({"prompt": text})
