"""From the start of a process to the first token of the default model, and what memory it takes.

    python benchmarks/start.py [--rounds 5] [--serve] [--no-keep-packed] [--json FILE]

A process of its own each time, as in `cpu_peers.py`: the clock starts before it is spawned; 16
random token ids, one greedy token. `--serve` starts `headrace serve` instead and asks it over HTTP
until it answers. The first round may have to repack the weights and to compile byte code (an
installed package has it, one under development after its first start): it is shown, not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

THREADS = 2
CHILD = """
import json, random, sys, time
from headrace import LLM, SamplingParams
imported = time.time()
llm = LLM(threads=int(sys.argv[2]), max_context=4096, offline=True, keep_packed=sys.argv[1] == "1")
started = time.time()
prompt = [random.randrange(1_000, 100_000) for _ in range(16)]
params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
llm.generate([prompt], params)
first = time.time()
llm.generate("A river is", params)
text = time.time()
print(json.dumps({"imported": imported, "first": first, "text": text, "phases": llm.phases}))
llm.close()
"""


def ids() -> list[int]:
    return [random.randrange(1_000, 100_000) for _ in range(16)]


def environment() -> dict[str, str]:
    """Byte code is kept between starts, as after an installation, whatever this shell says."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def of_llm(keep: bool) -> dict[str, Any]:
    begin = time.time()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(int(keep)), str(THREADS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), "OMP_NUM_THREADS": str(THREADS)},
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"the child ended with {process.returncode}")
    values = json.loads(said.splitlines()[-1])
    return {
        "seconds": values["first"] - begin,
        "import": values["imported"] - begin,
        "with_text": values["text"] - begin,
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / 1024,
        "phases": values["phases"],
    }


def of_server(keep: bool) -> dict[str, Any]:
    port = 18_000 + random.randrange(1_000)
    command = [
        sys.executable,
        "-m",
        "headrace",
        "serve",
        "--threads",
        str(THREADS),
        "--max-context",
        "4096",
        "--offline",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--keep-packed" if keep else "--no-keep-packed",
    ]
    body = {"model": "qwen2.5-coder-0.5b", "prompt": ids(), "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begin, listening = time.monotonic(), 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        try:
            while server.poll() is None and time.monotonic() < begin + 60:
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        answer.read()
                    took = time.monotonic() - begin
                    assert server.stdout is not None
                    return {
                        "seconds": took,
                        "listening": listening,
                        "ready": server.stdout.readline().strip(),
                        "peaks_mib": [peak(pid) for pid in (server.pid, *children(server.pid))],
                    }
                except urllib.error.HTTPError as error:
                    if error.code != 503:
                        raise
                    listening = listening or time.monotonic() - begin
                except (urllib.error.URLError, ConnectionError):
                    pass
                time.sleep(0.02)
            raise RuntimeError("the server did not start")
        finally:
            server.terminate()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in found.read_text().split()] if found.exists() else []


def peak(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--no-keep-packed", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measure = of_server if arguments.serve else of_llm
    rounds = []
    for number in range(arguments.rounds + 1):
        rounds.append(measure(not arguments.no_keep_packed))
        print(f"{number}: {json.dumps(rounds[-1])}", flush=True)
    seconds = [each["seconds"] for each in rounds[1:]]
    print(f"median {statistics.median(seconds):.2f} s, least {min(seconds):.2f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"load": os.getloadavg()[0], "rounds": rounds}) + "\n")


if __name__ == "__main__":
    main()
