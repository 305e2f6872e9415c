"""`headrace factory image`: what carries a profile from the store to where it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..factory.build import store_folder
from ..factory.image import ImageBuild
from ..factory.store import Store
from .factory_parts import AsJson, At, tell


def image(
    architectures: Annotated[str, typer.Option(help="Processors, by OCI's names.")] = "amd64,arm64",
    lock: Annotated[
        Path | None, typer.Option(help="Lock with hashes; none: the checkout's.")
    ] = None,
    wheels: Annotated[Path | None, typer.Option(help="Folder with wheels of this package.")] = None,
    debian: Annotated[
        str | None, typer.Option(help="Mirror of Debian, or a folder of packages.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use folders alone.")] = False,
    store: At = None,
    as_json: AsJson = False,
) -> None:
    """Make the engine's image, without a daemon; the same inputs give the same bytes."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    build = ImageBuild(
        Store(store_folder(store)),
        [one.strip() for one in architectures.split(",")],
        lock=lock,
        wheels=wheels,
        mirror=debian,
        offline=offline,
    )
    steps = build.run(lambda what, step: tell(console, what, step))
    result = steps[-1].result
    assert result is not None
    ran = [step.stage.name for step in steps if step.ran]
    digest = result.outputs["index.json"].digest
    sizes = {step.stage.name: step.result.figures["bytes"] for step in steps[:-1] if step.result}
    if as_json:
        print(json.dumps({"image": digest, "ran": ran, "bytes": sizes}))
    console.print(f"{build.name} {digest}: {len(ran)} of {len(steps)} stages ran")
