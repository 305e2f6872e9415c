"""The fleet's store: log lines a second of CPU, size against the JSON, and a query over all rows.

Run: `python benchmarks/fleet_store.py [MILLIONS]`; the result is `results/fleet_store.json`. Lines
are of the server's own formatter: exchanges, with a warning in a hundred and a stack in a thousand.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from headrace.base.hardware import cpu
from headrace.factory.lake import Lake
from headrace.obs.logs import JsonFormatter

PART = 500_000
QUERY = """SELECT service, date_trunc('minute', ts) AS minute, count(*),
quantile_cont(seconds, 0.95) FROM logs WHERE status IS NOT NULL GROUP BY ALL"""


def lines(count: int, seed: int) -> bytes:
    """So many lines of a day, as the server writes them."""
    draws, stream = random.Random(seed), io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.Logger("headrace.server")
    handler.setFormatter(JsonFormatter())
    made = []
    for number in range(count):
        record = log.makeRecord(log.name, logging.INFO, "", 0, "exchange", (), None)
        record.created = 1_795_000_000 + seed * 3600 + number * 3600 / count
        record.msecs = record.created % 1 * 1e3
        record.request_id = f"req-{draws.getrandbits(128):032x}"
        if number % 100 == 7:
            record.levelname, record.msg = "WARNING", "a client that reads nothing was left"
            record.unsent = draws.randrange(10_000)
            if number % 1000 == 7:
                try:
                    raise RuntimeError(f"step {number} failed")
                except RuntimeError:
                    record.exc_info = sys.exc_info()
        else:
            record.method, record.path = "POST", "/v1/chat/completions"
            record.status = 200 if draws.random() > 0.01 else 503
            record.seconds = round(draws.lognormvariate(-1, 0.6), 6)
        made.append(handler.format(record))
    return ("\n".join(made) + "\n").encode()


def main(millions: float) -> None:
    parts = max(1, round(millions * 1e6 / PART))
    spent = wall = size = 0.0
    with tempfile.TemporaryDirectory() as folder:
        lake, source = Lake(Path(folder) / "lake"), Path(folder) / "log"
        for part in range(parts):
            source.write_bytes(lines(PART, part))
            size += source.stat().st_size
            begin, cpu_begin = time.perf_counter(), time.process_time()
            taken = lake.take_logs(source, f"service-{part % 4}")
            spent += time.process_time() - cpu_begin
            wall += time.perf_counter() - begin
            assert (taken.rows, taken.refused.total()) == (PART, 0), taken
            print(f"part {part + 1} of {parts}: {PART * (part + 1) / spent:,.0f} a second of CPU")
        stored = sum(path.stat().st_size for path in lake.files("logs"))
        asked = []
        with lake.open() as database:
            database.execute("SET threads = 1")
            for _ in range(5):
                begin, cpu_begin = time.perf_counter(), time.process_time()
                groups = len(database.execute(QUERY).fetchall())
                asked.append((time.perf_counter() - begin, time.process_time() - cpu_begin))
    result = {
        "lines": PART * parts,
        "lines_per_cpu_second": PART * parts / spent,
        "lines_per_second": PART * parts / wall,
        "json_bytes": size,
        "smaller": size / stored,
        "query_seconds": sorted(one for one, _ in asked)[2],
        "query_cpu_seconds": sorted(one for _, one in asked)[2],
        "groups": groups,
        "cpu": cpu().name,
        "load": os.getloadavg()[0],
    }
    place = Path(__file__).parent / "results" / "fleet_store.json"
    place.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
