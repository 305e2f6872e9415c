"""The tables of what measuring is held against, made again:

    python benchmarks/measuring.py counts             # the roofline's counts against hand counts
    python benchmarks/measuring.py published          # published rows; three of them simulated too
    python benchmarks/measuring.py steps MODEL        # predicted against measured steps; calibrates
    python benchmarks/measuring.py server MODEL       # the simulator against this machine's server
    python benchmarks/measuring.py all MODEL          # one after the other, in this process

with `--json FILE` (of `all`: a folder) to keep what was found elsewhere than `results/`. `counts`
takes a second, `published` minutes of one core (`roofline/published.py`), `steps` and `server`
one and two minutes of the whole machine (`roofline/cpu_truth.py`, `roofline/against_server.py`,
which `--hardware` is handed on to). What a machine does in one minute it may not do in the next:
let `server` follow `steps` at once.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.roofline.composition import decode_step
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.step import step_time
from headrace.roofline.weights import WeightBytes
from roofline import against_server, cpu_truth, published

CONTEXT = 2048
LIMITS = ("H100", "H200", "B200")
SIMULATED = ("--simulate", "3", "23", "43")
"""Rows of `roofline/published.py`: 8B on one device, 70B on two, gpt-oss-120b."""


@dataclass(frozen=True)
class Hand:
    """A model counted by hand: numbers of weights that every token reads, and of experts."""

    name: str
    weights: WeightBytes
    kv_dtype: str
    dense: float
    """Bytes that every step reads, embedding rows left out."""
    expert: float = 0.0
    """Bytes of one expert in all layers that have them."""
    experts: int = 0
    active: int = 0
    kv_token: int = 0
    """Bytes of a token's KV in all layers."""
    full: float = 1.0
    """Share of the context that a mean layer sees."""


def hands() -> list[Hand]:
    """From the published sizes; b is bytes of a weight."""
    llama = 32 * (4096 * (4096 * 2 + 1024 * 2) + 3 * 4096 * 14_336) + 4096 * 128_256
    qwen = 48 * (2048 * (4096 * 2 + 512 * 2) + 2048 * 128) + 2048 * 151_936
    latent = 7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    deepseek = 61 * latent + 3 * 3 * 7168 * 18_432 + 58 * (3 * 7168 * 2048 + 7168 * 256)
    oss = 36 * (2880 * 64 * (64 + 16) + 64 * 64 * 2880 + 2880 * 128) + 2880 * 201_088
    return [
        Hand("llama-3.1-8b", WeightBytes(), "bfloat16", llama * 2.0, kv_token=32 * 8 * 128 * 2 * 2),
        Hand(
            "qwen3-30b-a3b",
            WeightBytes(),
            "bfloat16",
            qwen * 2.0,
            48 * 3 * 2048 * 768 * 2.0,
            128,
            8,
            48 * 4 * 128 * 2 * 2,
        ),
        Hand(
            "deepseek-v3",
            known("deepseek-v3")[1],
            "bfloat16",
            deepseek * 1.0 + 7168 * 129_280 * 2.0,
            58 * 3 * 7168 * 2048 * 1.0,
            256,
            8,
            61 * 576 * 2,
        ),
        Hand(
            "gpt-oss-120b",
            known("gpt-oss-120b")[1],
            "bfloat16",
            oss * 2.0,
            36 * 3 * 2880 * 2880 * 4.25 / 8,
            128,
            4,
            36 * 8 * 64 * 2 * 2,
            (129 + 2049) / 2 / 2049,
        ),
    ]


def counts() -> list[dict[str, Any]]:
    """Decode at batch 1 and 64, even routing: bytes of weights and KV, limits on three devices."""
    rows = []
    for hand in hands():
        arch, _ = known(hand.name)
        for batch in (1, 64):
            case = Case(arch, hand.weights, kv_dtype=hand.kv_dtype)
            step = decode_step(arch, batch, CONTEXT)
            times = {
                name: step_time(case, DEVICES[name], step) for name in ("H100", "H200", "B200")
            }
            found = times["H100"].operators
            hit = (
                hand.experts * (1 - (1 - hand.active / hand.experts) ** batch)
                if hand.experts
                else 0
            )
            by_hand = hand.dense + hit * hand.expert
            ours = sum(
                one.count.weight_bytes * one.count.calls
                for one in found
                if one.count.operator != "embed"
            )
            kv = batch * (CONTEXT + 1) * hand.kv_token * hand.full
            read = sum(
                one.count.kv_bytes * one.count.calls
                for one in found
                if one.count.kind == "attention"
            )
            rows.append(
                {
                    "model": hand.name,
                    "batch": batch,
                    "weights_by_hand": by_hand,
                    "weights": ours,
                    "kv_by_hand": kv,
                    "kv": read,
                    "limit_ms": {name: time.limit_seconds * 1e3 for name, time in times.items()},
                }
            )
    return rows


FILES = {
    "counts": "measuring_counts.json",
    "published": "published.json",
    "steps": "cpu_truth.json",
    "server": "against_server.json",
}


def run(what: str, model: str | None, out: Path, hardware: Path | None) -> None:
    """Make one of the tables, print it, and keep it in `out`."""
    print(f"## {what}", flush=True)
    if what == "published":
        published.main([str(out), *SIMULATED])
    elif what == "steps":
        assert model is not None
        cpu_truth.main([model, str(out)])
    elif what == "server":
        assert model is not None
        flags = [] if hardware is None else ["--hardware", str(hardware)]
        against_server.main([model, str(out), *flags])
    else:
        rows = counts()
        show(rows)
        out.write_text(json.dumps(rows, indent=1) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    print("| model | batch | weights GB by hand / ours | KV MB by hand / ours | limit ms |")
    print("|---|--:|--:|--:|--:|")
    for row in rows:
        limits = "/".join(f"{value:.2f}" for value in row["limit_ms"].values())
        print(
            f"| {row['model']} | {row['batch']} | {row['weights_by_hand'] / 1e9:.3f} / "
            f"{row['weights'] / 1e9:.3f} | {row['kv_by_hand'] / 1e6:,.1f} / "
            f"{row['kv'] / 1e6:,.1f} | {limits} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=(*FILES, "all"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hardware", type=Path)
    given = parser.parse_args()
    if given.what in ("steps", "server", "all") and given.model is None:
        parser.error("name the model to serve")
    results = Path(__file__).parent / "results"
    for what in FILES if given.what == "all" else (given.what,):
        if given.what == "all":
            out = (given.json or results) / FILES[what]
        else:
            out = given.json or results / FILES[what]
        run(what, given.model, out, given.hardware)


if __name__ == "__main__":
    main()
