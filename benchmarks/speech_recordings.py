"""Word errors on recordings of people, beside transformers on the same weights.

Run: `pip download --no-deps --no-binary :all: --no-build-isolation pocketsphinx==5.1.1`, unpack it,
and `python -m benchmarks.speech_recordings FOLDER/test/data` (needs PyTorch, transformers, and the
extra `audio`). The package's own tests have five sentences of a novel read for LibriVox (public
domain), as recorded and as one sound of 25 s, and five calls of playing cards, each with what is
said. They are heard by Headrace in eight bits (the default), with weights as the file has them, and
by transformers' own algorithm in fp32: English, greedy, no other temperatures. Errors are counted
over words without case or punctuation; Whisper writes numbers as digits, which counts as errors on
all sides. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tests.speech.whisper_oracle import in_transformers, long_form

from headrace.bench.word_errors import word_errors
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog
from headrace.media import decode
from headrace.speech.decoding import DecodingOptions
from headrace.speech.opening import open_transcriber

RESULTS = Path(__file__).parent / "results" / "speech_recordings.json"
LINE = re.compile(r"<s> (.*?) *</s> \((.*)\)")


def recordings(folder: Path) -> dict[str, tuple[str, Any]]:
    """Name → what is said, and samples at 16 kHz."""
    found: dict[str, tuple[str, Any]] = {}
    for said_in in (folder / "librivox/transcription", folder / "cards/cards.transcription"):
        for text, name in LINE.findall(said_in.read_text()):
            samples = decode((said_in.parent / f"{name}.wav").read_bytes()).samples
            found[name] = text, samples
    novel = [found[name] for name in found if name.startswith("sense")]
    texts, sounds = zip(*novel, strict=True)
    found["all of the novel"] = " ".join(texts), np.concatenate(sounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    folder = str(fetch_catalog(CATALOG["whisper-base"]))
    ours = {kind: open_transcriber(folder, given.threads, kind) for kind in ("int8", "exact")}
    oracle = in_transformers(ours["exact"].network.files)
    tokenizer = ours["exact"].network.files.tokenizer
    result: dict[str, Any] = {}
    for name, (said, samples) in recordings(given.folder).items():
        options = DecodingOptions(language="en", temperatures=(0.0,))
        texts = {kind: one.transcribe(samples, options).text for kind, one in ours.items()}
        tokens = long_form(oracle, samples, "en")
        texts["transformers"] = tokenizer.decode(tokens, skip_special_tokens=True)
        found: dict[str, Any] = {"seconds": round(len(samples) / 16_000, 1)}
        found["words"] = word_errors(said, "").said
        found |= {side: word_errors(said, heard).wrong for side, heard in texts.items()}
        found["same_text"] = texts["exact"].split() == texts["transformers"].split()
        result[name] = found | {"heard": texts["int8"].strip()}
        print(name, json.dumps(result[name]), flush=True)
    sides = ("words", *ours, "transformers")
    total = {side: sum(one[side] for one in result.values()) for side in sides}
    print(json.dumps(total))
    RESULTS.write_text(json.dumps({"recordings": result, "all": total}, indent=1) + "\n")


if __name__ == "__main__":
    main()
