"""`headrace keys`: the file of API keys that `headrace serve --keys` reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..base.errors import InvalidRequest
from ..server.keys import Key, hash_of, new_key, read_keys, write_keys
from .flags import argument, flag

command = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="API keys of a server. The file holds hashes: a key is shown once, when it is made.",
)

File = Annotated[Path, flag("The file that serve --keys reads.", "--keys", "--file")]
Name = Annotated[str, argument("Name of the key: who it is for.", show_default=False)]
DEFAULT_FILE = Path("headrace-keys.toml")


@command.command()
def add(
    name: Name,
    file: File = DEFAULT_FILE,
    operator: Annotated[bool, flag("It opens the operator's routes too.", "--operator")] = False,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    concurrent: Annotated[int | None, flag("Requests at the same time.", min=1)] = None,
) -> None:
    """Make a key, print it, and keep its hash. A running server takes it within seconds."""
    keys = read_keys(file) if file.exists() else []
    if any(key.name == name for key in keys):
        raise InvalidRequest(f"{file} has a key named {name!r} already", param="name")
    secret = new_key()
    made = Key(
        name,
        hash_of(secret),
        "operator" if operator else "user",
        requests_per_minute,
        tokens_per_minute,
        concurrent,
    )
    made.verify("the new key")
    write_keys(file, [*keys, made])
    print(secret)
    more = "keep it, since it cannot be shown again; " if sys.stdout.isatty() else ""
    print(f"{more}for a server: headrace serve --keys {file}", file=sys.stderr)


@command.command("list")
def list_keys(file: File = DEFAULT_FILE) -> None:
    """List names, roles and limits."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("name", "role", "requests/min", "tokens/min", "concurrent"):
        table.add_column(name)
    for key in read_keys(file):
        limits = (key.requests_per_minute, key.tokens_per_minute, key.concurrent)
        table.add_row(key.name, key.role, *("–" if x is None else str(x) for x in limits))
    Console(markup=False).print(table)


@command.command()
def remove(name: Name, file: File = DEFAULT_FILE) -> None:
    """Forget a key. A running server refuses it within seconds."""
    keys = read_keys(file)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        raise InvalidRequest(f"{file} has no key named {name!r}", param="name")
    write_keys(file, left)
