"""MLPerf Inference scenarios through the real LoadGen (`mlcommons-loadgen`).

LoadGen decides when queries come and judges the run; this file is only the system under test: it
sends each sample to a server and reports first tokens and ends. LoadGen's verdict is shown as it
is. LoadGen knows no failed request, so ours are counted beside it and named, never hidden in it.

Log files lie as submissions have them:
results/SYSTEM/MODEL/SCENARIO/performance/run_1/mlperf_log_*.txt (or …/accuracy/).
"""

from __future__ import annotations

import array
import asyncio
import random
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest, OptionError
from .client import Stream, judge, make_body
from .http import ConnectionLost, Pool, parse_url, request_bytes
from .job import Target
from .lengths import Lengths
from .material import Material
from .record import RequestRecord
from .sse import Lines
from .workload import Turn

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Interactive", "Offline")
MULTISTREAM_SAMPLES = 8
SUMMARY = "mlperf_log_summary.txt"
SUBMISSION_SECONDS = 600.0
"""Shortest run that MLPerf's rules accept."""
SEEDS = {
    "qsl_rng_seed": 2085463073848966840,
    "sample_index_rng_seed": 2747215439041700203,
    "schedule_rng_seed": 16159082839903944936,
}
"""Of MLPerf Inference v6.1."""


@dataclass(slots=True)
class MlperfOptions:
    """One LoadGen test. The defaults of the limits are llama3.1-8b's of v6.1."""

    target: Target
    scenario: str = "Offline"
    mode: str = "performance"
    """performance or accuracy."""
    samples: int = 64
    """Size of the query sample library."""
    input: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    min_seconds: float = SUBMISSION_SECONDS
    """Shorter runs are for trying: LoadGen judges by what it is told here."""
    min_queries: int = 1
    qps: float = 1.0
    """Target of Server and Interactive, expectation of Offline."""
    ttft_ms: float = 2000.0
    tpot_ms: float = 100.0
    system: str = "this"
    seed: int = 0

    def verify(self) -> None:
        if self.scenario not in SCENARIOS:
            raise InvalidRequest(
                f"scenario must be one of {', '.join(SCENARIOS)}, not {self.scenario!r}",
                param="scenario",
            )
        if self.mode not in ("performance", "accuracy"):
            raise InvalidRequest("mode must be performance or accuracy", param="mode")
        for name in ("samples", "min_seconds", "min_queries", "qps", "ttft_ms", "tpot_ms"):
            if not getattr(self, name) > 0:
                raise InvalidRequest(f"{name} must be above 0", param=name)


@dataclass(frozen=True, slots=True)
class MlperfResult:
    """LoadGen's words, and ours about failures."""

    folder: Path
    valid: bool | None
    """LoadGen's verdict; None in accuracy mode, where it gives none."""
    summary: dict[str, str]
    requests: int
    failures: list[str]


class SystemUnderTest:
    """Sends samples from LoadGen's threads over an event loop in a thread of its own."""

    def __init__(self, loadgen: Any, options: MlperfOptions, material: Material) -> None:
        self._loadgen = loadgen
        self._target = options.target
        self._accuracy = options.mode == "accuracy"
        rng = random.Random(options.seed)
        ids = bool(material.ids) and options.target.endpoint == "completions"
        self.samples = []
        for _ in range(options.samples):
            tokens, output = options.input.draw(rng), options.output.draw(rng)
            turn = (
                Turn("", output, ids=material.tokens(tokens, rng))
                if ids
                else Turn(material.text(tokens, rng), output)
            )
            self.samples.append(turn)
        self.requests = 0
        self.failures: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._pool = Pool(parse_url(options.target.url))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()

    def issue(self, queries: list[Any]) -> None:
        """LoadGen's call: returns at once."""
        pairs = [(query.id, query.index) for query in queries]
        self._loop.call_soon_threadsafe(self._start, pairs)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._pool.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _start(self, pairs: list[tuple[int, int]]) -> None:
        for query, index in pairs:
            task = self._loop.create_task(self._query(query, self.samples[index]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _query(self, query: int, turn: Turn) -> None:
        loadgen, target = self._loadgen, self._target
        record = RequestRecord(self.requests, 0, 0, 0, 0, asked_tokens=turn.output_tokens)
        self.requests += 1
        history = [{"role": "user", "content": turn.text}] if turn.text else []
        path, body = make_body(target, turn, history, record)
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else None
        stream = Stream(record, None, [], Lines(), bytearray(), 0)
        first = False

        def on_body(now: int, data: bytes) -> None:
            nonlocal first
            stream.on_body(now, data)
            if record.chunk_ns and not first:
                first = True
                loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(query, 0, 0)])

        try:
            async with asyncio.timeout(target.timeout):
                reply = await self._pool.request(
                    request_bytes(self._pool.address, "POST", path, body, headers), on_body
                )
            judge(target, stream, reply)
        except (TimeoutError, ConnectionLost) as error:
            record.error = str(error) or f"no end after {target.timeout:g} s"
        if record.error is not None:
            self.failures.append(record.error)
            if not first:
                loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(query, 0, 0)])
        tokens = max(1, record.tokens) if record.error is None else 1
        answer = array.array("B", "".join(stream.text).encode() if self._accuracy else b"")
        address, size = answer.buffer_info()
        loadgen.QuerySamplesComplete(
            [loadgen.QuerySampleResponse(query, address if size else 0, size, tokens)]
        )


def run_mlperf(options: MlperfOptions, material: Material, root: Path) -> MlperfResult:
    """One test; blocks until LoadGen is done. Raises `OptionError` where it is not installed."""
    options.verify()
    try:
        import mlperf_loadgen as loadgen
    except ImportError:
        raise OptionError(
            'MLPerf scenarios need LoadGen: pip install "headrace[bench]"', param="scenario"
        ) from None
    folder = root / "results" / options.system / options.target.model.replace("/", "_")
    folder = folder / options.scenario / options.mode
    if options.mode == "performance":
        folder = folder / "run_1"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadraceError(f"{folder}: {error.strerror}", param="out") from None
    under_test = SystemUnderTest(loadgen, options, material)
    sut = loadgen.ConstructSUT(under_test.issue, under_test.flush)
    qsl = loadgen.ConstructQSL(
        options.samples, options.samples, lambda _indices: None, lambda _indices: None
    )
    output = loadgen.LogOutputSettings()
    output.outdir = str(folder)
    output.copy_summary_to_stdout = False
    logs = loadgen.LogSettings()
    logs.log_output = output
    logs.enable_trace = False
    try:
        loadgen.StartTestWithLogSettings(sut, qsl, settings(loadgen, options), logs)
    finally:
        loadgen.DestroyQSL(qsl)
        loadgen.DestroySUT(sut)
        under_test.close()
    summary = read_summary(folder / SUMMARY)
    verdict = summary.get("Result is")
    return MlperfResult(
        folder, None if verdict is None else verdict == "VALID", summary, under_test.requests,
        under_test.failures,
    )  # fmt: skip


def settings(loadgen: Any, options: MlperfOptions) -> Any:
    """LoadGen's settings of a scenario; Interactive is Server with tighter limits."""
    made = loadgen.TestSettings()
    scenario = "Server" if options.scenario == "Interactive" else options.scenario
    made.scenario = getattr(loadgen.TestScenario, scenario)
    made.mode = (
        loadgen.TestMode.AccuracyOnly
        if options.mode == "accuracy"
        else loadgen.TestMode.PerformanceOnly
    )
    made.min_duration_ms = int(options.min_seconds * 1000)
    made.min_query_count = options.min_queries
    made.use_token_latencies = True
    made.ttft_latency = int(options.ttft_ms * 1e6)
    made.tpot_latency = int(options.tpot_ms * 1e6)
    made.server_target_qps = options.qps
    made.offline_expected_qps = options.qps
    made.multi_stream_samples_per_query = MULTISTREAM_SAMPLES
    for name, seed in SEEDS.items():
        setattr(made, name, seed)
    return made


def read_summary(path: Path) -> dict[str, str]:
    """`mlperf_log_summary.txt` as name → value, in its order."""
    if not path.is_file():
        raise HeadraceError(f"LoadGen wrote no {path}")
    found = {}
    for line in path.read_text().splitlines():
        match = re.match(r"\s*([^:]+?)\s*: (.+)", line)
        if match is not None:
            found[match.group(1)] = match.group(2).strip()
    return found
