"""The application: routes, error mapping and outer middleware, around one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from ..base import environment
from ..base.config import ServerOptions
from ..base.errors import HeadraceError, InvalidRequest, NotFound
from ..base.version import VERSION
from ..obs.loopwatch import LoopWatch
from ..obs.tasks import TaskWatch
from .accounts import Accounts
from .attaching import attach
from .authentication import Authentication, is_open
from .batches.runner import BatchRunner
from .border import Border
from .errors import MethodNotAllowed, error_response, internal_error
from .files.store import FileStore
from .heads import Heads
from .hosts import Hosts, read_fetch_hosts, read_hosts
from .meter import HttpMeter
from .openapi import document
from .origin import Origins, read_origins
from .page.route import router as page
from .paths import Paths
from .pins import Pins
from .refusal import refusal
from .routes.adapters import router as adapters
from .routes.audio import router as audio
from .routes.batches import router as batches
from .routes.chat.route import router as chat
from .routes.completions.route import router as completions
from .routes.control import router as control
from .routes.docs import router as docs
from .routes.embeddings import router as embeddings
from .routes.files import router as files
from .routes.health import router as health
from .routes.images import router as images
from .routes.invocations import router as invocations
from .routes.kserve import router as kserve
from .routes.llamacpp.route import router as llamacpp
from .routes.messages.route import router as messages
from .routes.metrics import router as metrics
from .routes.models import router as models
from .routes.nim import router as nim
from .routes.ocr import router as ocr
from .routes.ollama.route import router as ollama
from .routes.operate import router as operate
from .routes.pooling import router as pooling
from .routes.prefixes import router as prefixes
from .routes.recommend import router as recommend
from .routes.rerank import router as rerank
from .routes.residents import router as residents
from .routes.responses.route import router as responses
from .routes.responses.serve import Responses
from .routes.stats.route import router as stats
from .routes.tokenize import router as tokenize
from .routes.version import router as version
from .routes.vllm import router as vllm
from .service import Service
from .socket import Sockets
from .store import ResponseStore
from .traced import traced
from .wire import json_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope

    from ..engine.clients.face import ServingEngine

ROUTERS = (
    chat, completions, embeddings, audio, responses, messages, models, tokenize, rerank, files,
    batches, health, images, metrics, version, nim, kserve, ocr, invocations, ollama, llamacpp,
    vllm, pooling, stats, prefixes, adapters, recommend, page, docs,
)  # fmt: skip
OPERATOR_ROUTERS = (
    operate,
    residents,
    control,
    adapters,
    health,
    metrics,
    version,
    stats,
    prefixes,
)


class Application(FastAPI):
    """FastAPI with an exact OpenAPI document; `create_app` describes its state."""

    def __init__(self, routers: Sequence[APIRouter]) -> None:
        super().__init__(
            title="Headrace", version=VERSION, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self._routers = routers
        self._inside: ASGIApp | None = None
        self._guarded: Callable[[ASGIApp], ASGIApp] = lambda inner: inner
        self._made: dict[str, asyncio.Task[Any]] = {}
        # Not `include_router`, which would rebuild every route and its schemas in the first
        # request. These routers have no prefix and nothing else to add.
        self.router.routes.extend(route for router in routers for route in router.routes)
        self.add_exception_handler(HeadraceError, _typed)
        self.add_exception_handler(HTTPException, _http)
        self.add_exception_handler(RequestValidationError, _validation)
        self.add_exception_handler(Exception, _bug)

    def setup(self) -> None:
        """Add `/openapi.json`. FastAPI calls this; its own route would make the document in the
        event loop."""

        async def openapi(request: Request) -> Response:
            return json_response(await self.made("openapi", self.openapi))

        self.add_route("/openapi.json", openapi, include_in_schema=False)

    async def made(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make()`, which runs once, in a thread, for all callers.

        It goes on if they leave, so clients that come and go never start it a second time.
        """
        task = self._made.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            service: Service = self.state.service
            task = self._made[name] = service.tasks.errand(name, asyncio.to_thread(make))
        return await asyncio.shield(task)

    def openapi(self) -> dict[str, Any]:
        """Make the OpenAPI document. This takes long: in a server only `made` calls it."""
        closed = (lambda path: not is_open(path)) if self.state.accounts is not None else None
        return document(self, self._routers, closed)

    @property
    def inside(self) -> ASGIApp:
        """Routes with their error handling, without outer middleware and authentication (see
        `inside.post`)."""
        if self._inside is None:
            self._inside = super().build_middleware_stack()
        return self._inside

    def methods_of(self, scope: Scope) -> set[str]:
        """List the methods of all routes that match the path; Starlette's `Allow` has only the
        first.

        If a route has exactly this path, routes with parameters are ignored.
        """
        routes = [
            route
            for router in self._routers
            for route in router.routes
            if isinstance(route, APIRoute) and route.matches(scope)[0] is not Match.NONE
        ]
        own = [route for route in routes if not route.param_convertors]
        found = {method for route in own or routes for method in route.methods or ()}
        if found:
            found.add("OPTIONS")
        return found | {"HEAD"} if "GET" in found else found

    def guard(
        self,
        service: Service,
        meter: HttpMeter,
        authenticated: Callable[[ASGIApp], Authentication],
        origins: frozenset[str] = frozenset(),
        hosts: frozenset[str] | None = None,
    ) -> None:
        """Put outer middleware and authentication outermost, around Starlette's last error handler.

        `origins`: other origins whose pages may use this application. `hosts`: additional names
        under which it answers; None: any name.
        """

        def guarded(inner: ASGIApp) -> ASGIApp:
            routes = traced(authenticated(Heads(inner, self.methods_of)), service.spans)
            layers: ASGIApp = Origins(Paths(routes), origins, meter.refused)
            if hosts is not None:
                layers = Hosts(layers, hosts, meter.refused)
            return Sockets(Border(layers, service, meter))

        self._guarded = guarded

    def build_middleware_stack(self) -> ASGIApp:
        """Build Starlette's stack, which has the last error handler outermost, and guard it."""
        return self._guarded(super().build_middleware_stack())


def create_app(
    engine: ServingEngine | None = None, options: ServerOptions | None = None
) -> Application:
    """Create the HTTP application. Without an engine it answers 503 until
    `attach` gives `state.service` one.

    Its state: `service`, `meter`, `store`, `responses`, `accounts` (None: no keys are set, so every
    route is open), `pins`, `files` and `batches` (None: none are kept).

    Raises `OptionError` if the keys, the store or the folder of files cannot be used.
    """
    app = Application(ROUTERS)
    service = Service(options or ServerOptions())
    if engine is not None:
        attach(service, engine)
    given = service.options
    origins = read_origins(given.cors_origins)
    service.fetch_hosts = read_fetch_hosts(given.fetch_hosts)
    accounts = Accounts(Path(given.keys)) if given.keys else None
    meter = HttpMeter(accounts)
    store = ResponseStore(Path(given.store) if given.store else None, failed=meter.failed)
    if accounts is not None:
        accounts.failed = meter.failed
        accounts.restore(store.ledger())
    service.tasks = TaskWatch(lambda name: meter.failed("habit"))
    service.loop = LoopWatch(dumps=environment.cache_root() / "flight", on_beat=meter.late)
    app.state.service = service
    app.state.meter = meter
    app.state.store = store
    app.state.accounts = accounts
    app.state.responses = Responses(service, store)
    app.state.pins = Pins(app, Path(given.pinned_prompts) if given.pinned_prompts else None)
    app.state.files = app.state.batches = None
    if given.files:
        _keep_files(app, Path(given.files))
    app.guard(
        service,
        meter,
        lambda inner: Authentication(inner, accounts, refused=meter.refused),
        origins,
        _hosts(given),
    )
    return app


def create_operator_app(public: Application) -> Application:
    """Create the application of the operator's own port, around the same service."""
    app = Application(OPERATOR_ROUTERS)
    for name in ("service", "meter", "store", "accounts", "pins"):
        setattr(app.state, name, getattr(public.state, name))
    accounts, meter = public.state.accounts, public.state.meter
    app.guard(
        app.state.service,
        meter,
        lambda inner: Authentication(inner, accounts, operator=True, refused=meter.refused),
        hosts=_hosts(app.state.service.options),
    )
    return app


def _hosts(options: ServerOptions) -> frozenset[str] | None:
    """Return the accepted host names. With keys, any name will do: it proves nothing that the key
    does not."""
    hosts = read_hosts(options.hosts)
    return None if options.keys and not hosts else hosts


def _keep_files(app: Application, folder: Path) -> None:
    """Enable the routes for files and batches. Raises `OptionError`."""
    state, options = app.state, app.state.service.options
    meter: HttpMeter = state.meter
    state.files = FileStore(
        folder, quota=options.file_quota, max_file=options.max_file, failed=meter.failed
    )
    for service in state.service.models:
        service.files = state.files
    state.batches = BatchRunner(
        app, state.files, failed=meter.failed, ended=meter.batch_ended, line=meter.batch_request
    )


async def _typed(request: Request, error: Exception) -> Response:
    """Answer a typed error in the format of the called interface."""
    assert isinstance(error, HeadraceError)
    request.app.state.meter.refused(error)
    request.scope["headrace.error"] = error
    reply: Callable[[HeadraceError], Response] | None = request.scope.get("headrace.error_reply")
    return refusal(request.scope["path"], error) if reply is None else reply(error)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405 and request.method == "OPTIONS":
        allowed = ", ".join(sorted(request.app.methods_of(request.scope)))
        return Response(status_code=204, headers={"allow": allowed})
    if error.status_code == 405:
        refused: HeadraceError = MethodNotAllowed(
            f"{request.method} is not allowed on {request.url.path[:200]}"
        )
    elif error.status_code == 404:
        refused = NotFound(f"there is no {request.url.path[:200]}")
    else:
        refused = InvalidRequest(str(error.detail))
    request.app.state.meter.refused(refused)
    response = refusal(request.url.path, refused)
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(sorted(request.app.methods_of(request.scope)))
    return response


async def _validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][1:])
    return error_response(InvalidRequest(f"{name}: {first['msg']}", param=name))


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(internal_error())
