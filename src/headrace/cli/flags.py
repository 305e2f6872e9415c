"""Flags and arguments of commands, with the help first, and flags of a record's fields."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from ..base.errors import OptionError

Named = Mapping[str, Any]
"""Something for each field name."""
NONE: Named = MappingProxyType({})
RULES = ("min", "max", "metavar")
"""Metadata of a field that typer checks or shows."""


def flag(help: str, *names: str, **rules: Any) -> Any:
    """Describe a flag: its help, its names if not the parameter's, and typer's rules (`min` …)."""
    return typer.Option(*names, help=help, **rules)


def argument(help: str, **rules: Any) -> Any:
    """Describe an argument: its help and typer's rules (`metavar` …)."""
    return typer.Argument(help=help, **rules)


def with_flags(
    record: Any,
    name: str,
    make: Callable[[dict[str, Any]], Any] | None = None,
    only: Sequence[str] | None = None,
    *,
    helps: Named = NONE,
    panels: Named = NONE,
    types: Named = NONE,
    **defaults: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each field of a record that has a help text (or for those in
    `only`).

    `make` turns their values into the command's argument `name`, by default into the record.
    `helps`, `panels`, `types` and `defaults` override the record's for some fields; a flag with an
    overridden type defaults to None.
    """
    specs = [
        spec
        for spec in fields(record)
        if "help" in spec.metadata and (only is None or spec.name in only)
    ]
    kinds = get_type_hints(record) | dict(types)

    def record_of(given: dict[str, Any]) -> Any:
        return record(**given)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        every = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(command).parameters.values()
            if p.name != name
        ]
        for spec in specs:
            help = helps.get(spec.name, spec.metadata["help"])
            rules = {rule: spec.metadata[rule] for rule in RULES if rule in spec.metadata}
            names = spec.metadata.get("flag", ())
            described = flag(help, *names, rich_help_panel=panels.get(spec.name), **rules)
            every.append(
                inspect.Parameter(
                    spec.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=defaults.get(spec.name, None if spec.name in types else spec.default),
                    annotation=Annotated[kinds[spec.name], described],
                )
            )

        def run(**values: Any) -> None:
            given = {spec.name: values.pop(spec.name) for spec in specs}
            command(**values, **{name: (make or record_of)(given)})

        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in every}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def writable(path: Path | None, name: str) -> None:
    """Raise `OptionError` if a result cannot be written to this file: before the work, not after.

    `name`: the option's.
    """
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        why = "it is a folder" if path.is_dir() else f"{path.parent} is no folder to write into"
        raise OptionError(f"{path} cannot be written: {why}", param=name)
