"""`headrace profile`: time of a model's steps, as a timeline and a table."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..base.config import DEFAULT_MODEL, EngineOptions
from ..base.errors import HeadraceError
from ..base.process import Others, busy_words
from ..base.request import Request
from ..base.sampling import SamplingParams
from ..base.spec import RequestSpec
from ..base.version import revision
from ..bench.operators import (
    HEADER,
    Operator,
    SumCheck,
    document,
    operators_page,
    rows,
    said,
    table_of,
    too_low,
)
from ..engine.loop.build import build
from ..engine.loop.core import EngineCore
from ..engine.loop.executor import Executor, InlineExecutor
from ..engine.loop.prediction import case_of
from ..engine.loop.recording import RecordedStep, RecordingExecutor, step_lines
from ..engine.loop.timeline import timeline
from ..kernels.cpu.timing import timed
from ..loader import open_model
from ..roofline.composition import compose_plan
from ..roofline.hardware import Hardware
from ..roofline.machine import this_hardware
from ..roofline.step import StepModel
from ..worker import Worker
from .flags import argument, flag, writable

EAGER = (
    "operators are of a second run of as many such requests, one after the other: on a GPU without "
    "graphs, so that short kernels wait for their launch as well"
)


def profile(
    model: Annotated[str, argument("As of `headrace serve`.")] = DEFAULT_MODEL,
    requests: Annotated[int, flag("Requests, all at once.", min=1)] = 4,
    input: Annotated[int, flag("Prompt tokens of each.", min=1)] = 128,
    output: Annotated[int, flag("Output tokens of each.", min=1)] = 32,
    kernels: Annotated[str, flag("As of `headrace serve`.")] = "auto",
    depth: Annotated[int, flag("Steps in flight.", min=1, max=2)] = 1,
    out: Annotated[Path, flag("Timeline for ui.perfetto.dev.", "--out", "-o")] = Path(
        "timeline.json"
    ),
    html: Annotated[Path | None, flag("Write a page of the operators.")] = None,
    as_json: Annotated[Path | None, flag("Write the operators.", "--json")] = None,
    steps: Annotated[Path | None, flag("Step records too, for `headrace roofline --fit`.")] = None,
) -> None:
    """Run a model here; show the time of its steps and operators with the roofline's prediction and
    limit."""
    for path, name in ((out, "out"), (html, "html"), (as_json, "json"), (steps, "steps")):
        writable(path, name)
    console = Console(highlight=False, markup=False)
    files = open_model(model)
    options = EngineOptions(
        model=model,
        kernels=kernels,
        depth=depth,
        max_context=min(files.arch.max_context, max(256, 2 * (input + output))),
    )
    built = build(options, files)
    try:
        decided = {decision.name: decision.value for decision in built.decisions}
        device = decided.get("device", options.device)
        hardware = this_hardware(device)
        if hardware is None:
            raise HeadraceError(
                "this hardware is not known to the roofline: run `headrace roofline --calibrate`"
            )
        wide = "float32" if device == "cpu" else "bfloat16"
        dtype = decided.get("dtype", wide)
        case = case_of(files, dtype=dtype, kv_dtype=decided.get("kv_dtype", dtype))
        inner = built.core.executor
        shape = requests, input, files.arch.vocab_size
        others = Others()
        with timed() as records:
            found, wall = _run(built.core, inner, _prompts(0, *shape), output)
        disturbed = others.share()
        own = found
        if not records and isinstance(inner, InlineExecutor) and isinstance(inner.worker, Worker):
            times = inner.worker.time_operators()
            own, _ = _run(built.core, inner, _prompts(1, *shape), output)
            records = times.timed()
    finally:
        built.close()
    step_model = StepModel(case, hardware)
    try:
        out.write_text(json.dumps(timeline(found, step_model)))
        operators = table_of(records, [step.plan for step in own], step_model) if records else []
        check = SumCheck(
            sum(record.seconds for record in records), sum(step.device_seconds for step in own)
        )
        if html is not None:
            subtitle = f"{model} on {hardware.name} · {requests} × {input} in, {output} out"
            html.write_text(operators_page(operators, check, subtitle))
        if as_json is not None:
            about = {
                "model": model,
                "hardware": hardware.name,
                "efficiencies": hardware.efficiency.source,
                "requests": requests,
                "input": input,
                "output": output,
                "commit": revision(),
                "others_use": disturbed,
            }
            as_json.write_text(json.dumps(document(operators, check, about), indent=1))
        if steps is not None:
            steps.write_text("".join(json.dumps(line) + "\n" for line in step_lines(found)))
    except OSError as error:
        raise HeadraceError(f"{error.filename}: {error.strerror}") from None
    _show(console, found, step_model, hardware, wall)
    if (busy := busy_words(disturbed)) is not None:
        console.print(busy, style="bold red", soft_wrap=True)
    if records:
        _show_operators(console, operators, check)
    else:
        console.print("operators are timed one by one where the worker is in this process only")
    if own is not found:
        console.print(EAGER)
    console.print(f"timeline: {out} (open it in ui.perfetto.dev)")


def _prompts(seed: int, requests: int, tokens: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, vocabulary // 2) for _ in range(tokens)] for _ in range(requests)]


def _run(
    core: EngineCore, inner: Executor, prompts: list[list[int]], output: int
) -> tuple[list[RecordedStep], float]:
    """Run these requests at the same time; return (their steps, seconds)."""
    core.executor = recording = RecordingExecutor(inner)
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        core.add(Request(f"profile-{number}", prompt, RequestSpec(sampling, seed=0)))
    begin = time.perf_counter()
    while core.has_work:
        core.turn()
    return recording.steps, time.perf_counter() - begin


def _show(
    console: Console,
    steps: Sequence[RecordedStep],
    model: StepModel,
    hardware: Hardware,
    wall: float,
) -> None:
    groups: dict[str, list[tuple[RecordedStep, float, float, str]]] = defaultdict(list)
    for step in steps:
        composition = compose_plan(model.case.arch, step.plan)
        expected = model.time(composition)
        groups[composition.kind].append(
            (step, expected.seconds, expected.limit_seconds, expected.bound)
        )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("steps", "count", "tokens", "ms", "predicted", "ratio", "limit", "bound"):
        table.add_column(column, justify="left" if column == "steps" else "right")
    for kind, found in groups.items():
        measured = sum(step.device_seconds for step, *_ in found)
        predicted = sum(seconds for _, seconds, _, _ in found)
        limit = sum(seconds for _, _, seconds, _ in found)
        bounds = [bound for *_, bound in found]
        table.add_row(
            kind,
            str(len(found)),
            str(sum(step.plan.tokens for step, *_ in found)),
            f"{measured * 1e3:.1f}",
            f"{predicted * 1e3:.1f}",
            f"{predicted / measured:.2f}",
            f"{limit * 1e3:.1f}",
            max(set(bounds), key=bounds.count),
        )
    console.print(table)
    busy = sum(step.device_seconds for step in steps)
    console.print(
        f"{wall * 1e3:.0f} ms in all; on the device {busy / wall:.1%}, outside it (planning, "
        f"updating, idle) {1 - busy / wall:.1%}; {hardware.name}, efficiencies "
        f"{hardware.efficiency.source}"
    )


def _show_operators(console: Console, operators: Sequence[Operator], check: SumCheck) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in HEADER:
        left = column in ("steps", "operator")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in rows(operators):
        table.add_row(*row)
    console.print(table)
    style = None if check.holds else "bold red"
    console.print(said(check), style=style, soft_wrap=True)
    if (why := too_low(operators)) is not None:
        console.print(why, style="bold red", soft_wrap=True)


command = typer.Typer(help="Where the time of a model's steps goes.", add_completion=False)
command.command()(profile)
