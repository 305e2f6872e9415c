"""MLPerf Inference scenarios through the real LoadGen (`mlcommons-loadgen`).

LoadGen schedules the queries and judges the run. This file is only the system under test: it sends
each sample to a server and reports first tokens and ends. LoadGen's verdict is shown unchanged.
LoadGen has no failed requests, so ours are counted and shown separately.

Log files have the layout of submissions: results/SYSTEM/MODEL/SCENARIO/performance/run_1/
mlperf_log_*.txt, …/accuracy/, and a compliance test in …/TEST01/ and so on; `mlperf_submission`
writes the files next to them.
"""

from __future__ import annotations

import array
import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.config import option, parse_seconds, verify_bounds
from ..base.errors import HeadraceError, InvalidRequest, file_errors, one_of
from ..base.extras import needed
from ..obs.tasks import TaskWatch
from ..obs.threads import THREADS
from .audit import Finding, examine
from .client import Stream, judge, make_body, watch_lag
from .http import ConnectionLost, Pool, parse_url, request_bytes
from .job import Target
from .lengths import Lengths
from .material import Material
from .mlperf_accuracy import LOG, SCORES, read_logged, scores_of, write_accuracy
from .mlperf_compliance import (
    TESTS,
    ComplianceVerdict,
    audit_config,
    verify_lengths,
    verify_same,
    verify_score,
    verify_speed,
    verify_tokens,
    write_verdicts,
)
from .mlperf_hearing import AT_ONCE, KEPT, sound_request, take_transcript, word_accuracy
from .mlperf_samples import LibrarySample, made
from .mlperf_submission import SEEDS
from .record import ClientAudit, RequestRecord
from .sse import Lines
from .store import write_text

SCENARIOS = ("SingleStream", "MultiStream", "Server", "Interactive", "Offline")
MULTISTREAM_SAMPLES = 8
LIBRARY = 64
"""Number of samples to make if the user has none."""
HEADROOM = 1.5
"""Factor on the rate of one pass through the library, which includes its start and end."""
SUMMARY = "mlperf_log_summary.txt"
SUBMISSION_SECONDS = 600.0
"""Shortest run that MLPerf's rules accept."""


@dataclass(slots=True)
class MlperfOptions:
    """One LoadGen test. The defaults of the limits are llama3.1-8b's of v6.1."""

    target: Target
    scenario: str = "Offline"
    mode: str = option("performance", "performance, accuracy or both.")
    samples: int | None = option(
        None, f"Samples; none: all of a data set or trace, else {LIBRARY}.", above=0
    )
    input: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    output: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    min_seconds: float = option(
        SUBMISSION_SECONDS,
        f"Shortest run; a submission needs {SUBMISSION_SECONDS:g}.",
        above=0,
        flag=("--seconds",),
    )
    min_queries: int = option(1, "Fewest queries.", above=0, flag=("--queries",))
    qps: float | None = option(
        None,
        "Rate of Server and Interactive (none: 1); of Offline the rate that is expected (none: "
        "measured with one pass through the library).",
        above=0,
    )
    ttft: str = option("2s", "Limit of Server and Interactive, as in 500ms.")
    tpot: str = option("100ms", "Limit of Server and Interactive between tokens.")
    system: str = option("this", "Name of the system in the folders.")
    seed: int = 0
    library: list[LibrarySample] | None = None
    """Existing samples; None: made from the seed."""
    test: str | None = option(None, f"Compliance test: {', '.join(TESTS)}.")
    user_conf: Path | None = field(
        default=None,
        metadata={"help": "LoadGen's user.conf; it and LoadGen's mlperf.conf win over flags."},
    )
    benchmark: str | None = option(
        None, "Model's name in mlperf.conf, as in llama3_1-8b; none: the server's."
    )
    token_ids: bool = option(
        False, "Log ids of tokens (return_token_ids), not text.", flag=("--token-ids",)
    )
    end_id: int | None = option(None, "End of text, for TEST06.", flag=("--eos-id",))
    threshold: float | None = option(
        None, "Score in per cent that TEST07 asks for.", flag=("--accuracy-threshold",)
    )
    score: str = option("rougeL", f"{' or '.join(SCORES)}: what TEST07 and accuracy runs go by.")
    reference_tokens: float | None = option(
        None, "Mean tokens of the reference's answers, for TEST09."
    )

    def verify(self) -> None:
        one_of(self.scenario, SCENARIOS, "scenario")
        one_of(self.mode, ("performance", "accuracy"), "mode")
        if self.test is not None:
            one_of(self.test, TESTS, "test")
        if self.test is not None and self.mode != "performance":
            raise InvalidRequest("a compliance test is a performance run", param="mode")
        one_of(self.score, SCORES, "score")
        if self.user_conf is not None and not self.user_conf.is_file():
            raise InvalidRequest(f"no such file: {self.user_conf}", param="user_conf")
        if self.hears and self.scenario != "Offline":
            raise InvalidRequest("sounds are heard under Offline alone", param="scenario")
        if self.hears and self.test not in (None, "TEST01", "TEST07"):
            raise InvalidRequest(f"{self.test} is for language models", param="test")
        self.limits()
        verify_bounds(self)

    def limits(self) -> tuple[int, int]:
        """Return the nanoseconds to the first token and between tokens; raise `OptionError`."""
        found = [round(parse_seconds(getattr(self, name), name) * 1e9) for name in ("ttft", "tpot")]
        for name, value in zip(("ttft", "tpot"), found, strict=True):
            if not value:
                raise InvalidRequest(f"{name} must be a time above 0", param=name)
        return found[0], found[1]

    @property
    def hears(self) -> bool:
        """Whether the samples are sounds."""
        return bool(self.library) and self.library[0].recording is not None  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class MlperfResult:
    """LoadGen's output, and our count of failures."""

    folder: Path
    valid: bool | None
    """LoadGen's verdict; None in accuracy mode, which has none."""
    summary: dict[str, str]
    requests: int
    failures: list[str]
    findings: list[Finding]
    """Findings about this client and server by the rules of `bench run`, which LoadGen lacks."""
    verdicts: list[ComplianceVerdict] = field(default_factory=list)
    """Verdicts of the compliance test."""
    passed: bool | None = None
    """Whether the compliance test passed; None if there was none."""
    scores: dict[str, float] | None = None
    """Per cent of the data set's ground truth, if it has one."""


class SystemUnderTest:
    """Sender of LoadGen's samples over an event loop in its own thread."""

    def __init__(self, loadgen: Any, options: MlperfOptions, material: Material) -> None:
        self._loadgen = loadgen
        self.target = options.target
        self.accuracy = options.mode == "accuracy" or options.test is not None
        self.offline = options.scenario == "Offline"
        self.token_ids = options.token_ids and self.accuracy
        if self.token_ids:
            self.target.extra = {**self.target.extra, "return_token_ids": True}
        exact = material if options.target.endpoint == "completions" else Material()
        self.samples = options.library or made(
            options.samples or LIBRARY, options.input, options.output, exact, options.seed
        )
        self.answers: dict[int, str] = {}
        """Sample index → its latest text."""
        self.records: list[RequestRecord] = []
        self.audit = ClientAudit(0)
        self._loop = asyncio.new_event_loop()
        self._pool = Pool(parse_url(options.target.url))
        self._thread = THREADS.keep("load", self._loop.run_forever)
        self._errands = TaskWatch()
        self._places = asyncio.Semaphore(AT_ONCE if options.hears else 1 << 20)
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    async def _end(self) -> None:
        """Cancel all our tasks in the loop."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        self._pool.close()

    async def _watch(self) -> None:
        """Measure the loop's lag and the CPU of its thread while LoadGen runs."""
        cpu, wall = time.thread_time(), time.monotonic()
        try:
            await watch_lag(self.audit.lag_ns)
        finally:
            self.audit.cpu_seconds = time.thread_time() - cpu
            self.audit.wall_seconds = time.monotonic() - wall

    def rate(self) -> float:
        """Return the samples per second when the whole library is sent at once."""
        begin = time.monotonic()

        async def all_of_them() -> None:
            await asyncio.gather(*(self._exchange(one, begin, None) for one in self.samples))

        asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()
        return len(self.samples) / (time.monotonic() - begin)

    def failures(self) -> list[str]:
        return [record.error for record in self.records if record.error is not None]

    def issue(self, queries: list[Any]) -> None:
        """Take queries from LoadGen; return at once."""
        pairs = [(query.id, query.index) for query in queries]
        self._loop.call_soon_threadsafe(self._start, pairs, time.monotonic())

    def flush(self) -> None:
        """Do nothing: no query is held back."""

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _start(self, pairs: list[tuple[int, int]], planned: float) -> None:
        for query, index in pairs:
            work = self._query(query, index, planned)
            task = self._errands.errand("query", work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _query(self, query: int, index: int, planned: float) -> None:
        loadgen = self._loadgen

        def first_token(stream: Stream | None) -> None:
            first = array.array("B", b"" if stream is None else self._logged(stream))
            address, size = first.buffer_info()
            loadgen.FirstTokenComplete(
                [loadgen.QuerySampleResponse(query, address if size else 0, size)]
            )

        record, stream = await self._exchange(self.samples[index], planned, first_token)
        self.records.append(record)
        self.answers[index] = "".join(stream.text)
        if record.error is not None and not record.chunk_ns:
            first_token(None)
        tokens = max(1, record.tokens) if record.error is None else 1
        answer = array.array("B", self._logged(stream))
        address, size = answer.buffer_info()
        loadgen.QuerySamplesComplete(
            [loadgen.QuerySampleResponse(query, address if size else 0, size, tokens)]
        )

    def _logged(self, stream: Stream) -> bytes:
        """Return the bytes of a partial answer for LoadGen's log: ids as int32, else text."""
        if not self.accuracy:
            return b""
        if self.token_ids:
            return array.array("i", stream.ids).tobytes()
        return "".join(stream.text).encode()

    async def _exchange(
        self,
        sample: LibrarySample,
        planned: float,
        first_token: Callable[[Stream | None], None] | None,
    ) -> tuple[RequestRecord, Stream]:
        """Send a sample to the server; `planned`: its due time on the monotonic clock."""
        target, turn = self.target, sample.turn
        record = RequestRecord(
            len(self.records),
            len(self.records),
            0,
            0,
            int(planned * 1e9),
            asked_tokens=turn.output_tokens,
        )
        hears = sample.recording is not None
        if hears:
            asked = sound_request(self._pool.address, target, sample)
        else:
            path, body = make_body(target, turn, list(sample.history), record)
            headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else None
            asked = request_bytes(self._pool.address, "POST", path, body, headers)
        stream = Stream(record, None, [], Lines(), bytearray(), 0, KEPT if hears else 4096)
        first = False

        def on_body(now: int, data: bytes) -> None:
            nonlocal first
            stream.on_body(now, data)
            if record.chunk_ns and not first:
                first = True
                if first_token is not None:
                    first_token(stream)

        record.sent_ns = time.monotonic_ns()
        try:
            async with self._places, asyncio.timeout(target.timeout):
                reply = await self._pool.request(asked, on_body)
            if hears:
                take_transcript(stream, reply.status)
            else:
                judge(target, stream, reply)
        except (TimeoutError, ConnectionLost) as error:
            record.error_kind = "connection"
            record.error = str(error) or f"no end after {target.timeout:g} s"
        record.end_ns = time.monotonic_ns()
        text = "".join(stream.text)
        record.text_bytes = len(text.encode(errors="replace"))
        return record, stream


def run_mlperf(options: MlperfOptions, material: Material, root: Path) -> MlperfResult:
    """Run one test; blocks until LoadGen is done. Raises `PackageAbsent` without it."""
    options.verify()
    loadgen = needed("mlperf_loadgen", "MLPerf scenarios", "bench", param="scenario")
    place = root / "results" / options.system / options.target.model.replace("/", "_")
    place = place / options.scenario
    folder = place / "accuracy"
    if options.mode == "performance":
        folder = (place / options.test if options.test else place) / "performance" / "run_1"
    with file_errors(HeadraceError, f"{folder}", "out"):
        folder.mkdir(parents=True, exist_ok=True)
    under_test = SystemUnderTest(loadgen, options, material)
    sut = loadgen.ConstructSUT(under_test.issue, under_test.flush)
    qsl = loadgen.ConstructQSL(
        len(under_test.samples),
        len(under_test.samples),
        lambda _indices: None,
        lambda _indices: None,
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
        # Always named: otherwise LoadGen would read an audit.config of its working folder.
        config = folder.parent.parent / "audit.config" if options.test else folder / "no-audit"
        if options.test:
            write_text(config, audit_config(options.test, len(under_test.samples)))
        loadgen.StartTestWithLogSettings(sut, qsl, settings(loadgen, options), logs, str(config))
    finally:
        loadgen.DestroyQSL(qsl)
        loadgen.DestroySUT(sut)
        under_test.close()
    summary = read_summary(folder / SUMMARY)
    verdict = summary.get("Result is")
    scores = None
    if under_test.accuracy:
        answers, truths = under_test.answers, [one.truth for one in under_test.samples]
        if options.hears:
            heard = word_accuracy(answers, truths)
            scores = None if heard is None else {"word_accuracy": heard}
        else:
            scores = scores_of(answers, truths)
    verdicts: list[ComplianceVerdict] = []
    passed = None
    if options.test:
        (place / options.test / "accuracy").mkdir(exist_ok=True)
        (folder / LOG).replace(place / options.test / "accuracy" / LOG)
        verdicts = verify(options, place, folder, scores)
        passed = write_verdicts(place / options.test, options.test, verdicts)
    elif options.mode == "accuracy":
        write_accuracy(folder, scores, [record.tokens for record in under_test.records])
    return MlperfResult(
        folder,
        None if verdict is None else verdict == "VALID",
        summary,
        len(under_test.records),
        under_test.failures(),
        audit(under_test),
        verdicts,
        passed,
        scores,
    )


def verify(
    options: MlperfOptions, place: Path, folder: Path, scores: dict[str, float] | None
) -> list[ComplianceVerdict]:
    """Check a compliance test with its own logs and the submission's."""
    logged = read_logged(place / str(options.test) / "accuracy")
    if options.test == "TEST01":
        return [
            verify_same(logged, place / "accuracy"),
            verify_speed(folder, place / "performance" / "run_1", options.scenario),
        ]
    if options.test == "TEST06":
        ids, offline = options.token_ids, options.scenario == "Offline"
        return verify_tokens(logged, ids=ids, end=options.end_id, offline=offline)
    if options.test == "TEST07":
        found = None if scores is None else scores.get(options.score)
        return [verify_score(found, options.threshold)]
    return [verify_lengths(logged, options.reference_tokens)]


def audit(under_test: SystemUnderTest) -> list[Finding]:
    """Judge client and server by the rules of `bench run`."""
    target = under_test.target
    found = examine(
        under_test.records,
        [under_test.audit],
        open_loop=False,
        ignore_eos=target.ignore_eos,
        stream=target.stream,
    )
    # LoadGen decides the number of queries; an accuracy run has no times; Offline's queries are all
    # due at once.
    aside = {"few_requests"}
    if under_test.accuracy:
        aside |= {"client_lag", "client_cpu", "late_sends"}
    if under_test.offline:
        aside.add("late_sends")
    return [finding for finding in found if finding.code not in aside]


def settings(loadgen: Any, options: MlperfOptions) -> Any:
    """Return LoadGen's settings of a scenario; Interactive is Server with tighter limits."""
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
    made.ttft_latency, made.tpot_latency = options.limits()
    made.server_target_qps = made.offline_expected_qps = options.qps or 1.0
    made.multi_stream_samples_per_query = MULTISTREAM_SAMPLES
    for name, seed in SEEDS.items():
        setattr(made, name, seed)
    if options.user_conf is not None:
        name = options.benchmark or options.target.model
        if made.FromConfig(str(options.user_conf), name, scenario):
            raise InvalidRequest(f"LoadGen cannot read {options.user_conf}", param="user_conf")
    return made


def configuration(options: MlperfOptions) -> str:
    """Return the options as LoadGen's `user.conf`."""
    if options.user_conf is not None:
        return options.user_conf.read_text()
    scenario = "Server" if options.scenario == "Interactive" else options.scenario
    values: dict[str, float] = {
        "min_duration": int(options.min_seconds * 1000),
        "min_query_count": options.min_queries,
    }
    if options.qps is not None:
        values["target_qps"] = options.qps
    return "".join(f"*.{scenario}.{name} = {value:g}\n" for name, value in values.items())


def read_summary(path: Path) -> dict[str, str]:
    """Read `mlperf_log_summary.txt` as name → value, in its order."""
    if not path.is_file():
        raise HeadraceError(f"LoadGen wrote no {path}")
    found = {}
    for line in path.read_text().splitlines():
        match = re.match(r"\s*([^:]+?)\s*: (.+)", line)
        if match is not None:
            found[match.group(1)] = match.group(2).strip()
    return found
