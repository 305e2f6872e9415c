"""Eight bits hear what the file's own weights hear, as far as docs/speech.md says."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import speech_words as measured  # noqa: E402

RECORDED = json.loads((ROOT / "benchmarks/results/speech_words.json").read_text())


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng to speak")
def test_words_of_eight_bits_are_those_of_the_file() -> None:
    """English texts by one voice: 421 words."""
    sides = {kind: measured.Ours(kind, 2) for kind in measured.KINDS}
    clips = list(measured.by_one_voice("en"))
    found = measured.summary(measured.heard(iter(clips), sides))
    assert found["texts"] == measured.MOST
    assert found["wer, %"]["exact"] < 15, "another synthesiser: its speech is not understood"
    assert found["int8"] - found["exact"] <= 8
    assert found["differ"] <= 0.04 * found["words"]
    assert 0 < measured.likelihoods(iter(clips), sides)["apart"] < 0.04  # 0.026; five bits: 0.15.


def test_the_page_has_what_was_recorded() -> None:
    page = (ROOT / "docs" / "speech.md").read_text()
    _, _, rest = page.partition(measured.BEGIN)
    assert rest.partition(measured.END)[0].strip() == measured.as_table(RECORDED)


def rows(*pairs: tuple[int, int]) -> list[dict[str, object]]:
    return [
        {"language": "en", "text": f"en {place // 2}", "words": 10, "int8": a, "exact": b}
        | {"differ": abs(a - b)}
        for place, (a, b) in enumerate(pairs)
    ]


def test_differences_are_paired() -> None:
    """Sides that err alike in each text differ by nothing, however unlike the texts are."""
    same = measured.summary(rows((9, 9), (0, 0), (5, 5), (1, 1)))
    assert (same["points"], same["interval"]) == (0.0, [0.0, 0.0])
    assert (same["texts"], same["clips"], same["words"]) == (2, 4, 40)
    worse = measured.summary(rows((2, 1), (3, 2), (1, 0), (8, 7)))
    assert (worse["points"], worse["interval"]) == (10.0, [10.0, 10.0])
    low, high = measured.summary(rows((4, 0), (0, 0), (0, 4), (0, 0)))["interval"]
    assert (low, high) == (-20, 20)
