"""The default model as quantised safetensors on a CPU: memory, loading, speed, perplexity.

    python benchmarks/cpu_quantised.py PLACE make|perplexity|speed|starts [--forms …] [--json FILE]

`make` expands the default GGUF to a dense folder in bf16 and writes it in each form by rounding to
nearest, into PLACE; "mxfp4" is two layers of gpt-oss-20b's sizes, by chance. `perplexity` is over
windows of 512 tokens (`kv_types.windows`), as of the dense folder; `speed` is one round: each form
in a process of its own that finds its panels, in an order that turns with `--turn`; `starts` is a
start without kept panels and one with them, to four tokens, and their memory. `--json` adds to a
file, of which `table` makes medians. What the GGUF holds lies on the grids of its own types: forms
are compared by it as readers, not as quantisers.

*Share*: panels that a token reads times tokens a second over one read of the kept panels.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
    "gptq int8": ("gptq int8", "auto"),
    "int4": ("int4", "auto"),
    "int4 zeros": ("int4 zeros", "auto"),
    "int8": ("int8", "auto"),
    "fp8 block": ("fp8 block", "auto"),
    "fp8 channel": ("fp8 channel", "auto"),
    "mxfp4": ("mxfp4", "auto"),
}
FP8 = {"fp8 block": "hub-block", "fp8 channel": "channel"}
BESIDE = 150
"""MiB that a start may take beside the model's files and KV, which lies in what was zeros."""


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
    words = json.dumps(tokenizer_of(files.tokenizer), ensure_ascii=False)
    for name in dict.fromkeys(FORMS[form][0] for form in forms if FORMS[form][0] != DEFAULT):
        if name == "mxfp4":
            make_mixture(place / name)
            continue
        made: dict[str, torch.Tensor] = {}
        more: dict[str, Any] = {}
        for full, one in dense.items():
            if name == "bf16" or not full.endswith("_proj.weight"):
                made[full] = one
            elif name in FP8:
                codes, scales, _ = checkpoints.quantise(one.float(), FP8[name])
                suffix = "_scale_inv" if name == "fp8 block" else "_scale"
                made[full], made[full + suffix] = codes, scales
            else:
                parts, _ = quantised.quantise(quantised.FORMS[name], one.float())
                module = full.removesuffix("weight")
                made |= {module + suffix: part.contiguous() for suffix, part in parts.items()}
        if name in FP8:
            more = {"quantization_config": checkpoints.config_of(FP8[name])}
        elif name != "bf16":
            more = {"quantization_config": quantised.FORMS[name].config()}
        folder = place / name.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        save_file(made, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        (folder / "tokenizer.json").write_text(words)
        print(name, sum(one.nbytes for one in made.values()) >> 20, "MiB", flush=True)


def tokenizer_of(metadata: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary of a GGUF of Qwen 2 as the model's authors publish it."""
    from headrace.text.pretokenize import QWEN2

    tokens, types = (list(metadata[f"tokenizer.ggml.{key}"]) for key in ("tokens", "token_type"))
    ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": at, "content": tokens[at], **ways, "special": kind == 3}
        for at, kind in enumerate(types)
        if kind in (3, 4)
    ]
    level = {"type": "ByteLevel", "trim_offsets": False, "use_regex": False}
    level["add_prefix_space"] = False
    cut = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    vocabulary = {token: at for at, token in enumerate(tokens) if types[at] == 1}
    merges = list(metadata["tokenizer.ggml.merges"])
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, level]},
        "post_processor": level,
        "decoder": level,
        "model": model,
    }


def make_mixture(folder: Path) -> None:
    """Two layers of gpt-oss-20b's sizes with a vocabulary of 32,768, its experts in MXFP4."""
    import torch
    from safetensors.torch import save_file

    from tiny.families import with_words

    hidden, experts, words = 2880, 32, 32_768

    def numbers(*shape: int, centre: float = 0.0) -> torch.Tensor:
        return (centre + 0.02 * torch.randn(*shape)).bfloat16()

    made = {"model.embed_tokens.weight": numbers(words, hidden)}
    made |= {"lm_head.weight": numbers(words, hidden)}
    made |= {"model.norm.weight": numbers(hidden, centre=1.0)}
    for layer in (f"model.layers.{at}." for at in range(2)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"{layer}{name}.weight"] = numbers(hidden, centre=1.0)
        for part, out, width in (
            ("q", 4096, hidden),
            ("k", 512, hidden),
            ("v", 512, hidden),
            ("o", hidden, 4096),
        ):
            made[f"{layer}self_attn.{part}_proj.weight"] = numbers(out, width)
            made[f"{layer}self_attn.{part}_proj.bias"] = numbers(out)
        made[f"{layer}self_attn.sinks"] = numbers(64)
        made[f"{layer}mlp.router.weight"] = numbers(experts, hidden)
        made[f"{layer}mlp.router.bias"] = numbers(experts)
        for part, out in (("gate_up", 2 * hidden), ("down", hidden)):
            codes = torch.randint(0, 256, (experts, out, hidden // 32, 16), dtype=torch.uint8)
            stack = f"{layer}mlp.experts.{part}_proj"
            made[f"{stack}_blocks"], made[f"{stack}_bias"] = codes, numbers(experts, out)
            made[f"{stack}_scales"] = torch.full(codes.shape[:-1], 119, dtype=torch.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made, folder / "model.safetensors")
    config = {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1.5e5,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "swiglu_limit": 7.0,
        "vocab_size": words,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "eos_token_id": words - 1,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with_words(folder, words)


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


WHATS = ("make", "perplexity", "speed", "starts", "start", "table")
SAID = ("quantise", "matrices in fp32", "panels")


def start(place: Path, form: str) -> dict[str, Any]:
    """Seconds to four tokens, and the memory that they took."""
    from memory import sizes

    from headrace import SamplingParams

    begin = time.perf_counter()
    with started(place, form, place / "cache" / form) as llm:
        loaded = time.perf_counter() - begin
        asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        llm.generate([list(range(16))], asked)
        seconds = time.perf_counter() - begin
        said = {one.name: f"{one.value}: {one.reason}" for one in llm.decisions if one.name in SAID}
        said = {name: text.replace(str(place), "PLACE") for name, text in said.items()}
        spent = sum(os.times()[:2])
        return {"load": loaded, "seconds": seconds, "cpu": spent, **sizes(), "said": said}


def starts(arguments: argparse.Namespace, form: str) -> dict[str, Any]:
    shutil.rmtree(arguments.place / "cache" / form, ignore_errors=True)
    folder = arguments.place / FORMS[form][0].replace(" ", "-")
    files = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    return {
        "files": files,
        "first": child(arguments, form, "start"),
        "later": child(arguments, form, "start"),
    }


def speed(place: Path, form: str) -> dict[str, Any]:
    import numpy as np

    from headrace import SamplingParams

    begin = time.perf_counter()
    cache = place / "cache" / form
    with started(place, form, cache) as llm:
        loaded = time.perf_counter() - begin

        def seconds(prompt: int, output: int) -> float:
            ids = [random.randrange(32_000) for _ in range(prompt)]
            begin = time.perf_counter()
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=output, ignore_eos=True))
            return time.perf_counter() - begin

        worker = llm._engine.core.executor._worker  # type: ignore[attr-defined]
        from headrace.kernels.cpu.emit import parts_of
        from headrace.kernels.cpu.panels import low_bytes

        token, panels = 0, []
        for (_, role, *_), one in worker.text.model.weights.by_key.items():
            if role in ("linear", "logits"):
                panels += parts_of(one)
                # A greedy step reads next to nothing of the low plane of a head.
                token += sum(part.nbytes - low_bytes(part) for part in parts_of(one))
            elif role == "moe":  # Four of 32 experts.
                token += sum(part.nbytes for each in one for part in parts_of(each)) // 8
        team = worker.text.operators.providers["linear"].team
        maps = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
        kept = next(one[5] for one in maps if one[-1].endswith(".panels"))
        whole = np.memmap(kept, np.uint8, "r")
        decode, reads = [], []
        seconds(16, 4)
        for _ in range(3):
            first = seconds(16, 1)
            reads.append(team.read_bandwidth(whole))
            decode.append(OUTPUT / (seconds(16, 1 + OUTPUT) - first))
            reads.append(team.read_bandwidth(whole))
        prefill = max(PROMPT / seconds(PROMPT, 1) for _ in range(2))
        bandwidth = statistics.median(reads)
    return {
        "load": loaded,
        "decode": statistics.median(decode),
        "prefill": prefill,
        "token_bytes": token,
        "kinds": sorted({part.kind for part in panels}),
        "bandwidth": bandwidth,
        "share": token * statistics.median(decode) / bandwidth,
    }


def child(arguments: argparse.Namespace, form: str, what: str) -> dict[str, Any]:
    given = [str(arguments.place), what, "--child", form]
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
        begun = document.get("starts", {}).get(form, [])
        for which in ("first", "later") if begun else ():
            for key in ("seconds", "cpu", "peak"):
                middle = statistics.median(one[which][key] for one in begun)
                row[f"{which}: {key}"] = round(middle, 0 if key == "peak" else 2)
        if begun:
            kv = begun[-1]["later"]["by_kind"].get("KV", 0.0)
            row["files + KV + 150"] = round(begun[-1]["files"] + kv + BESIDE)
        told = document.get("perplexity", {}).get(form, [])
        row |= {"perplexity": round(told[-1]["perplexity"], 4)} if told else {}
        print(f"{form:16}", json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("place", type=Path)
    parser.add_argument("what", choices=WHATS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--turn", type=int, default=0)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--json", type=Path, default=Path("cpu_quantised.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        made = {
            "perplexity": lambda *one: perplexity(*one, arguments.windows),
            "speed": speed,
            "start": start,
        }
        print(json.dumps(made[arguments.what](arguments.place, arguments.child)))
    elif arguments.what == "make":
        make(arguments.place, arguments.forms)
    elif arguments.what == "table":
        table(arguments.json)
    else:
        turn = arguments.turn % len(arguments.forms)
        for form in arguments.forms[turn:] + arguments.forms[:turn]:
            begun = arguments.what == "starts"
            found = starts(arguments, form) if begun else child(arguments, form, arguments.what)
            document = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            document.setdefault(arguments.what, {}).setdefault(form, []).append(found)
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
            shown = {key: one for key, one in found.items() if key != "windows"}
            print(form, json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
