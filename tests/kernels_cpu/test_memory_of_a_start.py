"""A first start packs weights into the file that it maps: they are never in memory twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.kernels.cpu.library import load
from tiny.families import with_words
from tiny.gguf_files import VOCABULARY, WORDS, write_gguf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status is Linux's")
HIDDEN, INNER, LAYERS = 1024, 8192, 6
BESIDE = 150 << 20
"""Bytes that a start may take beside the model's file and KV, of which there is next to none."""
CHILD = """
import sys
from headrace import LLM
from headrace.engine.loop import build
build.needs_calibration = lambda device: False  # It reads an array larger than the caches.
model, cache, quantise = sys.argv[1:]
with LLM(model, cache_dir=cache, quantise=quantise, threads=1, max_context=64) as llm:
    (found,) = [each for each in llm.decisions if each.name == "panels"]
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(found.value, 1024 * int(status["VmHWM"].split()[0]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 MB of zeros: matrices of Q8_0 and of BF16 in turns, as many bytes of each."""
    load()  # Without the kernels nothing here has a meaning.
    shapes = {f"attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
    shapes |= {f"ffn_{part}": (INNER, HIDDEN) for part in ("gate", "up")}
    tensors = {
        "token_embd.weight": np.zeros((320, HIDDEN), np.float32),
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"blk.{layer}"
        for name, (out, width) in shapes.items():
            tensors[f"{at}.{name}.weight"] = np.zeros((out, width // 32 * 34), np.uint8)
        tensors[f"{at}.ffn_down.weight"] = np.zeros((HIDDEN, 2 * INNER), np.uint8)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"{at}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    keys: dict[str, Any] = {
        "llama.vocab_size": 320,
        "llama.context_length": 64,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": INNER,
        "llama.attention.head_count": 8,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.block_count": LAYERS,
    }
    kinds = {"ffn_down.weight": "BF16"} | {f"{name}.weight": "Q8_0" for name in shapes}
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    return write_gguf(path, "llama", keys | VOCABULARY | WORDS, tensors, kinds)


@pytest.mark.parametrize("quantise", ["auto", "int8"])
def test_a_first_start_peaks_as_a_later_one(model: Path, tmp_path: Path, quantise: str) -> None:
    assert max(peaks(model, tmp_path, quantise)) < model.stat().st_size + BESIDE


def peaks(model: Path, cache: Path, quantise: str = "auto") -> list[int]:
    """The highest resident memory (VmHWM: anonymous pages and all that are mapped of files) of a
    first and a later start."""
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", CHILD, str(model), str(cache), quantise]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert said[0] in ("mapped", "copied")
        found.append(int(said[1]))
    return found


def test_a_table_of_a_folder_is_not_in_memory_beside_its_head(tmp_path: Path) -> None:
    """A tied table of 200 MB: rows of it are read of the file, and the head has it in panels."""
    load()
    config = {
        "model_type": "qwen2",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
        "vocab_size": 100_000,
        "tie_word_embeddings": True,
    }
    stem = "model.layers.0"
    shapes = {"model.embed_tokens.weight": (100_000, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {f"{stem}.self_attn.{part}_proj.weight": (HIDDEN, HIDDEN) for part in "qkvo"}
    shapes |= {f"{stem}.self_attn.{part}_proj.bias": (HIDDEN,) for part in "qkv"}
    shapes |= {
        f"{stem}.mlp.{part}_proj.weight": (HIDDEN, HIDDEN) for part in ("gate", "up", "down")
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{stem}.{name}.weight"] = (HIDDEN,)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (begin, end)}
    model = tmp_path / "model"
    model.mkdir()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (model / "config.json").write_text(json.dumps(config))
    with_words(model, 320)
    assert max(peaks(model, tmp_path)) < end + BESIDE
