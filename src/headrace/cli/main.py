"""The `headrace` command: its subcommands load on use.

`headrace --help` and shell completion read the table below and import no command's module, so they
answer in a fraction of a second.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from ..base.environment import debug
from ..base.errors import HeadraceError, InvalidRequest
from ..base.names import hint, nearest
from ..base.version import VERSION
from .flags import flag

COMMANDS = {
    "serve": "Serve a model over HTTP, OpenAI-compatible.",
    "route": "One address before several servers.",
    "chat": "Talk to a model in the terminal.",
    "generate": "Continue a prompt once and print the answer.",
    "transcribe": "Speech to text: a file of sound as text, captions or JSON.",
    "draw": "A class's pictures from a denoiser, as PNG files.",
    "speak": "Text to speech: a file of the sound of a text.",
    "programs": "Detectors, readers and voices as ONNX files: inspect, run.",
    "models": "The catalog: what there is, what is on disk, licences.",
    "explain": "What the options become for a model, and why.",
    "top": "Watch a running server in the terminal.",
    "clients": "Settings for other programs: Continue, aider, Open WebUI, LiteLLM.",
    "keys": "API keys of a server: add, list, remove.",
    "cache": "The context cache on the disk: show, measure, precompute, export, import, forget.",
    "bench": "Load any server, ours or another, and measure what its users would feel.",
    "roofline": "What the hardware allows for a model, operator by operator.",
    "plan": "The cheapest layout that keeps an SLO, checked by the simulator.",
    "simulate": "A workload on engines that do not exist yet.",
    "replay": "Prove recorded answers again, bit for bit.",
    "quantise": "A model in fewer bits, calibrated on a text, with its loss measured.",
    "quantize": "The same as quantise.",
    "convert": "A model's numbers in another format, if that loses nothing.",
    "factory": "From a model to a signed profile of what was tested, and back to its evidence.",
    "profile": "Where the time of a model's steps goes, next to its prediction.",
}
"""Name → one line of help. The module of that name has `command`: a function, or a Typer
application."""
HOMES = {"cache": "cache_precompute", "quantize": "quantise"}
"""Commands whose module has a different name."""

ELSEWHERE = {
    "run": "chat", "pull": "models pull", "list": "models", "ls": "models", "rm": "models remove",
    "ps": "top", "show": "explain", "complete": "generate", "help": "--help",
}  # fmt: skip
"""Commands of Ollama and vLLM → ours."""
INTERRUPTED = 130
USAGE: Any = typer.BadParameter.__base__
"""Click's error for a wrong command line, from the Click that Typer uses."""


class Deferred(typer.core.TyperCommand):
    """A subcommand known by name and help, imported on first use."""

    def __init__(self, name: str, home: str, help: str) -> None:
        """Take `home`: `module:attribute`, or `module:attribute.command` of a Typer application."""
        super().__init__(name, help=help, short_help=help)
        self._home = home

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        module, _, path = self._home.partition(":")
        attribute, _, command = path.partition(".")
        found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function = found
            found = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            found.command()(function)
        real: Any = typer.main.get_command(found)
        if command:
            real = real.commands[command]
        real.name = self.name
        return real.make_context(info_name, args, parent=parent, **extra)


class LazyGroup(typer.core.TyperGroup):
    """The group over `COMMANDS`, and the place where errors become one line."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, help in COMMANDS.items():
            home = f"{__package__}.{HOMES.get(name, name)}:command"
            self.add_command(Deferred(name, home, help))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; raise `InvalidRequest` with ours for other tools' names."""
        if (name := args[0]) not in self.commands:
            ours = ELSEWHERE.get(name)
            words = (
                nearest(name, self.commands) if ours is None else f"; here that is headrace {ours}"
            )
            raise InvalidRequest(f"no command {name!r:.40}{words}; headrace --help lists all")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            sys.exit(INTERRUPTED)
        except USAGE as error:
            name = getattr(error, "option_name", "")
            params = error.ctx.command.params if name and error.ctx else []
            flags = {one.name: max(one.opts, key=len) for one in params}
            if words := hint(name, list(flags), lambda ours: flags[ours]):
                error.message, error.possibilities = f"No such option: {name}{words}", None
            raise
        except HeadraceError as error:
            if debug():
                traceback.print_exc()
            fail(error.message)
            sys.exit(error.exit_code)


application = typer.Typer(
    name="headrace",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {VERSION}")
        raise typer.Exit


@application.callback()
def headrace(
    version: Annotated[
        bool, flag("Print it and exit.", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Headrace runs, serves, measures, plans and ships generative-AI inference."""


def fail(message: str) -> None:
    """Write one line on stderr, in red on a terminal."""
    mark = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    sys.stderr.write(f"{mark} {' '.join(message.split())}\n")
    sys.stderr.flush()


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    try:
        typer.main.get_command(application).main(prog_name="headrace")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has left; its shell expects silence.
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if debug():
            raise
        fail(f"internal error: {type(error).__name__}: {error} (HEADRACE_DEBUG=1 shows where)")
        sys.exit(70)
    sys.exit(0)
