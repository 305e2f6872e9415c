"""Routes that vLLM's clients and balancers need in addition to OpenAI's."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.version import VERSION
from ..openapi import replies
from ..service import of
from ..wire import json_response
from .nim import profile

router = APIRouter(tags=["operation"])


class LoadReply(TypedDict):
    server_load: int


class ServerInfoReply(TypedDict):
    version: str
    model: str
    profile: dict[str, Any]


class TokenizerInfoReply(TypedDict):
    tokenizer: str
    vocab_size: int
    model_max_length: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    add_bos_token: bool
    special_tokens: dict[str, int]
    chat_template: str | None


@router.get("/load", responses=replies(LoadReply, body=False))
async def load(request: Request) -> Response:
    """Return the number of requests in work, for balancers."""
    return json_response({"server_load": of(request).in_work})


@router.get("/server_info", responses=replies(ServerInfoReply, body=False))
async def server_info(request: Request) -> Response:
    """Describe the version, the model, and how it runs."""
    service = of(request)
    return json_response({"version": VERSION, "model": service.name, "profile": profile(service)})


@router.get("/tokenizer_info", responses=replies(TokenizerInfoReply, body=False))
async def tokenizer_info(request: Request) -> Response:
    """Describe the model's tokenizer and chat template."""
    engine = of(request).engine
    vocabulary, files = engine.tokenizer.vocabulary, engine.files
    return json_response(
        {
            "tokenizer": getattr(vocabulary, "kind", "unknown"),
            "vocab_size": engine.tokenizer.vocab_size,
            "model_max_length": engine.max_context,
            "bos_token_id": files.bos_id,
            "eos_token_ids": list(files.eos_ids),
            "add_bos_token": files.add_bos,
            "special_tokens": engine.tokenizer.special_tokens,
            "chat_template": files.chat_template,
        }
    )
