"""`headrace quantise`: a model in fewer bits, calibrated on a text, with its loss measured."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..base.config import DEFAULT_MODEL, EngineOptions
from ..base.errors import OptionError, one_of
from ..factory.quantise import TARGETS
from ..factory.shrink import QuantiseWish, Shrinking, write_report
from ..factory.to_gguf import MIX
from ..loader.progress import ProgressLine
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from .flags import argument, flag, with_flags

DEFAULT = "q4_k"
FAILED = 1
"""Exit status if the result lost too much."""


@with_flags(QuantiseWish, "wish")
def quantise(
    wish: QuantiseWish,
    model: Annotated[str, argument("A dense model: as of `headrace serve`.")] = DEFAULT_MODEL,
    to: Annotated[
        str | None, flag(f"Of a GGUF or of safetensors: {', '.join(TARGETS)}; q4_k.", "--to")
    ] = None,
    dry_run: Annotated[
        bool, flag("Print size, predicted speed and loss; make nothing.", "--dry-run")
    ] = False,
    cache_dir: Annotated[str | None, flag("Where models are kept.")] = None,
    offline: Annotated[bool, flag("Download nothing.", "--offline")] = False,
    as_json: Annotated[bool, flag("Print one JSON object.", "--json")] = False,
) -> None:
    """Make a smaller model; publish it only if it lost no more than is allowed.

    Ended at any point (Ctrl-C, kill), the same command goes on from the last finished layer.
    """
    to = to or (DEFAULT if wish.budget is None else MIX)
    one_of(to, TARGETS, "to", OptionError)
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    engine = EngineOptions(model=model, cache_dir=cache_dir, offline=offline)
    wish = replace(wish, engine=engine, to=to)
    with ProgressLine(sys.stderr, enabled=not as_json) as bars:
        planned = Shrinking(wish, bars)
        if dry_run:
            _show(console, planned, as_json)
            return
        _say_text(console, planned)
        report = planned.run()
    if as_json:
        print(json.dumps(report))
    _say(console, planned.out, report)
    if report["gate"]["passed"] is False:
        paths = write_report(planned.out, report)
        console.print(f"nothing was published; report: {paths[1]}", style="bold red")
        raise typer.Exit(FAILED)


def _say_text(console: Console, planned: Shrinking) -> None:
    if planned.text is None or planned.sample is None:
        what = "an importance matrix" if planned.text else "no text"
        console.print(f"{what}: nothing goes through the model")
        return
    said = planned.sample.said()
    console.print(
        f"text: {planned.text.name} ({planned.text.licence}), {said['tokens']:,} of {said['of']:,} "
        f"tokens in {said['windows']} windows"
    )


def _show(console: Console, planned: Shrinking, as_json: bool) -> None:
    found = planned.predict(find_hardware("this", calibration_path()))
    if as_json:
        print(json.dumps(found))
        return
    _say_text(console, planned)
    for name, one in found.items():
        speeds = [f"{value:,} {what}" for what, value in one.items() if what.endswith("/s")]
        if loss := one.get("KL"):
            speeds.append(f"KL {loss['mean']:.4f} ({loss['low']:.4f} to {loss['high']:.4f})")
        console.print(f"{name}: {one['bytes'] / 1e6:,.1f} MB; predicted {', '.join(speeds)}")


def _say(console: Console, out: Path, report: dict[str, Any]) -> None:
    kinds = ", ".join(report["kinds"])
    console.print(
        f"{out}: {report['matrices']} matrices as {kinds}, {report['bytes'] / 1e6:,.1f} MB, "
        f"{report['bytes'] / report['was']:.0%} of the model"
    )
    for what in ("dense", "without_text", "few_rows"):
        if names := report.get(what):
            rule = {
                "dense": "stay dense: their rows are not whole blocks",
                "without_text": "no text reached them; rounded by the weights' own error",
                "few_rows": "few tokens reached them; rounded on their mixture's inputs",
            }[what]
            shown = ", ".join(names[:4]) + (" …" if len(names) > 4 else "")
            console.print(f"{len(names)} {rule}: {shown}", style="yellow")
    if found := report.get("comparison"):
        share, kl, same = found["share"], found["kl"], found["same_top"]
        console.print(
            f"perplexity {_shown(found['perplexity'])} (was {_shown(found['original'])}): "
            f"{_shown(share['mean'], '.2%')} kept; KL {_shown(kl['mean'], '.4f')}, 99.9th "
            f"percentile {_shown(found['kl_999'], '.3f')}; same top token "
            f"{_shown(same['mean'], '.1%')}; flips {found['flips']:.1%}; KV {found['kv_dtype']}"
        )
    for why in report["gate"]["why"]:
        console.print(why, style="bold red" if report["gate"]["passed"] is False else "yellow")


def _shown(value: float | None, form: str = "") -> str:
    return "not a number" if value is None else format(value, form)


command = quantise
