"""`headrace factory`: each command's module is imported on use.

`load` and `rollback`, for which pods and users wait, need few of `build`'s imports.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from ..base.errors import PackageAbsent
from ..base.extras import absent
from .main import Deferred

COMMANDS: dict[str, dict[str, str]] = {
    "build": {
        "build": "Fetch MODEL, hold it to its gates, sign a profile of it.",
        "explain": "Show what build with the same options would run, and why.",
    },
    "ship": {
        "fleet": "Build every model by every recipe of a file.",
        "image": "Make the engine's image, without a daemon.",
        "chart": "Write a Helm chart that serves a profile and nothing else.",
        "workflow": "Write a workflow that builds, verifies, publishes and promotes every cell.",
    },
    "store": {
        "verify": "Check every digest and signature of the store, or of one profile.",
        "profiles": "List the rings and profiles of the store, and which can be served here.",
        "promote": "Let a ring point to a profile whose gates have passed.",
        "rollback": "Let a ring point to what it had before.",
        "revoke": "Sign that keys, digests or profiles are believed no more.",
        "publish": "Bring a profile with its weights, or the image, to a registry.",
        "bundle": "Write profiles, weights and images into one file, for use without a network.",
        "load": "Take a bundle, or what a registry holds, into the store.",
    },
    "fleet": {
        "ingest": "Take what is new of logs, metrics, runs and builds into the fleet's store.",
        "usage": "Add up requests and tokens by key and model, from the services' logs.",
        "page": "Write the fleet's page: services, latency, builds and gates, runs, alarms.",
        "watch": "Find changes of the runs' metrics, and re-run them in pairs.",
    },
}
"""Commands of each module `factory_…`, with one line of help: listing them imports none."""


class FleetCommand(Deferred):
    """A command that needs DuckDB in addition to the factory's common packages."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*args, **extra)
        except PackageAbsent as fault:
            raise absent("the fleet's store needs", "duckdb", "fleet") from fault


class Commands(typer.core.TyperGroup):
    """The group over `COMMANDS`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for home, commands in COMMANDS.items():
            for name, help in commands.items():
                place = f"{__package__}.factory_{home}:command.{name}"
                kind = FleetCommand if home == "fleet" else Deferred
                self.add_command(kind(name, place, help))


command = typer.Typer(
    cls=Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)


@command.callback()
def factory() -> None:
    """Turn a model into a signed profile of the tested engine, and show its evidence."""
