"""A server of a profile until it is ready: with the panels that the profile binds, with panels that
an earlier start kept, and with an empty cache, as a pod's is.

Run: `python benchmarks/factory_panels.py [MODEL [ROUNDS]]`; the result is
`results/factory_panels.json`. All three hash the weights, the first the panels as well. Seconds
from the process's begin, and seconds of CPU of all its processes; medians of rounds in turns, of
which the first is not counted.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from headrace.base.config import EngineOptions
from headrace.base.environment import cache_root
from headrace.base.hardware import cpu
from headrace.factory.build import Build, BuildOptions
from headrace.factory.profile import find_profile
from headrace.factory.revoke import trusted
from headrace.loader import open_model
from headrace.loader.panels import panel_folder

WAYS = "bound", "kept", "empty"


def start(cache: Path, model: Path, profile: Path) -> tuple[float, float]:
    """(seconds until it is ready, seconds of CPU)."""
    words = ["serve", str(model), "--offline", "--profile", str(profile), "--port", "0"]
    command = [sys.executable, "-m", "headrace", *words]
    environment, begin = {**os.environ, "HEADRACE_CACHE": str(cache)}, time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ready = next((True for line in process.stdout if "ready" in line), False)
        taken = time.perf_counter() - begin
        process.terminate()
        process.stdout.read()
        _, _, used = os.wait4(process.pid, 0)
        process.returncode = 0
    assert ready, "it ended before it was ready"
    return taken, used.ru_utime + used.ru_stime


def main(name: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = open_model(name).path
        engine = EngineOptions(model=str(model), cache_dir=str(root / "built"), offline=True)
        build = Build(engine, BuildOptions(panels=True, without="accuracy,performance,sbom"))
        assert build.run().profile is not None
        profile = build.store.root / "profiles" / f"{build.cell}.json"
        body = find_profile(str(profile), None, trusted(None, str(root / "built"))).body
        panels = body.model.panels
        assert panels is not None, f"{name} has too few panels to keep"
        for way in WAYS:
            keys = Path("factory") / "trusted"
            shutil.copytree(root / "built" / keys, root / way / keys)
            shutil.copytree(cache_root() / "hardware", root / way / "hardware")
        panel_folder(root / "bound").mkdir()
        os.link(build.store.blob(panels.digest), panel_folder(root / "bound") / panels.path)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds + 1):
            for way in WAYS:
                shutil.rmtree(panel_folder(root / "empty"), ignore_errors=True)
                found[way].append(start(root / way, model, profile))
    told = {
        way: {
            "ready_s": round(statistics.median(one for one, _ in taken[1:]), 2),
            "cpu_s": round(statistics.median(one for _, one in taken[1:]), 2),
        }
        for way, taken in found.items()
    }
    result = {"model": name, "rounds": rounds, "panel_bytes": panels.size, **told}
    result |= {"cpu": cpu().name, "load": os.getloadavg()[0]}
    place = Path(__file__).parent / "results" / "factory_panels.json"
    place.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "qwen2.5-coder-0.5b",
        int(sys.argv[2]) if len(sys.argv) > 2 else 4,
    )
