"""Flags from the options records: one source for names, types, help, defaults and bounds.

A command's function takes the records (`engine: EngineOptions`); `configured` replaces each by
one flag per field and adds `--config FILE`, a TOML file with the same names. A flag wins over the
file, the file over the default.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.config import DEFAULT_MODEL, read_toml
from ..base.errors import OptionError
from ..base.names import hint
from .brief import PANEL, show_all
from .flags import argument, flag

POSITIONAL = {"model"}
"""Fields passed as the command's argument instead of a flag."""

Model = Annotated[
    str | None,
    argument(
        f"Catalog name, folder, .gguf file, or hub id; none: {DEFAULT_MODEL}.", show_default=False
    ),
]

Models = Annotated[
    list[str] | None,
    argument(f"Names, paths, hub ids; none: {DEFAULT_MODEL}.", metavar="MODEL", show_default=False),
]
"""The argument of a command with a parameter `models`, which gets several words."""

ConfigFile = Annotated[Path | None, flag("TOML file with any of these options.", "--config")]
HelpAll = Annotated[
    bool, flag("Show every option.", "--help-all", is_eager=True, callback=show_all)
]


def configured(command: Callable[..., Any], *, argument: bool = True) -> Callable[..., Any]:
    """Return the command with its options records expanded into flags.

    `argument`: the model is the command's argument; otherwise the command reads it itself.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    records: dict[str, type] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = hints[name]
        if not (isinstance(kind, type) and is_dataclass(kind)):
            parameters.append(_keyword(name, parameter.default, kind))
            continue
        records[name] = kind
        panel = kind.__name__.removesuffix("Options") + PANEL
        parameters += [
            _parameter(spec, _type_of(kind, spec.name), panel)
            for spec in fields(kind)
            if spec.name not in POSITIONAL
        ]
    parameters += [_keyword("config", None, ConfigFile), _keyword("help_all", False, HelpAll)]
    several = "models" in signature.parameters
    if several:
        parameters = [one for one in parameters if one.name != "models"]
    if argument and any("model" in _names(record) for record in records.values()):
        parameters.insert(0, _keyword("model", None, Models if several else Model))

    @wraps(command)
    def wrapper(**given: Any) -> Any:
        path = given.pop("config", None)
        given.pop("help_all", None)  # its callback has done it
        read = read_config(path, set().union(*map(_names, records.values()))) if path else {}
        made: dict[str, Any] = {}
        if several:
            words = given.pop("model", None) or _words(read.pop("model", DEFAULT_MODEL))
            made["models"], given["model"] = words, words[0]
        for name, record in records.items():
            own = _names(record)
            flags = {key: given.pop(key) for key in list(given) if key in own}
            flags = {key: value for key, value in flags.items() if value is not None}
            options = record(**{**{k: v for k, v in read.items() if k in own}, **flags})
            options.verify()
            made[name] = options
        return command(**given, **made)

    wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {
        "return": None
    }
    del wrapper.__wrapped__
    return wrapper


def read_config(path: Path, known: set[str]) -> dict[str, Any]:
    """Read the options in a TOML file, `max-context` and `max_context` alike; raise
    `OptionError`."""
    read = read_toml(path, f"{path}", "config")
    options = {name.replace("-", "_"): value for name, value in read.items()}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise OptionError(
            f"{path} has the unknown option {unknown[0]}; known are {', '.join(sorted(known))}"
            f"{hint(unknown[0], known)}",
            param="config",
        )
    return options


def _words(value: Any) -> list[str]:
    """Return a file's models, given as a text or a list of texts."""
    words = value if isinstance(value, list) else [value]
    if not words or not all(isinstance(word, str) for word in words):
        raise OptionError(f"model must be text, or a list of it, not {value!r:.80}", param="model")
    return words


def _names(record: type) -> set[str]:
    return {spec.name for spec in fields(record)}


def _type_of(record: type, name: str) -> type:
    """Return the field's type without None."""
    hint = typing.get_type_hints(record)[name]
    if isinstance(hint, types.UnionType):
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    assert isinstance(hint, type)
    return hint


def _parameter(spec: Field[Any], kind: type, panel: str) -> inspect.Parameter:
    flag = "--" + spec.name.replace("_", "-")
    choices = spec.metadata.get("choices")
    help = spec.metadata["help"]
    if choices:
        help += f" One of {', '.join(map(str, choices))}."
    default = None if spec.default is MISSING else spec.default
    if default is not None:
        shown = {True: "on", False: "off"}.get(default) if kind is bool else default
        help += f" [{shown}]"
    more: dict[str, Any] = {}
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    elif choices:
        more["autocompletion"] = lambda: [str(choice) for choice in choices]
    flags = [flag, *(f"--{name}" for name in [spec.metadata.get("alias")] if name)]
    option = typer.Option(*flags, help=help, show_default=False, rich_help_panel=panel, **more)
    return _keyword(spec.name, None, Annotated[kind | None, option])


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
