"""How far a live session is behind its speaker, and what a transcription costs streams of text.

Run: `python benchmarks/speech_served.py` (needs espeak-ng, and the extra `audio`). A server that
hears is started on two threads and is fed sentences of four voices in the time in which they are
spoken, in pieces of 100 ms. Of every word, the lag is from the moment at which its last sample was
sent, by the times of words of the same file, to the first event that has this word at its place,
guesses among them (neither case nor punctuation counts); the first word's lag is that of the first
partial. Below
zero: it was told before its end. Words that no event has right are counted apart. Then a server of
text decodes one stream, alone and beside
a server that hears a file again and again, both on the same two cores, in turns. Last, a request of
3 s is made alone, and beside a job of three hours, in order and chunked.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import soundfile
import soxr
import websockets

RESULTS = Path(__file__).parent / "results" / "speech_served.json"
SENTENCES = (
    "The meeting begins on Tuesday morning. Please bring the annual budget of the library.",
    "A third of the money comes from the county, and the rest is paid by the members.",
    "Good evening. The train from the north will arrive an hour late because of the snow.",
)
VOICES = ("en-us", "en-gb", "en-us+f3", "en-us+m3")
STEP = 0.1


@contextmanager
def server(model: str, threads: int) -> Iterator[tuple[str, int]]:
    """Its address and its process, once it is ready."""
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--threads", str(threads), "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"ready: .* on (http://\S+)", line):
                yield found[1], process.pid
                return
        raise SystemExit(f"the server of {model} ended")
    finally:
        process.terminate()
        process.wait(20)


def spoken(text: str, folder: Path, name: str, voice: str = VOICES[0]) -> Path:
    path = folder / f"{name}.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-s", "140", "-w", str(path), text], check=True)
    return path


def plain(word: str) -> str:
    return "".join(letter for letter in word.casefold() if letter.isalnum())


def quantiles(values: list[float]) -> dict[str, float]:
    found = np.quantile(values, [0.5, 0.9, 0.99])
    return {name: round(float(x), 3) for name, x in zip(("p50", "p90", "p99"), found, strict=True)}


async def live(url: str, path: Path) -> dict[str, Any]:
    """One sentence, in its own time."""
    reply = httpx.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": path.read_bytes()},
        data={
            "language": "en",
            "response_format": "verbose_json",
            "timestamp_granularities[]": "word",
        },
        timeout=60,
    )
    words = [(plain(word["word"]), word["end"]) for word in reply.json()["words"]]
    samples, rate = soundfile.read(path, dtype="float32")
    samples = np.concatenate((soxr.resample(samples, rate, 24_000), np.zeros(48_000)))
    data = (samples * 32767).astype("<i2").tobytes()
    arrived: dict[int, float] = {}
    final = stopped = 0.0
    async with websockets.connect(url.replace("http", "ws") + "/v1/realtime") as socket:
        change = {"audio": {"input": {"transcription": {"language": "en"}}}}
        # A second without a pause in it: the sentences are one turn, whose words can be counted.
        change["audio"]["input"]["turn_detection"] = {  # type: ignore[assignment]
            "type": "server_vad",
            "silence_duration_ms": 1000,
        }
        await socket.send(json.dumps({"type": "session.update", "session": change}))
        while json.loads(await socket.recv())["type"] != "session.updated":
            pass
        begin = time.perf_counter()

        async def feed() -> None:
            size = int(24_000 * STEP) * 2
            for number, at in enumerate(range(0, len(data), size), 1):
                # A piece is sent when its last sample has been spoken.
                await asyncio.sleep(max(0.0, begin + number * STEP - time.perf_counter()))
                audio = base64.b64encode(data[at : at + size]).decode()
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))

        feeding = asyncio.create_task(feed())
        stable: list[str] = []
        async with asyncio.timeout(60):
            while not final:
                event = json.loads(await socket.recv())
                now = time.perf_counter() - begin
                if event["type"].endswith("transcription.delta"):
                    stable += event["delta"].split()
                    for i, word in enumerate([*stable, *event["unstable"].split()]):
                        if i < len(words) and plain(word) == words[i][0]:
                            arrived.setdefault(i, now)
                elif event["type"].endswith("speech_stopped"):
                    stopped = now
                elif event["type"].endswith("transcription.completed"):
                    final = now - stopped
        await feeding
    lags = [there - words[i][1] for i, there in sorted(arrived.items())]
    return {"first": lags[0], "lags": lags, "missed": len(words) - len(lags), "final": final}


def tokens(url: str, count: int) -> list[float]:
    """Milliseconds between tokens of one stream."""
    body = {"prompt": "The history of rivers", "max_tokens": count, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    times = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [1000 * (b - a) for a, b in itertools.pairwise(times)][2:]


def beside(text: str, url: str, path: Path, rounds: int) -> dict[str, Any]:
    alone: list[float] = []
    together: list[float] = []
    sounds = 0
    for _ in range(rounds):
        time.sleep(2.0)
        alone += tokens(text, 60)
        job = subprocess.Popen(
            [sys.executable, "-c", REPEAT, f"{url}/v1/audio/transcriptions", str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(1.0)
        together += tokens(text, 60)
        job.terminate()
        sounds += len((job.communicate()[0] or "").split())
    return {"alone_ms": quantiles(alone), "beside_ms": quantiles(together), "sounds": sounds}


def beside_a_job(url: str, folder: Path, count: int) -> dict[str, Any]:
    """Seconds of a request of 3 s, alone and while a sound of three hours is heard."""
    short, talk = (
        spoken("The water turns the wheel of the old mill.", folder, "short"),
        folder / "a.mp3",
    )
    samples, rate = soundfile.read(spoken(" ".join(SENTENCES), folder, "all"), dtype="float32")
    samples = soxr.resample(samples, rate, 16_000)
    how: dict[str, Any] = {"format": "MP3", "compression_level": 0.99, "bitrate_mode": "CONSTANT"}
    soundfile.write(talk, samples, 16_000, **how)
    # Frames of MP3 may follow each other whatever they are of.
    talk.write_bytes(talk.read_bytes() * -(-10_800 * 16_000 // len(samples)))

    def once() -> float:
        begin = time.perf_counter()
        httpx.post(
            f"{url}/v1/audio/transcriptions",
            files={"file": short.read_bytes()},
            data={"language": "en"},
            timeout=60,
        ).raise_for_status()
        return time.perf_counter() - begin

    found = {"alone": quantiles([once() for _ in range(count)])}
    for name, more in (("in_order", {}), ("chunked", {"chunking_strategy": "auto"})):
        body = {"language": "en", "stream": "true"} | more
        with (
            talk.open("rb") as file,
            httpx.stream(
                "POST",
                f"{url}/v1/audio/transcriptions",
                files={"file": file},
                data=body,
                timeout=600,
            ) as reply,
        ):
            next(reply.iter_lines())  # It is being heard.
            found[f"beside_{name}"] = quantiles([once() for _ in range(count)])
    return found


REPEAT = """
import httpx, pathlib, sys
data = pathlib.Path(sys.argv[2]).read_bytes()
while True:
    httpx.post(sys.argv[1], files={"file": data}, data={"language": "en"}, timeout=100)
    print("heard", flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-text", action="store_true", help="the live part alone")
    given = parser.parse_args()
    found: dict[str, Any] = {"threads": given.threads, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder, server("whisper-base", given.threads) as (url, _):
        paths = [
            spoken(text, Path(folder), f"{voice} {i}", voice)
            for i, text in enumerate(SENTENCES)
            for voice in VOICES
        ]
        runs = [asyncio.run(live(url, path)) for path in paths * given.rounds]
        found["first_partial_seconds"] = {
            "median": round(median(run["first"] for run in runs), 3),
            "all": [round(run["first"], 3) for run in runs],
        }
        found["words_seconds"] = quantiles([lag for run in runs for lag in run["lags"]])
        found["words"] = sum(len(run["lags"]) + run["missed"] for run in runs)
        found["words_missed"] = sum(run["missed"] for run in runs)
        found["final_seconds"] = quantiles([run["final"] for run in runs])
        found["request_of_3_seconds"] = beside_a_job(url, Path(folder), 9)
        if not given.no_text:
            with server("qwen2.5-coder-0.5b", given.threads) as (text, _):
                tokens(text, 10)
                found["text"] = beside(text, url, paths[0], given.rounds)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
