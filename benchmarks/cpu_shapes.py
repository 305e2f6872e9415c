"""Decoding and prefill of real models' shapes on two threads, weights drawn by chance.

    python benchmarks/cpu_shapes.py [--shapes qwen3-30b-a3b] [--rounds 3] [--json FILE]

A model of 30 billion parameters does not fit on every machine that measures, but a few of its
layers do, and a layer is read as fast as its neighbours. Each shape is a GGUF file of one to two
gigabytes with the sizes of the published model and as many layers as `SHAPES` says; blocks of codes
are random, scales small. Headrace and, where `LLAMA_BIN` is a folder with llama-bench, llama.cpp
read the same file, each in a process of its own per round, in an order that turns with the rounds.

*Share*: bytes that a token has to read (of a mixture the experts that it chooses; of the table of
tokens one row) times tokens a second, over what one read of the kept panels gave in the same
process, which are what decoding reads: bandwidth depends on where the host put the pages.
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
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np

THREADS = 2
PROMPT, OUTPUT = 512, 64
VOCABULARY = 32_768
Q4_K, BF16, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q4_K", "BF16", "F32"))


@dataclass(frozen=True)
class Shape:
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    feed_forward: int
    """Inner width of the feed-forward part; in a mixture that of one expert."""
    matrices: gguf.GGMLQuantizationType
    experts: int = 0
    chosen: int = 0
    head_norms: bool = False
    biases: bool = False
    untied: bool = True

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], bool]]:
        """(name, shape as numpy says it, is it a matrix?)"""
        yield "token_embd.weight", (VOCABULARY, self.hidden), True
        yield "output_norm.weight", (self.hidden,), False
        if self.untied:
            yield "output.weight", (VOCABULARY, self.hidden), True
        wide, narrow = self.heads * self.head, self.kv_heads * self.head
        inner = self.feed_forward
        for layer in range(self.layers):
            at = f"blk.{layer}."
            for norm in ("attn_norm", "ffn_norm"):
                yield f"{at}{norm}.weight", (self.hidden,), False
            for part, rows in (("q", wide), ("k", narrow), ("v", narrow)):
                yield f"{at}attn_{part}.weight", (rows, self.hidden), True
                if self.biases:
                    yield f"{at}attn_{part}.bias", (rows,), False
                if self.head_norms and part != "v":
                    yield f"{at}attn_{part}_norm.weight", (self.head,), False
            yield f"{at}attn_output.weight", (self.hidden, wide), True
            if self.experts:
                yield f"{at}ffn_gate_inp.weight", (self.experts, self.hidden), False
            stack = (self.experts,) if self.experts else ()
            name = "_exps" if self.experts else ""
            for part in ("gate", "up"):
                yield f"{at}ffn_{part}{name}.weight", (*stack, inner, self.hidden), True
            yield f"{at}ffn_down{name}.weight", (*stack, self.hidden, inner), True

    def bytes_of(self, shape: tuple[int, ...], matrix: bool) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.matrices if matrix else F32]
        return int(np.prod(shape)) // block * size

    def token_bytes(self) -> int:
        """Bytes that one token reads."""
        total = 0
        for name, shape, matrix in self.tensors():
            size = self.bytes_of(shape, matrix)
            if name.startswith("token_embd") and self.untied:
                size //= VOCABULARY
            total += size * self.chosen // self.experts if "_exps" in name else size
        return total


SHAPES = {
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 4, 2048, 32, 4, 128, 768, Q4_K, experts=128, chosen=8, head_norms=True
    ),
    "qwen2.5-0.5b bf16": Shape("qwen2", 24, 896, 14, 2, 64, 4864, BF16, biases=True, untied=False),
}


def numbers(shape: tuple[int, ...], matrix: bool, kind: Shape, rng: np.random.Generator) -> Any:
    """What a tensor holds: norms about one, matrices of about the same size in either format."""
    if not matrix:
        return rng.normal(1.0 if len(shape) == 1 else 0.0, 0.02, shape).astype(np.float32)
    if kind.matrices is BF16:
        values = rng.normal(0.0, 0.02, shape).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[Q4_K]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    # Scale and minimum of 6 bits each, times these two: codes about zero, a fiftieth wide.
    scales = np.array([1.4e-4, 1e-3], np.float16).view(np.uint8)
    blocks[..., :4] = scales
    return blocks.reshape(*shape[:-1], -1)


def write(path: Path, kind: Shape) -> Path:
    writer = gguf.GGUFWriter(path, kind.architecture)
    writer.add_context_length(4096)
    writer.add_embedding_length(kind.hidden)
    writer.add_block_count(kind.layers)
    writer.add_head_count(kind.heads)
    writer.add_head_count_kv(kind.kv_heads)
    writer.add_key_length(kind.head)
    writer.add_value_length(kind.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_feed_forward_length(kind.feed_forward)
    if kind.experts:
        writer.add_expert_count(kind.experts)
        writer.add_expert_used_count(kind.chosen)
        writer.add_expert_feed_forward_length(kind.feed_forward)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [f"t{at}" for at in range(VOCABULARY - 2)]
    writer.add_token_list([*words, "t0t1", "<|endoftext|>"])
    writer.add_token_merges(["t0 t1"])
    writer.add_eos_token_id(VOCABULARY - 1)
    rng = np.random.default_rng(0)
    for name, shape, matrix in kind.tensors():
        data = numbers(shape, matrix, kind, rng)
        writer.add_tensor(name, data, raw_dtype=kind.matrices if matrix else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def child(model: str, cache: str) -> dict[str, float]:
    """Headrace, in a process of its own."""
    from headrace import LLM, SamplingParams

    options = {"max_context": 2048, "offline": True, "cache_dir": cache, "speculate": "off"}
    with LLM(model, threads=THREADS, **options) as llm:

        def seconds(prompt: int, output: int) -> float:
            ids = [random.randrange(VOCABULARY - 1) for _ in range(prompt)]
            begin = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
            (answer,) = llm.generate([ids], params)
            assert len(answer.outputs[0].token_ids) == output
            return time.perf_counter() - begin

        seconds(16, 4)
        team = llm._engine.core.executor._worker._operators.providers["linear"].team  # type: ignore[attr-defined]
        (kept,) = Path(cache).rglob("*.panels")
        panels = np.memmap(kept, np.uint8, "r")
        bandwidth = [team.read_bandwidth(panels) for _ in range(3)]
        decode = [OUTPUT / (seconds(16, 1 + OUTPUT) - seconds(16, 1)) for _ in range(3)]
        bandwidth += [team.read_bandwidth(panels) for _ in range(3)]
        prefill = [PROMPT / seconds(PROMPT, 1) for _ in range(2)]
    return {
        "decode": statistics.median(decode),
        "prefill": statistics.median(prefill),
        "bandwidth": max(bandwidth),
    }


def ours(model: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(model), str(model.parent / "cache")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def llama(folder: Path, model: Path) -> dict[str, float]:
    command = [str(folder / "llama-bench"), "-m", str(model), "-t", str(THREADS), "-r", "2"]
    command += ["-p", str(PROMPT), "-n", str(OUTPUT), "-o", "json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows = json.loads(done.stdout)
    names = {True: "decode", False: "prefill"}
    return {names[row["n_gen"] > 0]: row["avg_ts"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(*arguments.child)))
        return
    folder = os.environ.get("LLAMA_BIN")
    document: dict[str, Any] = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "shapes": {}}
    for name in arguments.shapes:
        kind = SHAPES[name]
        with tempfile.TemporaryDirectory() as place:
            model = write(Path(place) / "model.gguf", kind)
            runs = [("headrace", lambda m=model: ours(m))]
            if folder:
                runs.append(("llama.cpp", lambda m=model: llama(Path(folder), m)))
            rounds: list[dict[str, dict[str, float]]] = []
            for turn in range(arguments.rounds):
                order = runs if turn % 2 == 0 else runs[::-1]
                rounds.append({who: run() for who, run in order})
                print(name, turn, json.dumps(rounds[-1]), file=sys.stderr, flush=True)
        found: dict[str, Any] = {"token_bytes": kind.token_bytes(), "rounds": rounds}
        found["share"] = statistics.median(
            kind.token_bytes() * one["headrace"]["decode"] / one["headrace"]["bandwidth"]
            for one in rounds
        )
        for what in ("decode", "prefill"):
            found[what] = {
                who: statistics.median(one[who][what] for one in rounds) for who, _ in runs
            }
            if folder:
                found[f"{what}_ratio"] = statistics.median(
                    one["headrace"][what] / one["llama.cpp"][what] for one in rounds
                )
        document["shapes"][name] = found
        print(name, json.dumps({key: value for key, value in found.items() if key != "rounds"}))
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
