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
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest, OptionError
from ..obs.tasks import TaskWatch
from .audit import Finding, examine
from .client import Stream, judge, make_body, watch_lag
from .http import ConnectionLost, Pool, parse_url, request_bytes
from .job import Target
from .lengths import Lengths
from .material import Material
from .record import ClientAudit, RequestRecord
from .sse import Lines
from .workload import Turn

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Interactive", "Offline")
MULTISTREAM_SAMPLES = 8
HEADROOM = 1.5
"""Over the rate of one pass through the library, which has its beginning and its end in it."""
SUMMARY = "mlperf_log_summary.txt"
SUBMISSION_SECONDS = 600.0
"""Shortest run that MLPerf's rules accept."""
SEEDS = {
    "qsl_rng_seed": 2085463073848966840,
    "sample_index_rng_seed": 2747215439041700203,
    "schedule_rng_seed": 16159082839903944936,
}
"""Seeds that MLPerf Inference v6.1 prescribes."""


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
    qps: float | None = None
    """Target of Server and Interactive (none: 1), expectation of Offline (none: measured before:
    LoadGen makes as many samples as that rate takes in the shortest run)."""
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
            value = getattr(self, name)
            if value is not None and not value > 0:
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
    findings: list[Finding]
    """What `bench run` would say of this client and server; LoadGen looks at neither."""


class SystemUnderTest:
    """Sends samples from LoadGen's threads over an event loop in a thread of its own."""

    def __init__(self, loadgen: Any, options: MlperfOptions, material: Material) -> None:
        self._loadgen = loadgen
        self.target = options.target
        self.accuracy = options.mode == "accuracy"
        self.offline = options.scenario == "Offline"
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
        self.records: list[RequestRecord] = []
        self.audit = ClientAudit(0)
        self._loop = asyncio.new_event_loop()
        self._pool = Pool(parse_url(options.target.url))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._errands = TaskWatch()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    async def _watch(self) -> None:
        """The loop's lag and the CPU of its thread, while LoadGen runs."""
        cpu, wall = time.thread_time(), time.monotonic()
        try:
            await watch_lag(self.audit.lag_ns)
        finally:
            self.audit.cpu_seconds = time.thread_time() - cpu
            self.audit.wall_seconds = time.monotonic() - wall

    def rate(self) -> float:
        """Samples a second of the whole library, sent at once."""
        begin = time.monotonic()

        async def all_of_them() -> None:
            await asyncio.gather(*(self._exchange(turn, begin, None) for turn in self.samples))

        asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()
        return len(self.samples) / (time.monotonic() - begin)

    def failures(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    def issue(self, queries: list[Any]) -> None:
        """LoadGen's call: returns at once."""
        pairs = [(query.id, query.index) for query in queries]
        self._loop.call_soon_threadsafe(self._start, pairs, time.monotonic())

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._watched.cancel()
        self._loop.call_soon_threadsafe(self._pool.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _start(self, pairs: list[tuple[int, int]], planned: float) -> None:
        for query, index in pairs:
            work = self._query(query, self.samples[index], planned)
            task = self._errands.errand("query", work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _query(self, query: int, turn: Turn, planned: float) -> None:
        loadgen = self._loadgen

        def first_token() -> None:
            loadgen.FirstTokenComplete([loadgen.QuerySampleResponse(query, 0, 0)])

        record, text = await self._exchange(turn, planned, first_token)
        self.records.append(record)
        if record.error is not None and not record.chunk_ns:
            first_token()
        tokens = max(1, record.tokens) if record.error is None else 1
        answer = array.array("B", text.encode() if self.accuracy else b"")
        address, size = answer.buffer_info()
        loadgen.QuerySamplesComplete(
            [loadgen.QuerySampleResponse(query, address if size else 0, size, tokens)]
        )

    async def _exchange(
        self, turn: Turn, planned: float, first_token: Callable[[], None] | None
    ) -> tuple[RequestRecord, str]:
        """Ask the server; `planned` is when it was due, on the monotonic clock."""
        target = self.target
        record = RequestRecord(
            len(self.records),
            len(self.records),
            0,
            0,
            int(planned * 1e9),
            asked_tokens=turn.output_tokens,
        )
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
                if first_token is not None:
                    first_token()

        record.sent_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(target.timeout):
                reply = await self._pool.request(
                    request_bytes(self._pool.address, "POST", path, body, headers), on_body
                )
            judge(target, stream, reply)
        except (TimeoutError, ConnectionLost) as error:
            record.error_kind = "connection"
            record.error = str(error) or f"no end after {target.timeout:g} s"
        record.end_ns = time.monotonic_ns()
        text = "".join(stream.text)
        record.text_bytes = len(text.encode(errors="replace"))
        return record, text


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
        if options.scenario == "Offline" and options.qps is None:
            options = replace(options, qps=HEADROOM * under_test.rate())
        loadgen.StartTestWithLogSettings(sut, qsl, settings(loadgen, options), logs)
    finally:
        loadgen.DestroyQSL(qsl)
        loadgen.DestroySUT(sut)
        under_test.close()
    summary = read_summary(folder / SUMMARY)
    verdict = summary.get("Result is")
    return MlperfResult(
        folder,
        None if verdict is None else verdict == "VALID",
        summary,
        len(under_test.records),
        under_test.failures(),
        audit(under_test),
    )


def audit(under_test: SystemUnderTest) -> list[Finding]:
    """Whether client and server can be believed, by the rules of `bench run`."""
    target = under_test.target
    found = examine(
        under_test.records,
        [under_test.audit],
        open_loop=False,
        ignore_eos=target.ignore_eos,
        stream=target.stream,
    )
    # How many queries are enough is LoadGen's to say; an accuracy run has no times; Offline's
    # queries are all due at once.
    aside = {"few_requests"}
    if under_test.accuracy:
        aside |= {"client_lag", "client_cpu", "late_sends"}
    if under_test.offline:
        aside.add("late_sends")
    return [finding for finding in found if finding.code not in aside]


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
    made.server_target_qps = made.offline_expected_qps = options.qps or 1.0
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
