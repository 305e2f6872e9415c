"""Accuracy of a LoadGen accuracy run: the answers of `mlperf_log_accuracy.json`.

MLPerf scores answers against a data set's ground truth and requires 99 % or 99.9 % of the fp32
model's score. A user's data set is scored this way. Samples made from a seed have no ground truth;
their answers are compared with those of a reference system's run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import InvalidRequest
from .store import write_text
from .tasks import last_number

LOG = "mlperf_log_accuracy.json"
SCORES = ("rougeL", "exact_match", "word_accuracy")
"""Scores in per cent: ROUGE-L of words without stemming; answers that equal the truth or end with
its number; for sounds, 100 minus the word error rate. MLCommons' own scripts decide on a
submission; these scores predict their result."""
LOG_BYTES = 10 * 1024
"""Largest log in a submission: longer ones are cut, and their hash is kept next to them."""
TRUNCATED = 4000
"""Characters kept at either end of an accuracy log."""


@dataclass(frozen=True, slots=True)
class LogAgreement:
    """Agreement of answers with the reference's, sample by sample."""

    samples: int
    equal: int
    rouge_l: float
    """Mean F-measure of the longest common subsequence of words, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One answer as LoadGen logged it."""

    index: int
    data: bytes
    first: bytes
    tokens: int


def read_logged(path: Path, param: str = "test") -> list[Logged]:
    """Read the answers of a log or its folder; `InvalidRequest` if missing, half written or
    empty."""
    path = path / LOG if path.is_dir() else path
    try:
        found = [
            Logged(
                int(entry["qsl_idx"]),
                bytes.fromhex(entry["data"]),
                bytes.fromhex(entry.get("token_data", "")),
                int(entry.get("token_count", 0)),
            )
            for entry in json.loads(path.read_text())
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no accuracy log: {error}", param=param) from None
    if not found:
        raise InvalidRequest(f"{path} holds no answer", param=param)
    return found


def read_log(path: Path) -> dict[int, str]:
    """Read sample → answer."""
    logged = read_logged(path, "reference")
    return {one.index: one.data.decode(errors="replace") for one in logged}


def rouge_l(answer: str, reference: str) -> float:
    """Return the F-measure over words of the longest common subsequence (C.-Y. Lin, 2004)."""
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
    """Compare logs; both must have the same samples (same library, seed and tokenizer)."""
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


def scores_of(answers: Mapping[int, str], truths: Sequence[str | None]) -> dict[str, float] | None:
    """Return mean text scores over the answered samples; None if one has no truth."""
    pairs = [(answer, truths[index]) for index, answer in answers.items()]
    if not pairs or any(truth is None for _, truth in pairs):
        return None
    known = [(answer, truth) for answer, truth in pairs if truth is not None]
    return {
        "rougeL": 100 * sum(rouge_l(answer, truth) for answer, truth in known) / len(known),
        "exact_match": 100 * sum(_is_right(answer, truth) for answer, truth in known) / len(known),
    }


def _is_right(answer: str, truth: str) -> bool:
    if " ".join(answer.split()) == " ".join(truth.split()):
        return True
    number = last_number(truth)
    return number is not None and last_number(answer) == number


def write_accuracy(folder: Path, scores: Mapping[str, float] | None, tokens: Sequence[int]) -> None:
    """Write `accuracy.txt` next to LoadGen's log: scores, lengths, and the hash of the whole
    log."""
    found: dict[str, float] = {name: round(score, 4) for name, score in (scores or {}).items()}
    if tokens:
        found["tokens_per_sample"] = sum(tokens) / len(tokens)
    found["gen_num"] = len(tokens)
    digest = hashlib.sha256((folder / LOG).read_bytes()).hexdigest()
    write_text(folder / "accuracy.txt", f"{found}\nhash={digest}\n")


def truncate_logs(root: Path, backup: Path) -> list[Path]:
    """Cut accuracy logs to the size allowed in a submission, after copying each into `backup`."""
    done = []
    for path in sorted(root.rglob(LOG)):
        if path.stat().st_size <= LOG_BYTES:
            continue
        text = path.read_text()
        kept = backup / path.relative_to(root)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, text)
        write_text(path, f"{text[:TRUNCATED]}\n...\n{text[-TRUNCATED:]}")
        done.append(path)
    return done
