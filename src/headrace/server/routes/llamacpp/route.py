from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...infill import infill_prompt
from ...openapi import replies, takes
from .schema import InfillBody, NativeBody, NativeReply
from .serve import Native

router = APIRouter(tags=["llama.cpp"])


@router.post("/infill", responses=replies(NativeReply, stream=True))
@takes(InfillBody)
async def infill(request: Request) -> Response:
    """Fill the gap between a prefix and a suffix."""
    service, body = await entered(request, InfillBody)
    work = Native(service, body, request)
    work.prompt, work.ends = await infill_prompt(
        service,
        body.input_prefix,
        body.input_suffix,
        param="input_suffix",
        extra=[(file.filename, file.text) for file in body.input_extra or ()],
        written=body.prompt or "",
        output=work.most,
    )
    return await work.answer()


@router.post("/completion", responses=replies(NativeReply, stream=True))
@takes(NativeBody)
async def completion(request: Request) -> Response:
    """Continue a prompt."""
    service, body = await entered(request, NativeBody)
    work = Native(service, body, request)
    if isinstance(body.prompt, str):
        work.prompt = await service.encode(body.prompt, raw=True)
    else:
        service.check_ids(body.prompt, "prompt")
        work.prompt = list(body.prompt)
    return await work.answer()
