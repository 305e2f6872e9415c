"""Options of one run: server, workload, arrivals, bounds; all checked before the start."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..base.config import option, verify_bounds
from ..base.errors import InvalidRequest, one_of
from .arrivals import parse_arrivals
from .http import parse_url
from .lengths import parse_lengths
from .metrics import parse_slo
from .traces import TRACES
from .workload import CHAT_ONLY, EMBEDDING, WORKLOADS

REQUESTS = 64
"""Sessions of a run not bounded by a number, a duration or a trace."""


MOST_SIDE = 4096
"""Most pixels along a side of a drawn picture."""
NEEDS = {
    "max_concurrency": "it bounds an open loop (--arrivals); a closed one has -c users",
    "ramp": "the users of a closed loop come by it; an open loop has ramp:FROM:TO:SECONDS",
    "grace": "it follows a --duration",
    "stop_saturated": "only an open loop (--arrivals) can ask for more than a server can do",
}


PRESETS = {
    "1k1k": ("uniform:819:1024", "uniform:819:1024"),
    "1k8k": ("uniform:819:1024", "uniform:6554:8192"),
    "8k1k": ("uniform:6554:8192", "uniform:819:1024"),
}
"""Name → (input, output)."""


@dataclass(slots=True)
class RunOptions:
    """All options that affect the measurement; written into the result.

    `headrace bench` derives its flags from the fields (`cli.bench_flags`), named `flag` if that is
    set.
    """

    url: str = option("http://127.0.0.1:8000", "Address of the server.")
    model: str | None = option(None, "Model name; none: the server's first.")
    endpoint: str | None = option(None, "completions, chat or embeddings; none: as needed.")
    preset: str | None = option(
        None,
        f"Lengths as leaderboards have them: {', '.join(PRESETS)} (each 80 to 100 % of its "
        "length), 10 requests for each user after 2 that are not counted.",
    )
    workload: str = option("fixed", f"{', '.join(WORKLOADS)}.")
    trace: str | None = option(
        None, f"FORMAT:FILE in place of a workload; a format of {', '.join(TRACES)}."
    )
    trace_speed: float = option(1.0, "How much faster than recorded.", above=0)
    input: str = option("128", "Prompt tokens: N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:…")
    output: str = option("128", "Output tokens, likewise.")
    picture: str = option(
        "uniform:128:1024",
        f"Sides of pictures in pixels, likewise, at most {MOST_SIDE} (workload pictures).",
    )
    requests: int | None = option(
        None,
        "Requests (sessions, where a workload has turns); none: what --duration takes, all of a "
        f"trace, else {REQUESTS}.",
        low=1,
    )
    duration: float | None = option(None, "Seconds after which nothing new starts.", above=0)
    arrivals: str | None = option(
        None, "Open loop: constant:R, poisson:R, gamma:R:B, ramp:FROM:TO:S, trace. Else closed."
    )
    concurrency: int = option(8, "Users of the closed loop.", low=1, flag=("--concurrency", "-c"))
    seed: int = option(0, "Of prompts, lengths and arrivals; none: a new one, kept in the result.")
    tokenizer: str | None = option(
        None, "Model whose tokenizer makes prompts of exact token counts, and recounts answers."
    )
    prefix_tokens: int = option(1024, "Tokens of a shared prefix or system prompt.", low=1)
    groups: int = option(8, "Different shared prefixes.", low=1)
    zipf: float = option(1.0, "How unevenly prefixes are drawn; 0: evenly.")
    turns: int = option(4, "Turns of a session.", low=1)
    think_seconds: float = option(2.0, "Mean seconds between turns.", flag=("--think",))
    warmup: int | None = option(
        None, "Requests before the run, not counted; none: one for each user.", low=0
    )
    max_concurrency: int | None = option(
        None,
        "Open loop: requests in flight at most; what is due later waits, and is due when it may "
        "go.",
        low=1,
    )
    ramp: float = option(0.0, "Closed loop: seconds in which users come.", low=0)
    grace: float | None = option(
        None, "Seconds after --duration until what is in flight is hung up.", low=0
    )
    max_errors: int | None = option(None, "Failures above which the run ends, invalid.", low=0)
    stop_saturated: bool = option(
        False, "End an open loop that the server cannot keep up.", flag=("--stop-saturated",)
    )
    processes: int = option(1, "Client processes.", low=1)
    ignore_eos: bool = option(
        True, "Ask for exactly the output tokens.", flag=("--ignore-eos/--eos",)
    )
    stream: bool = option(True, "Stream the answers.")
    temperature: float = option(0.0, "Of the sampling; 0: greedy.")
    slo: str | None = option(None, "Limits, as in ttft:p99<500ms,tpot:p95<50ms.")
    timeout: float = option(600.0, "Seconds for a whole request.", above=0)
    stall: float = option(60.0, "Seconds without a byte that count as stalled.", above=0)
    wait: float = 120.0
    """Seconds for a server that answers 503 to become ready."""
    metrics_interval: float = option(
        1.0,
        "Seconds between looks at the server's /metrics, its processes and GPUs; 0: none.",
        low=0,
    )
    metrics_urls: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Another Prometheus exporter (DCGM, node); repeat it.",
            "flag": ("--metrics-url",),
        },
    )
    devices: int = option(1, "Devices of the server, for figures per device.", low=1)
    price_per_hour: float | None = option(
        None, "Price of one device per hour.", above=0, flag=("--price",)
    )
    api_key: str | None = option(None, "Sent as bearer token.")
    extra: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "JSON object: further fields of every request."}
    )

    def verify(self) -> None:
        """Raise `InvalidRequest` for the first field out of its bounds."""
        verify_bounds(self)
        if self.endpoint is not None:
            one_of(self.endpoint, ("completions", "chat", EMBEDDING), "endpoint")
        if self.trace is None:
            one_of(self.workload, WORKLOADS, "workload")
        if self.trace is not None and self.trace.partition(":")[0] not in TRACES:
            raise InvalidRequest(
                f"a trace is FORMAT:PATH with a format of {', '.join(TRACES)}, not {self.trace!r}",
                param="trace",
            )
        parse_lengths(self.input, "input")
        parse_lengths(self.output, "output")
        sides = parse_lengths(self.picture, "picture")
        longest = sides.b if sides.kind == "uniform" else sides.a
        if longest > MOST_SIDE:
            raise InvalidRequest(
                f"a side of a picture has {MOST_SIDE} pixels at most, not {longest:g}",
                param="picture",
            )
        if self.arrivals is not None and self.arrivals != "trace":
            parse_arrivals(self.arrivals)
        if self.arrivals == "trace" and self.trace is None:
            raise InvalidRequest("arrivals 'trace' needs a --trace", param="arrivals")
        if self.slo is not None:
            parse_slo(self.slo)
        if self.trace is not None and not (path := Path(self.trace.partition(":")[2])).is_file():
            raise InvalidRequest(f"no such trace file: {path}", param="trace")
        for url in self.metrics_urls:
            parse_url(url)
        for name, given, needs in (
            ("max_concurrency", self.max_concurrency is None, self.arrivals is not None),
            ("ramp", not self.ramp, self.arrivals is None),
            ("grace", self.grace is None, self.duration is not None),
            ("stop_saturated", not self.stop_saturated, self.arrivals is not None),
        ):
            if not (given or needs):
                raise InvalidRequest(f"{name} does nothing here: {NEEDS[name]}", param=name)
        if self.workload in CHAT_ONLY and self.endpoint == "completions" and self.trace is None:
            raise InvalidRequest(
                f"the workload {self.workload} needs the chat endpoint", param="endpoint"
            )
        embeds = self.trace is None and self.workload == EMBEDDING
        if self.endpoint is not None and (self.endpoint == EMBEDDING) != embeds:
            raise InvalidRequest(
                "the embeddings endpoint and the embeddings workload go together, not "
                f"{self.endpoint} with {'a trace' if self.trace else self.workload}",
                param="endpoint",
            )
        if embeds and self.slo is not None:
            for limit in parse_slo(self.slo).limits:
                if limit.metric != "e2e":
                    raise InvalidRequest(
                        f"embeddings have no {limit.metric}: only e2e can be limited", param="slo"
                    )

    @property
    def sessions(self) -> int:
        """Sessions made before the run; without a bound more follow."""
        least = 10 if self.preset is not None else 4
        return self.requests or max(REQUESTS, least * self.concurrency)

    @property
    def endless(self) -> bool:
        """Whether only the duration ends the load."""
        return self.duration is not None and self.requests is None and self.trace is None

    @property
    def resolved_endpoint(self) -> str:
        if self.endpoint is not None:
            return self.endpoint
        if self.trace is not None:
            return "chat" if self.trace.startswith(("sharegpt", "prompts")) else "completions"
        if self.workload == EMBEDDING:
            return EMBEDDING
        return "chat" if self.workload in CHAT_ONLY else "completions"

    @property
    def warms_up(self) -> int:
        """Requests before the run."""
        if self.warmup is not None:
            return self.warmup
        if self.preset is not None:
            return 2 * self.concurrency
        return 2 if self.arrivals is not None else self.concurrency

    @property
    def streams(self) -> bool:
        """Whether answers are streamed; embeddings never are."""
        return self.stream and self.resolved_endpoint != EMBEDDING

    @property
    def ignores_eos(self) -> bool:
        """Whether every answer has the requested length; a structured answer ends by itself."""
        return self.ignore_eos and (self.trace is not None or self.workload != "structured")

    def public(self) -> dict[str, Any]:
        """Return the options without the key, and only the file name of a local tokenizer."""
        values = asdict(self)
        values["endpoint"] = self.resolved_endpoint
        values["api_key"] = None if self.api_key is None else "set"
        if self.tokenizer is not None:
            values["tokenizer"] = Path(self.tokenizer).name
        return values
