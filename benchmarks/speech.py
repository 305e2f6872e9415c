"""Whisper base beside faster-whisper on the same file, in turns: seconds of sound per second, WER.

    make bench-speech PEER=/path/to/venv/bin/python [ARGS="--rounds 5 --json out.json"]

Speech with known text is made by espeak-ng in three voices. Each side is a process of its own that
has loaded its model and heard one recording before the first round, with `--threads` threads,
greedy, the language given, in eight bits (peer: compute type int8);
the two are asked in turns. Time is from samples in memory to text; processor time, which others'
work on the machine changes less, is that of a side's process for a second of sound. `--chunked`
takes stretches of speech side by side on both sides (peer: its batched pipeline, 8). `--streams N`
gives each side N recordings at once (peer: N threads on a worker for each thread of the machine,
which is quicker for it than one worker with all). `--fallback` tries other temperatures, which is
the default of both. `--reference` adds Headrace with weights as the file has them.

The peer's Python needs faster-whisper; without `PEER` Headrace runs alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import Any

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
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


def samples_of(path: str) -> Any:
    import numpy as np

    with wave.open(path, "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def serve(side: str, model: str, arguments: argparse.Namespace) -> None:
    """A line with paths in, a line of JSON out: what one side's process does."""
    threads, streams = arguments.threads, arguments.streams
    if side == "peer":
        from concurrent.futures import ThreadPoolExecutor

        from faster_whisper import BatchedInferencePipeline, WhisperModel

        each, workers = (threads, 1) if streams == 1 else (1, threads)
        peer: Any = WhisperModel(
            model, device="cpu", compute_type="int8", cpu_threads=each, num_workers=workers
        )
        options: dict[str, Any] = {"language": "en", "beam_size": 1}
        options["temperature"] = list(TEMPERATURES) if arguments.fallback else 0.0
        if arguments.chunked:
            peer, options = BatchedInferencePipeline(peer), options | {"batch_size": 8}
        pool = ThreadPoolExecutor(streams)

        def one(samples: Any) -> str:
            segments, _ = peer.transcribe(samples, **options)
            return " ".join(segment.text for segment in segments)

        def hear(sounds: list[Any]) -> list[str]:
            return list(pool.map(one, sounds))
    else:
        from headrace.engine.hearing.opening import open_transcriber
        from headrace.speech.decoding import DecodingOptions

        ours = open_transcriber(model, threads, "exact" if side == "reference" else "int8")
        how = DecodingOptions(
            language="en", temperatures=TEMPERATURES if arguments.fallback else (0.0,)
        )
        work = ours.chunked if arguments.chunked else ours.sequential

        def hear(sounds: list[Any]) -> list[str]:
            running = {
                i: work(samples, how, words=False, told=lambda new, upto: None)
                for i, samples in enumerate(sounds)
            }
            texts = [""] * len(sounds)
            while running:
                for i, sound in list(running.items()):
                    try:
                        next(sound)
                    except StopIteration as end:
                        texts[i] = end.value.text
                        del running[i]
                ours.jobs.turn()
            return texts

    for line in sys.stdin:
        sounds = [samples_of(path) for path in json.loads(line)]
        begin, worked = time.perf_counter(), time.process_time()
        texts = hear(sounds)
        taken, worked = time.perf_counter() - begin, time.process_time() - worked
        length = sum(len(samples) for samples in sounds) / 16_000
        answer = {"taken": taken, "worked": worked, "length": length, "texts": texts}
        print(json.dumps(answer), flush=True)


class Side:
    def __init__(self, python: str, name: str, arguments: argparse.Namespace, model: str) -> None:
        command = [python, __file__, "--side", name, "--model", model]
        command += ["--threads", str(arguments.threads), "--streams", str(arguments.streams)]
        command += ["--chunked"] * arguments.chunked + ["--fallback"] * arguments.fallback
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, paths: list[Path]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(path) for path in paths]) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from headrace.bench.word_errors import word_errors
    from headrace.loader.catalog import CATALOG
    from headrace.loader.download import fetch_catalog

    model = str(fetch_catalog(CATALOG["whisper-base"]))
    pythons = {"headrace": sys.executable}
    if arguments.reference:
        pythons["reference"] = sys.executable
    if arguments.peer:
        pythons["peer"] = arguments.peer
    sides = {name: Side(python, name, arguments, model) for name, python in pythons.items()}
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": arguments.threads,
        "chunked": arguments.chunked,
        "streams": arguments.streams,
        "fallback": arguments.fallback,
        "sides": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        made = speak(Path(folder))
        for side in sides.values():
            side.ask([made[0][0]])
        rates: dict[str, list[float]] = {name: [] for name in sides}
        worked: dict[str, list[float]] = {name: [] for name in sides}
        wrong = dict.fromkeys(sides, 0)
        rounds = [
            [made[(first + i) % len(made)] for i in range(arguments.streams)]
            for _ in range(arguments.rounds)
            for first in range(len(made) if arguments.streams == 1 else 1)
        ]
        for together in rounds:
            for name, side in sides.items():
                answer = side.ask([path for path, _ in together])
                rates[name].append(answer["length"] / answer["taken"])
                worked[name].append(answer["worked"] / answer["length"])
                for (_, said), text in zip(together, answer["texts"], strict=True):
                    wrong[name] += word_errors(said, text).wrong
        total = sum(word_errors(said, "").said for together in rounds for _, said in together)
    for name, side in sides.items():
        side.process.kill()
        rate = statistics.median(rates[name])
        result["sides"][name] = {
            "rtfx": rate,
            "least": min(rates[name]),
            "most": max(rates[name]),
            "wer": wrong[name] / total,
            "processor_ms": 1000 * statistics.median(worked[name]),
        }
        print(f"{name:9} RTFx {rate:6.1f}   WER {100 * wrong[name] / total:5.2f} %", end="")
        print(f"   {1000 * statistics.median(worked[name]):5.1f} ms of processor a second")
    if arguments.peer:
        pairs = zip(rates["headrace"], rates["peer"], strict=True)
        result["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"ratio     {result['ratio']:.2f} (median of pairs)", end="")
        spent = zip(worked["headrace"], worked["peer"], strict=True)
        result["processor_ratio"] = statistics.median(theirs / ours for ours, theirs in spent)
        print(f", of processor time {result['processor_ratio']:.2f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer", help="Python with faster-whisper")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=1, help="recordings at once")
    parser.add_argument("--chunked", action="store_true")
    parser.add_argument("--fallback", action="store_true", help="other temperatures are tried")
    parser.add_argument("--reference", action="store_true", help="weights as the file has them too")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        serve(arguments.side, arguments.model, arguments)
        return
    result = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
