"""What the factory's quantising costs: bytes, accuracy, speed, and its own time.

Run: `python benchmarks/factory_quantise.py MODEL.gguf [--windows 8]`. A dense F16 file is made of
MODEL first, whatever it holds, and is what every type is held against; the model's own types are
measured beside them, so that other quantisers are seen on the same weights. Those have seen the
weights before they were rounded once, which ours have not.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.base.config import EngineOptions
from headrace.factory.build import Build, BuildOptions
from headrace.factory.to_gguf import TARGETS
from headrace.kernels.arrays import floats
from headrace.kernels.weights import BlockWeight
from headrace.loader.gguf import MAGIC, GgufFile
from headrace.quant.ggml import dequantise
from headrace.quant.ggml_types import BY_NAME, DENSE


def write_dense(source: Path, target: Path) -> None:
    """The file with its quantised matrices in F16."""
    file, head, at = GgufFile(source), bytearray(), 0
    align = file.metadata.get("general.alignment", 32)
    made = {}
    for name, one in file.tensors.items():
        data = file.view(name)
        kind = one.type
        if kind.name not in DENSE:
            rows = data.reshape(-1, data.shape[-1])
            block = BlockWeight(kind.name, rows, (len(rows), one.shape[-1]))
            data, kind = dequantise(block, torch.float16).numpy(), BY_NAME["F16"]
        made[name] = np.ascontiguousarray(data if kind.name != "F32" else floats(data))
        word = name.encode()
        head += struct.pack("<Q", len(word)) + word + struct.pack("<I", len(one.shape))
        head += struct.pack(f"<{len(one.shape)}QIQ", *one.shape[::-1], kind.number, at)
        at += -(-made[name].nbytes // align) * align
    start = MAGIC + struct.pack("<IQQ", 3, len(made), len(file.metadata)) + file.entries() + head
    with target.open("wb") as out:
        out.write(start + bytes(-len(start) % align))
        for data in made.values():
            out.write(data.tobytes() + bytes(-data.nbytes % align))


def figures(path: Path, cache: str, windows: int, to: str | None) -> dict[str, Any]:
    """Bytes of the weights, perplexity, tokens/s, seconds of the quantising stage: of one build."""
    wanted = BuildOptions(quantise_to=to, windows=windows, without="sbom", least_share=0.0)
    build, started, took = Build(EngineOptions(model=str(path), cache_dir=cache), wanted), {}, {}

    def watch(what: str, step: Any) -> None:
        name = step.stage.name
        if what == "starts":
            started[name] = time.perf_counter()
        elif name in started:
            took[name] = round(time.perf_counter() - started[name], 1)

    steps = {step.stage.name: step.result for step in build.run(watch).steps}
    found = {name: dict(one.figures) for name, one in steps.items() if one}
    return {
        "bytes": found["quantise" if to else "fetch"]["bytes"],
        "perplexity": found["accuracy"]["perplexity"]["value"],
        "share": found["accuracy"].get("share"),
        "tokens_per_second": found["performance"]["tokens_per_second"],
        "ms_per_token_alone": round(found["performance"]["seconds_per_token"] * 1e3, 2),
        "quantise_s": took.get("quantise"),
    }


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    given = parser.parse_args()
    found: dict[str, Any] = {"model": given.model.name, "windows": given.windows}
    with tempfile.TemporaryDirectory() as cache:
        dense = Path(cache) / f"{given.model.stem}-f16.gguf"
        write_dense(given.model, dense)
        for to in (None, *TARGETS):
            found[to or "f16"] = figures(dense, cache, given.windows, to)
            print(to, found[to or "f16"], file=sys.stderr)
        found["as it came"] = figures(given.model, cache, given.windows, None)
    return found


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
