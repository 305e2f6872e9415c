"""Word errors of eight bits (the default) beside the file's own weights, over 12,000 words.

    pip download --no-deps --no-binary :all: pocketsphinx==5.1.1    (unpack it)
    python -m benchmarks.speech_words [--recordings FOLDER/test/data] [--oracle] [--levels]

Needs espeak-ng and the extra `audio`; `--oracle`, transformers on the same weights in fp32, needs
PyTorch and transformers. Texts of our own in six languages (speech_texts.json) are spoken by three
voices, English with five accents. The recordings are sentences of a novel read for LibriVox (public
domain) and calls of playing cards, which Whisper writes as digits: errors of every side. The
language is given, decoding is greedy, no other temperatures are tried. Errors are counted over
words without case or punctuation. Intervals are of 95 %, by bootstrap over texts: a text's voices
are drawn together, and the two sides of a text are never parted. Nothing is timed.

`--levels`: each level of the kernels hears some texts in eight bits; their bits are one by design
(`tests/kernels_cpu`), so their words are. `--table` writes the result between the marks of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.bench.word_errors import word_errors
from headrace.engine.hearing.opening import open_transcriber
from headrace.kernels.cpu.backend import CpuBackend
from headrace.kernels.cpu.library import LEVELS, level
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog
from headrace.loader.whisper_files import open_whisper
from headrace.media import decode
from headrace.speech.conductor import WalkUnderWay
from headrace.speech.decoding import Ask, DecodingOptions, WindowAnswer
from headrace.speech.features import WINDOW
from headrace.speech.product import Precision
from headrace.speech.windows import Windows

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "speech_words.json"
TEXTS: dict[str, Any] = json.loads((HERE / "speech_texts.json").read_text())
VARIANTS = ("", "+f3", "+m3")
"""Voices of each accent."""
RATE = 140
"""Words a minute."""
MOST = len(TEXTS["en"]["texts"])
LINE = re.compile(r"<s> (.*?) *</s> \((.*)\)")
BEGIN, END = "<!-- speech_words -->", "<!-- /speech_words -->"
KINDS: tuple[Precision, ...] = ("int8", "exact")
DRAWS = 10_000
OF_LEVELS = 3
"""Texts of each language on which levels are compared."""

Floats = npt.NDArray[np.float32]
Side = Callable[[Floats, str], str]


class Clip(NamedTuple):
    """A sound, what is said in it, and the text that it shares with other clips."""

    language: str
    text: str
    said: str
    samples: Floats


def spoken(voice: str, text: str) -> Floats:
    """Speak a text with espeak-ng; return float32 samples at 16 kHz."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.wav"
        command = ["espeak-ng", "-v", voice, "-s", str(RATE), "-w", str(path), text]
        subprocess.run(command, check=True)
        return decode(path.read_bytes()).samples


def synthetic(languages: Sequence[str], texts: int, variants: Sequence[str]) -> Iterator[Clip]:
    """Yield the first `texts` texts of each language, by each voice of each accent."""
    for language in languages:
        for number, text in enumerate(TEXTS[language]["texts"][:texts]):
            for accent in TEXTS[language]["voices"]:
                for variant in variants:
                    samples = spoken(accent + variant, text)
                    yield Clip(language, f"{language} {number}", text, samples)


def by_one_voice(language: str) -> Iterator[Clip]:
    """Yield each text of a language, by its first voice."""
    for number, text in enumerate(TEXTS[language]["texts"]):
        samples = spoken(TEXTS[language]["voices"][0], text)
        yield Clip(language, f"{language} {number}", text, samples)


def recordings(folder: Path) -> Iterator[Clip]:
    """Yield the recordings of pocketsphinx's own tests."""
    for said_in in (folder / "librivox/transcription", folder / "cards/cards.transcription"):
        for text, name in LINE.findall(said_in.read_text()):
            samples = decode((said_in.parent / f"{name}.wav").read_bytes()).samples
            yield Clip("en", name, text, samples)


class Ours:
    """Whisper base by Headrace, with weights and activations of one form."""

    def __init__(self, precision: Precision, threads: int, at: str | None = None) -> None:
        with mock.patch.object(CpuBackend, "_level", at):
            self._transcriber = open_transcriber("whisper-base", threads, precision)

    def __call__(self, samples: Floats, language: str) -> str:
        options = DecodingOptions(language=language, temperatures=(0.0,))
        return self._transcriber.transcribe(samples, options).text

    def log_shares(self, clip: Clip) -> Floats:
        """Compute the log-probability of each token of what is said, given those before it."""
        files, jobs = self._transcriber.files, self._transcriber.jobs
        special = files.special
        head = [special.start, special.languages[clip.language], special.transcribe]
        said = files.tokenizer.encode(f" {clip.said}", add_special_tokens=False).ids
        tokens = [*head, special.no_timestamps, *said]

        def walk() -> Generator[list[Ask], list[WindowAnswer], WindowAnswer]:
            sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
            with Windows(files).open(clip.samples[:WINDOW], short=False, aligns=False) as window:
                (scored,) = yield [Ask(tokens, RequestSpec(sampling, 0, inputs=(window,)))]
            return scored

        job = WalkUnderWay(walk(), jobs.share())
        window = jobs.lend(job.share)
        jobs.add(job)
        while not job.done:
            jobs.turn()
        jobs.take_back(job.share, window)
        assert job.result is not None, job.error
        return np.array([one.logprob for one in job.result.scores[len(head) :]], np.float32)


def oracle() -> Side:
    from tests.speech.whisper_oracle import in_transformers, long_form

    files = open_whisper(fetch_catalog(CATALOG["whisper-base"]))
    model = in_transformers(files)

    def hear(samples: Floats, language: str) -> str:
        tokens = long_form(model, samples, language)
        return str(files.tokenizer.decode(tokens, skip_special_tokens=True))

    return hear


def heard(clips: Iterator[Clip], sides: dict[str, Side]) -> list[dict[str, Any]]:
    """Count each clip's words, each side's errors, and the words in which int8 differs from the
    file's weights."""
    found = []
    for clip in clips:
        texts = {name: side(clip.samples, clip.language) for name, side in sides.items()}
        row: dict[str, Any] = {"language": clip.language, "text": clip.text}
        row["words"] = word_errors(clip.said, "").said
        row |= {name: word_errors(clip.said, text).wrong for name, text in texts.items()}
        row["differ"] = word_errors(texts["exact"], texts["int8"]).wrong
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def likelihoods(clips: Iterator[Clip], sides: dict[str, Ours]) -> dict[str, Any]:
    """Compare the log-probabilities, in nat a token, that the sides give to what is said."""
    found = [{name: side.log_shares(clip) for name, side in sides.items()} for clip in clips]
    apart = [np.abs(one["int8"] - one["exact"]).sum() for one in found]
    each = np.array([[len(one["int8"]), one["int8"].sum(), one["exact"].sum()] for one in found])
    tokens, coded, exact = each.sum(axis=0)
    sums = each[drawn(len(each))].sum(axis=1)
    low, high = np.percentile((sums[:, 1] - sums[:, 2]) / sums[:, 0], [2.5, 97.5])
    return {
        "clips": len(each),
        "tokens": int(tokens),
        "int8": round(float(coded / tokens), 4),
        "exact": round(float(exact / tokens), 4),
        "apart": round(float(sum(apart) / tokens), 4),
        "more": round(float((coded - exact) / tokens), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
    }


def drawn(count: int) -> npt.NDArray[np.int64]:
    """Draw texts for a bootstrap: [draws, count]."""
    return np.random.default_rng(0).integers(count, size=(DRAWS, count))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum rows up: counts, rates in per cent, and int8's errors above the file's, in points with
    the bounds of a paired bootstrap over texts."""
    names = [name for name in rows[0] if name not in ("language", "text")]
    texts: dict[str, npt.NDArray[np.float64]] = {}
    for row in rows:
        counts = np.array([row[name] for name in names], np.float64)
        texts[row["text"]] = texts.get(row["text"], 0) + counts
    table = np.stack(list(texts.values()))
    total = dict(zip(names, table.sum(axis=0).astype(int).tolist(), strict=True))
    sums = table[drawn(len(table))].sum(axis=1)
    words, coded, exact = (sums[:, names.index(name)] for name in ("words", "int8", "exact"))
    low, high = np.percentile(100 * (coded - exact) / words, [2.5, 97.5])
    sides = [name for name in names if name not in ("words", "differ")]
    return {
        "clips": len(rows),
        "texts": len(table),
        **total,
        "wer, %": {name: round(100 * total[name] / total["words"], 2) for name in sides},
        "points": round(100 * (total["int8"] - total["exact"]) / total["words"], 2),
        "interval": [round(float(low), 2), round(float(high), 2)],
    }


def levels(threads: int) -> dict[str, Any]:
    """Count the clips of which each level gives the best level's text."""
    sides = {name: Ours("int8", threads, name) for name in LEVELS if level(name)}
    best = level()
    same, clips = dict.fromkeys(sides, 0), 0
    for clip in (clip for one in TEXTS for clip in islice(by_one_voice(one), OF_LEVELS)):
        texts = {name: side(clip.samples, clip.language) for name, side in sides.items()}
        clips += 1
        for name, text in texts.items():
            same[name] += text == texts[str(best)]
    return {"clips": clips, "best": best, "same text": same}


def as_table(result: dict[str, Any]) -> str:
    lines = ["| | words | eight bits | the file's | more, in points (95 %) | words that differ |"]
    lines.append("|---|--:|--:|--:|--:|--:|")
    for name, one in result["sums"].items():
        low, high = one["interval"]
        rates = one["wer, %"]
        lines.append(
            f"| {name} | {one['words']:,} | {rates['int8']:.2f} % | {rates['exact']:.2f} % "
            f"| {one['points']:+.2f} ({low:+.2f} to {high:+.2f}) "
            f"| {100 * one['differ'] / one['words']:.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recordings", type=Path)
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--levels", action="store_true")
    parser.add_argument("--languages", nargs="*", default=list(TEXTS))
    parser.add_argument("--texts", type=int, default=MOST)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    ours = {kind: Ours(kind, given.threads) for kind in KINDS}
    sides: dict[str, Side] = ours | ({"transformers": oracle()} if given.oracle else {})
    rows = heard(synthetic(given.languages, given.texts, VARIANTS), sides)
    groups = {one: [row for row in rows if row["language"] == one] for one in given.languages}
    sums = {name: summary(found) for name, found in groups.items()}
    sums["all six" if len(groups) == len(TEXTS) else "all"] = summary(rows)
    if given.recordings is not None:
        sums["people"] = summary(heard(recordings(given.recordings), sides))
    result: dict[str, Any] = {"voices": VARIANTS, "level": level(), "sums": sums}
    one_voice = (clip for language in given.languages for clip in by_one_voice(language))
    result["likelihood"] = likelihoods(one_voice, ours)
    result["cpus"], result["load"] = os.cpu_count(), [round(one, 1) for one in os.getloadavg()]
    if given.levels:
        result["levels"] = levels(given.threads)
    print(json.dumps(result, indent=1))
    given.json.write_text(json.dumps(result, indent=1) + "\n")
    if given.table is not None:
        page = given.table.read_text()
        head, _, rest = page.partition(BEGIN)
        tail = rest.partition(END)[2]
        given.table.write_text(f"{head}{BEGIN}\n\n{as_table(result)}\n\n{END}{tail}")


if __name__ == "__main__":
    main()
