"""Small Parakeets with random weights, as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    ParakeetCTCConfig,
    ParakeetEncoderConfig,
    ParakeetForCTC,
    ParakeetForRNNT,
    ParakeetForTDT,
    ParakeetRNNTConfig,
    ParakeetTDTConfig,
)

VOCAB, BLANK = 64, 63
KINDS: dict[str, tuple[Any, Any]] = {
    "parakeet_ctc": (ParakeetCTCConfig, ParakeetForCTC),
    "parakeet_rnnt": (ParakeetRNNTConfig, ParakeetForRNNT),
    "parakeet_tdt": (ParakeetTDTConfig, ParakeetForTDT),
}


def make(kind: str, folder: Path, **changes: Any) -> Any:
    """A small model with random weights, kept in `folder` as the hub has them."""
    torch.manual_seed(4)
    encoder = ParakeetEncoderConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        subsampling_conv_channels=32,
        num_mel_bins=changes.pop("mels", 80),
        attention_bias=changes.pop("biases", True),
        convolution_bias=changes.pop("convolution", True),
        scale_input=changes.pop("scaled", True),
    )
    config, model = KINDS[kind]
    said = {"pad_token_id": BLANK} if kind == "parakeet_ctc" else {"blank_token_id": BLANK}
    if kind != "parakeet_ctc":
        said |= {"decoder_hidden_size": 32, "max_symbols_per_step": 10}
    made = model(config(vocab_size=VOCAB, encoder_config=encoder, **said, **changes)).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.mul_(4.0) if value.ndim == 2 else value.add_(0.1 * torch.randn_like(value))
            if name.startswith(("joint.head.weight", "ctc_head.weight")):
                value.mul_(8.0)  # So that it says many things.
        for name, value in made.named_buffers():
            if name.endswith("running_mean"):
                value.normal_(0, 0.3)
            elif name.endswith("running_var"):
                value.uniform_(0.5, 2)
    made.generation_config.decoder_start_token_id = BLANK
    made.save_pretrained(folder)
    write_tokenizer(folder)
    return made


def write_tokenizer(folder: Path) -> None:
    """Words of a letter and a number, every third of which begins with a space."""
    pieces = {f"{'▁' * (i % 3 == 0)}{chr(97 + i % 26)}{i}": i for i in range(VOCAB)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(pieces, unk_token="a0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
