"""A small Whisper with random weights, in both layouts, and the same in transformers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import WhisperConfig, WhisperForConditionalGeneration

from headrace.engine.hearing.opening import open_transcriber
from headrace.kernels.cpu.library import LibraryAbsent, load
from headrace.loader.whisper import open_transcription
from headrace.speech.transcript import Transcriber

from .whisper_parts import WhisperParts

SPECIALS = [
    "endoftext",
    "startoftranscript",
    "en",
    "de",
    "translate",
    "transcribe",
    "startoflm",
    "startofprev",
    "nocaptions",
    "notimestamps",
]
VOCAB = 256 + len(SPECIALS) + 1501


def make_tokenizer() -> tokenizers.Tokenizer:
    letters = sorted(ByteLevel.alphabet())
    made = tokenizers.Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([f"<|{name}|>" for name in SPECIALS])
    return made


def write_ctranslate(path: Path, variables: dict[str, np.ndarray]) -> None:
    """CTranslate2's format, version 6, written from its description in `ctranslate.py`."""

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    kinds = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.float16): 4}
    data = struct.pack("<I", 6) + name("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for key, array in variables.items():
        data += name(key) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", kinds[array.dtype], array.nbytes) + array.tobytes()
    data += (
        struct.pack("<I", 1) + name("decoder/projection/weight") + name("decoder/embeddings/weight")
    )
    path.write_bytes(data)


@pytest.fixture(scope="session")
def oracle() -> Any:
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        pad_token_id=256,
        bos_token_id=256,
        eos_token_id=256,
        decoder_start_token_id=257,
        suppress_tokens=[1, 2],
        begin_suppress_tokens=[220, 256],
    )
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0) if weight.ndim == 2 else weight.add_(0.05 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, oracle: Any) -> Path:
    """Hugging Face's layout."""
    where = tmp_path_factory.mktemp("whisper")
    oracle.save_pretrained(where)
    make_tokenizer().save(str(where / "tokenizer.json"))
    said = {"suppress_tokens": [1, 2], "begin_suppress_tokens": [220, 256]}
    (where / "generation_config.json").write_text(json.dumps(said))
    return where


@pytest.fixture(scope="session")
def built() -> None:
    """Skip where the CPU library is not built."""
    try:
        load()
    except LibraryAbsent as absent:
        pytest.skip(f"the CPU library is not built: {absent}")


@pytest.fixture
def parts(folder: Path, built: None) -> WhisperParts:
    return WhisperParts(open_transcription(folder, coded=False))


@pytest.fixture(scope="module")
def transcriber(folder: Path, built: None) -> Iterator[Transcriber]:
    """An engine that serves the small Whisper."""
    made = open_transcriber(str(folder), 2, "exact")
    yield made
    made.close()
