"""Traces as a collector receives them: over OTLP, decoded by its own message definitions."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.base.config import ServerOptions
from headrace.base.drafted import Drafted, Verified
from headrace.base.errors import OptionError
from headrace.obs.life import RequestLife
from headrace.obs.spans import Spans, attributes, phases, traces_url
from headrace.obs.trace import CURRENT
from headrace.server.app import create_app

pytest.importorskip("opentelemetry.sdk", reason="needs the extra telemetry")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from processes import headrace, running
from server_fake import FakeEngine

from tiny import talker
from tiny.kept import Kept

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Sink(ThreadingHTTPServer):
    """An OTLP/HTTP collector that keeps what it gets."""

    def __init__(self) -> None:
        sink = self
        self.spans: list[Any] = []
        self.paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                sink.paths.append(self.path)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        sink.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        super().__init__(("127.0.0.1", 0), Handler)

    def one(self, name: str) -> Any:
        found = [span for span in self.spans if span.name == name]
        assert len(found) == 1, [span.name for span in self.spans]
        return found[0]


@pytest.fixture
def sink() -> Iterator[Sink]:
    server = Sink()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class LivingEngine(FakeEngine):
    """Says of each request how it lived, as the real engine does."""

    on_end: Any = None

    def submit(self, prompt: Any, sampling: Any, *, request_id: str = "", **more: Any) -> Any:
        stream = super().submit(prompt, sampling, request_id=request_id, **more)
        now = time.monotonic()
        life = RequestLife(now - 0.3, len(stream.prompt_ids), max_tokens=sampling.max_tokens)
        life.scheduled, life.first_token, life.last_token = now - 0.2, now - 0.1, now
        life.generated, life.reason, life.ended = sampling.max_tokens, "length", now
        life.trace, life.temperature = CURRENT.get(), sampling.temperature
        life.drafted = Drafted()
        life.drafted.add(Verified("suffix", 4, 3, 0.004, 0.03))
        if self.on_end is not None:
            self.on_end(request_id, life)
        return stream


@pytest.fixture
async def traced(sink: Sink) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    options = ServerOptions(otlp_endpoint=f"http://127.0.0.1:{sink.server_port}")
    app = create_app(LivingEngine(), options)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client, app.state.service.spans
    app.state.service.spans.close()


def _values(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_becomes_a_tree_under_the_callers_span(
    sink: Sink, traced: tuple[httpx.AsyncClient, Spans], stream: bool
) -> None:
    client, spans = traced
    reply = await client.post(
        "/v1/chat/completions",
        headers={"traceparent": PARENT},
        json={
            "messages": [{"role": "user", "content": "a secret of mine"}],
            "max_tokens": 4,
            "temperature": 0.5,
            "stream": stream,
        },
    )
    assert reply.status_code == 200
    await client.get("/health")
    await client.post("/no/such/path")
    spans.close(120.0)
    assert set(sink.paths) == {"/v1/traces"}
    exchange = sink.one("POST /v1/chat/completions")
    request = sink.one("chat fake")
    trace, parent = PARENT.split("-")[1:3]
    assert exchange.trace_id.hex() == request.trace_id.hex() == trace
    assert exchange.parent_span_id.hex() == parent
    assert request.parent_span_id == exchange.span_id
    assert _values(exchange)["http.response.status_code"] == 200
    assert len(sink.spans) == 5, "probes and unknown paths have no span"

    told = _values(request)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "fake"
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.request.temperature"] == 0.5
    assert (told["headrace.draft_tokens"], told["headrace.accepted_tokens"]) == (4, 3)
    assert (told["headrace.draft_saved"], told["headrace.draft_spent"]) == (0.03, 0.004)
    assert [one.string_value for one in told["headrace.drafters"].values] == ["suffix"]
    assert told["gen_ai.response.finish_reasons"].values[0].string_value == "length"
    names = ("queue", "prefill", "decode")
    queue, prefill, decode = (sink.one(name) for name in names)
    assert {span.parent_span_id for span in (queue, prefill, decode)} == {request.span_id}
    assert queue.start_time_unix_nano == request.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano <= request.end_time_unix_nano
    for span in (queue, prefill, decode):
        assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(
            0.1, abs=0.01
        )
    assert abs(request.end_time_unix_nano / 1e9 - time.time()) < 600
    assert not any(b"secret" in span.SerializeToString() for span in sink.spans)


async def test_a_refused_request_has_its_status_and_no_request_span(
    sink: Sink, traced: tuple[httpx.AsyncClient, Spans]
) -> None:
    client, spans = traced
    assert (await client.post("/v1/chat/completions", json={"messages": []})).status_code == 400
    spans.close(120.0)
    exchange = sink.one("POST /v1/chat/completions")
    assert _values(exchange)["http.response.status_code"] == 400
    assert not exchange.parent_span_id, "without traceparent it is a root"
    assert len(sink.spans) == 1


@pytest.mark.slow
def test_a_real_server_sends_the_true_times(sink: Sink, kept: Kept) -> None:
    model = kept(talker.make)
    endpoint = f"http://127.0.0.1:{sink.server_port}"
    command = headrace("serve", str(model), "--port", "0", "--otlp-endpoint", endpoint)
    with running([*command, "--threads", "1"]) as server:
        begin = time.time()
        body = {"prompt": "water", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        took = time.time() - begin
        assert reply.status_code == 200
        # The end of a server waits two seconds for a collector, and no longer.
        end = time.monotonic() + 120
        while len(sink.spans) < 5 and time.monotonic() < end:
            time.sleep(0.05)
        server.signal()
        assert server.wait() == 0
    request = sink.one("text_completion tiny")
    told = _values(request)
    assert told["gen_ai.usage.output_tokens"] == 12
    assert told["gen_ai.usage.input_tokens"] == reply.json()["usage"]["prompt_tokens"]
    spent = [
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        for span in (sink.one(name) for name in ("queue", "prefill", "decode"))
    ]
    assert all(seconds >= 0 for seconds in spent)
    assert 0 < sum(spent) <= took
    assert begin - 0.01 <= request.start_time_unix_nano / 1e9 <= begin + took


def test_a_request_that_never_ran_was_only_in_the_queue() -> None:
    life = RequestLife(10.0, 5, reason="abort")
    assert phases(life, 12.0) == [("queue", 10.0, 12.0)]
    life.scheduled = 11.0
    assert phases(life, 12.0) == [("queue", 10.0, 11.0), ("prefill", 11.0, 12.0)]


def test_attributes_of_adapters_and_errors() -> None:
    life = RequestLife(1.0, 5, choices=2, reason="error", adapter="mine")
    told = attributes("id", life, operation="chat", model="base")
    assert (told["gen_ai.request.model"], told["gen_ai.response.model"]) == ("mine", "base")
    assert told["error.type"] == "engine"
    assert told["gen_ai.request.choice.count"] == 2


def test_a_collector_that_is_gone_costs_no_request() -> None:
    before = set(threading.enumerate())
    spans = Spans("http://127.0.0.1:9", batch_seconds=0.01)
    for number in range(2000):
        spans.request(str(number), RequestLife(1.0, 5, reason="stop"), model="m")
    spans.close(0.1)  # Neither end waits for the collector: the test has a limit of its own.
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive(), f"{thread.name} still tries a collector that is gone"


def test_off_means_that_nothing_is_imported_or_wrapped() -> None:
    app = create_app(FakeEngine(), ServerOptions())  # type: ignore[arg-type]
    assert app.state.service.spans is None
    assert CURRENT.get() is None
    code = (
        "import sys, headrace.server.app\n"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x"])
def test_an_endpoint_that_is_no_url_is_refused_at_start(endpoint: str) -> None:
    with pytest.raises(OptionError, match="otlp_endpoint"):
        Spans(endpoint)


def test_where_traces_go() -> None:
    assert traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("http://c/x/v1/traces") == "http://c/x/v1/traces"
