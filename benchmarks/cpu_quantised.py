"""The default model as quantised safetensors on a CPU: loading, decoding, prefill, perplexity.

    python benchmarks/cpu_quantised.py PLACE make|perplexity|speed|first [--forms …] [--json FILE]

`make` expands the default GGUF to a dense folder in bf16 and writes it in each form by rounding to
nearest, into PLACE. `perplexity` is over windows of 512 tokens (`kv_types.windows`), as of
the dense folder; `speed` is one round: each form in a process of its own that finds its panels, in
an order that turns with `--turn`; `first` the same without kept panels. `--json` adds to a file, of
which `table` makes medians. What the GGUF holds lies on the grids of its own types: forms are
compared by it as readers, not as quantisers.

*Share*: panels that a token reads times tokens a second over one read of the kept panels.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
DEFAULT = "qwen2.5-coder-0.5b"
THREADS, PROMPT, OUTPUT = 2, 512, 48
FORMS = {  # name → (folder, --quantise)
    "gguf q4_k_m": (DEFAULT, "auto"),
    "bf16": ("bf16", "auto"),
    "bf16 int8": ("bf16", "int8"),
    "bf16 int4": ("bf16", "int4"),
    "awq": ("awq", "auto"),
    "awq, head int8": ("awq", "int8"),
    "gptq": ("gptq", "auto"),
    "gptq order": ("gptq order", "auto"),
    "int8": ("int8", "auto"),
    "fp8 block": ("fp8 block", "auto"),
}


def make(place: Path, forms: list[str]) -> None:
    """The folders that these are read from; some minutes."""
    import torch
    from safetensors.torch import save_file

    from headrace.kernels.arrays import tensor
    from headrace.kernels.weights import BlockWeight
    from headrace.loader.open import open_model
    from headrace.loader.weights import load_weights
    from headrace.quant.ggml import dequantise
    from oracle import checkpoints
    from tiny import quantised
    from tiny.families import with_words

    files = open_model(DEFAULT)
    dense = {
        name: (dequantise(one) if isinstance(one, BlockWeight) else tensor(one)).bfloat16()
        for name, one in load_weights(files)
        if name != "lm_head.weight"
    }
    arch = files.arch
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": arch.hidden,
        "intermediate_size": arch.intermediate,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    for name in dict.fromkeys(FORMS[form][0] for form in forms if FORMS[form][0] != DEFAULT):
        made: dict[str, torch.Tensor] = {}
        more: dict[str, Any] = {}
        for full, one in dense.items():
            if name == "bf16" or not full.endswith("_proj.weight"):
                made[full] = one
            elif name == "fp8 block":
                codes, scales, _ = checkpoints.quantise(one.float(), "hub-block")
                made[full], made[full + "_scale_inv"] = codes, scales
            else:
                parts, _ = quantised.quantise(quantised.FORMS[name], one.float())
                module = full.removesuffix("weight")
                made |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
        if name == "fp8 block":
            more = {"quantization_config": checkpoints.config_of("hub-block")}
        elif name != "bf16":
            more = {"quantization_config": quantised.FORMS[name].config()}
        folder = place / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(made, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        with_words(folder, arch.vocab_size)
        print(name, sum(one.nbytes for one in made.values()) >> 20, "MiB", flush=True)


def started(place: Path, form: str, cache: Path) -> Any:
    from headrace import LLM

    folder, quantise = FORMS[form]
    model = folder if folder == DEFAULT else str(place / folder.replace(" ", "-"))
    options = {"max_context": 1024, "offline": True, "speculate": "off", "quantise": quantise}
    if folder != DEFAULT:
        options["cache_dir"] = str(cache)
    return LLM(model, threads=THREADS, max_sequences=4, **options)


def perplexity(place: Path, form: str, windows: int) -> dict[str, Any]:
    """Natural logarithms of each window's perplexity, and what the start says."""
    from kv_types import windows as texts

    from headrace import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    with started(place, form, place / "cache" / form) as llm:
        found = []
        for tokens in list(texts())[:: max(1, 28 // windows)][:windows]:
            (answer,) = llm.generate([tokens], asked)
            told = [one.logprob for one in answer.prompt_logprobs or () if one is not None]
            found.append(-statistics.fmean(told))
        said = {one.name: one.reason for one in llm.decisions if one.name in SAID}
    return {"perplexity": math.exp(statistics.fmean(found)), "windows": found, "said": said}


SAID = ("quantise", "matrices in fp32", "panels")


def speed(place: Path, form: str) -> dict[str, Any]:
    from headrace import SamplingParams

    begin = time.perf_counter()
    cache = place / "cache" / form
    with started(place, form, cache) as llm:
        loaded = time.perf_counter() - begin

        def seconds(prompt: int, output: int) -> float:
            ids = [random.randrange(150_000) for _ in range(prompt)]
            begin = time.perf_counter()
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
            return time.perf_counter() - begin

        seconds(16, 4)
        decode = [OUTPUT / (seconds(16, 1 + OUTPUT) - seconds(16, 1)) for _ in range(2)]
        prefill = PROMPT / seconds(PROMPT, 1)
        model = llm._engine.core.executor._worker._model  # type: ignore[attr-defined]
        from headrace.kernels.cpu.emit import parts_of

        panels = [
            part
            for key, one in model.weights.by_key.items()
            if key[1] in ("linear", "logits")
            for part in parts_of(one)
        ]
        token = sum(part.nbytes for part in panels)
        (worker,) = [llm._engine.core.executor._worker]  # type: ignore[attr-defined]
        team = worker._operators.providers["linear"].team
        layers = max((part.data for part in panels), key=lambda data: data.nbytes)
        bandwidth = max(team.read_bandwidth(layers) for _ in range(4))
    return {
        "load": loaded,
        "decode": statistics.median(decode),
        "prefill": prefill,
        "token_bytes": token,
        "kinds": sorted({part.kind for part in panels}),
        "bandwidth": bandwidth,
        "share": token * statistics.median(decode) / bandwidth,
    }


def child(arguments: argparse.Namespace, form: str) -> dict[str, Any]:
    if arguments.what == "first":
        shutil.rmtree(arguments.place / "cache" / form, ignore_errors=True)
    given = [str(arguments.place), arguments.what, "--child", form]
    command = [sys.executable, __file__, *given, "--windows", str(arguments.windows)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(path: Path) -> None:
    document = json.loads(path.read_text())
    for form in FORMS:
        rounds = document.get("speed", {}).get(form, [])
        row = {
            key: round(statistics.median(one[key] for one in rounds), 3)
            for key in ("load", "decode", "prefill", "share")
            if rounds
        }
        row |= {"MB a token": round(rounds[0]["token_bytes"] / 1e6)} if rounds else {}
        row |= {"kinds": rounds[0]["kinds"]} if rounds else {}
        first = document.get("first", {}).get(form, [])
        row |= {"first load": round(first[-1]["load"], 2)} if first else {}
        told = document.get("perplexity", {}).get(form, [])
        row |= {"perplexity": round(told[-1]["perplexity"], 4)} if told else {}
        print(f"{form:16}", json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("place", type=Path)
    parser.add_argument("what", choices=("make", "perplexity", "speed", "first", "table"))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--turn", type=int, default=0)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--json", type=Path, default=Path("cpu_quantised.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        made = {"perplexity": lambda *one: perplexity(*one, arguments.windows)}
        what = made.get(arguments.what, speed)
        print(json.dumps(what(arguments.place, arguments.child)))
    elif arguments.what == "make":
        make(arguments.place, arguments.forms)
    elif arguments.what == "table":
        table(arguments.json)
    else:
        turn = arguments.turn % len(arguments.forms)
        for form in arguments.forms[turn:] + arguments.forms[:turn]:
            found = child(arguments, form)
            document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            document.setdefault(arguments.what, {}).setdefault(form, []).append(found)
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
            shown = {key: one for key, one in found.items() if key != "windows"}
            print(form, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
