"""A Llama of Orpheus' shape that writes codes in order, and a codec beside it, all else random."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tiny.bytewise import byte_symbols
from tiny.llama import write_llama
from tiny.snac import make_codec

CODES, PLACES = 64, 7
START, STOP, END_OF_TEXT, FIRST = 256, 257, 258, 260
"""Tokens: a sound begins, ends; the text ends; the first code."""
VOCAB = FIRST + CODES * PLACES
VOICES = ["tara", "leo"]
SAID = {
    "codec": "snac",
    "voices": VOICES,
    "prompt": ["{voice}: {text}", END_OF_TEXT, START],
    "first_code": FIRST,
    "end": STOP,
    "sampling": {"temperature": 0.8, "top_p": 0.95},
}


def silent(place: int, count: int) -> torch.Tensor:
    return torch.zeros(1, 1, count)


def make(folder: Path, *, context: int = 512) -> Path:
    """Write the model to `folder`. Its sounds end with the limit of tokens or the context."""
    write_llama(folder, VOCAB, END_OF_TEXT, context=context)
    weights = load_file(folder / "model.safetensors")
    rows, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    # A code's row says its place, and the head looks for the place before its own.
    rows[:, :PLACES], head[:, :PLACES] = 0, -8
    rows[:, PLACES - 1] = 8
    for place in range(PLACES):
        own = slice(FIRST + place * CODES, FIRST + (place + 1) * CODES)
        rows[own, :PLACES] = 8 * (np.arange(PLACES) == place)
        head[own, (place - 1) % PLACES] = 8
    for name, matrix in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix[:PLACES] = 0  # No layer changes what says the place.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(byte_symbols())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<custom_token_{i}>" for i in range(VOCAB - 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<custom_token_2>"}))
    (folder / "speech.json").write_text(json.dumps(SAID))
    make_codec(folder / "snac", silent)
    return folder
