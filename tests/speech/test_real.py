"""Whisper base: the tokens of transformers' own generation, on speech that espeak-ng makes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog
from headrace.media import decode
from headrace.speech.decoding import DecodingOptions
from headrace.speech.features import RATE, WINDOW, log_mel
from headrace.speech.files import WhisperFiles, open_whisper
from headrace.speech.network import Network, Team
from headrace.speech.transcript import Transcriber

from .test_decoding import spoken_in

TEXT = (
    "The committee met on Tuesday to discuss the annual budget. Several members asked how the new "
    "library would be paid for. The chair answered that a third of the money comes from the county."
)


def in_transformers(files: WhisperFiles) -> WhisperForConditionalGeneration:
    width, special = files.width, files.special
    config = WhisperConfig(
        vocab_size=files.vocab,
        d_model=width,
        encoder_layers=files.encoder_layers,
        decoder_layers=files.decoder_layers,
        encoder_attention_heads=files.heads,
        decoder_attention_heads=files.heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )
    model = WhisperForConditionalGeneration(config).eval()
    state = {}
    for name in model.state_dict():
        stack = re.search(r"(encoder_attn|self_attn)\.([qkv])_proj", name)
        letters = "qkv" if stack and stack[1] == "self_attn" else "kv"
        if name == "proj_out.weight":
            data = files.tensor("model.decoder.embed_tokens.weight")
        elif stack and stack[2] in letters:
            whole = files.tensor(re.sub(r"[qkv]_proj", f"{letters}_proj", name))
            first = width * letters.index(stack[2])
            data = whole[first : first + width]
        else:
            data = files.tensor(name)
        state[name] = torch.from_numpy(data.astype("float32"))
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=special.start,
        eos_token_id=special.end,
        pad_token_id=special.end,
        bos_token_id=special.end,
        suppress_tokens=list(files.suppressed),
        begin_suppress_tokens=list(files.suppressed_first),
        no_timestamps_token_id=special.no_timestamps,
        max_initial_timestamp_index=50,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": token for code, token in special.languages.items()},
        task_to_id={"transcribe": special.transcribe, "translate": special.translate},
        prev_sot_token_id=special.previous,
        max_length=files.positions,
    )
    return model


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng to speak")
def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    files = open_whisper(fetch_catalog(CATALOG["whisper-base"]))
    oracle, network = in_transformers(files), Network(files, Team(2), "exact", windows=1)
    special = files.special
    for voice in ("en-us", "en-gb"):
        path = tmp_path / "a.wav"
        subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", path, TEXT], check=True)
        samples = decode(path.read_bytes()).samples[:WINDOW]
        features = torch.from_numpy(log_mel(samples, files.mels).T[None].copy())
        with torch.no_grad():
            wanted = oracle.generate(
                features, language="<|en|>", task="transcribe", return_timestamps=True
            )[0].tolist()
        options = DecodingOptions(language="en", temperatures=(0.0,))
        found = spoken_in(network, options, samples).tokens
        first = special.first_timestamp
        assert found == [token for token in wanted if token < special.end or token >= first]
        assert len(found) > 20


def spoken(text: str, path: Path, share: float = 1.0) -> np.ndarray:
    subprocess.run(["espeak-ng", "-w", path, text], check=True)
    return decode(path.read_bytes()).samples * np.float32(share)


def tone(hertz: float, seconds: int, level: float) -> np.ndarray:
    time = np.arange(seconds * RATE) / RATE
    return (level * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs espeak-ng to speak")
def test_words_are_heard_only_where_they_are_spoken(tmp_path: Path) -> None:
    """Whisper says "you" to a tone; short real words, quiet ones too, are as sure as that."""
    files = open_whisper(fetch_catalog(CATALOG["whisper-base"]))
    transcriber = Transcriber(Network(files, Team(2), "exact"))
    noise = np.random.default_rng(0).standard_normal(10 * RATE).astype(np.float32)
    options = DecodingOptions(language="en")
    for sound in (tone(1000, 5, 0.1), tone(440, 10, 0.3), tone(50, 10, 0.05), 1e-3 * noise):
        found = transcriber.transcribe(sound, options)
        assert found.text == ""
        assert found.left_out == [(0.0, len(sound) / RATE, "no speech")]
    for text, share in (("Yes.", 1.0), ("No.", 0.03), ("Thank you.", 1.0), ("You.", 0.03)):
        found = transcriber.transcribe(spoken(text, tmp_path / "a.wav", share), options)
        assert found.text != ""
        assert found.left_out == []
