"""What LoRA adapters cost: the same batch without them, with one, with a different one per row.

Run: `python benchmarks/adapters.py [--rank 16] [--rows 1 4] [--tokens 32] [--json FILE]`. Random
adapters on all projections of the model; tokens per second of decoding and of a prompt of 256
tokens, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.loader.open import open_model


def write(folder: Path, arch: Any, rank: int, seed: int) -> Path:
    """A random adapter on every projection, as PEFT saves one."""
    folder.mkdir()
    numbers = np.random.default_rng(seed)
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    shapes = {
        "self_attn.q_proj": (queries, arch.hidden),
        "self_attn.k_proj": (keys, arch.hidden),
        "self_attn.v_proj": (keys, arch.hidden),
        "self_attn.o_proj": (arch.hidden, queries),
        "mlp.gate_proj": (arch.intermediate, arch.hidden),
        "mlp.up_proj": (arch.intermediate, arch.hidden),
        "mlp.down_proj": (arch.hidden, arch.intermediate),
    }
    tensors = {}
    for layer in range(arch.layers):
        for name, (out, width) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}.lora_"
            tensors[f"{at}A.weight"] = numbers.normal(0, 0.01, (rank, width)).astype(np.float32)
            tensors[f"{at}B.weight"] = numbers.normal(0, 0.01, (out, rank)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted(name.rpartition(".")[2] for name in shapes),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def rates(llm: LLM, adapters: list[str | None], tokens: int) -> tuple[float, float]:
    """(decoded tokens per second, prompt tokens per second) of one row per entry."""

    def run(length: int, count: int) -> float:
        prompts = [[random.randrange(1_000, 100_000) for _ in range(length)] for _ in adapters]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, adapter=adapters)
        return time.perf_counter() - begin

    one = run(16, 1)
    decoding = len(adapters) * tokens / (run(16, tokens + 1) - one)
    return decoding, 256 * len(adapters) / run(256, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arch = open_model(arguments.model).arch
    most = max(arguments.rows)
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(
            arguments.model,
            threads=arguments.threads,
            max_sequences=most,
            max_context=1024,
            kv_memory="200MiB",
            max_adapters=most,
            adapter_rank=arguments.rank,
        ) as llm,
    ):
        for place in range(most):
            llm.load_adapter(
                f"a{place}", write(Path(folder) / str(place), arch, arguments.rank, place)
            )
        for rows in arguments.rows:
            cases: dict[str, list[str | None]] = {"none": [None] * rows, "one": ["a0"] * rows}
            if rows > 1:
                cases[f"{rows} different"] = [f"a{place}" for place in range(rows)]
                cases["one of the rows"] = ["a0", *[None] * (rows - 1)]
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
            for _ in range(arguments.rounds):
                for name, adapters in cases.items():
                    found[name].append(rates(llm, adapters, arguments.tokens))
            for name, pairs in found.items():
                decode, prefill = (statistics.median(column) for column in zip(*pairs, strict=True))
                results.append(
                    {
                        "rows": rows,
                        "adapters": name,
                        "rank": arguments.rank,
                        "decode": round(decode, 1),
                        "prefill": round(prefill, 1),
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
