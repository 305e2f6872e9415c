"""Serves the API's document to people."""

from __future__ import annotations

import gzip
import hashlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...page.route import ASK_AGAIN, VERSION, Kept, answer
from .render import rendered

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Every route with its fields; made of the document once."""
    state = request.app.state
    kept: Kept | None = getattr(state, "docs", None)
    if kept is None:
        page = rendered(request.app.openapi(), f"page/{VERSION}").encode()
        tag = f'"{hashlib.sha256(page).hexdigest()[:20]}"'
        kept = state.docs = Kept(
            "text/html; charset=utf-8", page, gzip.compress(page, 9, mtime=0), tag
        )
    return answer(request, kept, ASK_AGAIN)
