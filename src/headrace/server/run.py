"""The server's process: port, engine, ready line, signals, drain.

The port is bound before the model is touched, so that an occupied port is reported at once. From
then on probes are answered (live, not ready). On the first signal readiness ends, new work is
refused, and requests in work get up to `drain_seconds` to end. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Union

from ..base.config import ServerOptions
from ..base.errors import OptionError
from ..base.systemd import keep_alive, notify
from ..engine.preload import collector_paused
from ..obs.collector import collect_when_idle

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine
    from ..engine.clients.group import EngineGroup
    from ..engine.programs.engine import ProgramEngine
    from .accounts import Accounts
    from .app import Application
    from .grpc_port import GrpcPort
    from .kept import Life
    from .served_profile import ServedProfile
    from .service import Service

log = logging.getLogger("headrace.server")

BACKLOG = 2048
LEDGER_SECONDS = 10.0
"""Seconds between two saves of the keys' usage."""
SPAWN_SECONDS = 0.03
"""Seconds of head start for the engine: enough to start its process and to open the files of a
model on disk."""
ROUTES = (
    "pydantic.types",
    "starlette.applications",
    "fastapi",
    "uvicorn",
    "headrace.server.errors",
    "headrace.server.routes.chat.route",
    "headrace.server.routes.messages.route",
    "headrace.server.routes.responses.route",
    "headrace.server.batches.runner",
    "headrace.server.routes.control",
    "headrace.server.routes.kserve",
    "headrace.server.routes.operate",
    "headrace.server.app",
    "headrace.server.listen",
)
"""Modules that take long to import, in parts of 20 to 60 ms."""
BREATH_SECONDS = 0.001
"""Seconds between two parts, in which waiting requests are answered."""
LAST_WORDS = 2.0
"""Seconds in which aborted requests may still send their error."""

Engine = Union["ServingEngine", "EngineGroup", "ProgramEngine"]
StartEngine = Callable[[], Awaitable[Engine]]
StartPrograms = Callable[[], Awaitable["ProgramEngine"]]
Announce = Callable[[str], None]


def take_port(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises `OptionError` naming the option if that fails."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{host!r} is no address of this machine: {error}", param="host"
        ) from None
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
        taken.setblocking(False)
    except OSError as error:
        taken.close()
        if error.errno == errno.EADDRINUSE:
            raise OptionError(
                f"port {port} on {host} is in use; stop what listens there, or choose another "
                "with --port (0 takes a free one)",
                param="port",
            ) from None
        if error.errno == errno.EACCES:
            raise OptionError(
                f"port {port} needs privileges; choose one of 1024 and above", param="port"
            ) from None
        raise OptionError(f"cannot listen on {host}:{port}: {error.strerror}", param="host") from (
            None
        )
    return taken


def take_ports(options: ServerOptions) -> list[socket.socket]:
    """Bind the service's port and, if configured, the operator's. Raises `OptionError`."""
    options.verify()
    taken = [take_port(options.host, options.port)]
    if options.operator_port is not None:
        try:
            taken.append(take_port(options.operator_host, options.operator_port))
        except OptionError:
            taken[0].close()
            raise
    return taken


class ServerProcess:
    """One run of the server, from the port to the exit status."""

    def __init__(
        self,
        start_engine: StartEngine,
        options: ServerOptions,
        announce: Announce = print,
        sockets: list[socket.socket] | None = None,
        *,
        life: Life | None = None,
        served: ServedProfile | None = None,
        hears: Sequence[bool] = (),
        start_programs: StartPrograms | None = None,
    ) -> None:
        """Prepare a run.

        `sockets`: those of `take_ports`; None: `run` opens them. `life`: set if a parent restarts
        this process. `served`: the signed profile that `start_engine` applies to the engine.
        `hears`: for each model, whether it transcribes. `start_programs` starts foreign programs
        that are served in addition to the engine.
        """
        options.verify()
        if any(hears[:1]) and options.files:
            raise OptionError("a speech model has no batches, so it takes no files", param="files")
        self._sockets_wanted = (
            any(hears) or options.operator_port is not None or options.programs is not None
        )
        """Whether a model may transcribe live (an operator may load one that does), or programs
        may have cameras."""
        self._start_programs = start_programs
        self._programs: ProgramEngine | None = None
        self._life = life
        self._served = served
        self._sockets = sockets
        self._start_engine = start_engine
        self._options = options
        self._announce = announce
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._signal = 0

    def run(self) -> int:
        """Serve until a signal; return the exit status. Raises the error that prevented the
        engine's start."""
        taken = self._sockets or take_ports(self._options)
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                return runner.run(self._serve(taken))
        finally:
            for listener in taken:
                listener.close()

    async def _serve(self, sockets: list[socket.socket]) -> int:
        begin = time.perf_counter()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        starting: asyncio.Future[Engine] = asyncio.ensure_future(self._started())
        try:
            # The engine's process starts while this one imports the routes. They are imported in
            # parts, because the event loop must answer as soon as the engine asks what to load. If
            # a parent has already imported them, clients are answered first.
            if missing := [part for part in ROUTES if part not in sys.modules]:
                await asyncio.sleep(SPAWN_SECONDS)
                with collector_paused():
                    for part in missing:
                        import_module(part)
                        await asyncio.sleep(BREATH_SECONDS)
            # Local: they are imported by now.
            from .app import create_app, create_operator_app
            from .attaching import attach
            from .listen import http_server
            from .tls import Tls

            app = create_app(None, self._options)
            service: Service = app.state.service
            if self._life is not None:
                app.state.meter.restarted(self._life.restarts)
            tls = Tls.of(self._options)
            if tls is not None:
                tls.failed = app.state.meter.failed
            apps = [app, *([create_operator_app(app)] if len(sockets) > 1 else [])]
            servers = [
                http_server(
                    each,
                    tls,
                    app.state.meter,
                    backlog=BACKLOG,
                    last_words=LAST_WORDS,
                    websockets=self._sockets_wanted and each is app,
                )
                for each in apps
            ]
            grpc = await self._grpc(app)
        except BaseException:
            await _given_up(starting)
            raise
        http: asyncio.Future[Any] = asyncio.gather(
            *(
                server.serve(sockets=[listener])
                for server, listener in zip(servers, sockets, strict=True)
            )
        )
        keep = service.tasks.keep
        habits = [
            keep("ledger", partial(self._keep_ledger, app)),
            keep("watchdog", partial(keep_alive, lambda: service.health()[1])),
            keep("collector", partial(collect_when_idle, lambda: bool(service.in_work))),
        ]
        if tls is not None:
            habits.append(keep("certificates", tls.watch))
        if app.state.accounts is not None:
            habits.append(keep("keys", app.state.accounts.watch))
        service.loop.start()
        engine: Engine | None = None
        try:
            engine = await self._engine(starting, http)
            if engine is not None:
                attach(service, engine, self._programs)
                if self._served is not None:
                    service.served_profile = self._served
                    app.state.meter.certified(self._served)
                if app.state.batches is not None:
                    app.state.batches.start()
                if getattr(engine, "files", None) is not None:
                    habits.append(keep("pins", app.state.pins.keep))
                if service.residents is not None:
                    habits.append(keep("models", service.residents.watch))
                # Objects made during the start stay: scanning them would take 50 ms each time.
                gc.freeze()
                service.loop.longest = 0.0  # The start itself delays no client.
                self._ready(sockets, engine, time.perf_counter() - begin)
                if grpc is not None:
                    self._announce(f"grpc: {grpc.address}")
                await self._until_stopped(http)
            if app.state.batches is not None:
                service.draining = True
                await app.state.batches.close()
            await self._drain(service)
        finally:
            if service.in_work and engine is not None:
                await engine.close(0.0)
                if self._programs is not None:
                    await self._programs.close()
                with suppress(TimeoutError):
                    await asyncio.wait_for(service.idle(), LAST_WORDS)
            for server in servers:
                server.should_exit = True
            if grpc is not None:
                await grpc.stop(LAST_WORDS)
            await asyncio.wait({http})
            for habit in habits:
                habit.cancel()
            if app.state.batches is not None:
                await app.state.batches.close()
            service.loop.stop()
            service.hands.close()
            service.decoders.close()
            service.fetches.close()
            await self._save_ledger(app)
            app.state.store.close()
            if app.state.files is not None:
                app.state.files.close()
            if engine is not None:
                await engine.close(0.0)
            if self._programs is not None:
                await self._programs.close()
            if service.spans is not None:
                await asyncio.to_thread(service.spans.close)
        return 128 + signal.SIGINT if self._signal == signal.SIGINT else 0

    async def _grpc(self, app: Application) -> GrpcPort | None:
        """Listen for gRPC if the options ask for it. Raises `OptionError`, `PackageAbsent`."""
        if self._options.grpc_port is None:
            return None
        # Local: other servers do not need its imports.
        port: GrpcPort = import_module("headrace.server.grpc_port").GrpcPort(app)
        await port.start()
        return port

    async def _started(self) -> Engine:
        """Start the programs, if there are any, and then the engine."""
        if self._start_programs is None:
            return await self._start_engine()
        self._programs = await self._start_programs()
        try:
            return await self._start_engine()
        except BaseException:
            await self._programs.close()
            raise

    async def _engine(
        self, starting: asyncio.Future[Engine], http: asyncio.Future[Any]
    ) -> Engine | None:
        """Return the started engine, or None if a signal came first."""
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({starting, stop, http}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                return starting.result()
            if http.done():
                http.result()
            return None
        finally:
            stop.cancel()
            if not starting.done():
                await _given_up(starting)

    async def _until_stopped(self, http: asyncio.Future[Any]) -> None:
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({stop, http}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if http.done():
            http.result()

    async def _drain(self, service: Service) -> None:
        service.draining = True
        notify("STOPPING=1")
        if not service.in_work:
            return
        seconds = self._options.drain_seconds
        self._announce(
            f"finishing {service.in_work} requests, up to {seconds:g} s "
            "(a second signal ends them at once)"
        )
        idle = asyncio.ensure_future(service.idle())
        now = asyncio.ensure_future(self._now.wait())
        await asyncio.wait({idle, now}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        now.cancel()
        if service.in_work:
            self._announce(f"ending {service.in_work} requests")

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            self._now.set()
        self._signal = self._signal or number
        self._stop.set()

    async def _keep_ledger(self, app: Application) -> None:
        while True:
            await asyncio.sleep(LEDGER_SECONDS)
            await self._save_ledger(app)

    async def _save_ledger(self, app: Application) -> None:
        accounts: Accounts | None = app.state.accounts
        if accounts is not None:
            await app.state.store.save_ledger(accounts.totals())

    def _ready(self, sockets: list[socket.socket], engine: Engine, seconds: float) -> None:
        scheme = "https" if self._options.tls_cert else "http"
        addresses = [f"{scheme}://{_address(listener)}" for listener in sockets]
        phases = " · ".join(f"{name} {took:.2f}" for name, took in engine.phases.items())
        name = self._options.served_name or engine.model_name
        if self._programs is not None and self._programs is not engine:
            name = ", ".join([name, *self._programs.programs])
        for address in addresses[1:]:
            self._announce(f"operator: {address}")
        self._announce(f"ready: {name} on {addresses[0]} after {seconds:.2f} s ({phases})")
        for line in getattr(engine, "shares", ()):
            self._announce(line)
        self._announce(f"try: {_example(addresses[0], engine, self._options)}")
        if self._served is not None:
            self._announce(f"profile: {self._served}")
        if self._life is not None:
            self._life.serves()
        notify("READY=1", f"STATUS=serves {name} on {addresses[0]}")


def import_routes() -> None:
    """Import the server's modules, so that a fork of this process need not."""
    with collector_paused():
        for part in ROUTES:
            import_module(part)
    loop_factory()


async def _given_up(starting: asyncio.Future[Engine]) -> None:
    """Cancel a start that is no longer wanted; close the engine if it has started."""
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close(0.0)


def _example(address: str, engine: Engine, options: ServerOptions) -> str:
    """Return a shell command that gets an answer from this model."""
    curl = "curl"
    if options.tls_cert:
        curl += " -k"  # The certificate is for a name, and this is an IP address.
    if options.tls_clients:
        curl += " --cert CLIENT.pem --key CLIENT.key"
    if options.keys:
        curl += ' -H "authorization: Bearer $HEADRACE_API_KEY"'
    files = getattr(engine, "files", None)
    if files is None:
        programs: dict[str, Any] = getattr(engine, "programs", {})
        for name, voice in ((name, one.voice) for name, one in programs.items() if one.voice):
            body = f'{{"model": "{name}", "voice": "{voice.names[0]}", "input": "{voice.sample}"'
            return (
                f"{curl} {address}/v1/audio/speech -H 'content-type: application/json' -d "
                f'\'{body}, "response_format": "wav"}}\' -o speech.wav'
            )
        if programs:
            return f"{curl} {address}/v2/models/{engine.model_name}"
        return f"{curl} {address}/v1/audio/transcriptions -F file=@talk.wav"
    if files.arch.ranker is not None:
        return f"{curl} {address}/v1/models/{engine.model_name}"
    if files.arch.denoiser is not None:
        path, body = "images/generations", '{"prompt": "0"}'
    elif files.arch.task != "tokens":
        path, body = "embeddings", '{"input": "a river"}'
    elif files.chat_template is None:
        path, body = "completions", '{"prompt": "A river is", "max_tokens": 30}'
    else:
        path = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "Write a haiku about rivers."}]}'
    return f"{curl} {address}/v1/{path} -H 'content-type: application/json' -d '{body}'"


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop factory, or None if uvloop is missing (Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


__all__ = ["ServerProcess", "take_port"]
