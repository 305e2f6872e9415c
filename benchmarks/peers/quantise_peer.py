"""llm-compressor's GPTQ, or AutoRound, on the weights and windows of `benchmarks/quantise.py`.

Run in an environment of its own: `python quantise_peer.py MODEL WINDOWS.json OUT gptq|autoround
W4A16|W8A8 [--group 64] [--iters N]`. Two threads; prints CPU seconds and peak memory as JSON.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def gptq(model, windows, asked):
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    rows = Dataset.from_dict(
        {"input_ids": windows, "attention_mask": [[1] * len(w) for w in windows]}
    )
    scheme = preset_name_to_scheme(asked.scheme, ["Linear"])
    if asked.scheme == "W4A16":
        scheme.weights.group_size = asked.group
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    oneshot(
        model=model, dataset=rows, recipe=recipe, max_seq_length=max(map(len, windows)),
        num_calibration_samples=len(windows), shuffle_calibration_samples=False,
    )  # fmt: skip
    model.save_pretrained(asked.out, save_compressed=True)


def autoround(model, windows, asked):
    from auto_round import AutoRound

    length = min(map(len, windows))
    rows = [torch.tensor([w[:length]]) for w in windows]
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    maker = AutoRound(
        model, tokenizer, scheme=asked.scheme, group_size=asked.group, iters=asked.iters,
        nsamples=len(rows), seqlen=length, dataset=rows, device_map="cpu", batch_size=1,
        gradient_accumulate_steps=8,
    )  # fmt: skip
    maker.quantize_and_save(output_dir=str(asked.out), format="llm_compressor")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "windows", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("tool", choices=("gptq", "autoround"))
    parser.add_argument("scheme", choices=("W4A16", "W8A8"))
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--iters", type=int, default=200)
    asked = parser.parse_args()
    torch.set_num_threads(2)
    windows = json.loads(asked.windows.read_text())
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32)
    began, used = time.time(), time.process_time()
    {"gptq": gptq, "autoround": autoround}[asked.tool](model, windows, asked)
    took = {"seconds": time.time() - began, "cpu_seconds": time.process_time() - used}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({**{name: round(one, 1) for name, one in took.items()}, "peak_MB": peak}))


if __name__ == "__main__":
    main()
