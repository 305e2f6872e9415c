"""Our verdict on an MLPerf run, next to LoadGen's."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import HeadraceError
from .compare import INVALID_RUN, REGRESSED
from .gate import GATES
from .mlperf import SUBMISSION_SECONDS, SUMMARY, MlperfOptions, MlperfResult
from .mlperf_accuracy import compare_logs
from .mlperf_submission import UNVERIFIED


def findings(found: MlperfResult, options: MlperfOptions) -> list[str]:
    """Return LoadGen's summary and our findings, line by line."""
    lines = [(found.folder / SUMMARY).read_text(), f"logs: {found.folder}"]
    if options.mode == "performance" and options.min_seconds < SUBMISSION_SECONDS:
        lines.append(
            f"LoadGen judged a run of at least {options.min_seconds:g} s, as it was told; a "
            f"submission needs {SUBMISSION_SECONDS:g} s"
        )
    lines.append(f"by headrace, {UNVERIFIED}")
    lines += [
        f"{name}: {value:.3f} % against the data set"
        for name, value in (found.scores or {}).items()
    ]
    lines += [one.line + (f" ({one.why})" if one.why else "") for one in found.verdicts]
    return lines + [f"{one.severity}: {one.text}" for one in found.findings]


def judged(
    found: MlperfResult, options: MlperfOptions, reference: Path | None, at_least: float
) -> tuple[list[str], int]:
    """Return the verdict's lines, and the exit code: 0, `REGRESSED` or `INVALID_RUN`.

    `reference`: folder of another system's accuracy run; ROUGE-L to it must be at least `at_least`.
    Raises `HeadraceError` if requests failed.
    """
    if found.failures:
        raise HeadraceError(
            f"{len(found.failures)} of {found.requests} requests failed, which LoadGen does not "
            f"know: do not use this result; for example: {found.failures[0]:.200}"
        )
    if any(finding.severity == "invalid" for finding in found.findings):
        return ["INVALID, whatever LoadGen says: the numbers are not the server's"], INVALID_RUN
    if found.passed is not None:
        # The test's own settings decide its duration, so LoadGen's verdict does not count.
        said = f"{options.test} {'passed' if found.passed else 'FAILED'}"
        return [said], 0 if found.passed else REGRESSED
    if found.valid is False:
        return [], INVALID_RUN
    if reference is None:
        return [], 0
    logs = compare_logs(found.folder, reference)
    gates = ", ".join(
        f"{gate:.1%} {'passed' if logs.rouge_l >= gate else 'FAILED'}" for gate in GATES
    )
    said = (
        f"{logs.equal} of {logs.samples} answers equal to the reference's, ROUGE-L "
        f"{logs.rouge_l:.2%}: {gates}"
    )
    return [said], REGRESSED if logs.rouge_l < at_least else 0
