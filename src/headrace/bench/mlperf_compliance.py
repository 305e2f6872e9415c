"""MLPerf's compliance tests of language models: LoadGen's audit settings, and their checks.

Purpose and criteria are MLCommons' for Inference v6; the readers are ours. TEST01: performance mode
gives the answers of accuracy mode, as fast as the submission. TEST06: the reported first token is
the answer's; at most one end of text; as many tokens as reported. TEST07: all answers of a
performance run are accurate enough. TEST09: answers have the right length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest
from .mlperf_accuracy import Logged, read_logged
from .store import write_text

TESTS = ("TEST01", "TEST06", "TEST07", "TEST09")
LOG_SEED = 720381539243781796
"""Seed that MLCommons prescribes to select the logged answers."""
TEST01_SAMPLES, TEST06_SAMPLES = 64, 100
TEST01_APART = 0.1
"""Largest relative difference of a test run's performance from the submission's."""
LENGTH_APART = 0.1
"""Largest difference of the mean length from the reference's in TEST09."""
PERFORMANCE = {
    "SingleStream": "result_90.00_percentile_latency_ns",
    "MultiStream": "result_99.00_percentile_per_query_latency_ns",
    "Offline": "result_samples_per_second",
    "Server": "result_completed_samples_per_sec",
}
"""Scenario → the key of LoadGen's detailed log by which a submission is judged."""


@dataclass(frozen=True, slots=True)
class ComplianceVerdict:
    """Result of one check of a test."""

    what: str
    passed: bool | None
    """Whether it passed; None if it cannot be checked here: then `why` names the missing input."""
    why: str = ""

    @property
    def line(self) -> str:
        """The verdict in the format of MLCommons' scripts."""
        return f"{self.what} check pass: {'Skipped' if self.passed is None else self.passed}"


def audit_config(test: str, samples: int) -> str:
    """Return the `audit.config` for LoadGen."""
    lines = ["*.*.mode = 2", f"*.*.accuracy_log_rng_seed = {LOG_SEED}"]
    if test == "TEST01":
        lines.append(f"*.*.accuracy_log_sampling_target = {TEST01_SAMPLES}")
    else:
        few = test == "TEST06"
        target = TEST06_SAMPLES if few else max(10_000, 10 * samples)
        lines += [
            f"*.*.accuracy_log_sampling_target = {target}",
            f"*.*.min_query_count = {TEST06_SAMPLES if few else samples}",
            "*.*.min_duration = 0",
            "*.*.sample_concatenate_permutation = 0",
        ]
    return "\n".join(lines) + "\n"


def read_detail(folder: Path) -> dict[str, Any]:
    """Read key → value of `mlperf_log_detail.txt`; the last value of a repeated key."""
    path = folder / "mlperf_log_detail.txt"
    found: dict[str, Any] = {}
    try:
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith(":::MLLOG "):
                entry = json.loads(line.removeprefix(":::MLLOG "))
                found[str(entry["key"])] = entry["value"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no log of LoadGen's: {error}", param="test") from None
    return found


def ids_of(data: bytes) -> list[int]:
    """Decode token ids as MLPerf logs them: int32, little endian."""
    return [int(one) for one in np.frombuffer(data[: len(data) // 4 * 4], "<i4")]


def verify_same(logged: Sequence[Logged], accuracy: Path) -> ComplianceVerdict:
    """Check TEST01: every answer equals that of accuracy mode to the sample."""
    known = {one.index: one.data for one in read_logged(accuracy)}
    other = [one.index for one in logged if known.get(one.index) != one.data]
    if not other:
        return ComplianceVerdict("Accuracy", True)
    why = f"{len(other)} of {len(logged)} answers differ, for example sample {other[0]}"
    return ComplianceVerdict("Accuracy", False, why)


def verify_speed(here: Path, submitted: Path, scenario: str) -> ComplianceVerdict:
    """Check TEST01: as fast as the submission, within a tenth."""
    key = PERFORMANCE["Server" if scenario == "Interactive" else scenario]
    values = [_number(read_detail(folder), key) for folder in (here, submitted)]
    if None in values:
        return ComplianceVerdict("Performance", None, f"LoadGen logged no {key}")
    found, known = (value or 0.0 for value in values)
    apart = abs(found / known - 1) if known else float("inf")
    return ComplianceVerdict(
        "Performance", apart <= TEST01_APART, f"{key}: {found:g} against {known:g}"
    )


def _number(detail: dict[str, Any], key: str) -> float | None:
    value = detail.get(key)
    return float(value) if isinstance(value, int | float) else None


def verify_tokens(
    logged: Sequence[Logged], *, ids: bool, end: int | None, offline: bool
) -> list[ComplianceVerdict]:
    """Check TEST06; without token ids only the first piece can be compared with the answer."""
    with_first = [one for one in logged if one.first]
    wrong = [one.index for one in with_first if not one.data.startswith(one.first)]
    first = ComplianceVerdict("First token", None if offline else bool(with_first) and not wrong)
    if wrong:
        first = ComplianceVerdict(
            "First token", False, f"{len(wrong)} differ, for example sample {wrong[0]}"
        )
    if not ids:
        why = "the server tells no ids of tokens (return_token_ids)"
        return [
            first,
            ComplianceVerdict("EOS", None, why),
            ComplianceVerdict("Sample length", None, why),
        ]
    if end is None:
        eos = ComplianceVerdict("EOS", None, "--eos-id was not given")
    else:
        ended = [one.index for one in logged if ids_of(one.data)[-2:] == [end, end]]
        eos = ComplianceVerdict(
            "EOS", not ended, f"{len(ended)} end more than once" if ended else ""
        )
    unlike = [one.index for one in logged if len(one.data) != 4 * one.tokens]
    why = f"{len(unlike)} of another length than was reported" if unlike else ""
    return [first, eos, ComplianceVerdict("Sample length", not unlike, why)]


def verify_score(score: float | None, threshold: float | None) -> ComplianceVerdict:
    """Check TEST07."""
    if score is None or threshold is None:
        missing = "a ground truth (--dataset)" if score is None else "--accuracy-threshold"
        return ComplianceVerdict("Accuracy", None, f"there is no {missing}")
    return ComplianceVerdict("Accuracy", score >= threshold, f"{score:.3f} against {threshold:.3f}")


def verify_lengths(logged: Sequence[Logged], reference: float | None) -> ComplianceVerdict:
    """Check TEST09: the mean length within a tenth of the reference's."""
    mean = sum(one.tokens for one in logged) / len(logged)
    if reference is None:
        return ComplianceVerdict(
            "Output length", None, f"mean {mean:.2f}; --reference-tokens was not given"
        )
    kept = abs(mean - reference) <= LENGTH_APART * reference
    return ComplianceVerdict("Output length", kept, f"mean {mean:.2f} against {reference:.2f}")


def write_verdicts(folder: Path, test: str, verdicts: Sequence[ComplianceVerdict]) -> bool:
    """Write the verdicts as MLCommons' scripts do; return whether all passed."""
    passed = all(one.passed is not False for one in verdicts) and any(
        one.passed for one in verdicts
    )
    lines = [one.line + (f" ({one.why})" if one.why else "") for one in verdicts]
    lines += [f"TEST {'PASS' if passed else 'FAIL'}", "(by headrace; unverified by MLCommons)"]
    name = "verify_output_len.txt" if test == "TEST09" else "verify_accuracy.txt"
    write_text(folder / name, "\n".join(lines) + "\n")
    if test == "TEST01":
        write_text(folder / "verify_performance.txt", verdicts[-1].line + "\n")
    return passed
