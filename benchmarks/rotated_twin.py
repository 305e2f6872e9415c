"""The rotated twin of a dense or quantised Llama-like GGUF: the same function, other weights.

Run: `python benchmarks/rotated_twin.py MODEL.gguf TWIN.gguf [--type F16]`. Norm gains are folded
into the products that read them, and the residual stream is turned by a random orthogonal matrix
(QuaRot, 2404.00456). The twin computes what the model computes, up to the rounding of fp32, but no
weight lies on the grid of a quantised type: a file whose original is not to be had becomes one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headrace.factory.to_gguf import FileTensor, entries_of, write_tensors
from headrace.kernels.arrays import floats
from headrace.kernels.weights import BlockWeight
from headrace.loader import sealed
from headrace.loader.gguf import GgufFile
from headrace.quant.ggml import dequantise
from headrace.quant.ggml_types import BY_NAME, DENSE

Floats = npt.NDArray[np.float32]
READS = {"attn_norm": ("attn_q", "attn_k", "attn_v"), "ffn_norm": ("ffn_gate", "ffn_up")}
"""Norm of a block → products that read it."""
WRITES = ("attn_output", "ffn_down")
"""Products that add to the residual stream."""


def values_of(file: GgufFile, name: str) -> Floats:
    """A tensor's numbers, in fp32."""
    info, data = file.tensors[name], file.view(name)
    if info.type.name in DENSE:
        return floats(data).astype(np.float32)
    rows = data.reshape(-1, data.shape[-1])
    return dequantise(BlockWeight(info.type.name, rows, (len(rows), info.shape[-1]))).numpy()


def rotation(size: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """A random orthogonal matrix [size, size]."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((size, size)))
    return q * np.sign(np.diagonal(r))


def twin(file: GgufFile, seed: int = 0) -> dict[str, Floats]:
    """All tensors of the twin. A tied table becomes two: the head has the last norm's gain."""
    made = {name: values_of(file, name) for name in file.tensors}
    turn = rotation(made["token_embd.weight"].shape[1], seed)
    made.setdefault("output.weight", made["token_embd.weight"])
    gains = {"output.weight": "output_norm.weight"}
    blocks = {name.rpartition(".")[0].split(".")[1] for name in made if name.startswith("blk.")}
    for block in blocks:
        for norm, readers in READS.items():
            gains |= {f"blk.{block}.{one}.weight": f"blk.{block}.{norm}.weight" for one in readers}
    for name, norm in gains.items():
        made[name] = ((made[name].astype(np.float64) * made[norm]) @ turn).astype(np.float32)
    made["token_embd.weight"] = (made["token_embd.weight"] @ turn).astype(np.float32)
    for block in blocks:
        for one in WRITES:
            name = f"blk.{block}.{one}.weight"
            made[name] = (turn.T @ made[name]).astype(np.float32)
            if (bias := f"blk.{block}.{one}.bias") in made:
                made[bias] = (made[bias] @ turn).astype(np.float32)
    for norm in {*gains.values()}:
        made[norm] = np.ones_like(made[norm])
    return made


def write(file: GgufFile, tensors: dict[str, Floats], target: Path, kind: str) -> None:
    """Write them with the file's metadata; matrices as `kind`, vectors in F32."""
    entries, count = entries_of(file, ["F32", "F16"].index(kind))
    entries = entries.replace(sealed.ENTRY + sealed.EMPTY.encode(), b"")  # Peers would copy it.
    made = []
    for name, values in tensors.items():
        stored = values.astype(np.float16) if values.ndim > 1 and kind == "F16" else values
        of = BY_NAME["F32" if stored is values else "F16"]
        made.append(FileTensor(name, values.shape, of, lambda stored=stored: [stored]))
    with target.open("w+b") as out:
        write_tensors(out, entries, count - 1, file.metadata.get("general.alignment", 32), made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("twin", type=Path)
    parser.add_argument("--type", choices=("F16", "F32"), default="F16")
    asked = parser.parse_args()
    torch.set_grad_enabled(False)
    file = GgufFile(asked.model)
    write(file, twin(file), asked.twin, asked.type)


if __name__ == "__main__":
    main()
