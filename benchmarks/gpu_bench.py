"""`make gpu-bench`: one command, one JSON: is the GPU path right, and how fast is it?

    python benchmarks/gpu_bench.py [--smoke] [--only PART …] [--minutes M]

Needs torch, triton and (for one part) transformers; no network, no weights: models have real
configurations and random numbers. In order: Triton's cache is filled from several processes; every
kernel and path is checked against the reference on the device; the two ceilings, and every kernel's
time and share of the ceiling that binds it; whole models through the real worker and the real
scheduler; transformers on the same.

Every part is a process of its own with a limit of its own: what faults, hangs or takes the CUDA
context with it ends that part and no other, and the record says so. `--smoke` touches every part
once with small sizes, nearly all at the same time, in under two minutes: run it first on a machine
that is new. `--only` takes parts by a piece of their names. The exit status is 0 only where every
part ran and everything was right. `--tiny` runs the parts on a CPU in Triton's interpreter, with
sizes that mean nothing, to prove the script. `gpu_hour.py` runs it part by part.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")
HERE = Path(__file__).parent
CHECKS = HERE.parent / "tests/gpu"
SHARDS = min(12, os.cpu_count() or 1)
"""Processes that check and compile at the same time."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the benchmark."""

    name: str
    seconds: float
    """What it may take; most take less."""
    least: float = 15
    """With less than this left it is not begun."""


PARTS = (
    Part("compile", 75),
    Part("checks", 100),
    Part("kernels", 75),
    Part("llama-3.1-8b fp8", 105),
    Part("llama-3.1-8b bf16", 90),
    Part("transformers", 50),
    Part("llama-3.1-8b int4", 60),
    Part("qwen3-30b-a3b bf16", 75, 40),
    Part("qwen2.5-0.5b bf16", 45),
    Part("llama-3.1-8b bf16 deterministic", 40),
)
"""By worth: what comes last is what is left out."""
SMALL_PARTS = (
    Part("compile", 100),
    Part("checks", 150),
    Part("kernels", 150),
    Part("small bf16", 150),
    Part("small fp8", 150),
    Part("small int4", 150),
    Part("small experts fp8", 150),
    Part("transformers", 150),
)
"""Limits for a machine whose caches are empty: most of the time is compiling, also of what launches
a kernel, and eighteen processes share the cores."""
TINY_PARTS = (
    Part("checks", 1200),
    Part("kernels", 1200),
    Part("tiny", 1200),
    Part("transformers", 1200),
)
"""Limits that only tell a wait from an end, on a CPU that others use too."""
TINY_CHECKS = ("norms", "codes", "attention, one token, bf16", "product, blocks, 1 rows", "memory")


def by_rows(value: Any, indent: str = "\n ") -> str:
    """Write JSON with a line for each row: what holds no lists and tables is one line."""
    table = isinstance(value, dict)
    each = value.values() if table else value if isinstance(value, list) else ()
    if not any(isinstance(one, dict | list) for one in each):
        return json.dumps(value, default=str)
    names = [f"{json.dumps(str(name))}: " for name in value] if table else [""] * len(value)
    lines = [name + by_rows(one, indent + " ") for name, one in zip(names, each, strict=True)]
    first, last = "{}" if table else "[]"
    return f"{first}{indent}{f',{indent}'.join(lines)}{indent[:-1]}{last}"


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two marks of a page."""
    before, _, rest = page.read_text().partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"{page} lacks the marks"
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


class Bench:
    """The record being made, and the clock."""

    def __init__(self, minutes: float, path: Path, size: str) -> None:
        self._begin = time.perf_counter()
        self._end = self._begin + 60 * minutes
        self._path, self.size = path, size
        self._over = threading.Event()
        """Set when the run is broken off: no process is begun any more, and none is left."""
        self.folder = Path(tempfile.mkdtemp(prefix="gpu_bench_"))
        self.record: dict[str, Any] = {
            "size": size,
            "commit": commit(),
            "began": time.strftime("%F %T"),
            "left_out": [],
            "failures": [],
            "wrong": [],
            "seconds": {},
            "parts": {},
        }

    def left(self) -> float:
        return self._end - time.perf_counter()

    def run(self, part: Part) -> None:
        """One part, to its end or its limit."""
        if self.left() < part.least:
            self.record["left_out"].append(f"{part.name}: {self.left():.0f} s left")
            return
        limit = min(part.seconds, self.left())
        begin = time.perf_counter()
        print(f"== {part.name} (up to {limit:.0f} s)", flush=True)
        own = {"checks": self._checks, "compile": self._compile}
        work = own.get(part.name, self._alone)
        work(part.name, limit)
        self.record["seconds"][part.name] = round(time.perf_counter() - begin, 1)

    def run_all(self, parts: Sequence[Part]) -> None:
        """One after the other, with a record after each; `--smoke` at the same time."""
        if self.size == "small":
            # What spares the others their compiling comes first.
            for part in [part for part in parts if part.name == "compile"]:
                self.run(part)
            parts = [part for part in parts if part.name != "compile"]
            # Nothing is measured, and most of it is starting and compiling. The record is saved at
            # the end only: it cannot be written out while others add to it.
            self._at_once(self.run, parts)
            return
        for part in parts:
            self.run(part)
            self.save()

    def _at_once(self, work: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
        """Each in a thread. An interruption reaches only this one: it ends the others' processes,
        which they would wait for."""
        with ThreadPoolExecutor(max(1, len(items))) as pool:
            try:
                return list(pool.map(work, items))
            except BaseException:
                self._over.set()
                raise

    def save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(by_rows(self.record) + "\n")

    def finish(self) -> int:
        """Say what is amiss; → the exit status."""
        self.record["total_seconds"] = round(time.perf_counter() - self._begin, 1)
        self.save()
        for kind in ("left_out", "failures", "wrong"):
            for line in self.record[kind]:
                print(f"!! {kind.replace('_', ' ')}: {line}")
        print(f"{self.record['total_seconds']:.0f} s in all; {self._path}")
        return 1 if self.record["failures"] or self.record["wrong"] else 0

    def _alone(self, name: str, limit: float) -> None:
        out = self.folder / f"{name.replace(' ', '_')}.json"
        ceilings = self.folder / "ceilings.json"
        asked = [str(HERE / "gpu_parts.py"), name, "--size", self.size, "--out", str(out)]
        asked += ["--seconds", str(limit - 3), "--ceilings", str(ceilings)]
        code, tail = launch(asked, limit, over=self._over)
        # What a part had found when it ended is in its file.
        found = json.loads(out.read_text()) if out.exists() else {}
        self.record["parts"][name] = found
        if code:
            self.record["failures"].append(f"{name}: {describe(code, limit)}: {tail}")
        for row in found.get("kernels", []):
            if not row.get("right", False):
                self.record["wrong"].append(f"{row['kernel']}: {row.get('failure', row)}")
        self.record["left_out"] += found.get("left_out", [])

    def _checks(self, name: str, limit: float) -> None:
        names = list(TINY_CHECKS)
        if self.size != "tiny":
            names = self._names("SMOKE" if self.size == "small" else "all_checks()")
        deadline = time.perf_counter() + limit
        shards = [names[number::SHARDS] for number in range(SHARDS)]
        done = self._at_once(lambda shard: self._shard(shard, deadline), shards)
        rows = [row for found in done for row in found]
        self.record["parts"][name] = rows
        for row in rows:
            if not row["right"]:
                self.record["wrong"].append(f"{row['check']}: {row.get('failure', row)}")
        missing = set(names) - {row["check"] for row in rows}
        self.record["left_out"] += [f"check {each}" for each in sorted(missing)]
        print(f"{sum(bool(row['right']) for row in rows)} of {len(names)} checks are right")

    def _names(self, which: str) -> list[str]:
        """The names of some checks; none, and a failure, where they cannot be imported."""
        code = f"import json, gpu_checks; print(json.dumps(list(gpu_checks.{which})))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            cwd=HERE,
            env=environment(self.size),
        )
        if done.returncode:
            self.record["failures"].append(f"checks: {done.stderr[-1500:]}")
            return []
        found: list[str] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _shard(self, names: list[str], deadline: float) -> list[dict[str, Any]]:
        """Run some checks in a process; one that dies is followed by another for the rest."""
        rows: list[dict[str, Any]] = []
        while names and deadline - time.perf_counter() > 3 and not self._over.is_set():
            output = self.folder / f"check_{time.perf_counter_ns()}"
            arguments = [str(CHECKS / "gpu_checks.py"), "--names", json.dumps(names)]
            if self.size == "tiny":
                arguments.append("--tiny")
            code, tail = launch(arguments, deadline - time.perf_counter(), output, over=self._over)
            lines = [json.loads(x) for x in output.read_text().splitlines() if x.startswith("{")]
            done = [line for line in lines if "check" in line]
            rows += done
            begun = next((x["begins"] for x in reversed(lines) if "begins" in x), None)
            names = names[len(done) :]
            if not names or time.perf_counter() >= deadline:
                break
            if begun == names[0]:
                rows.append({"check": begun, "right": False, "failure": f"exit {code}: {tail}"})
                names = names[1:]
            elif not done:
                self.record["failures"].append(f"checks did not begin: exit {code}: {tail}")
                break
        return rows

    def _compile(self, name: str, limit: float) -> None:
        """Fill Triton's cache, so that the rest does not compile one by one."""
        begin = time.perf_counter()
        checks = ["--checks"] if self.size == "small" else []
        code, tail = launch(
            [str(HERE / "gpu_ahead.py"), "--seconds", str(limit - 5), *checks],
            limit,
            over=self._over,
        )
        # Nothing rests on it: what is not in the cache is compiled when it is used.
        self.record["parts"][name] = {
            "exit": code,
            "last": tail,
            "seconds": time.perf_counter() - begin,
        }


def environment(size: str) -> dict[str, str]:
    """Environment of every process."""
    own = (str(HERE.parent / "src"), str(HERE), str(CHECKS))
    path = os.pathsep.join(x for x in (*own, os.environ.get("PYTHONPATH", "")) if x)
    extra = {"PYTHONPATH": path}
    if size == "tiny":
        extra |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **extra}


def launch(
    arguments: list[str],
    limit: float,
    output: Path | None = None,
    *,
    over: threading.Event | None = None,
) -> tuple[int, str]:
    """→ (exit status, the end of what it said); its output is shown, or goes to a file.

    The process and its children are ended at the limit, when `over` is set, and when this one is
    interrupted: they are a session of their own, which no Ctrl-C reaches.
    """
    end = time.perf_counter() + max(1.0, limit)
    with tempfile.TemporaryFile("w+") as errors:
        out = output.open("w") if output else None
        size = "tiny" if "--tiny" in arguments or "tiny" in arguments else ""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env=environment(size),
            cwd=HERE,
        )
        try:
            while time.perf_counter() < end and not (over and over.is_set()):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                    break
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if out is not None:
                out.close()
        errors.seek(0)
        return code, errors.read()[-1500:].strip()


def describe(code: int, limit: float) -> str:
    return f"not done in {limit:.0f} s" if code == -signal.SIGKILL else f"exit {code}"


def commit() -> str:
    """The revision of what is measured; "" where git is not installed."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
        )
    except OSError:
        return ""
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--only", nargs="+", help="parts whose names contain one of these")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--smoke", action="store_true", help="every part once, in two minutes")
    sizes.add_argument("--tiny", action="store_true", help="on a CPU, interpreted, meaningless")
    arguments = parser.parse_args()
    size = "tiny" if arguments.tiny else "small" if arguments.smoke else "real"
    # A container may be lent any number of them.
    if size != "tiny" and not any(Path("/dev").glob("nvidia[0-9]*")):
        print("no GPU here; `--tiny` proves the script on a CPU", file=sys.stderr)
        return 2
    parts = {"tiny": TINY_PARTS, "small": SMALL_PARTS, "real": PARTS}[size]
    if arguments.only:
        parts = tuple(p for p in parts if any(word in p.name for word in arguments.only))
        if not parts:
            print(f"no such part; there are: {', '.join(p.name for p in PARTS)}", file=sys.stderr)
            return 2
    name = {"tiny": "gpu_bench_tiny", "small": "gpu_bench_smoke", "real": "gpu_bench"}[size]
    path = arguments.json or HERE / f"results/{name}.json"
    bench = Bench(arguments.minutes, path, size)
    bench.run_all(parts)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
