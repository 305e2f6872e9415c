"""Do other load generators see what `headrace bench` sees? Same server, same workload, in turns.

    python benchmarks/peers/agreement.py round --url URL --tokenizer DIR --out DIR --number 0 \\
        --aiperf BIN --guidellm BIN --vllm BIN
    python benchmarks/peers/agreement.py table --out DIR [--json FILE]

A round runs every client once, in an order that turns with `--number`; start the server anew before
each, so that no client finds the prompts of another round in its prefix cache. `table` compares
each client with ours by the ratios within a round and holds the difference against what our own
rounds differ by. On a machine that others use that is a weak test, so each client is also held
against the server's own histograms over exactly its run: same requests, same minute. No client
warms up (that would be in the histograms); the round does it once before the first.

A client that is not given is named as absent. Each lives in an environment of its own;
`--tokenizer` is a Hugging Face folder of the served model, since theirs read nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.crosscheck import means, read_metrics
from headrace.bench.http import fetch, parse_url

METRICS = (
    ("ttft", "TTFT mean, ms"),
    ("tpot", "TPOT mean, ms"),
    ("itl", "ITL mean, ms"),
    ("e2e", "end to end mean, ms"),
    ("throughput", "output tok/s"),
    ("input_tokens", "prompt tokens"),
    ("output_tokens", "output tokens"),
)
PLACES = ("url", "tokenizer")
"""Flags that name this machine, left out of what is kept."""
SERVER = {"ttft": "ttft", "tpot": "itl", "e2e": "e2e"}
"""Our name → the server's histogram; its mean ITL over all tokens is our mean TPOT."""
INVALID = 4
"""Our exit code where our own client was late: kept, and said below the table."""
Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Load:
    """The workload that all clients send."""

    url: str
    model: str
    tokenizer: str
    concurrency: int
    requests: int
    input: int
    output: int
    seed: int


def headrace(_program: str, load: Load, place: Path) -> Figures:
    run(
        [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            "run",
            "--url",
            load.url,
            "--no-history",
            "--tokenizer",
            load.tokenizer,
            "-c",
            str(load.concurrency),
            "--requests",
            str(load.requests),
            "--input",
            str(load.input),
            "--output",
            str(load.output),
            "--seed",
            str(load.seed),
            "--warmup",
            "0",
            "-o",
            str(place),
        ],
        place,
        (0, INVALID),
    )
    found = json.loads((place / "result.json").read_text())
    samples = found["samples"]
    return {
        **{name: samples[name]["mean"] * 1e3 for name in ("ttft", "tpot", "itl", "e2e")},
        "throughput": found["figures"]["output_throughput"]["value"],
        "valid": float(found["valid"]),
        "input_tokens": samples["input_tokens"]["mean"],
        "output_tokens": samples["output_tokens"]["mean"],
    }


def aiperf(program: str, load: Load, place: Path) -> Figures:
    run(
        [
            program,
            "profile",
            "-m",
            load.model,
            "--url",
            load.url,
            "--endpoint-type",
            "completions",
            "--streaming",
            "--tokenizer",
            load.tokenizer,
            "--concurrency",
            str(load.concurrency),
            "--request-count",
            str(load.requests),
            "--isl",
            str(load.input),
            "--osl",
            str(load.output),
            "--extra-inputs",
            "ignore_eos:true",
            "--extra-inputs",
            "temperature:0",
            "--use-legacy-max-tokens",
            "--use-server-token-count",
            "--random-seed",
            str(load.seed),
            "--ui",
            "none",
            "--artifact-dir",
            str(place),
        ],
        place,
    )
    found = json.loads((place / "profile_export_aiperf.json").read_text())
    names = {
        "ttft": "time_to_first_token",
        "tpot": "inter_token_latency",
        "itl": "inter_chunk_latency",
        "e2e": "request_latency",
        "throughput": "output_token_throughput",
        "input_tokens": "usage_prompt_tokens",
        "output_tokens": "usage_completion_tokens",
    }
    return {
        ours: found[theirs]["avg"] if theirs in found else None for ours, theirs in names.items()
    }


def guidellm(program: str, load: Load, place: Path) -> Figures:
    data = f"prompt_tokens={load.input},output_tokens={load.output}"
    run(
        [
            program,
            "run",
            "--backend",
            f"kind=openai_http,target={load.url},model={load.model},request_format=/v1/completions",
            "--profile",
            f"kind=concurrent,streams={load.concurrency}",
            "--constraint",
            f"kind=max_requests,count={load.requests}",
            "--data",
            f"kind=synthetic_text,{data}",
            "--tokenizer",
            f"kind=hf_auto,model={load.tokenizer}",
            "--seed",
            f"kind=static,value={load.seed}",
            "--output",
            f"kind=json,path={place / 'benchmarks.json'}",
            "--disable-progress",
        ],
        place,
    )
    found = json.loads((place / "benchmarks.json").read_text())["benchmarks"][0]
    mean = {
        name: value["successful"]["mean"]
        for name, value in found["metrics"].items()
        if isinstance(value, dict)
        and "successful" in value
        and isinstance(value["successful"], dict)
    }
    # Their "time per output token" is end to end / tokens; their ITL is what we call TPOT.
    tokens = mean["output_token_count"]
    return {
        "ttft": mean["time_to_first_token_ms"],
        "tpot": mean["inter_token_latency_ms"],
        "itl": None,
        "e2e": mean["request_latency"] * 1e3,
        "throughput": tokens * load.requests / found["duration"],
        "input_tokens": mean["prompt_token_count"],
        "output_tokens": tokens,
    }


def vllm(program: str, load: Load, place: Path) -> Figures:
    run(
        [
            program,
            "bench",
            "serve",
            "--backend",
            "openai",
            "--base-url",
            load.url,
            "--endpoint",
            "/v1/completions",
            "--model",
            load.model,
            "--tokenizer",
            load.tokenizer,
            "--dataset-name",
            "random",
            "--random-input-len",
            str(load.input),
            "--random-output-len",
            str(load.output),
            "--num-prompts",
            str(load.requests),
            "--max-concurrency",
            str(load.concurrency),
            "--ignore-eos",
            "--seed",
            str(load.seed),
            "--temperature",
            "0",
            "--ready-check-timeout-sec",
            "0",
            "--save-result",
            "--result-dir",
            str(place),
            "--result-filename",
            "result.json",
            "--percentile-metrics",
            "ttft,tpot,itl,e2el",
            "--disable-tqdm",
        ],
        place,
    )
    found = json.loads((place / "result.json").read_text())
    return {
        "ttft": found["mean_ttft_ms"],
        "tpot": found["mean_tpot_ms"],
        "itl": found["mean_itl_ms"],
        "e2e": found["mean_e2el_ms"],
        "throughput": found["output_throughput"],
        "input_tokens": found["total_input_tokens"] / found["completed"],
        "output_tokens": found["total_output_tokens"] / found["completed"],
    }


CLIENTS: dict[str, Callable[[str, Load, Path], Figures]] = {
    "headrace": headrace,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "vllm": vllm,
}


def run(command: list[str], place: Path, allowed: tuple[int, ...] = (0,)) -> None:
    """Into `place/log`; any other exit code ends the round."""
    place.mkdir(parents=True, exist_ok=True)
    # AIPerf refuses a local folder when it is told to be offline.
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    with (place / "log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False)
    if done.returncode not in allowed:
        raise SystemExit(
            f"{command[0]} ended with exit code {done.returncode}: see {place / 'log'}"
        )


def play_round(arguments: argparse.Namespace) -> None:
    load = Load(
        arguments.url,
        arguments.model,
        arguments.tokenizer,
        arguments.concurrency,
        arguments.requests,
        arguments.input,
        arguments.output,
        100 + arguments.number,
    )
    programs = {"headrace": "", **{name: getattr(arguments, name) for name in list(CLIENTS)[1:]}}
    names = [name for name in CLIENTS if programs[name] is not None]
    turn = arguments.number % len(names)
    folder: Path = arguments.out / f"round-{arguments.number}"
    found: dict[str, Figures] = {}
    address = parse_url(load.url)
    body = {"model": load.model, "prompt": "warm up", "max_tokens": 16, "ignore_eos": True}
    asyncio.run(fetch(address, "POST", "/v1/completions", json.dumps(body).encode()))
    for name in names[turn:] + names[:turn]:
        before = read_metrics(address)
        found[name] = CLIENTS[name](programs[name], load, folder / name)
        told = means(before, read_metrics(address))
        for ours, theirs in SERVER.items():
            found[name][f"server_{ours}"] = told[theirs]["mean"] * 1e3 if theirs in told else None
        found[name]["server_requests"] = told["e2e"]["count"] if "e2e" in told else None
        print(name, {k: v and round(v, 1) for k, v in found[name].items()}, flush=True)
    what = {name: value for name, value in asdict(load).items() if name not in PLACES}
    document = {"order": names[turn:] + names[:turn], "load": what, "found": found}
    (folder / "round.json").write_text(json.dumps(document, indent=1))


def spread(values: list[float]) -> float:
    """Largest over smallest, less one."""
    return max(values) / min(values) - 1


def compare(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """client → metric → median value, geometric mean of the ratios to ours, agrees?

    It agrees when that ratio differs from one by no more than our own rounds differ among
    themselves: a difference below it could not be told from the machine's noise.
    """
    made: dict[str, dict[str, Any]] = {}
    for name in CLIENTS:
        inside = [r["found"] for r in rounds if name in r["found"]]
        if not inside:
            continue
        made[name] = {}
        for metric, _ in METRICS:
            pairs = [
                (found["headrace"][metric], found[name][metric])
                for found in inside
                if found[name][metric]
            ]
            if not pairs:
                made[name][metric] = None
                continue
            ratio = math.exp(sum(math.log(b / a) for a, b in pairs) / len(pairs))
            theirs = sorted(b for _, b in pairs)
            noise = spread([a for a, _ in pairs])
            made[name][metric] = {
                "median": theirs[len(theirs) // 2],
                "ratio": ratio,
                "low": min(b / a for a, b in pairs),
                "high": max(b / a for a, b in pairs),
                "spread": spread(theirs),
                "agrees": abs(ratio - 1) <= max(noise, 0.005),
                "to_server": to_server(inside, name, metric),
            }
    return made


def to_server(inside: list[dict[str, Figures]], name: str, metric: str) -> list[float] | None:
    """Client's mean / server's mean of every round."""
    pairs = [(found[name][metric], found[name].get(f"server_{metric}")) for found in inside]
    ratios = [client / server for client, server in pairs if client and server]
    return ratios or None


def table(made: dict[str, dict[str, Any]]) -> str:
    lines = ["| | " + " | ".join(made) + " |", "|---|" + "--:|" * len(made)]
    for metric, title in METRICS:
        cells = []
        for name, found in made.items():
            cell = found[metric]
            if cell is None:
                cells.append("–")
            elif name == "headrace":
                cells.append(f"{cell['median']:.1f} (rounds differ by {cell['spread']:.1%})")
            else:
                word = "" if cell["agrees"] else " DIFFERS"
                cells.append(
                    f"{cell['median']:.1f}, ×{cell['ratio']:.3f} "
                    f"({cell['low']:.3f}–{cell['high']:.3f}){word}"
                )
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    for metric in SERVER:
        cells = []
        for found in made.values():
            ratios = found[metric] and found[metric]["to_server"]
            if not ratios:
                cells.append("–")
                continue
            middle = sorted(ratios)[len(ratios) // 2]
            cells.append(f"{middle:.3f} ({min(ratios):.3f}–{max(ratios):.3f})")
        lines.append(f"| {metric} / server's own mean | " + " | ".join(cells) + " |")
    lines += [f"absent: {name}" for name in CLIENTS if name not in made]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("round")
    one.add_argument("--url", required=True)
    one.add_argument("--model", required=True)
    one.add_argument("--tokenizer", required=True)
    one.add_argument("--number", type=int, required=True)
    for name, value in (("concurrency", 4), ("requests", 16), ("input", 128), ("output", 64)):
        one.add_argument(f"--{name}", type=int, default=value)
    for name in list(CLIENTS)[1:]:
        one.add_argument(f"--{name}")
    all_ = commands.add_parser("table")
    all_.add_argument("--json", type=Path)
    for sub in (one, all_):
        sub.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.command == "round":
        play_round(arguments)
        return
    files = sorted(arguments.out.glob("round-*/round.json"))
    if not files:
        raise SystemExit(f"no round in {arguments.out}")
    rounds = [json.loads(file.read_text()) for file in files]
    made = compare(rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"compared": made, "rounds": rounds}, indent=1) + "\n")
    print(table(made))
    late = [n for n, r in enumerate(rounds) if not r["found"]["headrace"]["valid"]]
    if late:
        print(f"our own client was late in the rounds {late}")


if __name__ == "__main__":
    main()
