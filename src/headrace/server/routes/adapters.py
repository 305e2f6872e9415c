"""Routes `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from ..body import read_model
from ..fields import Body
from ..openapi import ErrorReply, replies, takes
from ..service import of
from ..wire import json_response

router = APIRouter(tags=["adapters"])


FORBIDDEN = {"model": ErrorReply, "description": "The folder is not one that may be loaded."}


class LoadBody(Body):
    lora_name: str = Field(description="Name that requests give as model.")
    lora_path: str = Field(max_length=4096, description="Folder below one of adapter_roots.")
    model: str | None = Field(None, max_length=512, description="Its model; null: the first.")


class UnloadBody(Body):
    lora_name: str


@router.post("/v1/load_lora_adapter", responses={**replies(dict[str, str]), 403: FORBIDDEN})
@takes(LoadBody)
async def load(request: Request) -> Response:
    """Load a LoRA adapter; from then on it is one of the models."""
    service = of(request)
    body = await read_model(request, LoadBody, service.options.max_body)
    service = service.choose(body.model)
    service.check_model(body.model)
    service.check_new_name(body.lora_name)
    try:
        await service.engine.load_adapter(body.lora_name, body.lora_path)
    except (ModelFileError, UnsupportedModel) as error:
        # Not a server fault, unlike an unreadable model of the server's own.
        raise InvalidRequest(error.message, param="lora_path") from None
    return json_response({"loaded": body.lora_name})


@router.post("/v1/unload_lora_adapter", responses=replies(dict[str, str]))
@takes(UnloadBody)
async def unload(request: Request) -> Response:
    """Unload a LoRA adapter; requests that use it are finished."""
    service = of(request)
    body = await read_model(request, UnloadBody, service.options.max_body)
    service = service.choose(body.lora_name)
    await service.engine.unload_adapter(body.lora_name)
    return json_response({"unloaded": body.lora_name})
