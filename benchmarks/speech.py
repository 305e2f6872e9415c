"""Whisper base beside faster-whisper on the same file, in turns: seconds of sound per second, WER.

    make bench-speech PEER=/path/to/venv/bin/python [ARGS="--rounds 5 --json out.json"]

Speech with known text is made by espeak-ng in three voices. Each side is a process of its own that
has loaded its model and heard one recording before the first round, with `--threads` threads,
greedy, without other temperatures, the language given, in eight bits (peer: compute type int8);
the two are asked in turns. Time is from samples in memory to text. `--chunked`
takes stretches of speech side by side on both sides (peer: its batched pipeline, 8).

The peer's Python needs faster-whisper; without `PEER` Headrace runs alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

VOICES = ("en-us", "en-gb", "en-us+f3")
TEXTS = (
    "The committee met on Tuesday to discuss the annual budget. Several members asked how the new "
    "library would be paid for. The chair answered that a third of the money comes from the county "
    "and the rest from gifts.",
    "In the autumn the river often floods the lower meadows, so farmers move their cattle to the "
    "hills before the first heavy rain. The road along the valley is closed for a week or two, and "
    "the children go to school by boat.",
    "Please remember to bring your tickets, because without them nobody will be allowed to enter "
    "the theatre this evening. The doors open an hour before the play begins, and there is a small "
    "garden behind the house where guests may wait.",
)


def speak(folder: Path) -> list[tuple[Path, str]]:
    """One recording of all texts for each voice, 16 kHz, and what is said in it."""
    said = " ".join(TEXTS)
    made = []
    for voice in VOICES:
        raw, path = folder / "raw.wav", folder / f"{voice}.wav"
        subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", raw, said], check=True)
        from headrace.media import RATE, decode

        samples = decode(raw.read_bytes()).samples
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((samples * 32767).astype("<i2").tobytes())
        made.append((path, said))
    return made


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def errors(said: list[str], heard: list[str]) -> int:
    """Least number of words to change, take out or put in (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        corner, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (word != other))
    return row[-1]


def samples_of(path: str) -> Any:
    import numpy as np

    with wave.open(path, "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def serve(side: str, model: str, threads: int, chunked: bool) -> None:
    """A line with a path in, a line of JSON out: what one side's process does."""
    if side == "peer":
        from faster_whisper import BatchedInferencePipeline, WhisperModel

        peer: Any = WhisperModel(model, device="cpu", compute_type="int8", cpu_threads=threads)
        options: dict[str, Any] = {"language": "en", "beam_size": 1, "temperature": 0.0}
        if chunked:
            peer, options = BatchedInferencePipeline(peer), options | {"batch_size": 8}

        def hear(samples: Any) -> str:
            segments, _ = peer.transcribe(samples, **options)
            return " ".join(segment.text for segment in segments)
    else:
        from headrace.speech.decoding import DecodingOptions
        from headrace.speech.opening import open_transcriber

        ours = open_transcriber(model, threads)
        how = DecodingOptions(language="en", temperatures=(0.0,))

        def hear(samples: Any) -> str:
            return ours.transcribe(samples, how, chunked=chunked).text

    for line in sys.stdin:
        samples = samples_of(line.strip())
        begin = time.perf_counter()
        text = hear(samples)
        taken = time.perf_counter() - begin
        print(
            json.dumps({"taken": taken, "length": len(samples) / 16_000, "text": text}), flush=True
        )


class Side:
    def __init__(self, python: str, name: str, arguments: argparse.Namespace, model: str) -> None:
        command = [python, __file__, "--side", name, "--model", model]
        command += ["--threads", str(arguments.threads)] + ["--chunked"] * arguments.chunked
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, path: Path) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from headrace.loader.catalog import CATALOG
    from headrace.loader.download import fetch_catalog

    model = str(fetch_catalog(CATALOG["whisper-base"]))
    pythons = {"headrace": sys.executable}
    if arguments.peer:
        pythons["peer"] = arguments.peer
    sides = {name: Side(python, name, arguments, model) for name, python in pythons.items()}
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "chunked": arguments.chunked,
        "sides": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        made = speak(Path(folder))
        for side in sides.values():
            side.ask(made[0][0])
        rates: dict[str, list[float]] = {name: [] for name in sides}
        wrong = dict.fromkeys(sides, 0)
        for _ in range(arguments.rounds):
            for path, said in made:
                for name, side in sides.items():
                    answer = side.ask(path)
                    rates[name].append(answer["length"] / answer["taken"])
                    wrong[name] += errors(words(said), words(answer["text"]))
        total = arguments.rounds * sum(len(words(said)) for _, said in made)
    for name, side in sides.items():
        side.process.kill()
        rate = statistics.median(rates[name])
        result["sides"][name] = {
            "rtfx": rate,
            "least": min(rates[name]),
            "most": max(rates[name]),
            "wer": wrong[name] / total,
        }
        print(f"{name:9} RTFx {rate:6.1f}   WER {100 * wrong[name] / total:5.2f} %")
    if arguments.peer:
        pairs = zip(rates["headrace"], rates["peer"], strict=True)
        result["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"ratio     {result['ratio']:.2f} (median of pairs)")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer", help="Python with faster-whisper")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.model, arguments.threads, arguments.chunked)
        return
    result = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
