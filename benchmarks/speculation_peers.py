"""Code edits and talks, one at a time, beside peers with their own look-ups on.

    python benchmarks/speculation_peers.py [--rounds 3] [--classes code-edit conversation]
        [--prompts 3] [--tokens 128] [--json FILE [--go-on]]

Contestants, two threads each: Headrace with drafts and without; llama.cpp on the same file
(`LLAMA_BIN`: folder of llama-server), plain and with its look-ups at their defaults; OpenVINO GenAI
(`OPENVINO_ENV`, `OPENVINO_INT8`, `OPENVINO_INT4` as for `cpu_peers.py`), plain and with prompt
lookup of five tokens. One that is not there is named as absent.

All get the same ids of the same prompts (`speculation_speed.prompts`, others in each round),
greedy, with ends of text as they come: answers of models that were quantised otherwise differ, so
tokens a second are those of a contestant's own answers, prompts included. Each is a process of its
own per round, in an order that turns with the rounds. With `--go-on` the rounds that FILE has
count, and only those that it lacks run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from cpu_peers import THREADS

LOOKUP = 5
Ids = list[list[int]]
Run = Callable[[Ids, int], list[tuple[float, int]]]
"""(prompts, tokens) → (seconds, tokens of the answer) of each, one after the other."""


def headrace(speculate: str) -> Run:
    from headrace import LLM, SamplingParams

    # Nobody is to find a prompt that it has read before: classes share their instructions.
    options = {"max_context": 4096, "offline": True, "prefix_cache": False}
    llm = LLM(threads=THREADS, speculate=speculate, **options)

    def run(prompts: Ids, tokens: int) -> list[tuple[float, int]]:
        found = []
        for prompt in prompts:
            begin = time.perf_counter()
            (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=tokens))
            found.append((time.perf_counter() - begin, len(answer.outputs[0].token_ids)))
        return found

    return run


def openvino(model: str, lookup: bool) -> Run:
    import numpy
    import openvino as ov
    import openvino_genai

    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": THREADS}
    if lookup:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.LLMPipeline(model, "CPU", **properties)

    def run(prompts: Ids, tokens: int) -> list[tuple[float, int]]:
        found = []
        for prompt in prompts:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample = tokens, False
            config.set_eos_token_id(151645)
            if lookup:
                config.num_assistant_tokens, config.max_ngram_size = LOOKUP, 3
            ids = ov.Tensor(numpy.array([prompt], dtype=numpy.int64))
            mask = ov.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
            begin = time.perf_counter()
            answer = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
            found.append((time.perf_counter() - begin, len(answer.tokens[0])))
        return found

    return run


def child(kind: str, wanted: str) -> None:
    """Warm up, then answer what `wanted` (JSON) asks; prints JSON."""
    name, _, rest = kind.partition(":")
    run = headrace(rest) if name == "headrace" else openvino(*_model_of(rest))
    asked = json.loads(Path(wanted).read_text())
    run([asked["prompts"][0][:32]], 8)
    print(json.dumps(run(asked["prompts"], asked["tokens"])))


def _model_of(rest: str) -> tuple[str, bool]:
    variable, _, lookup = rest.partition(":")
    return os.environ[variable], lookup == "lookup"


def in_process(python: str, kind: str) -> Callable[[Path], list[tuple[float, int]]]:
    def run(wanted: Path) -> list[tuple[float, int]]:
        command = [python, __file__, "--child", kind, str(wanted)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        )
        return [(seconds, count) for seconds, count in json.loads(done.stdout.splitlines()[-1])]

    return run


def llama(folder: Path, model: Path, look_up: str) -> Callable[[Path], list[tuple[float, int]]]:
    def run(wanted: Path) -> list[tuple[float, int]]:
        asked = json.loads(wanted.read_text())
        port = 18_000 + random.randrange(1_000)
        command = [str(folder / "llama-server"), "-m", str(model), "--port", str(port)]
        command += ["-t", str(THREADS), "-tb", str(THREADS), "-np", "1", "-c", "4096", "-fa", "on"]
        command += ["--spec-type", look_up]

        def ask(prompt: list[int], tokens: int) -> int:
            body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/completion",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                return int(json.load(answer)["tokens_predicted"])

        null = subprocess.DEVNULL
        with subprocess.Popen(command, stdout=null, stderr=null) as server:
            try:
                begin = time.monotonic()
                while True:
                    try:
                        ask(asked["prompts"][0][:32], 8)
                        break
                    except (urllib.error.URLError, ConnectionError):  # Not ready yet, or 503.
                        if server.poll() is not None or time.monotonic() > begin + 60:
                            raise RuntimeError("llama-server did not start") from None
                        time.sleep(0.05)
                found = []
                for prompt in asked["prompts"]:
                    begin = time.perf_counter()
                    count = ask(prompt, asked["tokens"])
                    found.append((time.perf_counter() - begin, count))
                return found
            finally:
                server.terminate()

    return run


def contestants(model: Path) -> dict[str, Callable[[Path], list[tuple[float, int]]]]:
    found = {
        "headrace": in_process(sys.executable, "headrace:off"),
        "headrace auto": in_process(sys.executable, "headrace:auto"),
    }
    if folder := os.environ.get("LLAMA_BIN"):
        for look_up in ("none", "ngram-simple", "ngram-mod", "ngram-cache"):
            found[f"llama.cpp {look_up}"] = llama(Path(folder), model, look_up)
    else:
        print("absent: llama.cpp (LLAMA_BIN)")
    for variable in ("OPENVINO_INT8", "OPENVINO_INT4"):
        if variable in os.environ and "OPENVINO_ENV" in os.environ:
            python = str(Path(os.environ["OPENVINO_ENV"], "bin", "python"))
            for how in ("plain", "lookup"):
                found[f"{variable.lower().replace('_', ' ')} {how}"] = in_process(
                    python, f"openvino:{variable}:{how}"
                )
        else:
            print(f"absent: {variable}")
    return found


def asked_ids(name: str, count: int, seed: int, tokens: int) -> Ids:
    """Prompts as the default model reads them."""
    from speculation_speed import prompts

    from headrace import LLM, SamplingParams

    with LLM(max_context=4096, offline=True) as llm:
        asked = prompts(name, count, seed, tokens)
        answers = llm.chat(asked, SamplingParams(max_tokens=1), use_tqdm=False)
        return [list(answer.prompt_token_ids) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--classes", nargs="+", default=["code-edit", "conversation"])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    speeds: dict[str, dict[str, list[float]]] = {}
    if arguments.go_on and arguments.json.exists():
        speeds = json.loads(arguments.json.read_text())["speeds"]
    options = {key: vars(arguments)[key] for key in ("tokens", "prompts")}
    from headrace.base.config import DEFAULT_MODEL
    from headrace.loader import open_model

    model = open_model(DEFAULT_MODEL, offline=True).path
    runs = list(contestants(Path(model)).items())
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "asked.json")
        for turn, name in product(range(arguments.rounds), arguments.classes):
            speeds.setdefault(name, {})
            have = {who: speeds[name].setdefault(who, []) for who, _ in runs}
            lacking = [(who, run) for who, run in runs if len(have[who]) <= turn]
            if not lacking:
                continue
            ids = asked_ids(name, arguments.prompts, 1000 * turn, arguments.tokens)
            wanted.write_text(json.dumps({"prompts": ids, "tokens": arguments.tokens}))
            for who, run in lacking if turn % 2 == 0 else lacking[::-1]:
                found = run(wanted)
                have[who].append(sum(count for _, count in found) / sum(took for took, _ in found))
                print(f"round {turn} {name} {who}: {have[who][-1]:.1f} tok/s", flush=True)
                if arguments.json:
                    text = json.dumps({"options": options, "speeds": speeds}, indent=1)
                    arguments.json.write_text(text + "\n")
    for name, each in speeds.items():
        for who, found in each.items():
            print(f"{name:14s} {who:26s} {statistics.median(found):7.1f} tok/s")


if __name__ == "__main__":
    main()
