"""Throughput and latency of an engine in this process, without HTTP, with the same records.

*Throughput*: tokens a second with all requests submitted at once. *Latency*: the time of a batch of
simultaneous requests, repeated. The result has the form of a bench run, so that reports, the
history, comparisons and the roofline can read it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..base.config import EngineOptions
from ..base.errors import InvalidRequest
from ..base.process import Processes
from ..base.request import OutputDelta
from ..base.sampling import SamplingParams
from ..base.version import VERSION, revision
from ..engine.clients.llm import LLM
from .audit import Finding, examine
from .energy import EnergyMeter
from .metrics import Run
from .options import RunOptions
from .record import RequestRecord
from .result import LATENCY, THROUGHPUT, document
from .run import make_material, make_run, make_sessions
from .telemetry import Telemetry, local_probe
from .workload import Session

IN_PROCESS = "in-process"
WARM_UP = 8
"""Output tokens of the warm-up requests."""
OnRecord = Callable[[RequestRecord], None]


class OfflineBench:
    """An engine with a workload; a context manager, since it holds a model."""

    def __init__(self, engine: EngineOptions, options: RunOptions) -> None:
        """Load the engine; its model is `options.model`, and prompts use its own vocabulary."""
        options.verify()
        if options.arrivals is not None or options.duration is not None:
            raise InvalidRequest("an offline run has all requests at once", param="arrivals")
        self.options = options
        self._sessions = make_sessions(options, make_material(options.tokenizer))[0]
        for session in self._sessions:
            if (
                len(session.turns) != 1
                or session.turns[0].extra
                or session.turns[0].picture
                or not session.turns[0].output_tokens
            ):
                raise InvalidRequest(
                    "an offline run takes single requests that generate: the workloads fixed, "
                    "shared-prefix and long-context, or a trace of such",
                    param="workload",
                )
        self._llm = LLM(**asdict(engine))
        self._sent = 0

    def __enter__(self) -> OfflineBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def throughput(self, on_record: OnRecord = lambda _record: None) -> tuple[dict[str, Any], Run]:
        """Return (result, run) of all requests at once. Ctrl-C ends it; finished ones are kept."""
        return self._measured(THROUGHPUT, [self._sessions], on_record)

    def latency(
        self, on_record: OnRecord = lambda _record: None, *, batch: int
    ) -> tuple[dict[str, Any], Run]:
        """Return (result, run) of batches in sequence, each with its own prompts."""
        assert len(self._sessions) % batch == 0
        batches = [
            self._sessions[first : first + batch] for first in range(0, len(self._sessions), batch)
        ]
        return self._measured(LATENCY, batches, on_record)

    def _measured(
        self, kind: str, batches: Sequence[list[Session]], on_record: OnRecord
    ) -> tuple[dict[str, Any], Run]:
        options, interrupted = self.options, False
        self._warm_up(len(batches[0]))
        records: list[RequestRecord] = []

        def keep(record: RequestRecord) -> None:
            records.append(record)
            on_record(record)

        meter, watched = EnergyMeter(), options.metrics_interval > 0
        probes = [local_probe(Processes((os.getpid(),)))] if watched else []
        start_ns = time.monotonic_ns()
        with Telemetry(probes, options.metrics_interval) as telemetry:
            try:
                for sessions in batches:
                    self._together(sessions, len(records), keep)
            except KeyboardInterrupt:
                interrupted = True
        # Without the time spent reading the machine before the first request.
        start_ns = min((record.planned_ns for record in records), default=start_ns)
        run = make_run(options, records, start_ns, self._sessions, meter.joules())
        findings = examine(records, [], open_loop=False, ignore_eos=True, stream=True)
        if interrupted:
            findings.append(Finding("warning", "interrupted", "the run was interrupted"))
        result = document(
            run=run,
            options=options.public(),
            server={
                "url": IN_PROCESS,
                "model": options.model,
                "software": "headrace",
                "version": VERSION,
                "commit": revision(),
            },
            audits=[],
            findings=findings,
            interrupted=interrupted,
        )
        result["kind"] = kind
        result["engine"] = {one.name: one.value for one in self._llm.decisions}
        result["telemetry"] = telemetry.document(start_ns)
        return result, run

    def _warm_up(self, batch: int) -> None:
        """Run a few requests first, so that the measured ones are warm."""
        longest = max(session.turns[0].prompt_tokens for session in self._sessions)
        prompts = [[number % 7 + 3] * longest for number in range(min(batch, 8))]
        params = SamplingParams(temperature=0.0, max_tokens=WARM_UP, ignore_eos=True)
        self._llm.generate(prompts, params)
        self._sent += len(prompts)

    def _together(self, sessions: Sequence[Session], number: int, keep: OnRecord) -> None:
        """Answer simultaneous requests; keep each as it ends."""
        turns = [session.turns[0] for session in sessions]
        open_: dict[str, RequestRecord] = {}
        now = time.monotonic_ns()
        for place, (session, turn) in enumerate(zip(sessions, turns, strict=True)):
            open_[str(self._sent + place)] = RequestRecord(
                number + place,
                number + place,
                0,
                session.group,
                now,
                now,
                [],
                status=200,
                asked_tokens=turn.output_tokens,
                known_prompt_tokens=turn.prompt_tokens,
                exact_prompt=turn.ids is not None,
                output_tokens=0,
            )

        def take(delta: OutputDelta) -> None:
            at, record = time.monotonic_ns(), open_[delta.request_id]
            record.text_bytes += len(delta.text.encode(errors="replace"))
            if delta.prompt_tokens:  # Only with the first delta.
                record.prompt_tokens = delta.prompt_tokens
                record.cached_tokens = delta.cached_tokens
            if delta.token_ids:
                record.chunk_ns.append(at)
                record.output_tokens = (record.output_tokens or 0) + len(delta.token_ids)
            if delta.finish_reason is not None:
                record.end_ns, record.finish_reason = at, str(delta.finish_reason)
                if delta.finish_reason == "error":
                    record.error, record.error_kind = "the engine failed", "server"
                keep(record)

        params = [
            SamplingParams(
                temperature=self.options.temperature,
                max_tokens=turn.output_tokens,
                ignore_eos=self.options.ignore_eos,
                seed=self.options.seed,
            )
            for turn in turns
        ]
        prompts = [turn.text if turn.ids is None else turn.ids for turn in turns]
        self._llm.generate(prompts, params, on_delta=take)
        self._sent += len(turns)
