"""The first hour of a device: five calls of at most ten minutes, each a part of one plan.

    python benchmarks/gpu_hour.py CALL --out DIR [--minutes 9.5] [--dry] [--only PART …]

1 is it right: a smoke run, every check, every kernel beside its ceiling; 2 torch's own kernels on
the same shapes, one row; 3 whole models at saturation; 4 another engine on the same card; 5 the
tuner. A part is a process with a limit (`gpu_bench.py`). After each one DIR/hour.json says how it
ended, and DIR has its record. What is done for this commit is not done again; what failed, was cut
off or had no time is, first the parts of earlier calls. `--dry` runs the same plan on a CPU, in
Triton's interpreter, with sizes that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu_bench import PARTS, SMALL_PARTS, TINY_PARTS, Bench, Part, commit, launch

CALLS: dict[int, tuple[Part, ...]] = {
    1: (Part("smoke", 180), *(part for part in PARTS if part.name in ("checks", "kernels"))),
    2: (
        Part("peers", 100),
        *(p for p in PARTS if p.name.startswith(("qwen2.5", "llama-3.1-8b b"))),
    ),
    3: tuple(part for part in PARTS if part.name.endswith((" fp8", " int4", "a3b bf16"))),
    4: (Part("transformers", 100),),
    5: (Part("tune", 570, 60),),
}
DRY = {"smoke": "checks", "tune": "", "peers": "peers", "transformers": "transformers"}
"""What a CPU does in place of a part: another one, the tiny model, or nothing."""
TUNER = "-m", "headrace.kernels.triton.tune"


class Hour:
    """The plan's state, in a file after every change."""

    def __init__(self, folder: Path, *, dry: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dry = folder, dry
        self._path = folder / "hour.json"
        state = json.loads(self._path.read_text()) if self._path.exists() else {}
        if state.get("commit") != commit() or state.get("dry") is not dry:
            state = {"commit": commit(), "dry": dry, "parts": {}}
        self.state: dict[str, Any] = state

    def open(self, call: int) -> list[Part]:
        """The parts up to this call that are still to be done."""
        parts = [part for number in range(1, call + 1) for part in CALLS[number]]
        return [p for p in parts if self.state["parts"].get(p.name, {}).get("status") != 0]

    def run(self, part: Part, left: float) -> None:
        begin = time.perf_counter()
        self._keep(part.name, status=None, began=time.strftime("%F %T"))  # What a cut leaves.
        status, record = self._process(part, min(part.seconds, left))
        seconds = round(time.perf_counter() - begin, 1)
        self._keep(part.name, status=status, seconds=seconds, record=record)

    def _process(self, part: Part, limit: float) -> tuple[int, str]:
        name = f"{part.name.replace(' ', '_')}.json"
        if part.name == "tune" and self.dry:
            return 0, ""
        if part.name == "tune":
            given = [*TUNER, "--write", str(self.folder / name), "--seconds", str(limit - 15)]
            return (
                (0, "") if self.dry else (launch(given, limit, self.folder / "tune.txt")[0], name)
            )
        size, parts = ("small", SMALL_PARTS) if part.name == "smoke" else ("real", (part,))
        if self.dry:
            instead = DRY.get(part.name, part.name if part.name in DRY.values() else "tiny")
            limit, size = TINY_PARTS[0].seconds, "tiny"
            parts = (Part(instead, limit),)
        bench = Bench(limit / 60, self.folder / name, size)
        bench.run_all(parts)
        return bench.finish() or int(bool(bench.record["left_out"])), name

    def _keep(self, name: str, **found: object) -> None:
        self.state["parts"][name] = found
        self._path.write_text(json.dumps(self.state, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("call", type=int, choices=list(CALLS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--dry", action="store_true", help="on a CPU, interpreted")
    parser.add_argument("--only", nargs="+", help="parts whose names contain one of these")
    arguments = parser.parse_args()
    if not arguments.dry and not any(Path("/dev").glob("nvidia[0-9]*")):
        print("no GPU here; `--dry` runs the plan on a CPU", file=sys.stderr)
        return 2
    hour = Hour(arguments.out, dry=arguments.dry)
    end = time.perf_counter() + 60 * arguments.minutes
    for part in hour.open(arguments.call):
        wanted = not arguments.only or any(word in part.name for word in arguments.only)
        if wanted and (hour.dry or end - time.perf_counter() >= part.least):
            hour.run(part, end - time.perf_counter())
    for name, found in hour.state["parts"].items():
        print(f"{name:36} {found.get('seconds', '-'):>7} s  status {found['status']}")
    left = [part.name for part in hour.open(arguments.call)]
    print(f"still to do: {', '.join(left) or 'nothing'}")
    return int(bool(left) and not arguments.only)


if __name__ == "__main__":
    sys.exit(main())
