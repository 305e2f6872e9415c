"""One run from options to result: query the server, make the workload, send it, check the run."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest, Overloaded
from ..base.foreign import any_json
from ..loader import open_model
from ..text import load_tokenizer
from .arrivals import Arrivals, parse_arrivals, scheduled
from .audit import Finding, examine, few_for, saturated, unsteady
from .crosscheck import cross_check, means, read_metrics
from .energy import EnergyMeter
from .fleet import Fleet, Supply, deal
from .http import ConnectionLost, fetch, parse_url
from .identity import identify
from .job import Job, Target
from .lengths import Lengths, parse_lengths
from .material import Material
from .metrics import Run, parse_slo, possible_hit_rate, prefix_hit_rate
from .options import MOST_SIDE, RunOptions
from .record import ClientAudit, RequestRecord
from .result import document
from .store import Store
from .telemetry import Telemetry, probes_of
from .traces import load_trace
from .workload import Session, Wish, make_workload, shareable_tokens

SATURATION_EVERY = 20
"""Answers between saturation checks of an open loop, if saturation is to end it."""
STARTED = "headrace.bench.started/1"


@dataclass(slots=True)
class Progress:
    """State shown by a live view during a run."""

    total: int
    records: list[RequestRecord] = field(default_factory=list)
    lasts: float | None = None
    """Seconds, if only a duration ends the run; then `total` is only the number at the start."""
    started: float = field(default_factory=time.monotonic)
    phase: str = "preparing"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    result: dict[str, Any]
    run: Run
    problem: str | None
    """Reason why the files are incomplete (a full disk)."""


Watch = Callable[[Progress], None]


def run_bench(
    options: RunOptions, folder: Path | None = None, watch: Watch = lambda _progress: None
) -> Outcome:
    """Measure. Ctrl-C ends the run early and keeps its records.

    Raises `InvalidRequest` for bad options, `Overloaded` if no server answers.
    """
    options.verify()
    server = ask_server(options)
    model = options.model or server["model"]
    material = make_material(options.tokenizer)
    sessions, arrivals = make_sessions(options, material)
    target = Target(
        options.url,
        model,
        options.resolved_endpoint,
        options.api_key,
        options.ignore_eos,
        options.temperature,
        options.streams,
        options.extra,
        options.timeout,
        options.stall,
    )
    offsets = None
    if arrivals is not None:
        stream = arrivals(random.Random(options.seed + 1))
        if options.endless:
            assert options.duration is not None
            lasts = options.duration
            offsets = list(itertools.takewhile(lambda offset: offset < lasts, stream))
            sessions = make_sessions(replace(options, requests=max(1, len(offsets))), material)[0]
        else:
            offsets = list(itertools.islice(stream, len(sessions)))
        if options.duration is not None:
            sessions = sessions[: sum(offset < options.duration for offset in offsets)]
            offsets = offsets[: len(sessions)]
            if not sessions:
                raise InvalidRequest("no request is due within the duration", param="duration")
    endless = options.endless and offsets is None
    progress = Progress(sum(len(session.turns) for session in sessions))
    if endless:
        progress.lasts = options.duration
    store = Store(folder)
    try:
        started = {"schema": STARTED, "options": options.public(), "server": server}
        store.json("run.json", started)  # For `recovery`, if this process is killed.
        progress.phase = "warming up"
        watch(progress)
        _warm_up(options, target, material)
        progress.phase, progress.started = "running", time.monotonic()
        whole = Job(
            0,
            target,
            sessions,
            list(range(len(sessions))),
            concurrency=None if offsets is not None else options.concurrency,
            offsets=offsets,
            duration=options.duration,
            # Answers continue after their end, so a recount of their text proves nothing.
            tokenizer=None if options.ignores_eos else options.tokenizer,
            endless=endless,
            most=options.max_concurrency,
            ramp=options.ramp,
            grace=options.grace,
        )
        jobs = deal(whole, options.processes)
        supply = Supply(
            lambda count: make_sessions(replace(options, requests=count), material)[0],
            len(sessions),
            len(jobs),
        )
        fleet = Fleet(jobs, supply if endless else None)

        stop: list[Finding] = []

        def keep(record: RequestRecord) -> None:
            progress.records.append(record)
            store.record(record)
            if not stop and (why := stop_now(options, progress.records)) is not None:
                stop.append(why)
                fleet.stop()

        address = parse_url(options.url)
        before, meter = read_metrics(address), EnergyMeter(local=address.local)
        watched = options.metrics_interval > 0
        probes = probes_of(options.url, options.metrics_urls, options.api_key) if watched else []
        with Telemetry(probes, options.metrics_interval) as telemetry:
            finished = fleet.run(keep, lambda: watch(progress))
        joules = meter.joules()
        histograms = means(before, read_metrics(address))
        waited = histograms.get("queue", {}).get("mean")
        run = make_run(options, progress.records, fleet.start_ns, sessions, joules, waited)
        result = judge_run(
            options, run, server, fleet.audits, histograms, interrupted=not finished, stopped=stop
        )
        result["telemetry"] = telemetry.document(fleet.start_ns)
        progress.phase = "done"
        store.json("result.json", result)
    finally:
        store.close()
    return Outcome(result, run, store.problem)


def make_run(
    options: RunOptions,
    records: list[RequestRecord],
    start_ns: int,
    sessions: list[Session],
    joules: float | None = None,
    queue_seconds: float | None = None,
) -> Run:
    end = max((record.end_ns for record in records), default=start_ns + 1)
    single = all(len(session.turns) == 1 for session in sessions)
    complete = len(records) == len(sessions)
    return Run(
        sorted(records, key=lambda record: record.planned_ns),
        start_ns,
        max(end, start_ns + 1),
        parse_slo(options.slo) if options.slo else None,
        shareable_tokens(sessions) if single and complete else None,
        options.devices,
        options.price_per_hour,
        joules,
        queue_seconds,
    )


def judge_run(
    options: RunOptions,
    run: Run,
    server: dict[str, Any],
    audits: list[ClientAudit],
    histograms: dict[str, dict[str, float]],
    *,
    interrupted: bool,
    stopped: Sequence[Finding] = (),
) -> dict[str, Any]:
    findings = list(stopped)
    if options.arrivals is None and not interrupted and not stopped:
        findings += unsteady(run.records, options.concurrency)
    findings += examine(
        run.records,
        audits,
        open_loop=options.arrivals is not None,
        ignore_eos=options.ignores_eos,
        stream=options.streams,
    )
    table, disagreements = cross_check(histograms, run.records, stream=options.streams)
    findings += disagreements
    findings += stale_hits(run, template=options.resolved_endpoint == "chat")
    if run.slo is not None:
        findings += few_for(run.slo, run.records)
    if interrupted:
        findings.append(Finding("warning", "interrupted", "the run was interrupted"))
    return document(
        run=run,
        options=options.public(),
        server={**server, "histograms": table},
        audits=audits,
        findings=findings,
        interrupted=interrupted,
    )


def stop_now(options: RunOptions, records: Sequence[RequestRecord]) -> Finding | None:
    """Return a finding that ends the load early, or None."""
    failed = sum(record.error is not None for record in records)
    if options.max_errors is not None and failed > options.max_errors:
        text = f"ended early: {failed} requests failed, more than {options.max_errors}"
        return Finding("invalid", "max_errors", text)
    if options.stop_saturated and len(records) % SATURATION_EVERY == 0:
        return saturated(records, draining=False)
    return None


def stale_hits(run: Run, *, template: bool = False) -> list[Finding]:
    """Report cache hits for prompts that this run sent for the first time.

    With a `template` (chat), all requests share the tokens that it adds around every prompt.
    """
    possible, hit = possible_hit_rate.value(run), prefix_hit_rate.value(run)
    counted = [r for r in run.good if r.prompt_tokens and r.known_prompt_tokens] if template else []
    total = sum(r.prompt_tokens or 0 for r in counted)
    if total:
        around = sum(max(0, (r.prompt_tokens or 0) - r.known_prompt_tokens) for r in counted)
        possible = (possible or 0.0) + around / total
    if run.shareable_tokens is None or hit is None or hit <= (possible or 0.0) + 0.05:
        return []
    return [
        Finding(
            "warning",
            "stale_hits",
            f"{hit:.0%} of the prompt tokens came from the server's prefix cache, at most "
            f"{possible or 0:.0%} were shared in this run: an earlier run sent the same prompts; "
            "use another --seed",
        )
    ]


def ask_server(options: RunOptions) -> dict[str, Any]:
    """Query the server's model and version; raise `Overloaded` if it does not answer."""
    address = parse_url(options.url)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else None
    give_up = time.monotonic() + options.wait
    while True:
        try:
            status, body = asyncio.run(
                fetch(address, "GET", "/v1/models", headers=headers, timeout=10)
            )
        except ConnectionLost as error:
            raise Overloaded(
                f"no server to measure: {error}; headrace serve starts one", param="url"
            ) from None
        if status != 503 or time.monotonic() > give_up:
            break
        time.sleep(0.5)  # It is up and loading its model.
    if status == 503:
        raise Overloaded(
            f"{options.url} is still not ready after {options.wait:g} s: {body[:200]!r}",
            param="url",
        )
    found: dict[str, Any] = {"url": options.url, "model": options.model or "", "software": None}
    if status == 200:
        try:
            listed = any_json(body)["data"]
            models = [str(item["id"]) for item in listed]
            found["software"] = next(
                (str(o["owned_by"]) for o in listed if o.get("owned_by")), None
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            models = []
        if models and options.model is None:
            found["model"] = models[0]
    elif status in (401, 403):
        raise InvalidRequest(f"{options.url} wants another --api-key (HTTP {status})")
    if not found["model"]:
        raise InvalidRequest(f"{options.url} names no model: pass --model", param="model")
    identity = identify(address, headers or {})
    found["version"], found["commit"] = identity.version, identity.commit
    return found


def make_material(tokenizer: str | None) -> Material:
    if tokenizer is None:
        return Material(None)
    files = open_model(tokenizer)
    return Material(load_tokenizer(files.tokenizer, files.arch.vocab_size))


def make_sessions(options: RunOptions, material: Material) -> tuple[list[Session], Arrivals | None]:
    """Make the workload and its arrivals (None: closed loop)."""
    if options.trace is not None:
        kind, _, path = options.trace.partition(":")
        sessions = load_trace(kind, Path(path), material, limit=options.requests, seed=options.seed)
        if options.arrivals == "trace":
            times = [session.at for session in sessions]
            if None in times:
                raise InvalidRequest(f"a {kind} trace has no times", param="arrivals")
            return sessions, scheduled([t for t in times if t is not None], options.trace_speed)
    else:
        sessions = make_workload(options.workload, make_wish(options, material))
    arrivals = parse_arrivals(options.arrivals) if options.arrivals is not None else None
    return sessions, arrivals


def make_wish(options: RunOptions, material: Material) -> Wish:
    return Wish(
        sessions=options.sessions,
        seed=options.seed,
        input=parse_lengths(options.input, "input"),
        output=parse_lengths(options.output, "output"),
        picture=_sides(options.picture),
        material=material,
        ids=options.resolved_endpoint != "chat" and bool(material.ids),
        groups=options.groups,
        prefix_tokens=options.prefix_tokens,
        zipf=options.zipf,
        turns=options.turns,
        think_seconds=options.think_seconds,
    )


def _sides(text: str) -> Lengths:
    sides = parse_lengths(text, "picture")
    return replace(sides, high=min(sides.high, MOST_SIDE))


def _warm_up(options: RunOptions, target: Target, material: Material) -> None:
    """Send a few uncounted requests, with another seed so that no prefix is shared."""
    if not options.warms_up:
        return
    wish = make_wish(
        replace(
            options,
            workload="fixed",
            requests=options.warms_up,
            seed=options.seed + 7919,
            output="8",
            trace=None,
        ),
        material,
    )
    sessions = make_workload("fixed", wish)
    numbers = list(range(len(sessions)))
    Fleet([Job(0, target, sessions, numbers, options.concurrency)]).run(lambda _record: None)
