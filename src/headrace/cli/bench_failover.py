"""`headrace bench failover`: the effect of a server's death on its streams."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..base.errors import InvalidRequest
from ..bench.compare import MISSED
from ..bench.failover import Failover, by_command, failover, own_servers, sessions_of
from ..bench.job import Target
from ..bench.options import RunOptions
from ..bench.run import ask_server
from ..obs.progress import StatusLine
from .bench_flags import AsJson
from .flags import argument, flag
from .remote import API_KEY


def failover_command(
    model: Annotated[
        str | None, argument("Of the two servers that it starts; none: the default.")
    ] = None,
    url: Annotated[
        str | None, flag("Instead: a gateway before several servers that run; needs --kill.")
    ] = None,
    kill: Annotated[
        str | None,
        flag(
            "What ends a server, as in 'kubectl delete pod coder-0 --grace-period=0 --force'; "
            "none: SIGKILL to one of its own.",
            metavar="COMMAND",
        ),
    ] = None,
    streams: Annotated[int, flag("At the same time.", min=1, max=4096)] = 16,
    output: Annotated[int, flag("Tokens of each answer.", min=2)] = 128,
    served: Annotated[str | None, flag("Name at the gateway; none: its first.", "--model")] = None,
    api_key: Annotated[
        str | None, flag("If the servers want one.", *API_KEY, envvar="HEADRACE_API_KEY")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Kill a server under streams and hold every answer against an undisturbed run; exit 3 if one
    is lost or another."""
    if (url is None) != (kill is None):
        missing = "kill" if kill is None else "url"
        raise InvalidRequest(f"--url and --kill go together: {missing} is missing", param=missing)
    if url is not None and model is not None:
        raise InvalidRequest("a model is started without --url alone", param="model")
    strike = None if kill is None else by_command(kill)
    with ExitStack() as stack:
        say = stack.enter_context(StatusLine(sys.stderr, "failover"))
        if url is None or strike is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            threads = max(1, len(os.sched_getaffinity(0)) // 2)
            given = [] if model is None else [model]
            url, strike = stack.enter_context(own_servers(given, threads, folder, say))
        name = ask_server(RunOptions(url=url, model=served, api_key=api_key))["model"]
        found = failover(
            Target(url, name, api_key=api_key), sessions_of(streams, output), strike, say
        )
    if as_json:
        print(json.dumps({**asdict(found), "kept": found.kept}))
    else:
        print(*_lines(found), sep="\n")
    if not found.kept:
        raise typer.Exit(MISSED)


def _lines(found: Failover) -> list[str]:
    moved = "" if found.moved is None else f"; its {found.moved:.0f} moved to another"
    lines = [
        f"a server died while {found.in_work} of {found.streams} streams ran{moved}",
        f"{found.equal} answers equal the undisturbed ones, {found.unlike} differ, "
        f"{found.streams - found.equal - found.unlike} did not come whole",
        f"longest pause {found.pause:.2f} s (undisturbed {found.usual:.2f} s)",
    ]
    lines += [f"error: {one}" for one in found.failed[:3]]
    if found.kept:
        return [*lines, "nothing was lost or repeated"]
    if not found.in_work:
        return [*lines, "no stream was in work when the server died: longer answers by --output"]
    return lines
