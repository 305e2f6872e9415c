"""Write `roofline/accuracy.json` of the package from the results that it stands for.

python benchmarks/roofline/accuracy.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OUT = ROOT / "src" / "headrace" / "roofline" / "accuracy.json"
KEYS = ("model", "device", "layout", "format", "input", "output", "published", "predicted")
TAILS = ("ttft p99", "itl p50", "itl p99")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = json.loads((RESULTS / "published.json").read_text())["rows"]
    runs = json.loads((RESULTS / "against_server.json").read_text())["rows"]
    kept = ",\n".join(json.dumps({key: row[key] for key in KEYS}) for row in rows)
    ratios = {
        name: [round(run["simulated"][name] / run["server"][name], 3) for run in runs]
        for name in TAILS
    }
    OUT.write_text(f'{{"throughput": [\n{kept}\n],\n"latency": {json.dumps(ratios)}}}\n')


if __name__ == "__main__":
    main()
