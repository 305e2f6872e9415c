"""Flags and arguments of commands, each with its help first."""

from __future__ import annotations

from typing import Any

import typer


def flag(help: str, *names: str, **rules: Any) -> Any:
    """Describe a flag: its help, its names if not the parameter's, and typer's rules (`min` …)."""
    return typer.Option(*names, help=help, **rules)


def argument(help: str, **rules: Any) -> Any:
    """Describe an argument: its help and typer's rules (`metavar` …)."""
    return typer.Argument(help=help, **rules)
