"""`headrace draw`."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest
from ..engine.clients.drawing import (
    GUIDANCE,
    STEPS,
    denoiser_of,
    drawn,
    predicted,
    read_drawing,
    submit,
)
from ..server.generation import deltas
from .brief import BriefHelp
from .configured import configured
from .start import engine_of

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@command.command(cls=BriefHelp)
@configured
def draw(
    engine: EngineOptions,
    prompt: Annotated[str, typer.Argument(help="A text, or a class's name or number.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file, a PNG.")] = Path("out.png"),
    count: Annotated[
        int, typer.Option("--n", help="Pictures; of several, the files are numbered.")
    ] = 1,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Denoising steps.", show_default=str(STEPS))
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option("--guidance", help="Weight of the class.", show_default=f"{GUIDANCE:g}"),
    ] = None,
    negative: Annotated[
        str | None, typer.Option("--negative", help="Text that guidance leads away from.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same pictures.")] = None,
) -> None:
    """Draw pictures. MODEL is a folder of diffusers: a pipeline of DiT or PixArt."""
    if out.suffix.lower() != ".png":
        raise InvalidRequest(f"{out} must end in .png", param="out")
    if not out.parent.is_dir():  # Checked before work that would be lost.
        raise InvalidRequest(f"{out} cannot be written: {out.parent} is no folder", param="out")
    given: dict[str, Any] = {"n": count, "steps": steps, "guidance": guidance, "seed": seed}
    asyncio.run(_draw(engine, prompt, out, {**given, "negative": negative}))


async def _draw(options: EngineOptions, prompt: str, out: Path, given: dict[str, Any]) -> None:
    async with engine_of(options) as engine:
        denoiser = denoiser_of(engine.files, engine.model_name)
        order = read_drawing(engine, denoiser, prompt, **given)
        seconds = predicted(engine, order)
        if seconds is not None:
            print(f"about {seconds:.2g} s", file=sys.stderr)
        many = len(order.wishes) > 1
        names = [f"draw-{at}" for at in range(len(order.wishes))]
        async with aclosing(deltas(submit(engine, order, names, whole=True))) as parts:
            async for one in drawn(denoiser, parts):
                path = out.with_stem(f"{out.stem}-{one.number + 1}") if many else out
                try:
                    path.write_bytes(one.png)
                except OSError as error:
                    raise InvalidRequest(
                        f"{path} cannot be written: {error.strerror}", param="out"
                    ) from error
                print(path)
        print(f"seed {order.seed}", file=sys.stderr)
