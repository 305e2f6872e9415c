"""What one run is: server, workload, arrivals, bounds; all checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from .arrivals import parse_arrivals
from .http import parse_url
from .lengths import parse_lengths
from .slo import parse_slo
from .traces import TRACES
from .workload import CHAT_ONLY, EMBEDDING, WORKLOADS

REQUESTS = 64
"""Sessions of a run that neither a number, a duration nor a trace bounds."""


NEEDS = {
    "max_concurrency": "it bounds an open loop (--arrivals); a closed one has -c users",
    "ramp": "the users of a closed loop come by it; an open loop has ramp:FROM:TO:SECONDS",
    "grace": "it follows a --duration",
    "stop_saturated": "only an open loop (--arrivals) can ask for more than a server can do",
}


@dataclass(slots=True)
class RunOptions:
    """All that decides what is measured; written into the result."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """Name in the requests; none: the first of /v1/models."""
    endpoint: str | None = None
    """completions, chat or embeddings; none: what the workload needs."""
    preset: str | None = None
    """Lengths that leaderboards use; ten requests for each user, after two that do not count."""
    workload: str = "fixed"
    trace: str | None = None
    """FORMAT:PATH in place of a workload."""
    trace_speed: float = 1.0
    input: str = "128"
    output: str = "128"
    requests: int | None = None
    """Sessions of the workload; none: as many as the duration takes, all of a trace, else
    `REQUESTS`."""
    duration: float | None = None
    arrivals: str | None = None
    """Open loop; none: closed loop of `concurrency`."""
    concurrency: int = 8
    seed: int = 0
    tokenizer: str | None = None
    """Model whose tokenizer makes exact prompts and recounts answers."""
    prefix_tokens: int = 1024
    groups: int = 8
    zipf: float = 1.0
    turns: int = 4
    think_seconds: float = 2.0
    warmup: int | None = None
    """Requests before the run, as many at a time as the run has; none: one for each user."""
    max_concurrency: int | None = None
    """Open loop: requests in flight at most; what is due later waits, and is due when it may go."""
    ramp: float = 0.0
    """Closed loop: seconds over which the users come."""
    grace: float | None = None
    """Seconds after the duration for what is in flight; then it is hung up. None: all the time."""
    max_errors: int | None = None
    """Failures above which nothing new is sent, and the run is invalid."""
    stop_saturated: bool = False
    """Send nothing new once more has come than the server can do."""
    processes: int = 1
    ignore_eos: bool = True
    stream: bool = True
    temperature: float = 0.0
    slo: str | None = None
    timeout: float = 600.0
    stall: float = 60.0
    wait: float = 120.0
    """Seconds for a server that answers 503 to become ready."""
    metrics_interval: float = 1.0
    """Seconds between two looks at the server's metrics and its machine; 0: none."""
    metrics_urls: list[str] = field(default_factory=list)
    """Further Prometheus exporters (DCGM, node)."""
    devices: int = 1
    price_per_hour: float | None = None
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def verify(self) -> None:
        """Raise `InvalidRequest` for the first field that is out of its bounds."""
        for name, low in (
            ("requests", 1),
            ("concurrency", 1),
            ("groups", 1),
            ("turns", 1),
            ("warmup", 0),
            ("processes", 1),
            ("prefix_tokens", 1),
            ("devices", 1),
            ("ramp", 0),
            ("grace", 0),
            ("metrics_interval", 0),
            ("max_concurrency", 1),
            ("max_errors", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidRequest(f"{name} must be at least {low}, not {value}", param=name)
        for name in ("duration", "timeout", "stall", "trace_speed", "price_per_hour"):
            given = getattr(self, name)
            if given is not None and not (math.isfinite(given) and given > 0):
                raise InvalidRequest(f"{name} must be above 0, not {given}", param=name)
        if self.endpoint not in (None, "completions", "chat", EMBEDDING):
            raise InvalidRequest(
                f"endpoint must be completions, chat or embeddings, not {self.endpoint!r}",
                param="endpoint",
            )
        if self.trace is None and self.workload not in WORKLOADS:
            raise InvalidRequest(
                f"unknown workload {self.workload!r}; known: {', '.join(WORKLOADS)}",
                param="workload",
            )
        if self.trace is not None and self.trace.partition(":")[0] not in TRACES:
            raise InvalidRequest(
                f"a trace is FORMAT:PATH with a format of {', '.join(TRACES)}, not {self.trace!r}",
                param="trace",
            )
        parse_lengths(self.input, "input")
        parse_lengths(self.output, "output")
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
        """Sessions that are made before the run; without a bound more follow."""
        least = 10 if self.preset is not None else 4
        return self.requests or max(REQUESTS, least * self.concurrency)

    @property
    def endless(self) -> bool:
        """Does the duration alone say when the load ends?"""
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
        """Are answers streamed? Embeddings never are."""
        return self.stream and self.resolved_endpoint != EMBEDDING

    @property
    def ignores_eos(self) -> bool:
        """Is every answer as long as was asked? A form (structured) ends by itself."""
        return self.ignore_eos and (self.trace is not None or self.workload != "structured")

    def public(self) -> dict[str, Any]:
        """Without the key, and with only the file's name of a local tokenizer."""
        values = asdict(self)
        values["endpoint"] = self.resolved_endpoint
        values["api_key"] = None if self.api_key is None else "set"
        if self.tokenizer is not None:
            values["tokenizer"] = Path(self.tokenizer).name
        return values
