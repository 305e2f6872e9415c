"""The default model on two threads, side by side with its peers, in interleaved rounds.

    make bench-cpu            # or: python benchmarks/cpu_peers.py [--rounds 3] [--minutes 10]

Contestants: Headrace (`LLM`), llama.cpp on the same file (`LLAMA_BIN`: folder of llama-bench,
llama-batched-bench and llama-server), OpenVINO GenAI (`OPENVINO_ENV`: a virtual environment,
`OPENVINO_INT8` and `OPENVINO_INT4`: models that `optimum-cli export openvino` made; its defaults,
prefix caching on). One that is not there is named as absent.

Fair play: each is a process of its own per round, in an order that turns with the rounds; fresh
random token ids for each prompt, so that no cache hits by accident; no end of text; the same
lengths for all. Before each contestant the two ceilings are measured (bytes a second of one read
of 256 MiB, int8 operations a second on registers), and Headrace's process reads its own largest
weight beside its decoding, because where physical memory lies changes the bandwidth. Shares are
of these. Byte code of this package is compiled before the first round, as installing it does; that
of the peers' packages was when they were installed. llama.cpp takes one of the concurrent rows per
round in turn: all would be most of the time. Figures are medians over rounds; a ratio is the median
of the ratios within rounds.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

THREADS = 2
LEVELS = (8, 16, 32)
STARTS = 3
"""Starts of each contestant in a round that count."""
OURS = "headrace"
OPENVINO = ("openvino-int8", "openvino-int4")
Values = dict[str, float]
"""Row → figure, of one contestant in one round."""
Generate = Callable[[list[list[int]], int], None]
"""Answer prompts of token ids, all at once, with so many tokens each."""


@dataclass(frozen=True)
class Row:
    key: str
    title: str
    more_is_better: bool = True


ROWS = (
    Row("decode", "decode, batch 1, tokens/s"),
    Row("prefill512", "prefill 512, tokens/s"),
    Row("prefill2048", "prefill 2,048, tokens/s"),
    Row("concurrent8", "8 concurrent, 128 in, 128 out, output tokens/s"),
    Row("concurrent16", "16 concurrent"),
    Row("concurrent32", "32 concurrent"),
    Row("shared", "16 share 1,024, 32 own, 64 out, prefix known, output tokens/s"),
    Row("shared_cold", "the same, prefix new to all 16"),
    Row("start", "start to first token, files warm, s", more_is_better=False),
    Row("memory", "peak resident memory by 32 concurrent, MiB", more_is_better=False),
)


@dataclass(frozen=True)
class Sizes:
    """What is measured; `tiny` is for trying the script, its numbers mean nothing."""

    tiny: bool

    @property
    def output(self) -> int:
        return 8 if self.tiny else 64

    @property
    def concurrent(self) -> int:
        return 16 if self.tiny else 128

    @property
    def prefill(self) -> tuple[int, int]:
        return (64, 128) if self.tiny else (512, 2048)

    @property
    def shared(self) -> int:
        return 64 if self.tiny else 1024


def ids(count: int) -> list[int]:
    """Token ids that no prompt before had in this order; ordinary words of the vocabulary."""
    return [random.randrange(1_000, 100_000) for _ in range(count)]


def seconds(generate: Generate, prompts: list[list[int]], output: int) -> float:
    begin = time.perf_counter()
    generate(prompts, output)
    return time.perf_counter() - begin


def peak_mib() -> float:
    """Peak memory of this process since its start, from Linux; 0 where that is not to be had."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(float(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def single(generate: Generate, sizes: Sizes) -> Values:
    """Decoding at batch 1: the time of one token less, so that neither prompt nor call counts."""
    rates = []
    for _ in range(3):
        one = seconds(generate, [ids(16)], 1)
        rates.append(sizes.output / (seconds(generate, [ids(16)], 1 + sizes.output) - one))
    return {"decode": statistics.median(rates)}


def prefill(generate: Generate, sizes: Sizes) -> Values:
    values = {}
    for name, length in zip(("prefill512", "prefill2048"), sizes.prefill, strict=True):
        values[name] = statistics.median(
            length / seconds(generate, [ids(length)], 1) for _ in range(2)
        )
    return values


def concurrent(generate: Generate, sizes: Sizes) -> Values:
    values = {}
    for level in LEVELS:
        prompts = [ids(sizes.concurrent) for _ in range(level)]
        took = seconds(generate, prompts, sizes.concurrent)
        values[f"concurrent{level}"] = level * sizes.concurrent / took
    return {**values, "memory": peak_mib()}


def shared(generate: Generate, sizes: Sizes, *, cold: bool) -> Values:
    def wave(prefix: list[int]) -> float:
        prompts = [prefix + ids(32) for _ in range(16)]
        return 16 * sizes.output / seconds(generate, prompts, sizes.output)

    values = {"shared_cold": wave(ids(sizes.shared))} if cold else {}
    prefix = ids(sizes.shared)
    generate([prefix + ids(32)], 1)
    return {"shared": wave(prefix), **values}


# The contestants' own processes. Their imports are inside: each environment has its own packages.


def child_headrace_start() -> Values:
    from headrace import LLM, SamplingParams

    with LLM(threads=THREADS, max_context=4096, offline=True, speculate="off") as llm:
        llm.generate([ids(16)], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return {"first_token_at": time.time()}


def child_headrace(sizes: Sizes) -> Values:
    from headrace import LLM, SamplingParams

    llm = LLM(threads=THREADS, max_context=4096, offline=True, speculate="off")

    def generate(prompts: list[list[int]], output: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        answers = llm.generate(prompts, params)
        assert all(len(answer.outputs[0].token_ids) == output for answer in answers)

    generate([ids(16)], 1)
    values: Values = {}
    worker = llm._engine.core.executor._worker  # type: ignore[attr-defined]
    team = worker.text.operators.providers["linear"].team
    ends = {
        ref.role: worker.text.model.weights.weight(ref)
        for ref in worker.text.model.graph.weights()
        if ref.role in ("embed", "logits")
    }
    largest = ends["logits"].data
    arch = llm.files.arch
    layers = (
        arch.layers
        * arch.hidden
        * (2 * (arch.heads + arch.kv_heads) * arch.head_dim + 3 * arch.intermediate)
    )
    values["layer_operations"] = 2.0 * layers
    values["token_operations"] = 2.0 * (layers + arch.vocab_size * arch.hidden)

    def probe() -> tuple[float, float]:
        return max(team.read_bandwidth(largest) for _ in range(3)), team.int8_rate(500_000)

    probes = [probe()]
    values |= single(generate, sizes)
    spared = worker.text.program._head.head.spared() * ends["logits"].nbytes
    values["token_bytes"] = float(worker.facts.weight_bytes - ends["embed"].nbytes) - spared
    probes.append(probe())
    values |= concurrent(generate, sizes)
    probes.append(probe())
    values |= prefill(generate, sizes)
    probes.append(probe())
    values |= shared(generate, sizes, cold=True)
    values["own_bandwidth"] = statistics.mean(bandwidth for bandwidth, _ in probes[:2])
    values["own_int8"] = statistics.median(rate for _, rate in probes)
    llm.close()
    return values


def child_openvino(model: str, sizes: Sizes, part: str) -> Values:
    import numpy
    import openvino
    import openvino_genai

    def config(output: int) -> Any:
        made = openvino_genai.GenerationConfig()
        made.max_new_tokens, made.ignore_eos, made.do_sample = output, True, False
        return made

    def tensor(prompt: list[int]) -> Any:
        return openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))

    properties = {"INFERENCE_NUM_THREADS": THREADS}
    if part == "batched":
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

        def generate(prompts: list[list[int]], output: int) -> None:
            tensors = [tensor(prompt) for prompt in prompts]
            answers = pipeline.generate(tensors, [config(output)] * len(prompts))
            assert all(len(answer.m_generation_ids[0]) == output for answer in answers)

        generate([ids(16)], 4)
        return concurrent(generate, sizes) | shared(generate, sizes, cold=False)
    one = openvino_genai.LLMPipeline(model, "CPU", **properties)

    def generate_one(prompts: list[list[int]], output: int) -> None:
        for prompt in prompts:
            mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
            answer = one.generate(
                openvino_genai.TokenizedInputs(tensor(prompt), mask), config(output)
            )
            assert len(answer.tokens[0]) == output

    generate_one([ids(16)], 1)
    if part == "start":
        return {"first_token_at": time.time()}
    return single(generate_one, sizes) | prefill(generate_one, sizes)


def spawn(python: str, child: str, tiny: bool) -> Values:
    """Run one child of this script; its last line is its values."""
    command = [python, __file__, "--child", child] + (["--tiny"] if tiny else [])
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
    begin = time.time()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{child}: {done.stderr.strip()[-600:]}")
    values: Values = json.loads(done.stdout.splitlines()[-1])
    if "first_token_at" in values:
        values["start"] = values.pop("first_token_at") - begin
    return values


def start(seconds_to_first_token: Callable[[], float]) -> Values:
    """The median of `STARTS` after one that does not count: files are warm then."""
    taken = [seconds_to_first_token() for _ in range(1 + STARTS)]
    return {"start": statistics.median(taken[1:])}


class Llama:
    """llama.cpp: its own benchmarks, and its server for the start."""

    def __init__(self, folder: Path, model: Path, tiny: bool) -> None:
        self.folder, self.model, self.sizes = folder, model, Sizes(tiny)

    def _run(self, tool: str, *arguments: str) -> tuple[str, float]:
        """(standard output, peak MiB)"""
        command = [str(self.folder / tool), "-m", str(self.model), "-t", str(THREADS), *arguments]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{tool} ended with {process.returncode}")
        return text, usage.ru_maxrss / 1024

    def start(self) -> float:
        port = 18_000 + random.randrange(1_000)
        command = [str(self.folder / "llama-server"), "-m", str(self.model)]
        command += f"-t {THREADS} -tb {THREADS} -np 1 -c 4096 -fa on --port {port}".split()
        body = json.dumps({"prompt": ids(16), "n_predict": 1}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/completion", body, {"Content-Type": "application/json"}
        )
        begin = time.monotonic()
        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=null, stderr=null) as server:
            try:
                while server.poll() is None and time.monotonic() < begin + 60:
                    try:
                        with urllib.request.urlopen(request, timeout=60) as answer:
                            answer.read()
                        return time.monotonic() - begin
                    except (urllib.error.URLError, ConnectionError):  # Not ready yet, or 503.
                        time.sleep(0.02)
                raise RuntimeError("llama-server did not start")
            finally:
                server.terminate()

    def values(self, round_: int) -> Values:
        common = ("-fa", "1", "-r", "1", "-o", "json")
        short, long = self.sizes.prefill
        values = start(self.start)
        asked = f"-p 0 -n {self.sizes.output} -d 16 -fa 1 -r 3 -o json"
        text, _ = self._run("llama-bench", *asked.split())
        values["decode"] = json.loads(text)[0]["avg_ts"]
        # The first length is the warm-up.
        lengths = f"32,{short},{long}"
        text, _ = self._run("llama-bench", "-p", lengths, "-n", "0", "--no-warmup", *common)
        rates = {entry["n_prompt"]: entry["avg_ts"] for entry in json.loads(text)}
        values["prefill512"], values["prefill2048"] = rates[short], rates[long]
        level = LEVELS[-1 - round_ % len(LEVELS)]
        each = str(self.sizes.concurrent)
        asked = f"-tb {THREADS} -c {level * 2 * int(each)} -fa on -npp {each} -ntg {each}"
        asked += f" -npl {level} --output-format jsonl"
        text, peak = self._run("llama-batched-bench", *asked.split())
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        values[f"concurrent{level}"] = level * int(each) / lines[-1]["t"]
        if level == LEVELS[-1]:
            values["memory"] = peak
        return values


def contestants(model: Path, tiny: bool) -> tuple[dict[str, Callable[[int], Values]], list[str]]:
    """The contestants that are installed here, and a line for each that is not."""

    def ours(_: int) -> Values:
        begun = start(lambda: spawn(sys.executable, f"{OURS}:start", tiny)["start"])
        return begun | spawn(sys.executable, OURS, tiny)

    here: dict[str, Callable[[int], Values]] = {OURS: ours}
    absent = []
    folder = os.environ.get("LLAMA_BIN")
    if folder and (Path(folder) / "llama-bench").exists():
        here["llama.cpp"] = Llama(Path(folder), model, tiny).values
    else:
        absent.append("llama.cpp: LLAMA_BIN is not a folder with llama-bench")
    python = Path(os.environ.get("OPENVINO_ENV", "")) / "bin" / "python"
    for name in OPENVINO:
        variable = name.upper().replace("-", "_")
        if not os.environ.get("OPENVINO_ENV") or not python.exists():
            absent.append(f"{name}: OPENVINO_ENV is not a virtual environment")
        elif not Path(os.environ.get(variable, "absent")).exists():
            absent.append(f"{name}: {variable} is not an exported model")
        else:

            def parts(_: int, name: str = name) -> Values:
                begun = start(lambda: spawn(str(python), f"{name}:start", tiny)["start"])
                one = spawn(str(python), f"{name}:single", tiny)
                return begun | one | spawn(str(python), f"{name}:batched", tiny)

            here[name] = parts
    return here, absent


def figures(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per row: each contestant's median, and our ratio to the best peer within each round."""
    results = []
    for row in ROWS:
        found: dict[str, list[float]] = {}
        ratios: dict[str, list[float]] = {}
        for round_ in rounds:
            values = round_["values"]
            ours = values.get(OURS, {}).get(row.key)
            for name, its in values.items():
                if row.key in its:
                    found.setdefault(name, []).append(its[row.key])
                    if ours and name != OURS:
                        ratios.setdefault(name, []).append(ours / its[row.key])
        medians = {name: statistics.median(listed) for name, listed in found.items()}
        to = {name: statistics.median(listed) for name, listed in ratios.items()}
        pick = min if row.more_is_better else max
        best = pick(to, key=lambda name: to[name]) if to else None
        results.append(
            {
                "row": row.key,
                "title": row.title,
                "medians": medians,
                "samples": found,
                "ratios": to,
                "ratio_samples": ratios,
                "best_peer": best,
            }
        )
    return results


def shares(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Ours, of the ceilings of the same round: medians."""
    found: dict[str, list[float]] = {}
    for round_ in rounds:
        v = round_["values"].get(OURS)
        if v is None:
            continue
        both = v["layer_operations"] + v["token_operations"]
        one = {
            "decode of bandwidth": v["decode"] * v["token_bytes"] / v["own_bandwidth"],
            "prefill512 of int8": v["prefill512"] * v["layer_operations"] / v["own_int8"],
            "prefill2048 of int8": v["prefill2048"] * v["layer_operations"] / v["own_int8"],
        } | {f"concurrent{n} of int8": v[f"concurrent{n}"] * both / v["own_int8"] for n in LEVELS}
        for key, share in one.items():
            found.setdefault(key, []).append(share)
    return {key: statistics.median(listed) for key, listed in found.items()}


def table(document: dict[str, Any]) -> str:
    names = list(document["contestants"])
    lines = [
        "| | " + " | ".join(names) + " | ratio to the best peer | share of the ceiling |",
        "|---|" + "--:|" * (len(names) + 2),
    ]
    for result in document["figures"]:
        cells = []
        for name in names:
            median = result["medians"].get(name)
            digits = 2 if result["row"] == "start" else 0 if (median or 0) >= 100 else 1
            cells.append("–" if median is None else f"{median:,.{digits}f}")
        best = "–"
        if result["best_peer"] is not None:
            samples = result["ratio_samples"][result["best_peer"]]
            ratio = f"×{result['ratios'][result['best_peer']]:.2f}"
            best = f"{ratio} ({min(samples):.2f}–{max(samples):.2f}, {result['best_peer']})"
        share = [
            f"{100 * s:.0f} % {k.split(' ', 1)[1]}"
            for k, s in document["shares"].items()
            if k.startswith(result["row"] + " ")
        ]
        title = f"{result['title']}"
        lines.append(f"| {title} | " + " | ".join(cells) + f" | {best} | {''.join(share)} |")
    for n, round_ in enumerate(document["rounds"]):
        probes = ", ".join(
            f"{name} {p['bandwidth'] / 1e9:.0f} GB/s {p['int8'] / 1e9:.0f} GOP/s"
            for name, p in round_["ceilings"].items()
        )
        own = round_["values"].get(OURS)
        mine = f"; own weights {own['own_bandwidth'] / 1e9:.0f} GB/s" if own else ""
        lines.append(f"\nround {n}, {round_['seconds']:.0f} s, ceilings before: {probes}{mine}")
    lines += [f"\nabsent: {line}" for line in document["absent"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0, help="no round that would not fit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tries the script; not a measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.tiny)
    if arguments.child in (OURS, f"{OURS}:start"):
        only_start = arguments.child != OURS
        print(json.dumps(child_headrace_start() if only_start else child_headrace(sizes)))
        return
    if arguments.child:
        name, _, kind = arguments.child.partition(":")
        model = os.environ[name.upper().replace("-", "_")]
        print(json.dumps(child_openvino(model, sizes, kind)))
        return
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    import headrace
    from headrace.base.config import DEFAULT_MODEL
    from headrace.kernels.cpu.library import Team, allocate
    from headrace.loader.open import open_model

    compileall.compile_dir(Path(headrace.__file__).parent, quiet=1)
    begin = time.monotonic()
    model = open_model(DEFAULT_MODEL).weights[0]
    team = Team(THREADS)
    room = allocate(256 * 2**20)
    room.fill(1)
    here, absent = contestants(Path(model), arguments.tiny)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    rounds: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": platform.platform(),
        "level": team.level,
        "threads": THREADS,
        "model": DEFAULT_MODEL,
        "tiny": arguments.tiny,
        "contestants": list(here),
        "absent": absent,
        "rounds": rounds,
    }
    longest = 0.0
    for number in range(arguments.rounds):
        spent = time.monotonic() - begin
        if longest and spent + longest > arguments.minutes * 60:
            print(f"{number} rounds fitted into {arguments.minutes:g} minutes")
            break
        first = time.monotonic()
        values: dict[str, Values] = {}
        ceilings: dict[str, Values] = {}
        order = list(here)[number % len(here) :] + list(here)[: number % len(here)]
        for name in order:
            ceilings[name] = {
                "bandwidth": max(team.read_bandwidth(room) for _ in range(3)),
                "int8": team.int8_rate(500_000),
            }
            try:
                values[name] = here[name](number)
            except RuntimeError as error:
                print(f"round {number}, {name} failed: {error}", flush=True)
                absent.append(f"{name} in round {number}: failed")
                continue
            text = ", ".join(f"{k} {v:.4g}" for k, v in values[name].items())
            print(f"{time.monotonic() - begin:5.0f} s, round {number}, {name}: {text}", flush=True)
        longest = max(longest, time.monotonic() - first)
        rounds.append(
            {
                "order": order,
                "seconds": time.monotonic() - first,
                "load": os.getloadavg()[0],
                "ceilings": ceilings,
                "values": values,
            }
        )
        document["figures"], document["shares"] = figures(rounds), shares(rounds)
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
