"""llm-compressor's GPTQ, AutoRound or llama-quantize on what `benchmarks/quantise.py` quantises.

Run in an environment of its own: `python quantise_peer.py MODEL WINDOWS.json OUT gptq|autoround
W4A16|W8A8 [--group 64] [--iters N]`, or `python quantise_peer.py DENSE.gguf IMATRIX.gguf OUT.gguf
libllama.so Q4_K [--like OURS.gguf]` with llama.cpp's library, which the npm package
`@node-llama-cpp/linux-x64` has: its recipe, or OURS' type for each matrix. Two threads; prints CPU
seconds and peak memory as JSON.
"""

import argparse
import ctypes
import json
import re
import resource
import time
from pathlib import Path

KEYS = {"Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25}
"""Numbers of ggml's `general.file_type`; of K types their mixes (`_M`)."""


def fields(name, *pairs):
    return type(name, (ctypes.Structure,), {"_fields_": pairs})


C, N, P = ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p
Importance = fields("Importance", ("name", C), ("data", P), ("size", ctypes.c_size_t))
Kind = fields("Kind", ("pattern", C), ("type", N))
Params = fields(
    "Params", ("threads", N), ("ftype", N), ("ends", N * 2), ("flags", ctypes.c_bool * 8),
    ("imatrix", P), ("metadata", P), ("kinds", P), ("pruned", P), ("more", N * 2),
)  # fmt: skip


def llama(asked, *_):
    import gguf
    import numpy as np

    library = ctypes.CDLL(str(asked.tool))
    library.llama_model_quantize_default_params.restype = Params
    params = library.llama_model_quantize_default_params()
    params.threads, params.ftype = 2, KEYS[asked.scheme]
    parts = {one.name: one.data for one in gguf.GGUFReader(asked.windows).tensors}
    names = [name.removesuffix(".counts") for name in parts if name.endswith(".counts")]
    means = [
        np.ravel(parts[f"{name}.in_sum2"] / np.maximum(parts[f"{name}.counts"].reshape(-1, 1), 1))
        for name in names
    ]
    pairs = zip(names, means, strict=True)
    rows = [Importance(name.encode(), one.ctypes.data, one.size) for name, one in pairs]
    matrix = (Importance * (len(rows) + 1))(*rows)
    params.imatrix = ctypes.addressof(matrix)
    like = gguf.GGUFReader(asked.like).tensors if asked.like else []
    found = {one.name: one.tensor_type for one in like if len(one.shape) > 1}
    kinds = (Kind * (len(found) + 1))(
        *[Kind(f"^{re.escape(name)}$".encode(), kind) for name, kind in found.items()]
    )
    if found:
        params.kinds = ctypes.addressof(kinds)
        params.ends[:] = [found["output.weight"], found["token_embd.weight"]]
    paths = [str(one).encode() for one in (asked.model, asked.out)]
    assert library.llama_model_quantize(*paths, ctypes.byref(params)) == 0


def gptq(asked, model, windows):
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoTokenizer

    rows = {"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]}
    scheme = preset_name_to_scheme(asked.scheme, ["Linear"])
    if asked.scheme == "W4A16":
        scheme.weights.group_size = asked.group
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(
        model=model, dataset=Dataset.from_dict(rows), recipe=recipe,
        max_seq_length=max(map(len, windows)), num_calibration_samples=len(windows),
        shuffle_calibration_samples=False,
    )  # fmt: skip
    model.save_pretrained(asked.out, save_compressed=True)
    AutoTokenizer.from_pretrained(asked.model).save_pretrained(asked.out)


def autoround(asked, model, windows):
    import torch
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    length = min(map(len, windows))
    rows = [torch.tensor([w[:length]]) for w in windows]
    maker = AutoRound(
        model, AutoTokenizer.from_pretrained(asked.model), scheme=asked.scheme,
        group_size=asked.group, iters=asked.iters, nsamples=len(rows), seqlen=length, dataset=rows,
        device_map="cpu", batch_size=1, gradient_accumulate_steps=8,
    )  # fmt: skip
    maker.quantize_and_save(output_dir=str(asked.out), format="llm_compressor")


def opened(asked):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    return model, json.loads(asked.windows.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "windows", "out", "tool"):
        parser.add_argument(name, type=Path)
    parser.add_argument("scheme", choices=("W4A16", "W8A8", *KEYS))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--like", type=Path)
    asked = parser.parse_args()
    run = {"gptq": gptq, "autoround": autoround}.get(str(asked.tool), llama)
    given = () if run is llama else opened(asked)
    began, used = time.time(), time.process_time()
    run(asked, *given)
    took = {"seconds": time.time() - began, "cpu_seconds": time.process_time() - used}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({**{name: round(one, 1) for name, one in took.items()}, "peak_MB": peak}))


if __name__ == "__main__":
    main()
