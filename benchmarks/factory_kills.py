"""`kill -9` at random times of a build, again and again: does the same command end in the same?

Run: `python benchmarks/factory_kills.py MODEL [KILLS]`. A build that nothing disturbs says what is
right and how long it takes; then builds of the same cell in another store are killed after a
random part of that time (seed 0). One that ended before is compared byte for byte, and the next
begins in an empty store. No speed is measured: a clock's figures differ from build to build.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any


def contents(root: Path) -> dict[str, bytes]:
    """Every file that a build leaves, but locks and what was half done."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] not in ("locks", "tmp")
    }


def main(model: str, kills: int) -> dict[str, Any]:
    """How many kills fell where, how many builds ended, and whether each ended in the same."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        environment = {**os.environ, "HEADRACE_CACHE": str(root / "cache"), "PYTHONUNBUFFERED": "1"}

        def start(store: str, log: Any) -> subprocess.Popen[bytes]:
            words = ("factory", "build", model, "--without", "performance", "--windows", "2")
            command = [sys.executable, "-m", "headrace", *words, "--store", str(root / store)]
            return subprocess.Popen(command, env=environment, stdout=log)

        begin = time.perf_counter()
        assert start("whole", subprocess.DEVNULL).wait() == 0
        whole, wanted = time.perf_counter() - begin, contents(root / "whole")
        draw, fell, done, ended, equal = random.Random(0), Counter[str](), 0, 0, 0
        while done < kills or ended == 0:
            with (root / "log").open("wb") as log:
                process = start("killed", log)
                try:
                    process.wait(draw.uniform(0, whole) if done < kills else None)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    done += 1
                    last = (root / "log").read_text().splitlines()[-1:]
                    fell[last[0].partition(" ")[0] if last else "before the first stage"] += 1
                    sys.stderr.write(f"\r{done} kills, {equal} of {ended} ended builds equal")
                    continue
            assert process.returncode == 0
            ended += 1
            equal += contents(root / "killed") == wanted
            shutil.rmtree(root / "killed")
        after = dict(sorted(fell.items()))
    return {"kills": done, "last_word": after, "builds_ended": ended, "builds_equal": equal}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 100), indent=1))
