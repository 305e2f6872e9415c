"""A folder of Parakeet in Hugging Face's layout: FastConformer with CTC, RNN-T or TDT.

`model_type` is parakeet_ctc, parakeet_rnnt or parakeet_tdt (Rekesh et al. 2023 for the encoder, Xu
et al. 2023 for token-and-duration transducers); names of tensors are those of `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from ..base.errors import ModelFileError, UnsupportedModel
from ..loader.jsonfile import natural, read_json, read_optional, verify_usual
from ..loader.safetensors_file import StoredTensor, read_header
from ..loader.stored import shaped
from ..loader.whisper_files import open_tokenizer

Floats = npt.NDArray[np.float32]
_KINDS = "parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"
_SOUND = {
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
}
_NUMBERS = {
    "hidden_size": 4_096,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "intermediate_size": 16_384,
    "conv_kernel_size": 63,
    "subsampling_conv_channels": 1_024,
    "num_mel_bins": 256,
}


@dataclass(frozen=True)
class NoSpecial:
    """Substitute for Whisper's special tokens in a model without them, which does not distinguish
    languages."""

    end: int
    """Id after the last token of text."""
    languages: Mapping[str, int]


@dataclass(frozen=True)
class ParakeetFiles:
    """A checked folder; tensors are read when `tensor` is called."""

    kind: str
    width: int
    layers: int
    heads: int
    inner: int
    kernel: int
    channels: int
    mels: int
    halvings: int
    """Number of times the subsampling halves the frames."""
    scaled: bool
    """Flag: its rows are multiplied by the root of the width."""
    vocab: int
    blank: int
    predictor: int
    """Width of the predictor's state; 0: no predictor."""
    predictor_layers: int
    start: int
    """First token of the predictor."""
    durations: tuple[int, ...]
    """Frames that a token may last; empty: unknown."""
    most_symbols: int
    """Largest number of tokens of one frame."""
    special: NoSpecial
    tokenizer: tokenizers.Tokenizer
    header: Mapping[str, StoredTensor]

    @property
    def frame(self) -> float:
        """Return the seconds of a frame after the subsampling."""
        return 0.01 * float(1 << self.halvings)

    def tensor(self, name: str, *shape: int) -> Floats:
        """Read a tensor in fp32; raises `ModelFileError` if it is missing or has another shape."""
        return shaped(self.header, name, *shape)

    def optional(self, name: str, *shape: int) -> Floats | None:
        """Read a tensor; None if the file lacks it."""
        return self.tensor(name, *shape) if name in self.header else None

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each text token, with a space before those that begin a word."""
        pieces = [self.tokenizer.id_to_token(token) or "" for token in tokens]
        return [piece.replace("\u2581", " ").encode() for piece in pieces]


def open_parakeet(folder: Path) -> ParakeetFiles:
    """Read a folder's config and header. Raises `ModelFileError`, `UnsupportedModel`."""
    config = read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise UnsupportedModel(f"config.json: model_type must be one of {', '.join(_KINDS)}")
    encoder = config.get("encoder_config")
    if not isinstance(encoder, dict):
        raise ModelFileError("config.json: encoder_config must be an object")
    defaults = {"num_mel_bins": 80, "conv_kernel_size": 9, "subsampling_conv_channels": 256}
    encoder = {**defaults, **encoder}
    sizes = {name: natural(encoder, name, most) for name, most in _NUMBERS.items()}
    verify_usual(
        encoder, hidden_act="silu", subsampling_conv_kernel_size=3, subsampling_conv_stride=2
    )
    file, mels = "preprocessor_config.json", sizes["num_mel_bins"]
    # The features of `log_mel`.
    verify_usual(read_optional(folder / file), file, **_SOUND, feature_size=mels)
    factor = encoder.get("subsampling_factor", 8)
    halvings = {2: 1, 4: 2, 8: 3, 16: 4}.get(factor)
    if halvings is None or sizes["num_mel_bins"] % factor:
        raise UnsupportedModel("config.json: subsampling_factor must be 2, 4, 8 or 16")
    if sizes["hidden_size"] % sizes["num_attention_heads"] or sizes["hidden_size"] % 2:
        raise ModelFileError("config.json: num_attention_heads must divide hidden_size")
    if not sizes["conv_kernel_size"] % 2:
        raise ModelFileError("config.json: conv_kernel_size must be odd")
    vocab = natural(config, "vocab_size", 262_144)
    ctc = kind == "parakeet_ctc"
    blank = config.get("pad_token_id" if ctc else "blank_token_id")
    if type(blank) is not int or not 0 <= blank < vocab:
        raise ModelFileError("config.json: the blank must be a token of the vocabulary")
    if not ctc and config.get("hidden_act", "relu") != "relu":
        raise UnsupportedModel("config.json: hidden_act: only relu is run behind the encoder")
    durations = config.get("durations", [0, 1, 2, 3, 4]) if kind == "parakeet_tdt" else []
    if not isinstance(durations, list) or not all(
        type(one) is int and 0 <= one < 256 for one in durations
    ):
        raise ModelFileError("config.json: durations must be numbers of frames")
    if kind == "parakeet_tdt" and (not durations or len(durations) > 64):
        raise ModelFileError("config.json: durations must be a list of at most 64")
    start = read_optional(folder / "generation_config.json").get("decoder_start_token_id")
    start = blank if start is None else start
    if type(start) is not int or not 0 <= start < vocab:
        raise ModelFileError("generation_config.json: decoder_start_token_id is no token")
    return ParakeetFiles(
        kind,
        sizes["hidden_size"],
        sizes["num_hidden_layers"],
        sizes["num_attention_heads"],
        sizes["intermediate_size"],
        sizes["conv_kernel_size"],
        sizes["subsampling_conv_channels"],
        sizes["num_mel_bins"],
        halvings,
        encoder.get("scale_input", True) is True,
        vocab,
        blank,
        0 if ctc else natural(config, "decoder_hidden_size", 4_096),
        0 if ctc else natural(config, "num_decoder_layers", 8),
        start,
        tuple(durations),
        natural({"max_symbols_per_step": 10, **config}, "max_symbols_per_step", 1_000),
        NoSpecial(vocab, {}),
        open_tokenizer(folder / "tokenizer.json"),
        read_header(folder / "model.safetensors"),
    )
