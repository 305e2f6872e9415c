"""Two accuracy runs of LoadGen beside each other: the answers of `mlperf_log_accuracy.json`.

MLPerf scores answers against a data set's ground truth and asks for 99 % or 99.9 % of the fp32
model's score. The samples here are made from a seed and have no ground truth, so the answers
themselves are compared with those of a reference system's run: equal ones, and ROUGE-L.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import InvalidRequest

LOG = "mlperf_log_accuracy.json"


@dataclass(frozen=True, slots=True)
class LogAgreement:
    """Answers here against the reference's, sample by sample."""

    samples: int
    equal: int
    rouge_l: float
    """Mean F-measure of the longest common subsequence of words, 0 to 1."""


def read_log(folder: Path) -> dict[int, str]:
    """Sample → answer; `InvalidRequest` where the log is missing or half written."""
    path = folder / LOG if folder.is_dir() else folder
    try:
        entries = json.loads(path.read_text())
        found = {
            int(entry["qsl_idx"]): bytes.fromhex(entry["data"]).decode(errors="replace")
            for entry in entries
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no accuracy log: {error}", param="reference") from None
    if not found:
        raise InvalidRequest(f"{path} holds no answer", param="reference")
    return found


def rouge_l(answer: str, reference: str) -> float:
    """F-measure over words of the longest common subsequence (C.-Y. Lin, 2004)."""
    ours, theirs = answer.split(), reference.split()
    if not ours or not theirs:
        return float(ours == theirs)
    row = [0] * (len(theirs) + 1)
    for word in ours:
        before = 0
        for index, other in enumerate(theirs, 1):
            above = row[index]
            row[index] = before + 1 if word == other else max(above, row[index - 1])
            before = above
    return 2 * row[-1] / (len(ours) + len(theirs))


def compare_logs(here: Path, reference: Path) -> LogAgreement:
    """Both must have answered the same samples (same library, seed and tokenizer)."""
    ours, theirs = read_log(here), read_log(reference)
    if set(ours) != set(theirs):
        raise InvalidRequest(
            f"{reference} has answers to {len(theirs)} samples, {here} to {len(ours)}: not the "
            "same library",
            param="reference",
        )
    scores = [rouge_l(ours[index], theirs[index]) for index in theirs]
    equal = sum(ours[index] == theirs[index] for index in theirs)
    return LogAgreement(len(theirs), equal, sum(scores) / len(scores))
