"""Several models in one server: gaps and memory, against servers of their own.

    python benchmarks/several_models.py [--seconds 20] [--rounds 2] [--share 0.25] [--hears]

Two chats (qwen2.5-coder-0.5b, smollm2-135m) stream without a pause and an embedding model
(all-minilm-l6-v2) answers one request after the other. `--hears`: whisper-base in place of the
second chat, with one sound of ten seconds after the other. Each load runs

  alone       the one load in a server of its own: nothing else computes
  apart       all three at once, in three servers on the same cores
  together    all three at once, in one server
  loading     the two chats in one server, while a fourth model is loaded and unloaded; or, with
              `--hears`, `eight_chats` of the first model beside the second's sounds

`--share`: next to those, `paced_alone` and `paced_together`, in which each load begins a request
every 1/share of the time that one took alone: the device has time for all. `priced`: predicted over
measured seconds of each model's steps in the second, and of all, by `/metrics`. `simulated`: the
paced loads as `headrace simulate` predicts them.

A gap is the time between two pieces of a stream, or of an embedding or a sound its whole request.
Memory is the proportional set size of all processes below `headrace serve`, after the loads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from headrace.media.writing import to_pcm, wav_head

CHATS = ("qwen2.5-coder-0.5b", "smollm2-135m")
VECTORS, EARS = "all-minilm-l6-v2", "whisper-base"
INPUT = ["The water wheel of the old mill turns in the race below the weir. "] * 8
QUESTION = [{"role": "user", "content": "Tell a long story about a river and a mill."}]


@contextmanager
def serving(*models: str, rows: int = 8) -> Any:
    """Yield (address, operator's address, process) of a server of these models."""
    command = [sys.executable, "-m", "headrace", "serve", *models, "--port", "0"]
    command += ["--operator-port", "0", "--offline", "--log-level", "warning"]
    if models != (EARS,):
        command += ["--max-sequences", str(rows), "--context-cache", "0", "--speculate", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    operator = url = ""
    try:
        for line in process.stdout:
            if found := re.search(r"operator: (\S+)", line):
                operator = found[1]
            if found := re.search(r"ready: .* on (http\S+)", line):
                url = found[1]
                break
        if not url:
            raise SystemExit(f"{' '.join(models)}: the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield url, operator, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


class Clock:
    """The times at which a load begins its requests, and what they took."""

    def __init__(self, every: float = 0.0) -> None:
        self.end = threading.Event()
        self.every, self.next = every, time.perf_counter()
        self.requests: list[float] = []

    def turns(self) -> Iterator[None]:
        """Yield when a request is to begin, until the end."""
        while not self.end.wait(max(0.0, self.next - time.perf_counter())):
            begin = time.perf_counter()
            self.next = max(begin, self.next + self.every)
            yield
            self.requests.append(time.perf_counter() - begin)


def stream(url: str, model: str, clock: Clock, gaps: list[float], **more: Any) -> None:
    """Stream one answer after the other; note the gaps after each answer's first piece. `more`
    fields: `logprobs`, of every token, for models that write parts of letters."""
    wish = {"max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
    body = {"model": model, "messages": QUESTION, **wish, **more}
    mark = '"logprob"' if more else '"content":'
    with httpx.Client(timeout=300) as client:
        for _ in clock.turns():
            with client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply:
                latest = 0.0
                for line in reply.iter_lines():
                    if mark not in line:
                        continue
                    now = time.perf_counter()
                    if latest:
                        gaps.append(now - latest)
                    latest = now
                    if clock.end.is_set():
                        break


def embed(url: str, model: str, clock: Clock, gaps: list[float]) -> None:
    """Embed eight sentences, again and again; note the seconds of each request."""
    with httpx.Client(timeout=300) as client:
        for _ in clock.turns():
            begin = time.perf_counter()
            client.post(f"{url}/v1/embeddings", json={"model": model, "input": INPUT})
            gaps.append(time.perf_counter() - begin)


def hear(url: str, model: str, clock: Clock, gaps: list[float]) -> None:
    """Transcribe ten seconds, again and again; note the seconds of each request."""
    t = np.arange(16_000 * 10) / 16_000
    samples = 0.3 * np.sin(2 * np.pi * (200 + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    pcm = to_pcm(samples.astype(np.float32))
    sound = wav_head(16_000, len(pcm)) + pcm
    with httpx.Client(timeout=300) as client:
        for _ in clock.turns():
            begin = time.perf_counter()
            form = {"files": {"file": sound}, "data": {"model": model, "language": "en"}}
            client.post(f"{url}/v1/audio/transcriptions", **form).raise_for_status()
            gaps.append(time.perf_counter() - begin)


LOADS = {CHATS[0]: stream, CHATS[1]: stream, VECTORS: embed, EARS: hear}


def loads(
    urls: dict[str, str], seconds: float, every: Mapping[str, float] = {}, chats: int = 1
) -> dict[str, dict[str, float]]:
    """Run the load of each model on its address, `chats` times of the first; return the quantiles
    of its gaps in ms, and the median of its requests' seconds. `every`: from begin to begin."""
    clocks = {model: Clock(every.get(model, 0.0)) for model in urls}
    gaps: dict[str, list[float]] = {model: [] for model in urls}
    given = [(url, model, clocks[model], gaps[model]) for model, url in urls.items()]
    given += given[:1] * (chats - 1)
    threads = [threading.Thread(target=LOADS[one[1]], args=one) for one in given]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    for clock in clocks.values():
        clock.end.set()
    for thread in threads:
        thread.join()
    took = {model: round(statistics.median(one.requests), 3) for model, one in clocks.items()}
    return {model: summed(found) | {"request": took[model]} for model, found in gaps.items()}


def summed(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)

    def at(share: float) -> float:
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "longest": at(1.0)}


def memory(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return the MiB of a server's processes: proportional set size, and their number."""
    every = [tree := psutil.Process(process.pid), *tree.children(recursive=True)]
    pss = sum(one.memory_full_info().pss for one in every)
    return {"processes": len(every), "pss_mib": round(pss / 2**20, 1)}


def seconds_of(url: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each model's steps so far, and of all: predicted, and on the device."""
    found: dict[str, dict[str, float]] = {"all": {"predicted": 0.0, "device": 0.0}}
    row = r'headrace:(predicted|device)_seconds_total{.*?model_name="(.+?)".*?} (\S+)'
    for kind, model, value in re.findall(row, httpx.get(f"{url}/metrics").text):
        found.setdefault(model, {})[kind] = float(value)
        found["all"][kind] += float(value)
    return found


def simulated(models: tuple[str, ...], share: float) -> Any:
    """Return the gaps of the paced loads on virtual time."""
    first, *others = (f"{model}:share={share}" for model in models)
    command = [sys.executable, "-m", "headrace", "simulate", first, "--input=20", "--output=200"]
    command += ["--json", *(f"--beside={one}" for one in others)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["models"]


def run(models: tuple[str, ...], seconds: float, share: float) -> dict[str, Any]:
    found: dict[str, Any] = {"load_average": os.getloadavg()[0], "alone": {}, "memory": {}}
    with ExitStack() as stack:
        servers = {model: stack.enter_context(serving(model)) for model in models}
        for model, (url, _, _) in servers.items():
            found["alone"] |= loads({model: url}, seconds)
        every = {model: found["alone"][model]["request"] / share for model in models}
        found["paced_alone"] = {}
        for model, (url, _, _) in servers.items():
            found["paced_alone"] |= loads({model: url}, seconds, every)
        found["apart"] = loads({model: url for model, (url, _, _) in servers.items()}, seconds)
        each = {model: memory(process) for model, (_, _, process) in servers.items()}
        found["memory"]["apart"] = each
    with serving(*models) as (url, operator, process):
        found["together"] = loads(dict.fromkeys(models, url), seconds)
        before = seconds_of(url)
        found["paced_together"] = loads(dict.fromkeys(models, url), seconds, every)
        found["priced"] = {
            model: round((p["predicted"] - b["predicted"]) / (p["device"] - b["device"]), 3)
            for (model, p), b in zip(seconds_of(url).items(), before.values(), strict=True)
        }
        found["memory"]["together"] = memory(process)
        if EARS in models:
            found["simulated"] = simulated(models, share)
            found["eight_chats"] = loads(dict.fromkeys(models[:2], url), seconds, chats=8)
            return found
        took, end = list[float](), threading.Event()

        def come_and_go() -> None:
            with httpx.Client(timeout=300) as client:
                while not end.is_set():
                    begin = time.perf_counter()
                    wanted = {"model": f"{CHATS[1]}:name=fourth,kv=64MiB"}
                    client.post(f"{operator}/operate/models", json=wanted).raise_for_status()
                    took.append(time.perf_counter() - begin)
                    client.delete(f"{operator}/operate/models/fourth").raise_for_status()

        (thread := threading.Thread(target=come_and_go)).start()
        found["loading"] = loads(dict.fromkeys(CHATS, url), seconds)
        end.set()
        thread.join()
        found["loading"]["load_seconds"] = [round(one, 3) for one in took]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.25, help="of a paced load")
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="file for the figures")
    parser.add_argument("--hears", action="store_true", help="whisper-base as the second model")
    given = parser.parse_args()
    rounds = []
    models = (CHATS[0], EARS if given.hears else CHATS[1], VECTORS)
    for number in range(given.rounds):
        rounds.append(run(models, given.seconds, given.share))
        print(f"round {number + 1} of {given.rounds}", json.dumps(rounds[-1], indent=1), flush=True)
    commit = subprocess.getoutput(f"git -C {Path(__file__).parent} rev-parse --short HEAD")
    record = {"commit": commit, "cores": os.cpu_count(), "seconds": given.seconds, "rounds": rounds}
    given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
