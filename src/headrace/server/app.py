"""The application: routes, error mapping and the border, around one engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ..base.config import ServerOptions
from ..base.errors import HeadraceError, InvalidRequest, NotFound
from ..base.version import VERSION
from .border import Border
from .errors import MethodNotAllowed, error_response, internal_error
from .meter import HttpMeter
from .openapi import document
from .page.route import router as page
from .routes.chat.route import router as chat
from .routes.completions.route import router as completions
from .routes.health.route import router as health
from .routes.invocations.route import router as invocations
from .routes.kserve.route import router as kserve
from .routes.messages.route import router as messages
from .routes.metrics.route import router as metrics
from .routes.models.route import router as models
from .routes.nim.route import router as nim
from .routes.responses.route import router as responses
from .routes.responses.serve import Responses
from .routes.stats.route import router as stats
from .routes.tokenize.route import router as tokenize
from .routes.version.route import router as version
from .service import Service
from .store import ResponseStore

if TYPE_CHECKING:
    from ..engine.face import ServingEngine

ROUTERS = (
    chat, completions, responses, messages, models, tokenize,
    health, metrics, version, nim, kserve, invocations, stats, page,
)  # fmt: skip


class Application(FastAPI):
    """FastAPI with an exact document; its state holds `service` and `meter`."""

    def openapi(self) -> dict[str, Any]:
        return document(self, ROUTERS)


def create_app(
    engine: ServingEngine | None = None, options: ServerOptions | None = None
) -> Application:
    """The HTTP application. Without an engine it answers 503 until `state.service.attach`."""
    app = Application(
        title="Headrace", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    service = Service(options or ServerOptions(), engine)
    meter = HttpMeter()
    app.state.service = service
    app.state.meter = meter
    path = service.options.store
    app.state.responses = Responses(service, ResponseStore(Path(path) if path else None))
    for router in ROUTERS:
        app.include_router(router)
    app.add_exception_handler(HeadraceError, _typed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(Exception, _bug)
    wrap = app.build_middleware_stack

    def stack() -> Border:
        return Border(wrap(), service, meter)

    # Outermost of all, around Starlette's own handler of last resort.
    app.build_middleware_stack = stack  # type: ignore[method-assign]
    return app


async def _typed(request: Request, error: Exception) -> Response:
    """In the shape of the route's interface, where that has one of its own."""
    assert isinstance(error, HeadraceError)
    reply: Response = request.scope.get("headrace.error_reply", error_response)(error)
    return reply


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        refused: HeadraceError = MethodNotAllowed(
            f"{request.method} is not allowed on {request.url.path[:200]}"
        )
    elif error.status_code == 404:
        refused = NotFound(f"there is no {request.url.path[:200]}")
    else:
        refused = InvalidRequest(str(error.detail))
    response = error_response(refused)
    response.headers.update(error.headers or {})
    return response


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return error_response(InvalidRequest(f"{name}: {first['msg']}", param=name))


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
