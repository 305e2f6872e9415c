"""Flags that the commands of `headrace bench` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    str | None, typer.Option(help="FORMAT:FILE; format sharegpt, mooncake, azure or burstgpt.")
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
Warmup = Annotated[int, typer.Option(help="Requests before the run, not counted.")]
Processes = Annotated[int, typer.Option(help="Client processes.")]
Eos = Annotated[bool, typer.Option("--ignore-eos/--eos", help="Ask for exactly the output tokens.")]
Stream = Annotated[bool, typer.Option(help="Stream the answers.")]
SloText = Annotated[
    str | None, typer.Option("--slo", help="Limits, as in ttft:p99<500ms,tpot:p95<50ms.")
]
Price = Annotated[float | None, typer.Option("--price", help="Price of one device per hour.")]
Devices = Annotated[int, typer.Option(help="Devices of the server, for figures per device.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Sent as bearer token.")]
Extra = Annotated[str | None, typer.Option(help="JSON object: further fields of every request.")]
Stall = Annotated[float, typer.Option(help="Seconds without a byte that count as stalled.")]
Timeout = Annotated[float, typer.Option(help="Seconds for a whole request.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the results.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Keep = Annotated[bool, typer.Option("--history/--no-history", help="Add to the history.")]
