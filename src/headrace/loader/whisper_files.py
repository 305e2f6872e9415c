"""A folder of Whisper: CTranslate2's (`model.bin`) or Hugging Face's (`model.safetensors`).

Tensors of both have Hugging Face's names and shapes from here on, except that products with q, k
and v of one input are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ..base.errors import ModelFileError, UnsupportedModel
from ..models.whisper import WhisperArch
from .ctranslate import BinaryModel
from .jsonfile import MAX_JSON, read_json, read_optional
from .safetensors_file import StoredTensor, read_header
from .stored import mapped, stored

Array = npt.NDArray[Any]
TABLE, HEAD = "model.decoder.embed_tokens.weight", "proj_out.weight"
HEAD_SIZE = 64
"""Numbers of a head, in all of OpenAI's sizes."""
TIMESTAMPS = 1_501
"""Tokens <|0.00|> to <|30.00|>, in steps of 20 ms."""
FIRST_TIMES = 51
"""Tokens with which a text with times may begin: <|0.00|> to <|1.00|>."""
_LARGEST = {"width": 4_096, "layers": 64, "vocab": 100_000, "mels": 256}
_LANGUAGES = 110


@dataclass(frozen=True)
class Special:
    """Ids of the special tokens."""

    end: int
    start: int
    languages: Mapping[str, int]
    """Code of the language → its token; empty for an English-only model."""
    translate: int
    transcribe: int
    previous: int
    no_speech: int
    no_timestamps: int

    @property
    def first_timestamp(self) -> int:
        return self.no_timestamps + 1


@dataclass(frozen=True)
class WhisperFiles:
    """A checked folder; tensors are read when `tensor` is called."""

    path: Path
    weights: tuple[Path, ...]
    """Paths of the weights: one file."""
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mels: int
    vocab: int
    positions: int
    """Tokens of the decoder's context, 448."""
    frames: int
    """Positions of the encoder's output, 1,500."""
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    """Tokens that are also forbidden as the first one."""
    alignment: tuple[tuple[int, int], ...]
    """Layer and head of the cross attention that follow the sound."""
    special: Special
    table: Array
    """The decoder's embedding [vocab, width], mapped if the file has its numbers as they are
    read."""
    file_bytes: int
    """Bytes of a number in the file."""
    tokenizer: tokenizers.Tokenizer
    tensor: Callable[[str], Array]

    def bytes_of(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token of a byte-level vocabulary: a token may be part of a
        letter."""
        pieces = (self.tokenizer.id_to_token(token) or "" for token in tokens)
        return [bytes(_BYTES[letter] for letter in piece if letter in _BYTES) for piece in pieces]

    @property
    def arch(self) -> WhisperArch:
        """Return the sizes that its graphs are described by."""
        return WhisperArch(
            self.width,
            self.encoder_layers,
            self.decoder_layers,
            self.mels,
            self.vocab,
            self.frames,
            self.positions,
            self.file_bytes,
            self.alignment,
        )


def _byte_letters() -> dict[str, int]:
    """Map GPT-2's letters to bytes: visible ones stand for themselves."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_letters()


def own_head(header: Mapping[str, StoredTensor]) -> bool:
    """Return whether a decoder's head, if the file has one, differs from its embedding."""
    head, table = header.get(HEAD), header.get(TABLE)
    return head is not None and (table is None or not head.equals(table))


def open_whisper(folder: Path) -> WhisperFiles:
    """Read a folder's config and headers. Raises `ModelFileError`, `UnsupportedModel`."""
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    special = _special(tokenizer)
    config = read_json(folder / "config.json")
    weights = folder / "model.bin"
    if weights.exists():
        binary = BinaryModel(weights)
        called: Callable[[str], str] = _translated
        shapes = {name: variable.shape for name, variable in binary.variables.items()}
        tensor: Callable[[str], Array] = lambda name: _floating(binary, _translated(name))  # noqa: E731
        table: Callable[[], Array] = partial(_floating, binary, _translated(TABLE), binary.mapped)
        suppressed, first = config.get("suppress_ids"), config.get("suppress_ids_begin")
        alignment = config.get("alignment_heads")
    else:
        weights = folder / "model.safetensors"
        if config.get("model_type") != "whisper" or not weights.exists():
            raise UnsupportedModel(
                "the folder holds no Whisper: no model.bin, no model.safetensors"
            )
        header = read_header(weights)
        if own_head(header):
            raise UnsupportedModel(
                f"{weights.name}: {HEAD} is not equal to the embedding; a Whisper with a head of "
                "its own is not run"
            )
        called, shapes = str, {name: one.shape for name, one in header.items()}
        tensor, table = partial(stacked, header), partial(mapped, header, TABLE)
        generation = read_optional(folder / "generation_config.json")
        suppressed = generation.get("suppress_tokens", config.get("suppress_tokens"))
        first = generation.get("begin_suppress_tokens", config.get("begin_suppress_tokens"))
        alignment = generation.get("alignment_heads")
    width, mels = _shape(shapes, called("model.encoder.conv1.weight"), 3)[:2]
    vocab = _shape(shapes, called(TABLE), 2)[0]
    positions, frames = (
        _shape(shapes, called(f"model.{part}.embed_positions.weight"), 2)[0]
        for part in ("decoder", "encoder")
    )
    layers = [
        sum(
            called(f"model.{part}.layers.{i}.fc1.bias") in shapes for i in range(_LARGEST["layers"])
        )
        for part in ("encoder", "decoder")
    ]
    for what, value in (("width", width), ("mels", mels), ("vocab", vocab)):
        if not 0 < value <= _LARGEST[what]:
            raise UnsupportedModel(f"{what} of {value:,}, at most {_LARGEST[what]:,} are run")
    heads = width // HEAD_SIZE
    if width % HEAD_SIZE or not all(layers) or frames != 1_500 or not 8 <= positions <= 4_096:
        raise UnsupportedModel("the sizes of the network are not a Whisper's")
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if vocab <= max(largest, special.no_timestamps + TIMESTAMPS):
        raise ModelFileError(
            f"tokenizer.json: the vocabulary is larger than the embedding, which has {vocab:,} rows"
        )
    never, never_first = (
        _ids(suppressed, vocab, "suppressed tokens"),
        _ids(first, vocab, "tokens suppressed first"),
    )
    _verify_first({*never, *never_first}, special)
    return WhisperFiles(
        folder,
        (weights,),
        width,
        heads,
        layers[0],
        layers[1],
        mels,
        vocab,
        positions,
        frames,
        never,
        never_first,
        _pairs(alignment, layers[1], heads),
        special,
        table(),
        tensor("model.decoder.embed_positions.weight").itemsize,
        tokenizer,
        tensor,
    )


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
    shape = shapes.get(name, ())
    if len(shape) != rank:
        raise ModelFileError(f"{name} is missing, or is no array of {rank} dimensions")
    return shape


def _ids(value: object, vocab: int, what: str) -> tuple[int, ...]:
    found = value if isinstance(value, list) else []
    if not all(isinstance(one, int) and -1 <= one < vocab for one in found):
        raise ModelFileError(f"config.json: {what} must be token ids")
    return tuple(one for one in found if one >= 0)


def _verify_first(never: set[int], special: Special) -> None:
    """Raise `ModelFileError` unless a text has a token to begin with: a time, or without times a
    word. Any later one may be the end."""
    begin = special.first_timestamp
    if special.end >= begin:
        raise ModelFileError("tokenizer.json: <|endoftext|> must come before the timestamps")
    others = {special.start, special.translate, special.transcribe, special.previous}
    others |= {special.no_speech, special.no_timestamps, *special.languages.values()}
    words, times = range(special.end), range(begin, begin + FIRST_TIMES)
    if (never | others).issuperset(words) or never.issuperset(times):
        raise ModelFileError("config.json: suppressed tokens leave no first token of a text")


def _pairs(value: object, layers: int, heads: int) -> tuple[tuple[int, int], ...]:
    """Check pairs of layer and head; without any, all heads of the upper half of the layers are
    meant, as in OpenAI's code."""
    if value is None or value == []:
        return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))
    pairs: list[Any] = value if isinstance(value, list) else [0]
    for one in pairs:
        right = isinstance(one, list) and len(one) == 2 and all(isinstance(i, int) for i in one)
        if not right or not (0 <= one[0] < layers and 0 <= one[1] < heads):
            raise ModelFileError("config.json: alignment_heads must be pairs of layer and head")
    return tuple((one[0], one[1]) for one in pairs)


def open_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer. Raises `ModelFileError`."""
    if not path.exists() or path.stat().st_size > MAX_JSON:
        raise ModelFileError("tokenizer.json is missing or too large")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise ModelFileError("tokenizer.json cannot be read") from error
    tokenizer.no_padding()  # It would write an id that no vocabulary has.
    tokenizer.no_truncation()
    return tokenizer


def _special(tokenizer: tokenizers.Tokenizer) -> Special:
    def one(*names: str) -> int:
        for name in names:
            found = tokenizer.token_to_id(f"<|{name}|>")
            if found is not None:
                return int(found)
        raise ModelFileError(f"tokenizer.json: there is no token <|{names[0]}|>")

    start, translate = one("startoftranscript"), one("translate")
    languages = {
        (tokenizer.id_to_token(id) or "")[2:-2]: id
        for id in range(start + 1, min(translate, start + _LANGUAGES))
    }
    return Special(
        one("endoftext"),
        start,
        languages,
        translate,
        one("transcribe"),
        one("startofprev"),
        one("nospeech", "nocaptions"),
        one("notimestamps"),
    )


def stacked(header: Mapping[str, Any], name: str) -> Array:
    """Read a tensor of safetensors by its name; for q, k and v, or k and v, the stack, whose key
    has no bias."""
    for stack in ("qkv", "kv"):
        if f".{stack}_proj." not in name:
            continue
        names = [name.replace(f".{stack}_proj.", f".{letter}_proj.") for letter in stack]
        bias = name.endswith(".bias")
        parts = [None if bias and ".k_proj." in part else stored(header, part) for part in names]
        shapes = {part.shape for part in parts if part is not None}
        shape, *others = shapes
        if others or len(shape) != (1 if bias else 2):
            raise ModelFileError(f"{name}: its parts must have one shape, not {sorted(shapes)}")
        return np.concatenate(
            [np.zeros(shape, np.float32) if part is None else part for part in parts]
        )
    return stored(header, name)


_LAYER = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "self_attn.qkv_proj": "self_attention/linear_0",
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.kv_proj": "attention/linear_1",
    "encoder_attn.out_proj": "attention/linear_2",
    "final_layer_norm": "ffn/layer_norm",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
}
_TOP = {
    "conv1": "conv1",
    "conv2": "conv2",
    "layer_norm": "layer_norm",
    "embed_tokens": "embeddings",
}


def _translated(name: str) -> str:
    """Return the name in CTranslate2's file of a tensor by Hugging Face's."""
    _, part, rest = name.split(".", 2)
    if rest == "embed_positions.weight":
        return f"{part}/position_encodings/encodings"
    inner, _, kind = rest.rpartition(".")
    table = _TOP
    place = part
    if inner.startswith("layers."):
        _, number, inner = inner.split(".", 2)
        table, place = _LAYER, f"{part}/layer_{number}"
    norm = {"weight": "gamma", "bias": "beta"} if inner.endswith("norm") else {}
    return f"{place}/{table[inner]}/{norm.get(kind, kind)}"


def _floating(binary: BinaryModel, name: str, read: Callable[[str], Array] | None = None) -> Array:
    """Read an array as fp16 or fp32: int8 files have a scale for each output."""
    data = (read or binary.read)(name)
    if data.dtype == np.int8:
        scale = binary.read(f"{name}_scale").astype(np.float32)
        if not data.ndim or scale.shape != data.shape[:1]:
            raise ModelFileError(f"{name}_scale is {scale.shape}, where one for each output is due")
        each = scale.reshape(-1, *[1] * (data.ndim - 1))
        return np.asarray(data.astype(np.float32) / each)
    if data.dtype == np.uint16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if data.dtype not in (np.float16, np.float32):
        raise UnsupportedModel(f"{name} is of {data.dtype}; fp32, fp16, bf16 and int8 are read")
    return data
