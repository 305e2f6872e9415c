"""Routes that NIM's clients, charts and probes need in addition to OpenAI's; all values are
real."""

from __future__ import annotations

import math
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.version import VERSION
from ..entry import entered
from ..fields import Body
from ..openapi import raw, replies, takes
from ..service import Service, of
from ..vectors import check_vectors
from ..wire import json_response
from .embeddings import VectorFields, VectorUsage
from .metrics import render
from .rerank import best_first, scored

router = APIRouter(tags=["NIM"])


@router.get("/v1/version")
async def version(request: Request) -> Response:
    """Return the release and the API version."""
    return json_response({"release": VERSION, "api": "1"})


@router.get("/v1/metadata", responses=replies(dict[str, Any], body=False))
async def metadata(request: Request) -> Response:
    """Describe the model, its licence, and how it runs."""
    service = of(request)
    engine = service.engine
    served = service.served_profile
    return json_response(
        {
            "version": VERSION,
            "modelInfo": [{"shortName": service.name, "modelUrl": engine.files.name}],
            "assetInfo": [path.name for path in engine.files.weights],
            "licenseInfo": {"name": engine.files.licence or "unknown"},
            "selectedModelProfileId": served.digest if served else service.fingerprint,
            "profile": profile(service),
            "certified": served and served.document(),
        }
    )


@router.get("/v1/manifest", responses=replies(dict[str, Any], body=False))
async def manifest(request: Request) -> Response:
    """List the served files and the resolved profile."""
    service = of(request)
    files = [
        {"name": path.name, "bytes": path.stat().st_size}
        for path in service.engine.files.weights
        if path.exists()
    ]
    return json_response(
        {"model": service.engine.files.name, "files": files, "profile": profile(service)}
    )


@router.get("/v1/license", responses=replies(dict[str, Any], body=False))
async def licence(request: Request) -> Response:
    """Return the licences of the model and of the server."""
    files = of(request).engine.files
    return json_response(
        {
            "name": files.licence or "unknown",
            "type": "model",
            "model": files.name,
            "server": {"name": "Apache-2.0", "type": "software"},
        }
    )


@router.get("/v1/metrics", responses=raw("text/plain"))
async def metrics(request: Request) -> Response:
    """Return the same as `/metrics`."""
    return render(request)


def profile(service: Service) -> dict[str, Any]:
    """Describe how the model runs: every decision with its reason."""
    engine = service.engine
    return {
        "id": service.fingerprint,
        "format": engine.files.format,
        "family": engine.files.arch.family,
        "max_model_len": engine.max_context,
        "decisions": {
            decision.name: {"value": decision.value, "reason": decision.reason}
            for decision in engine.decisions
        },
    }


class Passage(Body):
    text: str


class RankingBody(VectorFields):
    query: Passage
    passages: list[Passage] = Field(min_length=1)
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END cuts a longer input at its end; NONE or null: it is an error."
    )


class Ranking(TypedDict):
    index: int
    logit: float


class RankingReply(TypedDict):
    rankings: list[Ranking]
    usage: VectorUsage


@router.post("/v1/ranking", responses=replies(RankingReply))
@takes(RankingBody)
async def ranking(request: Request) -> Response:
    """Sort passages by how well they fit a query; return their logits. An embedding model has no
    logits: its cosine similarities take their place."""
    service, body = await entered(request, RankingBody)
    service.check_model(body.model)
    logits = check_vectors(service, pairs=True)
    pairs = [(body.query.text, passage.text) for passage in body.passages]
    _, scores, usage = await scored(service, request, body, pairs, "ranking", "passages")
    values = [_logit(score) for score in scores] if logits else scores
    rankings = [{"index": place, "logit": values[place]} for place in best_first(values)]
    return json_response({"rankings": rankings, "usage": usage})


def _logit(share: float) -> float:
    """Invert the sigmoid."""
    bounded = min(max(share, 1e-12), 1 - 1e-12)
    return math.log(bounded / (1 - bounded))
