"""The same workload against several servers, interleaved, and the ratio table.

    python benchmarks/peers/run.py benchmarks/peers/peers.toml --model FILE.gguf --tokenizer \
        FILE.gguf --requests 24 --output 64 --out DIR --json benchmarks/results/peers_table.json

Each peer is a command in an environment of its own (see peers.toml). Every round starts one server
after the other, measures, and stops it, in an order that turns with the rounds, so that a slow
minute of a shared machine hits no peer alone. Ratios are to the first peer that runs, within a
round. What cannot be started is named as absent, never left out silently, and a run that the
bench's audit finds invalid is named below the table. The client has a higher priority where the
system allows it: it must be there when an answer comes, and all servers compute on every core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.errors import HeadraceError
from headrace.bench.options import RunOptions
from headrace.bench.run import run_bench
from headrace.bench.statistics import ratio_interval

FIGURES = (
    ("output tok/s", "figures", "output_throughput", None),
    ("TTFT p50 ms", "samples", "ttft", "p50"),
    ("TTFT p99 ms", "samples", "ttft", "p99"),
    ("TPOT p50 ms", "samples", "tpot", "p50"),
    ("ITL p99 ms", "samples", "itl", "p99"),
)
"""Not the median ITL: some servers send in bursts."""
PROMPT = -10
"""Niceness of the client; the servers keep the ordinary one."""


def value(result: dict[str, Any], kind: str, name: str, percentile: str | None) -> float:
    found = result[kind][name]
    return float(found["value"] if percentile is None else found["percentiles"][percentile] * 1e3)


def measure(peer: dict[str, Any], options: RunOptions, model: str, log: Path) -> dict[str, Any]:
    """Start, wait until ready, run, stop."""
    command = [
        os.path.expandvars(
            part.format(model=model, port=peer["port"], here=Path(__file__).resolve().parent)
        )
        for part in shlex.split(peer["command"])
    ]
    unset = [part for part in command if "$" in part]
    if unset:
        raise HeadraceError(f"{unset[0]} is not set")
    if shutil.which(command[0]) is None:
        raise HeadraceError(f"{command[0]} is not installed here")
    with log.open("ab") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        own = replace(
            options,
            url=f"http://127.0.0.1:{peer['port']}",
            model=peer.get("model"),
            wait=peer.get("wait", 300.0),
            extra=peer.get("extra", {}),
        )
        wait_for(own, server)
        with prompt():
            return run_bench(own).result
    finally:
        with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextlib.contextmanager
def prompt() -> Iterator[None]:
    """This process, and the client that it starts, with a higher priority."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PROMPT)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


def wait_for(options: RunOptions, server: subprocess.Popen[bytes]) -> None:
    """Until the port answers; an ended process is an absent peer."""
    import asyncio
    import time

    from headrace.bench.http import ConnectionLost, fetch, parse_url

    end = time.monotonic() + options.wait
    while time.monotonic() < end:
        if server.poll() is not None:
            raise HeadraceError(f"the server ended with exit code {server.returncode}")
        try:
            status, _ = asyncio.run(fetch(parse_url(options.url), "GET", "/v1/models", timeout=5))
            if status == 200:
                return
        except ConnectionLost:
            pass
        time.sleep(0.5)
    raise HeadraceError(f"not ready after {options.wait:g} s")


def table(results: dict[str, list[dict[str, Any]]], absent: dict[str, str]) -> str:
    names = [name for name, found in results.items() if found]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for title, kind, name, percentile in FIGURES:
        cells = []
        for peer in names:
            pairs = [
                (value(first, kind, name, percentile), value(other, kind, name, percentile))
                for first, other in zip(results[names[0]], results[peer], strict=False)
            ]
            pairs = [pair for pair in pairs if pair[0] > 0 and pair[1] > 0]
            if not pairs:
                cells.append("–")
                continue
            middle = sorted(pair[1] for pair in pairs)[len(pairs) // 2]
            ratio, low, high = ratio_interval(pairs)
            interval = f" ({low:.2f}–{high:.2f})" if len(pairs) > 1 and peer != names[0] else ""
            cells.append(f"{middle:.1f}, ×{ratio:.2f}{interval}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines += [f"absent: {name}: {reason}" for name, reason in absent.items()]
    for name in names:
        late = [n for n, found in enumerate(results[name]) if not found["valid"]]
        failed = sum(found["requests"] - found["succeeded"] for found in results[name])
        if late:
            lines.append(f"invalid: {name} in the rounds {late}: the client was late or overloaded")
        if failed:
            lines.append(f"failed: {name}: {failed} requests")
    return "\n".join(lines)


def summary(
    results: dict[str, list[dict[str, Any]]], absent: dict[str, str], load: argparse.Namespace
) -> dict[str, Any]:
    """What is kept of a comparison: the load, and each round's figures by peer."""
    return {
        "load": {
            name: getattr(load, name) for name in ("requests", "concurrency", "input", "output")
        },
        "rounds": {
            name: [
                {
                    "created": one["created"],
                    "valid": one["valid"],
                    "succeeded": one["succeeded"],
                    **{title: value(one, *rest) for title, *rest in FIGURES},
                }
                for one in found
            ]
            for name, found in results.items()
            if found
        },
        "absent": {name: why for name, why in absent.items() if not results[name]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, default=Path("peers-results"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, help="Play this round; the table is of all in --out.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input", default="128")
    parser.add_argument("--output", default="128")
    parser.add_argument("--tokenizer")
    parser.add_argument("--json", type=Path, help="Keep the figures of all rounds here.")
    arguments = parser.parse_args()
    # As Ctrl-C: the server that is being measured must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments.out.mkdir(parents=True, exist_ok=True)
    peers: dict[str, dict[str, Any]] = tomllib.loads(arguments.peers.read_text())
    absent: dict[str, str] = {}
    rounds = range(arguments.rounds) if arguments.only is None else [arguments.only]
    for round_ in rounds:
        order = list(peers)[round_ % len(peers) :] + list(peers)[: round_ % len(peers)]
        for name in order:
            if name in absent:
                continue
            options = RunOptions(
                requests=arguments.requests,
                concurrency=arguments.concurrency,
                input=arguments.input,
                output=arguments.output,
                seed=1000 + round_,
                tokenizer=arguments.tokenizer,
            )
            try:
                found = measure(
                    peers[name], options, arguments.model, arguments.out / f"{name}.log"
                )
            except HeadraceError as error:
                absent[name] = error.message
                print(f"{name} is absent: {error.message}", flush=True)
                continue
            (arguments.out / f"{name}-{round_}.json").write_text(json.dumps(found))
            verdict = "" if found["valid"] else " INVALID"
            speed = value(found, *FIGURES[0][1:])
            good = f"{found['succeeded']} of {found['requests']}"
            print(f"round {round_} {name}: {speed:.1f} tok/s, {good}{verdict}", flush=True)
    results = {
        name: [
            json.loads(file.read_text()) for file in sorted(arguments.out.glob(f"{name}-*.json"))
        ]
        for name in peers
    }
    text = table(results, {name: why for name, why in absent.items() if not results[name]})
    (arguments.out / "table.md").write_text(text + "\n")
    if arguments.json is not None:
        kept = summary(results, absent, arguments)
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
