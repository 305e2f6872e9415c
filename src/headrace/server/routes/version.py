"""Route `/version`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.version import VERSION, revision
from ..wire import json_response

router = APIRouter(tags=["operation"])
COMMIT = revision()
"""Commit of the code when the server started."""


@router.get("/version")
async def version(request: Request) -> Response:
    """Return Headrace's version, and the commit if it runs from a checkout."""
    return json_response({"version": VERSION, "commit": COMMIT})
