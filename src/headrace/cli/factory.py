"""`headrace factory`: a command's module is imported when it is used, since `load` and `rollback`,
on which pods and users wait, need little of what `build` does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main

HOMES = {
    "build": ("build", "explain"),
    "ship": ("fleet", "image", "chart", "workflow"),
    "store": ("verify", "profiles", "promote", "rollback", "revoke", "publish", "bundle", "load"),
    "fleet": ("ingest", "page", "watch"),
}
"""Commands of each module `factory_…`."""


class Commands(typer.core.TyperGroup):
    """The group over `HOMES`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in HOMES.values() for name in names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for home, names in HOMES.items():
            if cmd_name in names:
                found = import_module(f"{__package__}.factory_{home}").command
                return typer.main.get_group(found).commands[cmd_name]
        return None


command = typer.Typer(
    cls=Commands, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True
)


@command.callback()
def factory() -> None:
    """From a model to a signed profile of what was tested, and back to its evidence."""
