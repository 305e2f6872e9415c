"""A folder of Moonshine in Hugging Face's layout (Jeffries et al. 2024)."""

from __future__ import annotations

import re
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
from ..loader.whisper_files import open_tokenizer, own_head
from .parakeet_files import NoSpecial

Floats = npt.NDArray[np.float32]
_NUMBERS = {
    "vocab_size": 262_144,
    "hidden_size": 2_048,
    "intermediate_size": 8_192,
    "encoder_num_hidden_layers": 64,
    "decoder_num_hidden_layers": 64,
    "encoder_num_attention_heads": 64,
    "decoder_num_attention_heads": 64,
}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class MoonshineFiles:
    """A checked folder; tensors are read when `tensor` is called."""

    vocab: int
    width: int
    inner: int
    layers: tuple[int, int]
    """Layers of the encoder and of the decoder."""
    heads: tuple[int, int]
    rotated: float
    """Share of a head's numbers that positions rotate."""
    theta: float
    positions: int
    start: int
    ends: frozenset[int]
    tied: bool
    special: NoSpecial
    tokenizer: tokenizers.Tokenizer
    header: Mapping[str, StoredTensor]
    frame: float = 0.0
    """Seconds of a frame; 0, since a token's time is unknown."""

    def tensor(self, name: str, *shape: int) -> Floats:
        """Read a tensor in fp32; raises `ModelFileError` if it is missing or has another shape."""
        return shaped(self.header, name, *shape)

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each text token, with a space before those that begin a word."""
        found = []
        for token in tokens:
            piece = self.tokenizer.id_to_token(token) or ""
            byte = _BYTE.fullmatch(piece)
            plain = piece.replace("\u2581", " ").encode()
            found.append(plain if byte is None else bytes([int(byte[1], 16)]))
        return found


def open_moonshine(folder: Path) -> MoonshineFiles:
    """Read a folder's config and header. Raises `ModelFileError`, `UnsupportedModel`."""
    config = read_json(folder / "config.json")
    defaults = {"encoder_num_attention_heads": 8, "decoder_num_attention_heads": 8}
    said = {**defaults, **config}
    sizes = {name: natural(said, name, most) for name, most in _NUMBERS.items()}
    for part in ("encoder", "decoder"):
        heads = sizes[f"{part}_num_attention_heads"]
        if said.get(f"{part}_num_key_value_heads") not in (None, heads):
            raise UnsupportedModel(f"config.json: {part}_num_key_value_heads: only {heads} is run")
        if sizes["hidden_size"] % heads:
            raise ModelFileError(f"config.json: {part}_num_attention_heads must divide hidden_size")
    verify_usual(said, encoder_hidden_act="gelu", decoder_hidden_act="silu", attention_bias=False)
    file = "preprocessor_config.json"
    verify_usual(read_optional(folder / file), file, do_normalize=False)
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise UnsupportedModel("config.json: rope_parameters: only the default type is run")
    rotated = rope.get("partial_rotary_factor", said.get("partial_rotary_factor", 0.9))
    theta = rope.get("rope_theta", said.get("rope_theta", 10_000.0))
    for name, value, most in (("partial_rotary_factor", rotated, 1), ("rope_theta", theta, 1e9)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            raise ModelFileError(f"config.json: {name} must be a number up to {most:g}")
    ends = said.get("eos_token_id", 2)
    ends = ends if isinstance(ends, list) else [ends]
    start = said.get("decoder_start_token_id", 1)
    for token in (start, *ends):
        if type(token) is not int or not 0 <= token < sizes["vocab_size"]:
            raise ModelFileError(
                "config.json: decoder_start_token_id and eos_token_id are no token"
            )
    header = read_header(folder / "model.safetensors")
    return MoonshineFiles(
        sizes["vocab_size"],
        sizes["hidden_size"],
        sizes["intermediate_size"],
        (sizes["encoder_num_hidden_layers"], sizes["decoder_num_hidden_layers"]),
        (sizes["encoder_num_attention_heads"], sizes["decoder_num_attention_heads"]),
        float(rotated),
        float(theta),
        natural({"max_position_embeddings": 512, **said}, "max_position_embeddings", 65_536),
        start,
        frozenset(ends),
        said.get("tie_word_embeddings", True) is True and not own_head(header),
        NoSpecial(sizes["vocab_size"], {}),
        open_tokenizer(folder / "tokenizer.json"),
        header,
    )
