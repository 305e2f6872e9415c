"""`headrace serve`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ..base.config import EngineOptions, ServerOptions
from ..obs.logs import configure_logs
from ..server.kept import Life, keep
from ..server.run import ServerProcess, import_routes, take_ports
from .brief import BriefHelp
from .configured import configured
from .start import started

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def serve(
    engine: EngineOptions,
    server: ServerOptions,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be served, and stop.")
    ] = False,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible. MODEL is downloaded where it is not on disk."""
    if dry_run:
        from .explain import show  # Local: the other run does without its imports.

        show(engine, server)
        return
    configure_logs(server.log_level, server.log_format)
    start = partial(started, engine)
    sockets = take_ports(server)  # What is wrong with a port is told before there is a child.

    def run(life: Life) -> int:
        return ServerProcess(start, server, announce, sockets, life=life).run()

    raise typer.Exit(keep(run, import_routes))


def announce(line: str) -> None:
    print(line, flush=True)
