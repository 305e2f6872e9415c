"""Flags that the commands of `headrace bench` share, and what they make of a run's options."""

from __future__ import annotations

import inspect
import json
import secrets
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ..base.errors import InvalidRequest
from ..bench.options import RunOptions

PRESETS = {
    "1k1k": ("uniform:819:1024", "uniform:819:1024"),
    "1k8k": ("uniform:819:1024", "uniform:6554:8192"),
    "8k1k": ("uniform:6554:8192", "uniform:819:1024"),
}
Url = Annotated[str, typer.Option(help="Address of the server.")]
Model = Annotated[str | None, typer.Option(help="Model name; none: the server's first.")]
Endpoint = Annotated[
    str | None, typer.Option(help="completions, chat or embeddings; none: as needed.")
]
Workload = Annotated[
    str,
    typer.Option(help="fixed, shared-prefix, chat, agentic, long-context, structured, embeddings."),
]
Trace = Annotated[
    str | None,
    typer.Option(help="FORMAT:FILE; format prompts, sharegpt, mooncake, azure or burstgpt."),
]
TraceSpeed = Annotated[float, typer.Option(help="How much faster than recorded.")]
Input = Annotated[
    str, typer.Option(help="Prompt tokens: N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:…")
]
Output = Annotated[str, typer.Option(help="Output tokens, likewise.")]
Requests = Annotated[
    int | None,
    typer.Option(
        help="Requests (sessions, where a workload has turns); none: what --duration takes, all "
        "of a trace, else 64."
    ),
]
Duration = Annotated[float | None, typer.Option(help="Seconds after which nothing new starts.")]
Arrive = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        help="Open loop: constant:R, poisson:R, gamma:R:B, ramp:FROM:TO:S, trace. Else closed.",
    ),
]
Users = Annotated[int, typer.Option("--concurrency", "-c", help="Users of the closed loop.")]
Seed = Annotated[
    int | None,
    typer.Option(help="Of prompts, lengths and arrivals; none: a new one, kept in the result."),
]
TokenizerOf = Annotated[
    str | None,
    typer.Option("--tokenizer", help="Model whose tokenizer makes prompts of exact token counts."),
]
PrefixTokens = Annotated[int, typer.Option(help="Tokens of a shared prefix or system prompt.")]
Groups = Annotated[int, typer.Option(help="Different shared prefixes.")]
Zipf = Annotated[float, typer.Option(help="How unevenly prefixes are drawn; 0: evenly.")]
Turns = Annotated[int, typer.Option(help="Turns of a session.")]
Think = Annotated[float, typer.Option("--think", help="Mean seconds between turns.")]
Warmup = Annotated[
    int | None, typer.Option(help="Requests before the run, not counted; none: one for each user.")
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="Lengths as leaderboards have them: " + ", ".join(PRESETS) + " (each 80 to 100 % of "
        "its length), 10 requests for each user after 2 that are not counted."
    ),
]
Cap = Annotated[
    int | None, typer.Option("--max-concurrency", help="Open loop: requests in flight at most.")
]
RampUp = Annotated[float, typer.Option("--ramp", help="Closed loop: seconds in which users come.")]
Grace = Annotated[
    float | None, typer.Option(help="Seconds after --duration until what is in flight is hung up.")
]
MaxErrors = Annotated[
    int | None, typer.Option("--max-errors", help="Failures above which the run ends, invalid.")
]
StopSaturated = Annotated[
    bool, typer.Option("--stop-saturated", help="End an open loop that the server cannot keep up.")
]
Temperature = Annotated[float, typer.Option(help="Of the sampling; 0: greedy.")]
Processes = Annotated[int, typer.Option(help="Client processes.")]
Eos = Annotated[bool, typer.Option("--ignore-eos/--eos", help="Ask for exactly the output tokens.")]
Stream = Annotated[bool, typer.Option(help="Stream the answers.")]
SloText = Annotated[
    str | None, typer.Option("--slo", help="Limits, as in ttft:p99<500ms,tpot:p95<50ms.")
]
Interval = Annotated[
    float,
    typer.Option(
        help="Seconds between looks at the server's /metrics, its processes and GPUs; 0: none."
    ),
]
Exporters = Annotated[
    list[str] | None,
    typer.Option("--metrics-url", help="Another Prometheus exporter (DCGM, node); repeat it."),
]
Price = Annotated[float | None, typer.Option("--price", help="Price of one device per hour.")]
Devices = Annotated[int, typer.Option(help="Devices of the server, for figures per device.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Sent as bearer token.")]
Extra = Annotated[str | None, typer.Option(help="JSON object: further fields of every request.")]
Stall = Annotated[float, typer.Option(help="Seconds without a byte that count as stalled.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.")]
Roofline = Annotated[
    str | None, typer.Option(help="Model whose roofline is put beside what is measured.")
]
HardwareOf = Annotated[
    str, typer.Option("--hardware", help="What the server runs on: this, H100, H200 …")
]
GateFile = Annotated[
    Path | None,
    typer.Option(
        help="Reference of `bench accuracy --save`: its answers and tasks are asked again after "
        "each run, at the run's own concurrency; below --at-least the exit code is 3."
    ),
]
AtLeast = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the reference below which exit is 3.")
]
GateKinds = Annotated[
    str, typer.Option("--gate", help="What decides: of tokens, perplexity, tasks.")
]
EVERY_GATE = "tokens,perplexity,tasks"
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Keep = Annotated[bool, typer.Option("--history/--no-history", help="Add to the history.")]


_RUN: dict[str, tuple[Any, Any]] = {
    "url": (Url, "http://127.0.0.1:8000"),
    "model": (Model, None),
    "endpoint": (Endpoint, None),
    "preset": (Preset, None),
    "workload": (Workload, "fixed"),
    "trace": (Trace, None),
    "trace_speed": (TraceSpeed, 1.0),
    "input": (Input, "128"),
    "output": (Output, "128"),
    "requests": (Requests, None),
    "duration": (Duration, None),
    "arrivals": (Arrive, None),
    "concurrency": (Users, 8),
    "max_concurrency": (Cap, None),
    "ramp": (RampUp, 0.0),
    "grace": (Grace, None),
    "max_errors": (MaxErrors, None),
    "stop_saturated": (StopSaturated, False),
    "seed": (Seed, None),
    "tokenizer": (TokenizerOf, None),
    "prefix_tokens": (PrefixTokens, 1024),
    "groups": (Groups, 8),
    "zipf": (Zipf, 1.0),
    "turns": (Turns, 4),
    "think_seconds": (Think, 2.0),
    "warmup": (Warmup, None),
    "processes": (Processes, 1),
    "ignore_eos": (Eos, True),
    "stream": (Stream, True),
    "temperature": (Temperature, 0.0),
    "slo": (SloText, None),
    "timeout": (Timeout, 600.0),
    "stall": (Stall, 60.0),
    "metrics_interval": (Interval, 1.0),
    "metrics_urls": (Exporters, None),
    "devices": (Devices, 1),
    "price_per_hour": (Price, None),
    "api_key": (Key, None),
    "extra": (Extra, None),
}
"""Field of `RunOptions` → its flag and default; `preset` stands for several fields."""


def with_run_flags(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every flag of a run but those that it sets itself.

    The command gets them as its first argument, a `RunOptions` (with `UNSAID` for a seed).
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = {name: flag for name, flag in _RUN.items() if name not in without}
        hints = get_type_hints(command, include_extras=True)
        own = {
            name: p
            for name, p in inspect.signature(command).parameters.items()
            if name != "options"
        }

        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in flags}
            command(make_options(given), **values)

        arguments = [p.replace(annotation=hints[name]) for name, p in own.items()]
        shared = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
            )
            for name, (annotation, default) in flags.items()
        ]
        every = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in arguments] + shared
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in every}
        run.__doc__, run.__name__ = command.__doc__, command.__name__
        return run

    return decorate


def make_options(given: dict[str, Any]) -> RunOptions:
    """`RunOptions` of flags, with `UNSAID` for a seed that was not said (`fresh_seed`)."""
    given = dict(given)
    preset = given.pop("preset", None)
    if preset is not None:
        if preset not in PRESETS:
            raise InvalidRequest(
                f"preset must be one of {', '.join(PRESETS)}, not {preset!r}", param="preset"
            )
        given["input"], given["output"] = PRESETS[preset]
        given["preset"] = preset
    if "extra" in given:
        given["extra"] = _object(given["extra"])
    given["metrics_urls"] = given.get("metrics_urls") or []
    if given.get("seed") is None:
        given["seed"] = UNSAID
    return RunOptions(**given)


def default_folder(kind: str) -> Path:
    """Where results go that nobody gave a place."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("bench-results") / f"{kind}-{stamp}-{time.monotonic_ns() % 1000:03d}"


INVALID_RUN = 4
"""Exit code of a run that says nothing about the server."""
UNSAID = -1
"""Seed of options whose command has still to draw one."""


def fresh_seed(wish: int) -> int:
    """A new one by default: prompts of an earlier run would be in the server's prefix cache."""
    return secrets.randbelow(10**6) if wish == UNSAID else wish


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"extra is not JSON: {error}", param="extra") from None
    if not isinstance(value, dict):
        raise InvalidRequest("extra must be a JSON object", param="extra")
    return value
