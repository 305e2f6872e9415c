"""`/version`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.version import VERSION
from ...wire import json_response

router = APIRouter(tags=["operation"])


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of Headrace."""
    return json_response({"version": VERSION})
