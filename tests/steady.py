"""Run the quick set many times and name the tests that fall by luck.

Run: `make steady` or `python tests/steady.py --times 10 --busy`. With `--busy` two processes for
each core compute meanwhile. The status is 1 if any test failed in any run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
SPIN = "while True: pass"


def run(expression: str, jobs: int) -> tuple[list[str], int, str]:
    """Run the tests once; return those that failed, pytest's status and its last line."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal"),
            *("-m", expression, "-p", "no:cacheprovider"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    return FAILED.findall(done.stdout), done.returncode, lines[-1] if lines else done.stderr[-200:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", action="store_true", help="beside two processes for each core")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("-m", dest="expression", default="not slow and not model and not gpu")
    arguments = parser.parse_args()
    others = 2 * (os.cpu_count() or 1) if arguments.busy else 0
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(others)]
    failed: Counter[str] = Counter()
    broken = 0
    try:
        for number in range(1, arguments.times + 1):
            begun = time.monotonic()
            names, status, line = run(arguments.expression, arguments.jobs)
            failed.update(names)
            broken += status != 0
            print(f"{number:3} {time.monotonic() - begun:6.0f} s  {line}", flush=True)
            for name in names:
                print(f"      {name}", flush=True)
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    print(f"{arguments.times - broken} of {arguments.times} runs green")
    for name, count in failed.most_common():
        print(f"{count:4} times: {name}")
    sys.exit(broken > 0)


if __name__ == "__main__":
    main()
