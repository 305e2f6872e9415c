"""A rerank request: a query and documents → the documents by their scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ...connection import while_connected
from ...generation import Usage
from ...wire import json_response
from ..score.serve import scores_of
from .schema import RerankBody

if TYPE_CHECKING:
    from ...service import Service


async def serve(
    service: Service, request: Request, body: RerankBody, *, show_documents: bool
) -> Response:
    service.check_model(body.model)
    request_id = f"rerank-{body.request_id or request.scope['headrace.request_id']}"
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    shown = show_documents if body.return_documents is None else body.return_documents
    usage = Usage()
    request.scope["headrace.usage"] = usage

    async def whole() -> Response:
        scores = await scores_of(
            service,
            body,
            [(body.query, text) for text in texts],
            request_id=request_id,
            usage=usage,
            param="documents",
            most=body.max_tokens_per_doc,
        )
        order = sorted(range(len(texts)), key=lambda place: (-scores[place], place))
        results: list[dict[str, Any]] = []
        for place in order[: body.top_n or None]:
            result: dict[str, Any] = {"index": place, "relevance_score": scores[place]}
            if shown:
                result["document"] = {"text": texts[place]}
            results.append(result)
        counted = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return json_response(
            {"id": request_id, "model": service.name, "results": results, "usage": counted}
        )

    return await while_connected(request.receive, whole())
