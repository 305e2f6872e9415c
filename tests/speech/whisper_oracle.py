"""Whisper as transformers computes it, with the weights of a folder that we read."""

from __future__ import annotations

import re

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from headrace.loader.whisper_files import WhisperFiles


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


def long_form(
    oracle: WhisperForConditionalGeneration, samples: np.ndarray, language: str
) -> list[int]:
    """Tokens of a sound by transformers' own algorithm: of one window, or of windows behind each
    other, each of which hears what was said before; greedy, with times."""
    extract = WhisperFeatureExtractor(feature_size=oracle.config.num_mel_bins)
    short = len(samples) <= 480_000
    features = extract(
        samples,
        sampling_rate=16_000,
        return_tensors="pt",
        truncation=False,
        padding="max_length" if short else "longest",
        return_attention_mask=True,
    )
    options = {} if short else {"condition_on_prev_tokens": True}
    with torch.no_grad():
        found = oracle.generate(
            features.input_features,
            attention_mask=features.attention_mask,
            language=f"<|{language}|>",
            task="transcribe",
            return_timestamps=True,
            **options,
        )
    return found[0].tolist()
