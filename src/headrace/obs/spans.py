"""OpenTelemetry traces of requests: HTTP exchange → request → queue, prefill, decode.

Off unless an endpoint is given. Then this module imports the SDK (extra `telemetry`) and sends OTLP
over HTTP in batches, from its own thread. It drops spans when its queue is full, so a slow or lost
collector costs only its spans. Names follow OpenTelemetry's conventions for generative AI. No span
holds a word of a prompt or an answer.

The times of queue, prefill and decode are known when a request has ended (`RequestLife`). Its spans
are written then, with these times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import OptionError
from ..base.extras import needing
from ..base.version import VERSION
from .life import RequestLife

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SERVICE = "headrace"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Spans:
    """Writer of the spans of one server. Every method is cheap and never waits for the network."""

    def __init__(self, endpoint: str, *, exporter: Any = None, batch_seconds: float = 2.0) -> None:
        """Connect to `endpoint`: base URL of an OTLP collector, such as `http://collector:4318`.

        Raises `OptionError` for a wrong URL, `PackageAbsent` without the packages.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise OptionError(
                f"otlp_endpoint must be an http or https URL, not {endpoint!r}",
                param="otlp_endpoint",
            )
        with needing("otlp_endpoint needs", "telemetry", param="otlp_endpoint"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self._propagator = TraceContextTextMapPropagator()
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": SERVICE, "service.version": VERSION}),
            shutdown_on_exit=False,
        )
        self._exporter = exporter or OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=5)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=8192, schedule_delay_millis=batch_seconds * 1000
            )
        )
        self._tracer = self._provider.get_tracer(SERVICE, VERSION)

    def exchange(self, method: str, path: str, traceparent: str | None, state: str | None) -> Span:
        """Start the span of an HTTP exchange, under the caller's span if it named one."""
        from opentelemetry.trace import SpanKind

        carrier = {"traceparent": traceparent} if traceparent else {}
        if state:
            carrier["tracestate"] = state
        return self._tracer.start_span(
            f"{method} {path}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path, "http.route": path},
        )

    def answered(self, span: Span, status: int) -> None:
        """End the span of an HTTP exchange."""
        from opentelemetry.trace import StatusCode

        span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def request(self, request_id: str, life: RequestLife, *, model: str) -> None:
        """Write the spans of an ended request and its phases, with their true times."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        at = _clock()
        parent: Span | None = life.trace
        under: Context | None = set_span_in_context(parent) if parent is not None else None
        operation = _OPERATIONS.get(_path(parent), "text_completion")
        ended = life.ended or time.monotonic()
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=under,
            kind=SpanKind.INTERNAL,
            start_time=at(life.arrival),
            attributes=attributes(request_id, life, operation=operation, model=model),
        )
        if life.reason == "error":
            span.set_status(StatusCode.ERROR)
        inside = set_span_in_context(span)
        for name, begin, end in phases(life, ended):
            self._tracer.start_span(name, context=inside, start_time=at(begin)).end(at(end))
        span.end(at(ended))

    def close(self, seconds: float = 2.0) -> None:
        """Send the remaining spans; give up after `seconds`."""
        # The provider's own shutdown retries a dead collector for half a minute.
        end = threading.Thread(target=self._provider.shutdown, daemon=True)
        end.start()
        end.join(seconds)
        if end.is_alive():
            self._exporter.shutdown()


def traces_url(endpoint: str) -> str:
    """Return the URL for traces at a collector, by the OTLP specification."""
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def phases(life: RequestLife, ended: float) -> Sequence[tuple[str, float, float]]:
    """Return (name, begin, end) of each phase that the request reached."""
    found = [("queue", life.arrival, life.scheduled or ended)]
    if life.scheduled:
        found.append(("prefill", life.scheduled, life.first_token or ended))
    if life.first_token:
        found.append(("decode", life.first_token, max(life.last_token, life.first_token)))
    return found


def attributes(
    request_id: str, life: RequestLife, *, operation: str, model: str
) -> dict[str, str | int | float | list[str]]:
    """Name attributes by the conventions for generative AI; others are `headrace.`."""
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": SERVICE,
        "gen_ai.request.model": life.adapter or model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request_id,
        "gen_ai.response.finish_reasons": [life.reason],
        "gen_ai.usage.input_tokens": life.prompt_tokens,
        "gen_ai.usage.output_tokens": life.generated,
        "gen_ai.usage.cache_read.input_tokens": life.cached,
        "headrace.preemptions": life.preemptions,
    }
    if life.choices != 1:
        found["gen_ai.request.choice.count"] = life.choices
    if life.max_tokens:
        found["gen_ai.request.max_tokens"] = life.max_tokens
    if life.temperature is not None:
        found["gen_ai.request.temperature"] = life.temperature
    if life.top_p is not None:
        found["gen_ai.request.top_p"] = life.top_p
    if life.first_token:
        found["headrace.time_to_first_token"] = life.ttft
    if life.drafted is not None:
        drafts, tokens, accepted = life.drafted.totals()
        found["headrace.drafts"], found["headrace.draft_tokens"] = drafts, tokens
        found["headrace.accepted_tokens"] = accepted
        found["headrace.drafters"] = sorted({name for name, _, _ in life.drafted.cases})
        found["headrace.draft_saved"] = life.drafted.saved
        found["headrace.draft_spent"] = life.drafted.spent
    if life.reason == "error":
        found["error.type"] = "engine"
    return found


def _clock() -> Callable[[float], int]:
    """Make a converter from `time.monotonic()` to nanoseconds since 1970."""
    shift = time.time_ns() - time.monotonic_ns()
    return lambda moment: int(moment * 1e9) + shift


def _path(span: Any) -> str:
    read = getattr(span, "attributes", None) or {}
    return str(read.get("http.route", ""))
