"""Simulated engines from the options of `headrace simulate`, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from rich.console import Console
from rich.table import Table

from ..base.config import option, parse_seconds
from ..base.errors import OptionError
from ..base.layout import Layout
from ..base.names import nearest
from ..bench.options import RunOptions
from ..bench.report import MET, number
from ..bench.steady_run import document, steady_run
from ..engine.loop.draft_law import MEASURED, draft_law
from ..engine.simulator.described import make_case
from ..engine.simulator.routing import ROUTERS
from ..engine.simulator.sim import Cluster, Failures
from ..engine.simulator.sim_replica import ReplicaSpec
from ..roofline.hardware import Hardware
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from .bench_flags import LAYOUT, SKEW

LOOP = {"gateway": "gateway", "loop": "step", "row": "row", "answer": "answer"}
"""Option → the part of `Loop` that it sets."""
YES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a simulation; each field is the option of that name."""

    model: str = ""
    hardware: str = option("H200", "this, A100, H100, H200, B200 …")
    replicas: int = option(1, "Engines behind the router.", min=1)
    prefill: int = option(0, "How many of them only prefill.", min=0)
    handover: str = option(
        "always", "Prompts that these compute: always all, or pays: by the live rule."
    )
    routing: str = option("least-loaded", ", ".join(ROUTERS))
    told_after: str | None = option(
        None,
        "Until `prefix` learns what caches hold, as in 100ms; none: it knows what it sent.",
        metavar="TIME",
    )
    layout: str = option("1", LAYOUT)
    skew: float | None = option(None, SKEW, min=0)
    format: str | None = option(None, "Weight format.")
    kv_dtype: str = option("auto", "Type of the KV cache.")
    rows: int = option(256, "Sequences at a time, per engine.", min=1)
    step_tokens: int = option(8192, "Token budget of a step.", min=16)
    max_context: int | None = option(None, "Longest sequence.")
    depth: int = option(2, "Steps in flight.", min=1, max=2)
    prefix_cache: bool = option(True, "Share prefixes.")
    speculate: str = option(
        "off", f"Drafts: off, as measured of {', '.join(MEASURED)}, or a chance from 0 to 1."
    )
    failures: str | None = option(
        None, "A replica dies after 1h, say, in the mean; none: never.", metavar="TIME"
    )
    restart: str = option("60s", "Until it is back, its cache empty.", metavar="TIME")
    gateway: str | None = option(
        None,
        "Before the engine; none: as calibrated (--measure-loop), or 1ms.",
        metavar="TIME",
    )
    loop: str | None = option(
        None, "Between steps, hidden at depth 2; none: as calibrated, or 0.", metavar="TIME"
    )
    row: str | None = option(None, "The same for each sequence of a step.", metavar="TIME")
    answer: str | None = option(None, "From a step's end to the client.", metavar="TIME")

    def spec(self) -> ReplicaSpec:
        """Return one engine. Raises `HeadraceError` for impossible options."""
        device = self._device()
        layout = Layout.parse(self.layout)
        case = make_case(self.model, device, self.format, "auto", self.kv_dtype, layout, self.skew)
        return ReplicaSpec(
            case,
            device,
            rows=self.rows,
            step_tokens=self.step_tokens,
            max_context=self.max_context,
            depth=self.depth,
            prefix_cache=self.prefix_cache,
            drafts=None if self.speculate == "off" else draft_law(self.speculate),
        )

    def _device(self) -> Hardware:
        device = find_hardware(self.hardware, calibration_path())
        stated = {
            f"{part}_seconds": parse_seconds(text, name)
            for name, part in LOOP.items()
            if (text := getattr(self, name)) is not None
        }
        return replace(device, loop=replace(device.loop, **stated))

    def run(self, options: RunOptions, watch: Callable[[str], None]) -> dict[str, Any]:
        """Simulate a workload; return its result, with the model's name."""
        spec = self.spec()
        dying = None
        if self.failures is not None:
            dying = Failures(
                parse_seconds(self.failures, "failures", bare=True),
                parse_seconds(self.restart, "restart", bare=True),
            )
        after = self.told_after
        told_seconds = None if after is None else parse_seconds(after, "told_after", bare=True)

        def cluster(warm: bool) -> Cluster:
            return Cluster(
                spec,
                self.replicas,
                self.routing,
                prefill=self.prefill,
                told_after=told_seconds,
                handover=self.handover,
                failures=dying,
                warm=warm,
            )

        devices = self.replicas * spec.case.layout.devices
        asked = replace(options, url="simulated", model=self.model, devices=devices)
        result = document(steady_run(cluster, asked, watch=watch))
        result["server"]["model"] = self.model
        return result

    def changed(self, text: str) -> Engines:
        """Return the engines with a change such as `kv_dtype=fp8` or `replicas=2,routing=prefix`.

        Raises `OptionError`.
        """
        names = {one.name for one in fields(self)}
        types = get_type_hints(Engines)
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            name = name.removeprefix("--").replace("-", "_")
            if not equals or name not in names:
                raise OptionError(
                    f"change must be parts such as kv_dtype=fp8, with an option of the engines, "
                    f"not {part!r:.60}{nearest(name, names)}",
                    param="change",
                )
            values[name] = _value(types[name], name, value.strip())
        return replace(self, **values)


def _value(kind: Any, name: str, text: str) -> Any:
    if kind is bool:
        if text.lower() not in YES:
            raise OptionError(f"change: {name} is yes or no, not {text!r:.60}", param="change")
        return YES[text.lower()]
    if kind in (int, int | None, float | None):
        try:
            return float(text) if kind == float | None else int(text)
        except ValueError:
            raise OptionError(
                f"change: {name} is a number, not {text!r:.60}", param="change"
            ) from None
    return text


def show_changes(console: Console, results: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Print runs of one load next to each other, by their change."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    head = ["tok/s", "req/s", "most\nreq/s", "TTFT\np50", "p99\nms", "TPOT\np50", "p99\nms"]
    longest = max(len(name) for name, _ in results)
    table.add_column("", overflow="fold", min_width=min(longest, 24))
    for column in head:
        table.add_column(column, justify="right", no_wrap=True)
    if slo := results[0][1].get("slo") is not None:
        table.add_column("SLO", overflow="fold")
    for name, result in results:
        figures, samples = result["figures"], result["samples"]
        cells = [
            number(figures[one]["value"]) for one in ("output_throughput", "request_throughput")
        ]
        steady = result["simulation"]["steady"]
        most = steady["most_rate"]
        cells.append("–" if most is None else number(most))
        for sample in ("ttft", "tpot"):
            points = samples[sample]["percentiles"] if sample in samples else {}
            cells += [number(points[p] * 1e3) if p in points else "–" for p in ("p50", "p99")]
        if slo:
            steady_word = "" if steady["verdict"] == "steady" else f", {steady['verdict']}"
            cells.append(f"{MET[result['slo']['met']]}{steady_word}")
        table.add_row(name, *cells)
    console.print(table)
