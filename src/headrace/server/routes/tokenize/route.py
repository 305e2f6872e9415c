from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest
from ...body import converted
from ...entry import entered
from ...logprobs import token_text
from ...openapi import replies, takes
from ...prompts import check_ids
from ...service import Service
from ...wire import Many, json_response, large_response
from ..chat.request import Chat
from ..chat.schema import ChatBody
from .schema import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply

router = APIRouter(tags=["tokens"])


@router.post("/tokenize", responses=replies(TokenizeReply))
@takes(TokenizeBody)
async def tokenize(request: Request) -> Response:
    """The ids of a prompt, or of messages through the chat template."""
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
    """The text of ids, special tokens included."""
    service, body = await entered(request, DetokenizeBody)
    service.check_model(body.model)
    check_ids(service, body.tokens, "tokens")
    decode = service.engine.tokenizer.decode
    text = await service.hands.run(decode, body.tokens, skip_special=False)
    return json_response({"prompt": text})
