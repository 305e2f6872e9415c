"""The tables of what measuring is held against, made again:

    python benchmarks/measuring.py counts             # the roofline's counts against hand counts
    python benchmarks/measuring.py published           # the simulator at full load, published rows
    python benchmarks/measuring.py server MODEL        # the simulator against this machine's server

with `--json FILE` to keep what was found. `counts` takes a second, `published` minutes of one core,
`server` minutes of the whole machine (`roofline/against_server.py`, whose loads it names).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.roofline.composition import decode_step
from headrace.roofline.counts import Case, Layout
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import KNOWN, PUBLISHED
from headrace.roofline.step import step_time
from headrace.roofline.weights import WeightBytes, parse_format

CONTEXT = 2048
LIMITS = ("H100", "H200", "B200")
LOADS = ("closed:1", "closed:2", "closed:16", "poisson:1.2")


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
            PUBLISHED["deepseek-v3"],
            "bfloat16",
            deepseek * 1.0 + 7168 * 129_280 * 2.0,
            58 * 3 * 7168 * 2048 * 1.0,
            256,
            8,
            61 * 576 * 2,
        ),
        Hand(
            "gpt-oss-120b",
            PUBLISHED["gpt-oss-120b"],
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
        arch = KNOWN[hand.name]
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


PUBLISHED_ROWS = (
    # model, device, tp, format, in, out, output tokens/s of a device (docs/roofline.md has all).
    ("llama-3.1-8b", "H200", 1, "fp8", 1000, 1000, 17_591),
    ("llama-3.1-70b", "H100", 2, "fp8", 1000, 1000, 2_209),
    ("gpt-oss-120b", "H200", 1, "bfloat16,experts=mxfp4", 1000, 1000, 6_868),
)


def published(users: int, waves: int) -> list[dict[str, Any]]:
    """The simulator with `users` at once, `waves` requests of each."""
    rows = []
    for model, device, tp, format, input, output, told in PUBLISHED_ROWS:
        weights = parse_format(format)
        kv_dtype = "fp8" if weights.format == "fp8" else "bfloat16"
        case = Case(KNOWN[model], weights, kv_dtype=kv_dtype, layout=Layout(tp))
        spec = ReplicaSpec(case, DEVICES[device], rows=users, step_tokens=8192, max_context=4096)
        options = RunOptions(
            url="simulated",
            requests=users * waves,
            concurrency=users,
            input=str(input),
            output=str(output),
        )
        result, _ = Simulation(Cluster(spec, 1), options).run()
        rate = result["figures"]["output_throughput"]["value"] / tp
        rows.append(
            {
                "model": model,
                "device": device,
                "tp": tp,
                "format": format,
                "in": input,
                "out": output,
                "published": told,
                "simulated": rate,
                "ratio": rate / told,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("counts", "published", "server"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--users", type=int, default=512)
    parser.add_argument("--waves", type=int, default=2)
    given = parser.parse_args()
    if given.what == "server":
        script = Path(__file__).parent / "roofline" / "against_server.py"
        out = str(given.json or "against_server.json")
        raise SystemExit(subprocess.call([sys.executable, str(script), given.model, out, *LOADS]))
    rows = counts() if given.what == "counts" else published(given.users, given.waves)
    if given.what == "counts":
        print("| model | batch | weights GB by hand / ours | KV MB by hand / ours | limit ms |")
        print("|---|--:|--:|--:|--:|")
        for row in rows:
            limits = "/".join(f"{value:.2f}" for value in row["limit_ms"].values())
            print(
                f"| {row['model']} | {row['batch']} | {row['weights_by_hand'] / 1e9:.3f} / "
                f"{row['weights'] / 1e9:.3f} | {row['kv_by_hand'] / 1e6:,.1f} / "
                f"{row['kv'] / 1e6:,.1f} | {limits} |"
            )
    else:
        print("| model | device | published | simulated | ratio |\n|---|---|--:|--:|--:|")
        for row in rows:
            print(
                f"| {row['model']} | {row['device']} TP{row['tp']} | {row['published']:,} | "
                f"{row['simulated']:,.0f} | {row['ratio']:.2f} |"
            )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
