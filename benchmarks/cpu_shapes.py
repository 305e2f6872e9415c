"""Decoding and prefill of real models' shapes on two threads, weights drawn by chance.

    python benchmarks/cpu_shapes.py [--shapes qwen3-30b-a3b] [--rounds 3] [--json FILE]

`shape_files.py` has the shapes. Headrace and, where `LLAMA_BIN` is a folder with llama-bench,
llama.cpp read the same file, each in a process of its own per round, in an order that turns with
the rounds. A shape that is a folder of safetensors, too, is read as such by Headrace, and by
OpenVINO where `OPENVINO_ENV` is a virtual environment with openvino_genai and `OPTIMUM_ENV` one
with `optimum-cli` (`--weight-format fp16`; its inference precision is what it chooses, bf16 where
the processor has it). Headrace reads a folder also with each level of `--kernels` by name (`amx`,
`avx512-bf16` …) that the processor has. `--files` keeps what is written for a next run, and the
rounds of several runs with `--json` go to one document, as each is done.

A run beside which others had more than a twentieth of the processors' time is done again, up to
four times; what it was at last is in the document (`others`).

*Share*: bytes that a token has to read (of a mixture the experts that it chooses; of the table of
tokens one row; what states hold) times tokens a second, over what reads of the kept panels gave,
which are what decoding reads, in turns with the runs: bandwidth depends on where the host put the
pages, and on the second. Panels that fit into the last level are read from there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

THREADS = 2
PROMPT, OUTPUT = 512, 64
OTHERS = 0.05
"""Share of the processors' time that others may have had for a run to count."""
WORDS = 32_000
"""Token ids below this are drawn: every shape has them."""
Rates = dict[str, float]


def rates_of(
    generate: Callable[[list[int], int], None], between: Callable[[], None] = lambda: None
) -> Rates:
    """Decoding is the time of one token less, so that neither prompt nor call counts; `between` is
    called before and behind each run of it."""

    def seconds(prompt: int, output: int) -> float:
        ids = [random.randrange(WORDS) for _ in range(prompt)]
        begin = time.perf_counter()
        generate(ids, output)
        return time.perf_counter() - begin

    seconds(16, 4)
    decode = []
    for _ in range(3):
        first = seconds(16, 1)
        between()
        decode.append(OUTPUT / (seconds(16, 1 + OUTPUT) - first))
        between()
    prefill = [PROMPT / seconds(PROMPT, 1) for _ in range(2)]
    return {"decode": statistics.median(decode), "prefill": statistics.median(prefill)}


def child_headrace(model: str, cache: str, kernels: str = "auto") -> Rates:
    """Headrace, in a process of its own."""
    import numpy as np

    from headrace import LLM, SamplingParams

    options = {"max_context": 2048, "offline": True, "cache_dir": cache, "speculate": "off"}
    options["kernels"] = kernels
    with LLM(model, threads=THREADS, **options) as llm:

        def generate(ids: list[int], output: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            (answer,) = llm.generate([ids], params)
            assert len(answer.outputs[0].token_ids) == output

        generate([1, 2, 3], 1)
        team = llm._engine.core.executor._worker.text.operators.providers["linear"].team  # type: ignore[attr-defined]
        (kept,) = Path(cache).rglob("*.panels")
        panels = np.memmap(kept, np.uint8, "r")
        reads: list[float] = []
        rates = rates_of(generate, lambda: reads.extend(team.read_bandwidth(panels) for _ in "abc"))
    return {**rates, "bandwidth": statistics.median(reads)}


def child_openvino(model: str, _: str) -> Rates:
    """OpenVINO GenAI, in a process and an environment of its own."""
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=THREADS)

    def generate(ids: list[int], output: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        tensors = (np.array([ids], np.int64), np.ones((1, len(ids)), np.int64))
        inputs = openvino_genai.TokenizedInputs(*map(openvino.Tensor, tensors))
        assert len(pipeline.generate(inputs, config).tokens[0]) == output

    return rates_of(generate)


def spawn(python: str, child: str, model: Path, cache: Path) -> Rates:
    command = [python, __file__, "--child", child, str(model), str(cache)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Rates = json.loads(done.stdout.splitlines()[-1])
    return found


def llama(folder: str, model: Path) -> Rates:
    command = [f"{folder}/llama-bench", "-m", str(model), "-t", str(THREADS), "-r", "3"]
    command += ["-p", str(PROMPT), "-n", str(OUTPUT), "-o", "json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    names = {True: "decode", False: "prefill"}
    return {names[row["n_gen"] > 0]: row["avg_ts"] for row in json.loads(done.stdout)}


def busy() -> float:
    """Seconds that all processors have worked since the machine's start; from Linux."""
    first = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, first[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own() -> float:
    return sum(os.times()[:4])


def undisturbed(run: Callable[[], Rates]) -> Rates:
    for attempt in range(4):
        for _ in range(60):  # Until a second passes in which others let the machine be.
            begin, before = time.perf_counter(), busy()
            time.sleep(1)
            if busy() - before <= OTHERS * (time.perf_counter() - begin) * (os.cpu_count() or 1):
                break
        begin, all_before, own_before = time.perf_counter(), busy(), own()
        rates = run()
        spent = (time.perf_counter() - begin) * (os.cpu_count() or 1)
        rates["others"] = (busy() - all_before - (own() - own_before)) / spent
        if rates["others"] <= OTHERS:
            break
        print(f"attempt {attempt}: others had {rates['others']:.2f}", file=sys.stderr, flush=True)
    return rates


def contestants(name: str, place: Path) -> dict[str, Callable[[], Rates]]:
    """A run for each engine that is here; files are written under `place` where they lack."""
    from shape_files import SHAPES, write_folder, write_gguf

    from headrace.kernels.cpu.library import PAIRS, ROUNDED, TILES, level

    shape = SHAPES[name]
    own = place / name.replace(" ", "-")
    own.mkdir(parents=True, exist_ok=True)
    file, folder, exported = own / "model.gguf", own / "folder", own / "openvino"
    peers = {key: os.environ.get(key) for key in ("LLAMA_BIN", "OPENVINO_ENV", "OPTIMUM_ENV")}
    if not file.exists():
        write_gguf(file, shape)
    model = file
    runs: dict[str, Callable[[], Rates]] = {}
    if shape.config:
        if not folder.exists():
            write_folder(folder, shape)
        model = folder
    runs["headrace"] = lambda: spawn(sys.executable, "headrace", model, own / "cache")
    for kernels in (PAIRS, TILES, ROUNDED):
        if shape.config and level(kernels):
            runs[f"headrace {kernels}"] = partial(
                spawn, sys.executable, f"headrace {kernels}", model, own / "cache"
            )
    if binaries := peers["LLAMA_BIN"]:
        runs["llama.cpp"] = lambda: llama(binaries, file)
    if shape.config and (environment := peers["OPENVINO_ENV"]):
        if not exported.exists():
            command = [f"{peers['OPTIMUM_ENV']}/bin/optimum-cli", "export", "openvino"]
            command += ["--model", str(folder), "--task", "text-generation-with-past"]
            subprocess.run([*command, "--weight-format", "fp16", str(exported)], check=True)
        python = f"{environment}/bin/python"
        runs["openvino"] = lambda: spawn(python, "openvino", exported, own)
    return runs


def summary(token_bytes: int, rounds: list[dict[str, Rates]]) -> dict[str, Any]:
    """Medians, and what the rounds say of each other."""
    found: dict[str, Any] = {"token_bytes": token_bytes}
    ours = [one["headrace"] for one in rounds]
    shares = [token_bytes * one["decode"] / one["bandwidth"] for one in ours]
    found["share"] = statistics.median(shares)
    for what in ("decode", "prefill"):
        found[what] = {
            who: statistics.median(one[who][what] for one in rounds if who in one)
            for who in rounds[-1]
        }
        for us in (who for who in found[what] if who.startswith("headrace")):
            for who in (who for who in found[what] if not who.startswith("headrace")):
                both = [one for one in rounds if us in one and who in one]
                ratios = [one[us][what] / one[who][what] for one in both]
                found[f"{what}: {us} over {who}"] = {
                    "median": statistics.median(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                }
    return {**found, "rounds": rounds}


def processor() -> str:
    """Name, family and model, of which a virtual machine's name says little."""
    pairs = (line.split(":") for line in Path("/proc/cpuinfo").read_text().splitlines() if line)
    found = {pair[0].strip(): pair[1].strip() for pair in pairs}
    if "model" not in found:
        return platform.machine()
    return f"{found['model name']}, family {found['cpu family']}, model {found['model']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="all of shape_files.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, help="where files are kept; else nowhere")
    parser.add_argument("--json", type=Path, help="rounds are added to those that it has")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        who, model, cache = arguments.child
        name, *kernels = who.split()
        run = {"headrace": child_headrace, "openvino": child_openvino}[name]
        print(json.dumps(run(model, cache, *kernels)))
        return
    from shape_files import SHAPES

    document: dict[str, Any] = {"shapes": {}}
    if arguments.json and arguments.json.exists():
        document = json.loads(arguments.json.read_text())
    document |= {"at": datetime.now(UTC).isoformat(timespec="seconds"), "processor": processor()}
    names = arguments.shapes or list(SHAPES)
    with tempfile.TemporaryDirectory() as temporary:
        runs = {name: contestants(name, arguments.files or Path(temporary)) for name in names}
        for turn in range(arguments.rounds):
            for name in names:
                known = document["shapes"].get(name, {"rounds": []})["rounds"]
                order = list(runs[name]) if len(known) % 2 == 0 else list(runs[name])[::-1]
                rounds = [*known, {who: undisturbed(runs[name][who]) for who in order}]
                print(name, turn, json.dumps(rounds[-1]), file=sys.stderr, flush=True)
                document["shapes"][name] = summary(SHAPES[name].token_bytes(), rounds)
                if arguments.json:
                    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    for name in names:
        found = document["shapes"][name]
        print(name, json.dumps({key: found[key] for key in found if key != "rounds"}))


if __name__ == "__main__":
    main()
