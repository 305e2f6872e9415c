"""Help in one screen: `--help` shows the common options, `--help-all` every option.

The choice is a property of the command line, not of the options: a hidden flag works, completes and
is suggested like any other.
"""

from __future__ import annotations

from typing import Any

import typer
import typer.core

PANEL = " options"
"""Suffix of the names of panels made from options records (`configured`)."""
SHOWN = frozenset(
    """
    host port served_name keys device max_context threads max_tokens temperature top_p seed
    accept_licences at_least fresh key reference without
    """.split()  # noqa: SIM905
)
"""The options of these panels that `--help` shows."""
SERVING = frozenset({"max_sequences", "kv_memory"})
"""More of them, for commands without a server as an alternative (`--url`)."""
ALL = "headrace.help_all"


class BriefHelp(typer.core.TyperCommand):
    """A command whose `--help` omits rarer options and reports their number."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        talks = any(param.name == "url" for param in self.params)
        shown = SHOWN if talks else SHOWN | SERVING
        rare = [param for param in self.params if _optional(param) and param.name not in shown]
        if ctx.meta.get(ALL) or not rare:
            super().format_help(ctx, formatter)
            return
        before = self.epilog
        self.epilog = f"{len(rare)} more options are left to their defaults: --help-all lists them."
        try:
            _hide(rare, True)
            super().format_help(ctx, formatter)
        finally:
            _hide(rare, False)
            self.epilog = before


def show_all(ctx: typer.Context, wanted: bool) -> None:
    """Print the whole help and exit (`--help-all`)."""
    if wanted and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help(), color=ctx.color)
        raise typer.Exit


def _optional(param: Any) -> bool:
    return (getattr(param, "rich_help_panel", None) or "").endswith(PANEL)


def _hide(params: list[Any], hidden: bool) -> None:
    for param in params:
        param.hidden = hidden
