"""`headrace roofline`: the hardware's limit for a model, operator by operator."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ..base.errors import HeadraceError, OptionError
from ..base.layout import Layout
from ..base.process import Others, busy_words
from ..bench.calibrate import calibrate, measure_steps
from ..bench.loop import measure_loop
from ..engine.simulator.described import make_case
from ..engine.simulator.sim_replica import ReplicaSpec
from ..roofline.composition import Composition, compose, decode_step, prefill_step, verify_step
from ..roofline.counts import Case, device_bytes
from ..roofline.fit import fit_efficiency, honest, prediction_errors, read_records
from ..roofline.fits import verify_fits
from ..roofline.hardware import DEVICES, Hardware
from ..roofline.hardware_files import find_hardware, save_hardware
from ..roofline.machine import calibration_path
from ..roofline.plot import write_png
from ..roofline.report import COLUMNS, as_json, html_page, roofline_chart, rows, share_chart
from ..roofline.step import StepModel, StepTime, step_time
from ..roofline.weights import total_bytes
from ..speech.finding import hears
from .bench_flags import LAYOUT, SKEW
from .flags import argument, flag
from .roofline_hearing import show_hearing


def roofline(
    model: Annotated[
        str | None,
        argument("Model, config.json, hub id, or a known name: an unknown one lists them."),
    ] = None,
    hardware: Annotated[str, flag("this, a .json file, or one of: " + ", ".join(DEVICES))] = "this",
    batch: Annotated[int, flag("Sequences that decode.", min=1)] = 1,
    context: Annotated[int, flag("Tokens before the decoded one.", min=0)] = 1024,
    prompt: Annotated[int, flag("Tokens of the prefilled prompt.", min=1)] = 512,
    format: Annotated[
        str | None,
        flag(
            "Weight format; none: as stored or published. With parts of their own as in "
            "int4,head=int4 (embedding and head of narrow formats are bfloat16)."
        ),
    ] = None,
    dtype: Annotated[str, flag("Type of activations.")] = "auto",
    kv_dtype: Annotated[str, flag("Type of the KV cache.")] = "auto",
    layout: Annotated[str, flag(LAYOUT)] = "1",
    skew: Annotated[float | None, flag(SKEW, min=0)] = None,
    drafts: Annotated[int, flag("Also a step that verifies so many.", min=0)] = 0,
    measure: Annotated[
        bool, flag("Measure this machine first and keep the result.", "--calibrate")
    ] = False,
    measure_steps_: Annotated[
        bool, flag("Time real steps of the model here, fit, and show the errors.", "--measure")
    ] = False,
    measure_loop_: Annotated[
        str | None,
        flag(
            "Measure what a server of the model costs around its steps, for `simulate`.",
            "--measure-loop",
            metavar="URL",
        ),
    ] = None,
    fit: Annotated[
        Path | None, flag("Recorded steps (JSON lines) to fit efficiencies from.")
    ] = None,
    html: Annotated[Path | None, flag("Write a page with charts.")] = None,
    png: Annotated[Path | None, flag("Write the charts as a picture.")] = None,
    as_json_: Annotated[bool, flag("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """Show FLOPs, bytes, bottleneck and time of each operator of a step."""
    console = Console(highlight=False, markup=False)
    others = Others() if measure or measure_steps_ or measure_loop_ is not None else None
    if measure:
        device, raw = calibrate()
        if not as_json_:
            _show_calibration(console, device, raw["launch_seconds"])
        if model is None:
            _say_busy(console, others)
            return
    else:
        device = find_hardware(hardware, calibration_path())
    if model is None:
        raise OptionError("name a model, or pass --calibrate", param="model")
    if hears(model):
        show_hearing(console, model, device, batch, plain=as_json_)
        return
    case = make_case(model, device, format, dtype, kv_dtype, Layout.parse(layout), skew)
    case.layout.verify(case.arch)
    if fit is not None:
        device = _fit(console, case, device, fit)
    if measure_steps_:
        device = _measure(console, case, device, model)
    if measure_loop_ is not None:
        device = _measure_loop(console, case, device, model, measure_loop_)
    steps = _steps(case, batch, context, prompt, drafts)
    for _, step in steps:
        verify_fits(case, device, step)
    times = [(name, step_time(case, device, step)) for name, step in steps]
    if as_json_:
        print(json.dumps({name: as_json(time) for name, time in times}))
    else:
        for name, time in times:
            _show(console, name, time)
        weights = total_bytes(case.arch, case.weights)
        console.print(
            f"{device.name} ({device.source}); efficiencies {device.efficiency.source}\n"
            f"weights {weights / 1e9:.3f} GB, on each device {device_bytes(case) / 1e9:.3f} GB"
        )
        engines = case.layout.engines
        each = f" of each of {engines} batches" if engines > 1 else ""
        for (name, time), (_, step) in zip(times, steps, strict=True):
            console.print(f"{name}{each}: {_rates(time, step)}")
        _say_busy(console, others)
    if html is not None:
        html.write_text(html_page(f"Roofline of {model} on {device.name}", case, device, times))
    if png is not None:
        charts = [
            chart
            for name, time in times
            for chart in (
                roofline_chart(case, device, time, step=name),
                share_chart(time, step=name),
            )
        ]
        write_png(charts, png)


def _rates(time: StepTime, step: Composition) -> str:
    """Format a step's tokens per second; prompts and answers separately."""
    found = f"at most {time.tokens / time.limit_seconds:,.0f} tokens/s, predicted "
    found += f"{time.tokens / time.seconds:,.0f}"
    if step.kind != "mixed":
        return found
    out = step.decodes
    return (
        f"{found}, prompts and answers together; of answers at most "
        f"{out / time.limit_seconds:,.0f}, predicted {out / time.seconds:,.0f}"
    )


def _say_busy(console: Console, others: Others | None) -> None:
    """Report that others used the machine while it was measured."""
    if others is not None and (said := busy_words(others.share())) is not None:
        console.print(said, style="bold red", soft_wrap=True)


def _steps(
    case: Case, batch: int, context: int, prompt: int, drafts: int
) -> list[tuple[str, Composition]]:
    """Return the shown steps by name."""
    arch = case.arch
    if arch.task != "tokens":
        if prompt > arch.max_context:
            raise OptionError(
                f"prompt ({prompt}) is more than the model was made for ({arch.max_context})",
                param="prompt",
            )
        return [(f"{batch} inputs of {prompt} tokens", prefill_step(arch, [prompt] * batch))]
    longest = max(context + 1 + drafts, prompt)
    if longest > arch.max_context:
        raise OptionError(
            f"{longest:,} tokens are more than the model was made for ({arch.max_context:,})",
            param="context" if longest > prompt else "prompt",
        )
    steps = [
        (f"decode, batch {batch}, context {context}", decode_step(arch, batch, context)),
        (f"prefill of {prompt} tokens", prefill_step(arch, [prompt])),
        (
            f"mixed: {batch} decode and {prompt} tokens of a prompt",
            compose(arch, [context] * batch + [0], [1] * batch + [prompt]),
        ),
    ]
    if drafts:
        verify = verify_step(arch, batch, context, drafts)
        steps.append((f"verify, batch {batch}, {drafts} drafts, context {context}", verify))
    return steps


def _measure(console: Console, case: Case, device: Hardware, model: str) -> Hardware:
    """Fit on measured steps; print the errors on shapes excluded from the fit."""
    fitted_on, held = measure_steps(model)
    found = fit_efficiency(case, device, fitted_on)
    device = honest(case, device.fitted(found.efficiency), [*fitted_on, *held])
    save_hardware(device, calibration_path())
    middle, worst = prediction_errors(case, device, held)
    console.print(
        f"fitted on {found.steps} steps: median error {found.median_error:.1%}, worst "
        f"{found.worst_error:.1%}; on {len(held)} steps of other shapes: median {middle:.1%}, "
        f"worst {worst:.1%}"
    )
    model_ = StepModel(case, device)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title="shapes kept out of the fit")
    for column in ("entries", "tokens", "first start", "measured ms", "predicted ms", "ratio"):
        table.add_column(column, justify="right")
    for record in held:
        predicted = model_.seconds(compose(case.arch, record.starts, record.counts, record.samples))
        table.add_row(
            str(len(record.starts)),
            str(sum(record.counts)),
            str(record.starts[0]),
            f"{record.seconds * 1e3:.1f}",
            f"{predicted * 1e3:.1f}",
            f"{predicted / record.seconds:.2f}",
        )
    console.print(table)
    return device


def _measure_loop(console: Console, case: Case, device: Hardware, model: str, url: str) -> Hardware:
    loop = measure_loop(url, ReplicaSpec(case, device, rows=32), model, seed=int(time.time()))
    device = replace(device, loop=loop)
    if device.kind == "cpu":
        save_hardware(device, calibration_path())
    console.print(
        f"before the engine {loop.gateway_seconds * 1e3:.1f} ms, between steps "
        f"{loop.step_seconds * 1e3:.2f} ms and {loop.row_seconds * 1e3:.3f} ms a row, after them "
        f"{loop.answer_seconds * 1e3:.1f} ms"
    )
    return device


def _fit(console: Console, case: Case, device: Hardware, records: Path) -> Hardware:
    if not records.is_file():
        raise HeadraceError(f"no such file: {records}", param="fit")
    recorded = read_records(records)
    found = fit_efficiency(case, device, recorded)
    device = honest(case, device.fitted(found.efficiency), recorded)
    if device.kind == "cpu":
        save_hardware(device, calibration_path())
    console.print(
        f"fitted on {found.steps} steps: median error {found.median_error:.1%}, "
        f"worst {found.worst_error:.1%}"
    )
    return device


def _show(console: Console, name: str, time: StepTime) -> None:
    table = Table(
        title=name,
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for number, column in enumerate(COLUMNS):
        # On a narrow terminal names are folded and figures are not cut.
        table.add_column(
            column.replace(" ", "\n"),
            justify="left" if number == 0 else "right",
            no_wrap=number > 0,
            overflow="fold",
        )
    lines = rows(time)
    for line in lines[:-1]:
        table.add_row(*line)
    table.add_section()
    table.add_row(*lines[-1], style="bold")
    console.print(table)


def _show_calibration(console: Console, device: Hardware, launch: float) -> None:
    console.print(device.name, style="bold")
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in device.rates.items())
    console.print(
        f"read bandwidth {device.bandwidth / 1e9:.1f} GB/s (in cache "
        f"{device.cache_bandwidth / 1e9:.0f}); products {rates} GFLOP/s; "
        f"one small torch operator {launch * 1e6:.1f} µs\nkept in {calibration_path()}"
    )


command = typer.Typer(
    help="What the hardware allows for a model, operator by operator.", add_completion=False
)
command.command()(roofline)
