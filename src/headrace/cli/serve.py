"""`headrace serve`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from ..base.config import DEFAULT_MODEL, EngineOptions, ServerOptions
from ..base.errors import OptionError
from ..base.hardware import hardware
from ..base.several import read_models
from ..engine.loop.context import served_size
from ..engine.programs.files import is_program
from ..loader.catalog import proposed
from ..obs.logs import configure_logs
from ..server.kept import Life, keep
from ..server.run import ServerProcess, StartEngine, import_routes, take_ports
from ..speech.finding import hears
from .brief import BriefHelp
from .configured import configured
from .flags import flag
from .start import running, several, started
from .translate import listed, translate

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
LINE = "headrace.line"
"""Key of the translated line in the context's `meta`."""


class Serve(BriefHelp):
    """The command, which also accepts another engine's line (`--from`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        place = next((n for n, word in enumerate(own) if word.split("=")[0] == "--from"), None)
        if place is None:
            return super().parse_args(ctx, args)
        name, _, engine = own[place].partition("=")
        rest = own[place + 1 :]
        if not engine and rest:
            engine, *rest = rest
        if not engine or (own is args and (rest or place)):
            raise OptionError(
                f"{name} needs an engine, then -- and its line, as in "
                "headrace serve --from vllm -- MODEL --max-model-len 4096",
                param="from",
            )
        if own is args:
            typer.echo(listed(engine))
            raise typer.Exit
        line = translate(engine, args[len(own) + 1 :])
        ctx.meta[LINE] = line
        mine = [*line.arguments, *own[:place], *rest]
        announce(shlex.join(["headrace", "serve", *mine]))
        for note in line.notes:
            announce(f"left out {note}")
        return super().parse_args(ctx, mine)

    def invoke(self, ctx: Any) -> Any:
        given = ctx.params
        if not any(given.get(name) for name in ("model", "config", "profile", "dry_run")):
            announce(proposal())
        return super().invoke(ctx)


def proposal() -> str:
    """Return a line about the default model, and a better one if it fits this machine."""
    here = hardware()
    better = proposed("cuda" if here.gpus else "cpu", here.free)
    line = f"serving {DEFAULT_MODEL}, the default: small, for code; headrace models lists others"
    if better is not None:
        line += (
            f"\nfor chat, {better.name} ({better.size / 1e9:.1f} GB) fits the "
            f"{here.free / 1e9:.1f} GB that are free: headrace serve {better.name}"
        )
    return line


@command.command(cls=Serve)
@configured
def serve(
    context: typer.Context,
    models: list[str],
    engine: EngineOptions,
    server: ServerOptions,
    profile: Annotated[
        str | None,
        flag(
            "Signed profile (headrace factory build), which sets the options: ring, file, "
            "name or digest."
        ),
    ] = None,
    from_engine: Annotated[
        str | None,
        flag(
            "Run a line of vllm, sglang, llama.cpp or ollama: --from vllm -- LINE; without "
            "one, list its options.",
            "--from",
            metavar="ENGINE",
        ),
    ] = None,
    dry_run: Annotated[bool, flag("Print what would be served, and stop.", "--dry-run")] = False,
) -> None:
    """Serve models over HTTP, OpenAI-compatible. A MODEL is fetched if not on disk.

    Requests choose a model by name. MODEL:kv=2GiB,name=ALIAS sets options of one.
    Programs (NAME.onnx) are served at /v2/models.
    """
    asked = [word for word in models if is_program(word)]
    if asked:
        server.programs = ",".join([*asked, *server.program_names])
    alone = bool(asked) and len(asked) == len(models)
    chosen = read_models(asked[:1] if alone else [w for w in models if w not in asked], engine)
    engine = chosen[0].options
    heard = [
        not alone and hears(one.options.model, cache_dir=engine.cache_dir, offline=engine.offline)
        for one in chosen
    ]
    if alone and profile is not None:
        raise OptionError("a profile is of a model; a program takes none", param="profile")
    if len(chosen) > 1 or chosen[0].names:
        _check_several(server, profile)
    admitted = None
    if profile is not None:
        from ..factory.admit import admit, certified  # Local: other runs do not need its imports.

        admitted = admit(profile, engine)
        engine = admitted.options
    if engine.context_cache == "auto" and not (all(heard) or alone):
        engine = replace(engine, context_cache=served_size(engine))
        chosen = [
            replace(one, options=replace(one.options, context_cache=engine.context_cache))
            for one in chosen
        ]
    if dry_run and alone:
        raise OptionError(
            f"--dry-run plans a model; headrace programs inspect {engine.model} shows a program",
            param="dry_run",
        )
    if dry_run:
        from .explain import show  # Local: other runs do not need its imports.

        show([replace(chosen[0], options=engine), *chosen[1:]], server)
        return
    configure_logs(server.log_level, server.log_format)
    if engine.launcher == "env":
        from .rank import followed  # Local: other runs do not need its imports.

        if followed(engine):
            return
    start: StartEngine = partial(started, engine)
    if not alone and (
        len(chosen) > 1 or chosen[0].names or any(heard) or server.operator_port is not None
    ):
        start = partial(several, chosen)
    programs = partial(running, engine, server) if server.program_names else None
    if alone and programs is not None:
        start, programs = programs, None
    if admitted is not None:
        start = partial(certified, partial(started, engine), admitted)
        server.served_name = server.served_name or admitted.profile.body.model.name
    sockets = take_ports(server)  # A wrong port is reported before any child starts.
    if (line := context.meta.get(LINE)) is not None:
        line.write_key_file()

    def run(life: Life) -> int:
        served = None if admitted is None else admitted.served
        return ServerProcess(
            start,
            server,
            announce,
            sockets,
            life=life,
            served=served,
            hears=heard,
            start_programs=programs,
        ).run()

    raise typer.Exit(keep(run, import_routes))


def _check_several(server: ServerOptions, profile: str | None) -> None:
    """Raise `OptionError` for options that a server of several named models cannot have."""
    if profile is not None:
        raise OptionError("a profile is of one model, and served alone", param="profile")
    if server.served_name is not None:
        raise OptionError(
            "served_name is of one model; give each its names, as in MODEL:name=ALIAS",
            param="served_name",
        )


def announce(line: str) -> None:
    print(line, flush=True)
