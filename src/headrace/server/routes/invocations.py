"""SageMaker's two routes: a body with messages is a chat, one with a prompt a completion."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import InvalidRequest
from ...base.foreign import Undecodable, json_reader
from ..body import parse
from ..entry import chosen, entered_raw
from ..openapi import health as probe
from ..openapi import replies, takes
from ..service import of
from .chat.schema import ChatBody, ChatReply
from .chat.serve import serve as serve_chat
from .completions.schema import CompletionBody, CompletionReply
from .completions.serve import serve as serve_completion
from .health import ready

router = APIRouter(tags=["SageMaker"])


class _Kind(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


_kind = json_reader(_Kind)


@router.get("/ping", responses=probe())
async def ping(request: Request) -> Response:
    """Return 200 if a request would be served."""
    return ready(of(request))


@router.post("/invocations", responses=replies(ChatReply | CompletionReply, stream=True))
@takes(ChatBody | CompletionBody)
async def invocations(request: Request) -> Response:
    """Answer a chat or a completion, depending on the body."""
    service, body = await entered_raw(request)
    try:
        kind = _kind(body)
    except Undecodable:
        kind = _Kind(messages=msgspec.Raw(b"?"))  # parsing it as a chat reports the error
    if bytes(kind.messages):
        chat = await service.hands.beside(parse, body, ChatBody)
        return await serve_chat(await chosen(service, chat.model), request, chat)
    if bytes(kind.prompt):
        completion = await service.hands.beside(parse, body, CompletionBody)
        return await serve_completion(await chosen(service, completion.model), request, completion)
    raise InvalidRequest("the body must have messages or a prompt", param="messages")
