"""AIConfigurator's line in our words: `headrace plan --from aiconfigurator -- LINE`.

Names are those of its published user guide, with dashes or underscores.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

import typer

from ..base.errors import InvalidRequest
from ..base.names import nearest
from ..roofline.known import KNOWN

PLANNER = "aiconfigurator"
NAMES = {
    "model": "", "model-path": "", "hf-id": "", "total-gpus": "", "system": "",
    "isl": "--input", "osl": "--output", "prefix": "--shared", "ttft": "--ttft", "tpot": "--tpot",
    "save-dir": "--launch",
}  # fmt: skip
"""Its option → ours; "": the model, or a part of `--devices`."""
MILLISECONDS = ("ttft", "tpot")
NO_EFFECT = {
    "backend": "--launch FOLDER writes the commands of every engine",
    "backend-version": "predictions are of no version of an engine",
    "database-mode": "predictions are of one kind",
}


def ours(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our arguments for an AIConfigurator line, and notes about what is left out.

    Raises `InvalidRequest` for an unknown option, and for a line without model or devices.
    """
    rest, given, notes = list(words), dict[str, str](), list[str]()
    while rest and rest[0] in (PLANNER, "cli", "default"):
        rest.pop(0)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        name = word.lstrip("-").replace("_", "-")
        if not word.startswith("--") or name not in {*NAMES, *NO_EFFECT}:
            near = nearest(name, [*NAMES, *NO_EFFECT], "--{}".format)
            raise InvalidRequest(f"{PLANNER}'s {word!r:.80} is not known here{near}", param="from")
        if not equals and not rest:
            raise InvalidRequest(f"{PLANNER}'s --{name} needs a value", param="from")
        value = value if equals else rest.pop(0)
        if name in NO_EFFECT:
            notes.append(f"--{name}: {NO_EFFECT[name]}")
        given[name] = value + "ms" * (name in MILLISECONDS)
    model = next((given[name] for name in ("model", "model-path", "hf-id") if name in given), None)
    if model is None or not {"total-gpus", "system"} <= given.keys():
        raise InvalidRequest(
            f"{PLANNER}'s line needs --model, --total-gpus and --system", param="from"
        )
    short = model.rpartition("/")[2].lower().replace("_", "-")
    found = [short if short in KNOWN else model]
    found += ["--devices", f"{given['total-gpus']}x{given['system']}"]
    for name, value in given.items():
        found += [NAMES[name], value] if NAMES.get(name) else []
    return found, notes


class PlanCommand(typer.core.TyperCommand):
    """The command, which also takes a line of AIConfigurator (`--from`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        place = next((n for n, word in enumerate(own) if word.split("=")[0] == "--from"), None)
        if place is None:
            return super().parse_args(ctx, args)
        named = "=".join(own[place : place + 2]).split("=")[1:2]
        if named != [PLANNER] or own is args:
            raise InvalidRequest(
                f"--from needs {PLANNER}, then -- and its line, as in headrace plan --from "
                f"{PLANNER} -- --model QWEN3_32B --total-gpus 32 --system h200_sxm",
                param="from",
            )
        mine, notes = ours(args[len(own) + 1 :])
        mine += own[:place] + own[place + (1 if "=" in own[place] else 2) :]
        print(shlex.join(["headrace", "plan", *mine]), file=sys.stderr)
        for note in notes:
            print(f"left out {note}", file=sys.stderr)
        return super().parse_args(ctx, mine)
