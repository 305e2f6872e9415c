"""Programs on time: a run beside bare ONNX Runtime, four programs at once, streams beside chats.

    python benchmarks/programs.py [overhead] [four] [streams] [memory] [--seconds 20] [--json FILE]

  overhead  quantiles of one run of the engine, from call to outputs, minus those of bare ONNX
            Runtime on the same inputs, in turns (vad-silero, a frame of 32 ms)
  four      vad-silero and the three of ocr-pp-v4, each asked again as soon as it has answered: by
            the engine, by four sessions of ONNX Runtime as it makes them, and by four with one
            thread each that does not spin, in turns. Work is the sum of runs, each weighed by what
            it takes alone on one thread; of the ratios of a round's work the median is told
  streams   a server of the default model and programs: eight chats without a pause, streams of 33
            and 100 ms as they are admitted beside them, and then more streams until one is refused
  memory    growth of both processes after the first quarter of --requests runs

Without a name all but `memory` run; the others keep their figures in the file. The clock of a busy
machine says nothing: the load average is written down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnxruntime
import psutil
import uvloop
from several_models import CHATS, Clock, serving, stream, summed

from headrace.engine.programs.engine import ProgramEngine, ProgramLimits
from headrace.engine.programs.files import program_files

DRAW = np.random.default_rng(0)
SILERO, DET, REC, CLS = "vad-silero", "ocr-pp-v4-det", "ocr-pp-v4-rec", "ocr-pp-v4-cls"
SIZES = {DET: (1, 3, 160, 160), REC: (1, 3, 48, 160), CLS: (1, 3, 48, 192)}
FEEDS = {name: {"x": DRAW.standard_normal(size, np.float32)} for name, size in SIZES.items()}
FRAME = {"input": DRAW.standard_normal((1, 576), np.float32), "sr": np.array(16_000)}
FEEDS[SILERO] = {**FRAME, "state": np.zeros((2, 1, 128), np.float32)}
NAMES = SILERO, "ocr-pp-v4"
LIMITS = ProgramLimits(seconds=600.0, load_seconds=600.0)
STREAMS = ((CLS, 0.033), (DET, 0.1))
"""Program and period of each stream."""
Arm = Callable[[float], tuple[Counter[str], float]]
"""Asks for so many seconds; returns the runs of each program, and the seconds to the last end."""


def session(name: str, *, tuned: bool) -> Any:
    options = onnxruntime.SessionOptions()
    if tuned:
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    file = program_files(NAMES)[name]
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


async def overhead(frames: int) -> dict[str, Any]:
    engine = await ProgramEngine.start(program_files([SILERO]), LIMITS, lanes=1)
    bare = session(SILERO, tuned=True)
    program, ours, theirs = engine.find(SILERO), [], []
    for _ in range(frames):
        begun = time.perf_counter()
        await engine.run(program, FEEDS[SILERO])
        between = time.perf_counter()
        bare.run(None, FEEDS[SILERO])
        ours.append(1e3 * (between - begun))
        theirs.append(1e3 * (time.perf_counter() - between))
    await engine.close()
    found: dict[str, Any] = {"frames": frames}
    for at in (50, 99):
        one, other = (float(np.percentile(took[frames // 20 :], at)) for took in (ours, theirs))
        found[f"p{at}_ms"] = {"ours": one, "bare": other, "above": one - other}
    return found


def by_sessions(*, tuned: bool) -> Arm:
    made = {name: session(name, tuned=tuned) for name in FEEDS}

    def ask(seconds: float) -> tuple[Counter[str], float]:
        runs, begun = Counter[str](), time.perf_counter()

        def loop(name: str) -> None:
            while time.perf_counter() < begun + seconds:
                made[name].run(None, FEEDS[name])
                runs[name] += 1

        with ThreadPoolExecutor(len(FEEDS)) as pool:
            list(pool.map(loop, FEEDS))
        return runs, time.perf_counter() - begun

    return ask


async def by_engine(engine: ProgramEngine, seconds: float) -> tuple[Counter[str], float]:
    runs, begun = Counter[str](), time.perf_counter()

    async def loop(name: str) -> None:
        while time.perf_counter() < begun + seconds:
            await engine.run(engine.find(name), FEEDS[name])
            runs[name] += 1

    await asyncio.gather(*map(loop, FEEDS))
    return runs, time.perf_counter() - begun


async def four(seconds: float, rounds: int) -> dict[str, Any]:
    alone, engine = {}, await ProgramEngine.start(program_files(NAMES), LIMITS)
    for name in FEEDS:
        bare, times = session(name, tuned=True), []
        for _ in range(30):
            begun = time.perf_counter()
            bare.run(None, FEEDS[name])
            times.append(time.perf_counter() - begun)
        alone[name] = statistics.median(times)
    arms = {"default": by_sessions(tuned=False), "tuned": by_sessions(tuned=True)}
    work: dict[str, list[float]] = {"engine": [], **{name: [] for name in arms}}
    for number in range(rounds + 1):  # The first is for warming up.
        told = {name: await asyncio.to_thread(arm, seconds) for name, arm in arms.items()}
        told["engine"] = await by_engine(engine, seconds)
        for name, (runs, took) in told.items() if number else ():
            work[name].append(sum(runs[one] * alone[one] for one in runs) / took)
    await engine.close()
    found: dict[str, Any] = {"alone_ms": {name: 1e3 * one for name, one in alone.items()}}
    found["work"] = {name: statistics.median(one) for name, one in work.items()}
    found["runs_of_the_last_round"] = {name: dict(runs) for name, (runs, _) in told.items()}
    for name in arms:
        pairs = [ours / other for ours, other in zip(work["engine"], work[name], strict=True)]
        found[f"of_{name}"] = {"median": statistics.median(pairs), "rounds": pairs}
    return found


class FrameStream:
    """One admitted stream, and the frames that were sent on it."""

    def __init__(self, url: str, name: str, period: float) -> None:
        self.place, self.period = f"{url}/v2/models/{name}", period
        shapes = {one: list(value.shape) for one, value in FEEDS[name].items()}
        asked = {"shapes": shapes, "period": period, "deadline": period}
        reply = httpx.post(f"{self.place}/streams", json=asked, timeout=60)
        self.told = reply.json()
        self.admitted = reply.status_code == 200
        self.ends, self.took = Counter[str](), list[float]()
        tensors, data = list[dict[str, Any]](), b""
        for one, value in FEEDS[name].items():
            tensors.append({"name": one, "shape": list(value.shape), "datatype": "FP32"})
            tensors[-1]["parameters"] = {"binary_data_size": value.nbytes}
            data += value.tobytes()
        place = {"stream": self.told.get("id"), "binary_data_output": True}
        head = json.dumps({"inputs": tensors, "parameters": place}).encode()
        self.body, self.length = head + data, str(len(head))

    def send(self, clock: Clock) -> None:
        headers = {"Inference-Header-Content-Length": self.length}
        with httpx.Client(timeout=60) as client:
            for _ in clock.turns():
                begun = time.perf_counter()
                reply = client.post(f"{self.place}/infer", content=self.body, headers=headers)
                self.took.append(time.perf_counter() - begun)
                told = "" if reply.is_success else reply.json()
                self.ends[str(told.get("code", told)) if told else "answered"] += 1


def streams(seconds: float) -> dict[str, Any]:
    with serving(CHATS[0], "--programs", "ocr-pp-v4") as (url, _, _):
        chats, gaps = [Clock() for _ in range(8)], list[float]()
        talks = [threading.Thread(target=stream, args=(url, CHATS[0], one, gaps)) for one in chats]
        for one in talks:
            one.start()
        time.sleep(5)
        opened = [FrameStream(url, *one) for one in STREAMS]
        found: dict[str, Any] = {"opened": [one.told for one in opened]}
        sending = [(one, Clock(one.period)) for one in opened if one.admitted]
        frames = [threading.Thread(target=one.send, args=(clock,)) for one, clock in sending]
        for thread in frames:
            thread.start()
        time.sleep(seconds)
        while (more := FrameStream(url, *STREAMS[1])).admitted and len(opened) < 64:
            opened.append(more)
        found["refused"], found["admitted"] = more.told, len(opened)
        found["utilisation"] = sum(one.told.get("utilisation", 0.0) for one in opened)
        for clock in (*(clock for _, clock in sending), *chats):
            clock.end.set()
        for thread in (*frames, *talks):
            thread.join()
        found["frames"] = {
            f"{one.period * 1e3:.0f} ms": dict(one.ends) | {"took_ms": summed(one.took)}
            for one, _ in sending
        }
        found["missed"] = sum(len(one.took) - one.ends["answered"] for one, _ in sending)
        return found | {"chats_gap_ms": summed(gaps)}


async def memory(requests: int) -> dict[str, Any]:
    """Eight callers at a time; sizes are in MiB after each twentieth of the runs."""
    engine = await ProgramEngine.start(program_files([SILERO]), LIMITS)
    program, left = engine.find(SILERO), iter(range(requests))
    watched = {"engine": psutil.Process(), "program": psutil.Process(program.confined.pid)}
    sizes: dict[str, list[float]] = {name: [] for name in watched}

    async def loop() -> None:
        for number in left:
            await engine.run(program, FEEDS[SILERO])
            for name, one in watched.items() if number % (requests // 20) == 0 else ():
                sizes[name].append(one.memory_info().rss / 2**20)

    await asyncio.gather(*(loop() for _ in range(8)))
    await engine.close()
    growth = max(abs(one[-1] / one[len(one) // 4] - 1) for one in sizes.values())
    return {"requests": requests, "rss_mib": sizes, "growth": growth}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=["overhead", "four", "streams"])
    parser.add_argument("--seconds", type=float, default=20.0, help="of an arm, and of the streams")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=5000)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path, default=Path(os.devnull), help="for the figures")
    given = parser.parse_args()
    found: dict[str, Any] = json.loads(given.json.read_text()) if given.json.is_file() else {}
    looped = asyncio.Runner(loop_factory=uvloop.new_event_loop)  # As the server has it.
    works: dict[str, Callable[[], Any]] = {
        "overhead": lambda: looped.run(overhead(given.frames)),
        "four": lambda: looped.run(four(given.seconds, given.rounds)),
        "streams": lambda: streams(given.seconds),
        "memory": lambda: looped.run(memory(given.requests)),
    }
    for part in given.parts:
        load = round(os.getloadavg()[0], 1)
        found[part] = {"cores": os.cpu_count(), "load_average": load, **works[part]()}
        print(part, json.dumps(found[part], indent=1), flush=True)
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
