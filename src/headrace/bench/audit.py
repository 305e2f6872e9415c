"""Validity of a run: the client's own behaviour, and contradictions in the server's answers.

"invalid": the client was the bottleneck or nothing was measured, so the numbers are not the
server's. "server": the server's answers contradict its own figures. "warning": readers of the
numbers must know this.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .metrics import Slo
from .record import ClientAudit, RequestRecord

MAX_CPU_SHARE = 0.9
"""Largest share of one core that a client process may use."""
LAG_SHARE = 0.1
"""Share of the measured median latency above which timer or send delays falsify it."""
LAG_FLOOR = 10e-3
SEND_FLOOR = 10e-3
BUFFER_SHARE = 0.05
TOGETHER = 0.1
"""Share of the mean pause below which a piece counts as sent together with the previous one."""
BURSTS = 0.25
"""Share of such pieces from which pauses reflect the server's sending, not its computing."""
MAX_FAILURES = 0.05
"""Share of failed requests above which the actual load was not the planned one."""
FEW_FOR_P99 = 100
"""Requests below which a 99th percentile is the largest value or the one before it."""
STEADY_USERS, STEADY_TIME = 0.75, 0.5
"""Share of users that must be active in a closed loop, for this share of the time."""
STALL_FACTOR = 20
STALL_FLOOR = 1.0


class Finding(NamedTuple):
    """One finding."""

    severity: str
    """invalid, server or warning."""
    code: str
    text: str


_invalid, _server, _warning = (partial(Finding, one) for one in ("invalid", "server", "warning"))


def examine(
    records: Sequence[RequestRecord],
    audits: Sequence[ClientAudit],
    *,
    open_loop: bool,
    ignore_eos: bool,
    stream: bool,
) -> list[Finding]:
    """Return all findings, the worst first."""
    good = [record for record in records if record.ok]
    findings = [*_client(records, good, audits, open_loop=open_loop)]
    findings += [*_failures(records), *_usage(good, ignore_eos=ignore_eos)]
    if stream:
        findings += _streams(good)
    if open_loop and (found := saturated(records)) is not None:
        findings.append(found)
    if 0 < len(good) < FEW_FOR_P99:
        text = f"{len(good)} answers are too few for a 99th percentile: it is their largest value"
        findings.append(_warning("few_requests", text))
    order = {"invalid": 0, "server": 1, "warning": 2}
    return sorted(findings, key=lambda finding: order[finding.severity])


def send_lags(records: Sequence[RequestRecord]) -> list[float]:
    return [(record.sent_ns - record.planned_ns) / 1e9 for record in records]


def _client(
    records: Sequence[RequestRecord],
    good: Sequence[RequestRecord],
    audits: Sequence[ClientAudit],
    *,
    open_loop: bool,
) -> Iterator[Finding]:
    if not records:
        yield _invalid("nothing", "no request was sent")
        return
    if any(audit.gave_up for audit in audits):
        text = "the server was not there any more, so the run was ended before its time"
        yield _invalid("server_gone", text)
    if not good:
        yield _invalid("no_success", "no request succeeded")
        return
    for audit in audits:
        share = audit.cpu_seconds / audit.wall_seconds if audit.wall_seconds else 0.0
        if share > MAX_CPU_SHARE:
            yield _invalid(
                "client_cpu",
                f"client process {audit.process} used {share:.0%} of a core: the load "
                "generator was the bottleneck; use more --processes",
            )
    gaps = [b - a for record in good for a, b in itertools.pairwise(record.chunk_ns)]
    # An embedding has no pieces, so its first piece is its end.
    first = [(r.chunk_ns[0] if r.chunk_ns else r.end_ns) - r.planned_ns for r in good]
    scale = float(np.median(gaps or first or [0])) / 1e9
    lags = [lag / 1e9 for audit in audits for lag in audit.lag_ns]
    bound = max(LAG_FLOOR, LAG_SHARE * scale)
    if lags and (late := float(np.percentile(lags, 99))) > bound:
        yield _invalid(
            "client_lag",
            f"the client's event loop was {late * 1e3:.1f} ms late (p99; at most "
            f"{bound * 1e3:.1f} ms are sound here): its time stamps are not to be trusted; run "
            "it on another machine, or at a higher priority (chrt -f 1; "
            "where the system groups by session, nice does nothing between two of them)",
        )
    delays = send_lags(records)
    bound = max(SEND_FLOOR, LAG_SHARE * float(np.median(first or [0])) / 1e9)
    if (late := float(np.percentile(delays, 99))) > bound:
        what = "after their arrival" if open_loop else "after their user was ready"
        yield _invalid(
            "late_sends",
            f"requests were sent {late * 1e3:.1f} ms {what} (p99; at most "
            f"{bound * 1e3:.1f} ms are sound here): the offered load was not the planned one",
        )


def _failures(records: Sequence[RequestRecord]) -> Iterator[Finding]:
    kinds = Counter(record.error_kind or "" for record in records if record.error is not None)
    failed = kinds.total()
    if failed > MAX_FAILURES * len(records) and failed < len(records):
        yield _invalid(
            "failures",
            f"{failed / len(records):.0%} of the requests failed (at most {MAX_FAILURES:.0%} "
            "are sound): what is left is not the load that was meant",
        )
    for kind, count in kinds.most_common():
        example = next(r.error for r in records if r.error_kind == kind and r.error is not None)
        text = f"{count} of {len(records)} requests failed ({kind}), for example: {example:.200}"
        yield _warning(f"failed_{kind}", text)
    again = sum(record.reconnected for record in records)
    if again:
        yield _warning(
            "reconnected",
            f"{again} of {len(records)} requests found the connection closed that the server "
            "had kept open, and were sent again on a new one; the lost time counts",
        )


def _usage(good: Sequence[RequestRecord], *, ignore_eos: bool) -> list[Finding]:
    """Compare the server's token counts with the prompts sent and the pieces received."""
    findings = []

    def share(bad: int, text: str, code: str, severity: str = "server") -> None:
        if bad:
            findings.append(Finding(severity, code, f"{bad} of {len(good)} answers: {text}"))

    reported = [record for record in good if record.output_tokens is not None]
    if good and len(reported) < len(good):
        silent = [record for record in good if record.output_tokens is None]
        blind = any(not record.chunk_ns for record in silent)
        share(
            len(silent),
            "no usage, and not streamed: nobody knows how many tokens they have"
            if blind
            else "no usage; tokens are counted as pieces",
            "no_usage",
            "invalid" if blind else "warning",
        )
    share(
        sum((r.output_tokens or 0) > r.asked_tokens for r in reported),
        "usage claims more tokens than were asked for",
        "claims_more",
        "invalid",
    )
    share(
        sum(len(r.chunk_ns) > (r.output_tokens or 0) for r in reported),
        "more pieces than usage has tokens: pieces are sent twice, or usage leaves tokens out",
        "claims_less",
        "invalid",
    )
    # A token is at least one byte, except at the end: tokens without text may follow.
    plain = [r for r in reported if r.text_bytes + r.call_bytes]
    over = sum((r.output_tokens or 0) > r.text_bytes + r.call_bytes + 1 for r in plain)
    if ignore_eos:
        # A model may add tokens without text after its end: then this proves nothing.
        if over > len(reported) / 2:
            share(
                over,
                "usage claims more tokens than the answer has bytes: they are tokens without "
                "text, or not there; --eos tells",
                "claims_many",
                "warning",
            )
    else:
        share(
            over,
            "usage claims more tokens than the answer has bytes",
            "claims_impossible",
            "invalid",
        )
    # With ignore_eos, special tokens are counted but have no text, so a recount proves nothing.
    counted = [] if ignore_eos else [r for r in reported if r.recount_tokens is not None]
    differ = sum(
        abs((r.output_tokens or 0) - (r.recount_tokens or 0)) > 2 + 0.1 * (r.output_tokens or 0)
        for r in counted
    )
    if differ > len(counted) / 2:
        share(
            differ,
            "usage and the tokenizer's count of the text differ by more than 10 %",
            "claims_differ",
        )
    share(
        sum(
            r.prompt_tokens is not None
            and r.exact_prompt
            and not 0 <= r.prompt_tokens - r.known_prompt_tokens <= 1
            for r in reported
        ),
        "usage counts other prompt tokens than the ids that were sent (one begin-of-text is "
        "allowed)",
        "prompt_differs",
    )
    asked = [r for r in reported if r.known_prompt_tokens and not r.exact_prompt]
    share(
        sum((r.prompt_tokens or 0) > 1.8 * r.known_prompt_tokens + 64 for r in asked),
        "usage counts nearly twice the prompt's words and more: pass --tokenizer for prompts of "
        "exact lengths",
        "prompt_longer",
        "warning",
    )
    if ignore_eos:
        share(
            sum((r.output_tokens or 0) < r.asked_tokens for r in reported),
            "shorter than asked although ignore_eos was set: output lengths are not those planned",
            "short",
            "warning",
        )
    return findings


def _streams(good: Sequence[RequestRecord]) -> Iterator[Finding]:
    long = [record for record in good if record.tokens >= 8]
    bunched = [
        record
        for record in long
        if record.chunk_ns
        and record.chunk_ns[-1] - record.chunk_ns[0]
        < BUFFER_SHARE * (record.chunk_ns[-1] - record.sent_ns)
    ]
    if long and len(bunched) > len(long) / 2:
        yield _server(
            "buffered",
            f"{len(bunched)} of {len(long)} streams came all at once at their end: something "
            "buffers, TTFT and ITL say nothing",
        )
    gaps = [(b - a) / 1e9 for record in good for a, b in itertools.pairwise(record.chunk_ns)]
    if gaps:
        mean = sum(gaps) / len(gaps)
        together = sum(gap < TOGETHER * mean for gap in gaps) / len(gaps)
        if together >= BURSTS and len(bunched) <= len(long) / 2:
            yield _warning(
                "bursts",
                f"{together:.0%} of the pieces came together with the one before (the mean "
                f"pause is {mean * 1e3:.1f} ms): the median ITL says nothing, read TPOT",
            )
        bound = max(STALL_FLOOR, STALL_FACTOR * float(np.median(gaps)))
        stood = sum(gap > bound for gap in gaps)
        if stood:
            yield _server(
                "standstill",
                f"{stood} times a stream stood still for more than {bound:.1f} s "
                f"(longest {max(gaps):.1f} s)",
            )


def saturated(records: Sequence[RequestRecord], *, draining: bool = True) -> Finding | None:
    """Return a finding if the queue grows without bound.

    Compares the latency of the last quarter with that of the first one. `draining`: the run is
    over, so the time of the remaining requests counts, too.
    """
    ordered = sorted((r for r in records if r.ok), key=lambda record: record.planned_ns)
    if len(ordered) < 20:
        return None
    quarter = len(ordered) // 4
    waits = [((r.chunk_ns[0] if r.chunk_ns else r.end_ns) - r.planned_ns) / 1e9 for r in ordered]
    early, late = float(np.mean(waits[:quarter])), float(np.mean(waits[-quarter:]))
    arriving = (ordered[-1].planned_ns - ordered[0].planned_ns) / 1e9
    drained = (max(r.end_ns for r in ordered) - ordered[-1].planned_ns) / 1e9
    service = float(np.percentile([(r.end_ns - r.planned_ns) / 1e9 for r in ordered[:quarter]], 50))
    if late <= 2 * early or late - early <= 0.1 * arriving:
        return None
    if draining and drained <= 2 * service:
        return None
    return _invalid(
        "over_saturated",
        f"time to first token grew from {early:.2f} s to {late:.2f} s: more came than the "
        "server can do, so its latencies depend on how long the run was",
    )


def unsteady(records: Sequence[RequestRecord], users: int) -> list[Finding]:
    """Return a finding if a closed loop's users were not active together for most of the run.

    A session lasts from its first request's due time to its last one's end, thinking included.
    """
    spans: dict[int, tuple[int, int]] = {}
    for record in records:
        first, last = spans.get(record.session, (record.planned_ns, record.end_ns))
        spans[record.session] = min(first, record.planned_ns), max(last, record.end_ns)
    if not spans:
        return []
    if len(spans) < min(2, users) * users:
        what = f"{len(spans)} sessions of {users} users: each has hardly begun when others end"
    else:
        events = sorted(
            [(first, 1) for first, _ in spans.values()] + [(end, -1) for _, end in spans.values()]
        )
        together = flying = 0
        for (at, change), (following, _) in itertools.pairwise(events):
            flying += change
            together += (following - at) * (flying >= STEADY_USERS * users)
        share = together / max(1, events[-1][0] - events[0][0])
        if share >= STEADY_TIME:
            return []
        what = f"{users} users were at work together for {share:.0%} of the time"
    text = f"{what}: the run is mostly its beginning and its end; ask more --requests"
    return [_invalid("not_steady", text)]


def few_for(slo: Slo, records: Sequence[RequestRecord]) -> list[Finding]:
    """Return findings for limits on percentiles that need more requests."""
    return [
        _invalid(
            "few_for_slo",
            f"{len(records)} requests have no {limit.percentile:g}th percentile: whether the SLO "
            f"is kept takes {math.ceil(100 / (100 - limit.percentile))}",
        )
        for limit in slo.limits
        if limit.metric != "itl" and len(records) * (100 - limit.percentile) < 100
    ]
