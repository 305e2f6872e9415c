"""Memory of a server that hears, by how many sounds it hears at a time.

Run: `python benchmarks/speech_memory.py [--streams 1 8 48] [--model whisper-base]` (needs espeak-ng
and the extra `audio`). For each number a server is started anew on two threads, and is sent so many
recordings of 40 s at once. Told, in MB: the peak of resident memory of the process
that hears (VmHWM) and of the one that answers, and PSS of both together before the first sound and
at the end, in which a page that several share is counted once. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from speech_served import server

from speech import speak

RESULTS = Path(__file__).parent / "results" / "speech_memory.json"


def processes(parent: int) -> list[int]:
    """The process and all below it."""
    found = [parent]
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found += processes(int(path.parent.name))
    return found


def megabytes(process: int, file: str, name: str) -> float:
    text = Path(f"/proc/{process}/{file}").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1000 * 1.024 if found else 0.0


def ask(url: str, path: Path) -> str:
    reply = httpx.post(
        f"{url}/v1/audio/transcriptions",
        files={"file": path.read_bytes()},
        data={"language": "en", "response_format": "text"},
        timeout=600,
    )
    reply.raise_for_status()
    return reply.text


def measure(model: str, streams: int, paths: list[Path]) -> dict[str, Any]:
    with server(model, 2) as (url, pid):
        own = processes(pid)
        hears = next(
            one for one in own if b"hearing.process" in Path(f"/proc/{one}/cmdline").read_bytes()
        )
        before = sum(megabytes(one, "smaps_rollup", "Pss") for one in own)
        with ThreadPoolExecutor(streams) as pool:
            wanted = [paths[i % len(paths)] for i in range(streams)]
            texts = list(pool.map(lambda path: ask(url, path), wanted))
        assert all(texts)
        return {
            "streams": streams,
            "hears_peak": round(megabytes(hears, "status", "VmHWM")),
            "answers_peak": round(megabytes(pid, "status", "VmHWM")),
            "pss_before": round(before),
            "pss_after": round(sum(megabytes(one, "smaps_rollup", "Pss") for one in own)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 48])
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for path, _ in speak(Path(folder))]
        found = []
        for streams in given.streams:
            found.append(measure(given.model, streams, paths))
            print(json.dumps(found[-1]), flush=True)
    given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
