"""`headrace factory image`, `chart`, `fleet` and `workflow`: outputs of profiles and cells."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import track

from ..base.config import EngineOptions
from ..base.errors import OptionError
from ..factory.artifact import panels_manifest, weights_manifest
from ..factory.build import BuildOptions
from ..factory.chart import write_chart
from ..factory.fleet import Cell, locally, read_fleet, run_fleet
from ..factory.image import FLAVOURS, ImageBuild
from ..factory.release import Rings
from ..factory.revoke import FILE, trusted
from ..factory.sign import key_folder, signer
from ..factory.store import Store, store_folder
from ..factory.workflow import Platform, WorkflowOptions
from ..factory.workflow import workflow as write_workflow
from .configured import configured
from .factory_parts import AsJson, At, Signing, existing, tell
from .flags import argument, flag

command = typer.Typer()


@command.command()
def image(
    architectures: Annotated[
        str | None, flag("Processors, by OCI's names; none: all of the flavour.")
    ] = None,
    flavour: Annotated[str, flag(f"{', '.join(FLAVOURS)}.")] = "cpu",
    lock: Annotated[Path | None, flag("Lock with hashes; none: the checkout's.")] = None,
    wheels: Annotated[Path | None, flag("Folder with wheels of this package.")] = None,
    debian: Annotated[str | None, flag("Mirror of Debian, or a folder of packages.")] = None,
    offline: Annotated[bool, flag("Use folders alone.", "--offline")] = False,
    store: At = None,
    key: Signing = None,
    as_json: AsJson = False,
) -> None:
    """Make the engine's image, without a daemon; the same inputs give the same bytes."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True, markup=False)
    build = ImageBuild(
        Store(store_folder(store)),
        signer(key),
        [
            one.strip()
            for one in (architectures or ("amd64" if flavour == "cuda" else "amd64,arm64")).split(
                ","
            )
        ],
        flavour=flavour,
        lock=lock,
        wheels=wheels,
        mirror=debian,
        offline=offline,
    )
    steps = build.run(lambda what, step: tell(console, what, step))
    ran = [step.stage.name for step in steps if step.ran]
    done = {step.stage.name: step.result for step in steps if step.result}
    digest = done["image"].outputs["index.json"].digest
    sizes = {name: one.figures["bytes"] for name, one in done.items() if one.figures}
    if as_json:
        print(json.dumps({"image": digest, "ran": ran, "bytes": sizes}))
    console.print(f"{build.name} {digest}: {len(ran)} of {len(steps)} stages ran")


@command.command()
def chart(
    folder: Annotated[Path, argument("The folder to be written.")],
    profile: Annotated[str, argument("Ring, name, digest or file of a profile.")],
    reference: Annotated[str, argument("Where it was published: host/repository@digest.")],
    image: Annotated[str, flag("Where the image was: host/repository@digest.")],
    store: At = None,
) -> None:
    """Write a Helm chart that serves PROFILE and nothing else; its pods trust the keys that you
    do."""
    folder_of_keys, place = key_folder() / "trusted", existing(store)
    found = Rings(place, trusted(None)).find(profile)
    shown = [*sorted(folder_of_keys.glob("*.pem")), *folder_of_keys.glob(FILE)]
    believed = {path.name: path.read_text() for path in shown}
    weights, kept = weights_manifest(place, found.body), panels_manifest(place, found.body)
    write_chart(
        folder,
        found,
        image=image,
        reference=reference,
        weights=weights.digest,
        panels=kept.digest if kept else None,
        trusted=believed,
    )
    print(f"{folder}: helm install {found.body.model.name} {folder}")


Where = Literal["local", "ray"]


@command.command()
def fleet(
    file: Annotated[Path, argument("TOML: models, recipes, hardware, build.")],
    workers: Annotated[int, flag("Processes at once on this machine.", min=1)] = 1,
    on: Annotated[Where, flag("This machine, or those of a Ray cluster.")] = "local",
    store: At = None,
    as_json: AsJson = False,
) -> None:
    """Build every model by every recipe of FILE; an unchanged one starts nothing."""
    rows, cells = [], read_fleet(file, store)
    if on == "ray":
        # Local: `ray` is a separate extra.
        from ..factory.cluster import RayCluster

        cluster = RayCluster()
        ends = run_fleet(cells, cluster.build, cluster.plan)
    elif kinds := sorted({cell.hardware for cell in cells} - {""}):
        raise OptionError(f"{file} asks for {kinds[0]}, so it needs --on ray", param="on")
    else:
        ends = run_fleet(cells, locally(workers))
    bar = Console(stderr=True, markup=False)
    quiet = as_json or not bar.is_terminal
    for one in track(ends, "cells", len(cells), console=bar, transient=True, disable=quiet):
        rows.append({"cell": one.name, "end": one.end, "why": one.why})
        if not as_json and one.end != "kept":
            print(f"{one.name}: {one.end} {one.why}".rstrip(), file=sys.stderr)
    counts = Counter(row["end"] for row in rows)
    if as_json:
        print(json.dumps({"cells": rows, "ends": counts}))
    else:
        print(f"{len(rows)} cells: {', '.join(f'{n} {end}' for end, n in sorted(counts.items()))}")
    if counts["failed"] or counts["broken"]:
        raise typer.Exit(1)


@command.command()
@partial(configured, argument=False)
def workflow(
    platform: Annotated[Platform, argument("Who is to run it.")],
    source: Annotated[str, argument("A fleet's file (TOML), or a model.")],
    asked: WorkflowOptions,
    out: Annotated[typer.FileTextWrite, flag("The file; -: standard output.")] = "-",  # type: ignore[assignment]
) -> None:
    """Write a workflow that builds, verifies, publishes and promotes every cell of SOURCE."""
    if source.endswith(".toml"):
        cells, text = read_fleet(Path(source)), Path(source).read_text(encoding="utf-8")
    else:
        cells = [Cell(EngineOptions(model=source), BuildOptions())]
        text = f"models = [{json.dumps(source, ensure_ascii=False)}]\n"
    out.write(write_workflow(platform, cells, asked, text))
