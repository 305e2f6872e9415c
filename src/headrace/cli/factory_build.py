"""`headrace factory build` and `explain`: from a model to its signed profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from rich.console import Console

from ..base.config import EngineOptions
from ..factory.build import Build, BuildOptions
from ..factory.graph import Step
from ..factory.release import Rings
from ..factory.revoke import trusted
from ..factory.sign import signer
from ..loader.progress import ProgressLine
from .brief import BriefHelp
from .configured import configured
from .factory_parts import AsJson, show, tell

command = typer.Typer()
FAILED = 1
"""Exit status if a gate failed; `Untrusted` has a different one."""


@command.command(cls=BriefHelp)
@configured
def build(engine: EngineOptions, wanted: BuildOptions, as_json: AsJson = False) -> None:
    """Fetch MODEL, hold it to its gates, sign a profile of it. Unchanged stages do not run."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    with ProgressLine(sys.stderr, enabled=not as_json) as bars:
        planned = Build(engine, wanted, bars)
        built = planned.run(lambda what, step: tell(console, what, step))
    if as_json:
        summary = {
            "cell": planned.cell,
            "profile": built.profile and built.profile.digest,
            "evidence": str(built.page),
            "ran": built.ran,
            "stages": {step.stage.name: _plain(step) for step in built.steps},
        }
        print(json.dumps(summary))
    ran = f"{len(built.ran)} of {len(built.steps)} stages ran"
    console.print(f"{ran if built.ran else 'nothing was to run'}; evidence: {built.page}")
    if built.profile is not None:
        path = f"{planned.store.root}/profiles/{planned.cell}.json"
        name = planned.cell if wanted.store is None else path
        console.print(f"serve it: headrace serve --profile {name}")
    if built.failed:
        console.print(f"failed: {', '.join(built.failed)}; no profile was signed", style="bold red")
        raise typer.Exit(FAILED)
    if wanted.ring is not None and built.profile is not None:
        own = signer(Path(wanted.key) if wanted.key else None, engine.cache_dir)
        rings = Rings(planned.store, trusted(None, engine.cache_dir), engine.cache_dir)
        now = rings.promote(built.profile.digest, wanted.ring, own)
        console.print(f"{wanted.ring} {now.counter}: {now.profile}")


@command.command(cls=BriefHelp)
@configured
def explain(engine: EngineOptions, wanted: BuildOptions, as_json: AsJson = False) -> None:
    """Show what `build` with the same options would run, and why; no stage runs."""
    with ProgressLine(sys.stderr, enabled=not as_json) as bars:
        steps = Build(engine, wanted, bars).plan()
    rows = []
    for step in steps:
        kept, why = ("runs", step.why)
        if step.result is not None:
            kept, why = str(step.result.outcome), step.result.reason
        rows.append({"stage": step.stage.name, "kept": kept, "why": why})
    show(rows, as_json)


def _plain(step: Step) -> dict[str, object]:
    result = step.result
    return {
        "outcome": None if result is None else str(result.outcome),
        "reason": step.why if result is None else result.reason,
        "ran": step.ran,
        "why": step.why,
        "manifest": step.manifest and step.manifest.digest,
    }
