"""Whether drafts change an answer: 64 prompts of 256 tokens of the default model, each drafter.

Run: `python benchmarks/speculation_equal.py [--prompts 64] [--tokens 256] [--at-once 8]
[--json FILE]`.

Prompts of all classes (`bench/natural.py`) are answered without drafts, then with each choice of
`--speculate`, and with `auto` and a prediction (an answer without its last third), half of them
greedily, half at temperature 0.7, each with a seed of its own and log-probabilities. Ids,
log-probabilities and the reason of the end must be the same. Given is how many drafts were
verified and how many accepted; where that is none, nothing was proved, and the run fails.

`draft model` is the model itself, `head` an EAGLE head of random weights: at real prices neither
would draft, so rows and drafts cost nothing there, and of a head no draft need be accepted.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from speculation_speed import MIXED, prompts

from headrace import LLM, SamplingParams
from headrace.base.arch import ModelArch
from headrace.base.config import DEFAULT_MODEL
from headrace.base.step import DraftCosts
from headrace.engine import prediction
from headrace.loader import open_model
from headrace.sched import StepPrices
from headrace.worker.draft_slots import DraftPart

BY_MODEL = ("draft model", "head")
PREDICTED = "auto and a prediction"
WAYS = ("auto", "suffix", "ngram", PREDICTED, *BY_MODEL)


class Free(StepPrices):
    """Rows that cost nothing."""

    def rising(self, least: int, most: int) -> list[float]:
        return [1e9] * (most - least + 1)


def save_head(folder: Path, arch: ModelArch) -> None:
    """An EAGLE head of random weights that fits the model, in fp32."""
    wide, inner, chance = arch.hidden, arch.intermediate, np.random.default_rng(7)
    keys = arch.kv_heads * arch.head_dim
    shapes = {
        "fusion_fc": (wide, 2 * wide),
        "transformer.self_attn.q_proj": (arch.heads * arch.head_dim, wide),
        "transformer.self_attn.k_proj": (keys, wide),
        "transformer.self_attn.v_proj": (keys, wide),
        "transformer.self_attn.o_proj": (wide, arch.heads * arch.head_dim),
        "transformer.mlp.gate_proj": (inner, wide),
        "transformer.mlp.up_proj": (inner, wide),
        "transformer.mlp.down_proj": (wide, inner),
        "transformer.post_attention_layernorm": (wide,),
    }
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes.items():
        values = chance.normal(0, wide**-0.5, shape) if len(shape) > 1 else np.ones(shape)
        bytes_of = values.astype("<f4").tobytes()
        at = [len(data), len(data) + len(bytes_of)]
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": at}
        data += bytes_of
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    layer = {
        "hidden_size": wide,
        "vocab_size": arch.vocab_size,
        "intermediate_size": inner,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "max_position_embeddings": arch.max_context,
        "rope_theta": arch.rope.theta,
    }
    config = {"speculators_model_type": "eagle", "transformer_layer_config": layer}
    (folder / "config.json").write_text(json.dumps(config))


def told_of(way: str, folder: Path) -> dict[str, Any]:
    """Options of a way to draft."""
    if way not in BY_MODEL:
        return {"speculate": way.partition(" ")[0]}
    prediction.StepPrices = Free  # type: ignore[misc]
    free = property(lambda _: DraftCosts(0.0, 0.0), lambda _, told: None)
    DraftPart.costs = free  # type: ignore[assignment]
    if way == "head":
        save_head(folder, open_model(DEFAULT_MODEL).arch)
    return {"speculate": "draft", "draft_model": str(folder) if way == "head" else DEFAULT_MODEL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = prompts(MIXED, args.prompts, 5, args.tokens)
    wishes = [
        SamplingParams(temperature=0, max_tokens=args.tokens)
        if place % 2
        else SamplingParams(temperature=0.7, seed=place, max_tokens=args.tokens, logprobs=2)
        for place in range(args.prompts)
    ]
    options: dict[str, Any] = {"max_sequences": args.at_once, "max_context": 4096}
    begin = time.perf_counter()
    with LLM(DEFAULT_MODEL, speculate="off", **options) as llm:
        wanted = [answer.outputs for answer in llm.chat(asked, wishes)]
    tokens = sum(len(one.token_ids) for outputs in wanted for one in outputs)
    print(f"without: {tokens} tokens, {time.perf_counter() - begin:.0f} s", flush=True)
    found = []
    for way in args.ways:
        told = None
        if way == PREDICTED:
            told = [outputs[0].text[: len(outputs[0].text) * 2 // 3] for outputs in wanted]
        begin = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            LLM(DEFAULT_MODEL, **told_of(way, Path(folder)), **options) as llm,
        ):
            answers = llm.chat(asked, wishes, prediction=told)
            stats = llm.stats
        different = sum(
            answer.outputs != outputs for answer, outputs in zip(answers, wanted, strict=True)
        )
        verified, accepted = stats.draft_tokens, stats.accepted_tokens
        line = {"drafters": way, "verified": verified, "accepted": accepted}
        found.append({**line, "different": different})
        print(f"{found[-1]}, {time.perf_counter() - begin:.0f} s", flush=True)
        if args.json:
            shown = {key: value for key, value in vars(args).items() if key != "json"}
            text = json.dumps({"options": shown, "tokens": tokens, "found": found}, indent=1)
            args.json.write_text(text + "\n")
        assert not different, f"{way}: {different} answers differ"
        proof = verified if way == "head" else accepted
        assert proof, f"{way}: no draft was verified or accepted, nothing was proved"


if __name__ == "__main__":
    main()
