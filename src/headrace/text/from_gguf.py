"""A tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.base.config import Decision
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.base.textlibrary import absence

from .native import native_bpe
from .pieces import SPACE
from .pretokenize import PRE_TOKENIZERS, PreTokenizer
from .sentencepiece import SentencePieceEncoder
from .tokenizer import Encoder, Tokenizer, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as LibraryTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_ADDED = re.compile(rb"[%c%c%c]" % (UNKNOWN, CONTROL, USER_DEFINED))
"""Types of tokens that are never parts of a word: some tens among 150,000, found without an
interpreter step for each."""
_MODELS = ("gpt2", "llama")
_PREFIX = "tokenizer.ggml."


def tokenizer_from_gguf(metadata: dict[str, Any], rows: int | None = None) -> Tokenizer:
    """Load a tokenizer; `rows`: see `load_tokenizer`."""
    model = metadata.get(_PREFIX + "model")
    if model not in _MODELS:
        raise UnsupportedModel(
            f"tokenizer model {model!r} is not supported; supported are {', '.join(_MODELS)}",
            param=_PREFIX + "model",
        )
    tokens = _array(metadata, "tokens", str)
    types = _types(_list(metadata, "token_type", int, default=[NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise ModelFileError(
            f"{_PREFIX}token_type has {len(types)} entries for {len(tokens)} tokens",
            param=_PREFIX + "token_type",
        )
    if model == "gpt2":
        encoder, find, served = _byte_level(metadata, tokens)
        return Tokenizer(_vocabulary(metadata, tokens, types, find, rows), encoder, served)
    ids = _ids(tokens)
    vocabulary = _vocabulary(metadata, tokens, types, ids.get, rows)
    served = Decision("tokenizer", "own SentencePiece", "the vocabulary is of that kind")
    return Tokenizer(vocabulary, _sentencepiece(metadata, tokens, types, ids), served)


class ByteLevelEncoder:
    """The library's byte-level BPE over plain text."""

    def __init__(self, library: LibraryTokenizer) -> None:
        self._library = library

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=False).ids)


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    """Make the ids; keep them only in an encoder: as Python objects they take 25 MiB for 150,000
    tokens."""
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _byte_level(
    metadata: dict[str, Any], tokens: Sequence[str]
) -> tuple[Encoder, Callable[[str], int | None], Decision]:
    """Return (encoder, function that finds a token's id, which encoder it is and why).

    The encoder is our own, or the library's if ours lacks the pre-tokenizer or rejects the
    vocabulary; the library's errors then explain a vocabulary that does not fit.
    """
    pre = metadata.get(_PREFIX + "pre")
    known = PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if known is None:
        raise UnsupportedModel(
            f"pre-tokenizer {pre!r} is not known; known are {', '.join(sorted(PRE_TOKENIZERS))}",
            param=_PREFIX + "pre",
        )
    merges = _array(metadata, "merges", str)
    if known.native is None:
        why = f"our own library does not know how {pre} cuts text into words"
    else:
        own = native_bpe(
            tokens, merges, known.native, ignore_merges=known.ignore_merges, composed=known.nfc
        )
        if own is not None:
            why = f"it knows how {pre} cuts text into words"
            return own, own.find, Decision("tokenizer", "own byte-level BPE", why)
        why = absence() or "our own library does not take this vocabulary"
    library = library_of(_ids(tokens), merges, known)
    served = Decision("tokenizer", "tokenizers library", f"{why} (same ids, a slower start)")
    return ByteLevelEncoder(library), library.token_to_id, served


def library_of(ids: dict[str, int], merges: Sequence[str], known: PreTokenizer) -> LibraryTokenizer:
    """Make the library's byte-level BPE. Raises `ModelFileError` for merges that do not fit."""
    # Local: a start without it saves 20 ms.
    from tokenizers import Tokenizer as LibraryTokenizer
    from tokenizers import models

    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        # If a merge's result is not a token the library panics, which is not an Exception.
        if len(pair) != 2 or "".join(pair) not in ids:
            raise ModelFileError(
                f"{_PREFIX}merges do not fit the vocabulary: {merge!r:.80} gives no token",
                param=_PREFIX + "merges",
            )
    try:
        bpe = models.BPE(ids, pairs, ignore_merges=known.ignore_merges)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for bad merges
        raise ModelFileError(
            f"{_PREFIX}merges do not fit the vocabulary: {error}", param=_PREFIX + "merges"
        ) from None
    library = LibraryTokenizer(bpe)
    library.pre_tokenizer = known.build()
    normalizer = known.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    return library


def _sentencepiece(
    metadata: dict[str, Any], tokens: Sequence[str], types: bytes, ids: dict[str, int]
) -> SentencePieceEncoder:
    if metadata.get(_PREFIX + "remove_extra_whitespaces"):
        raise UnsupportedModel(
            "SentencePiece vocabularies that drop whitespace are not supported",
            param=_PREFIX + "remove_extra_whitespaces",
        )
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise ModelFileError(
            f"{_PREFIX}scores has {len(scores)} entries for {len(tokens)} tokens",
            param=_PREFIX + "scores",
        )
    pieces = {
        token: (score, index)
        for index, (token, score, kind) in enumerate(zip(tokens, scores, types, strict=True))
        if kind == NORMAL
    }
    found = [ids.get(f"<0x{byte:02X}>") for byte in range(256)]
    byte_ids = [index for index in found if index is not None and types[index] == BYTE]
    if len(byte_ids) not in (0, 256):
        raise ModelFileError(
            f"the vocabulary has {len(byte_ids)} of 256 byte tokens", param=_PREFIX + "tokens"
        )
    return SentencePieceEncoder(
        pieces, byte_ids=byte_ids, unknown=_id(metadata, "unknown_token_id", len(tokens))
    )


def _vocabulary(
    metadata: dict[str, Any],
    tokens: Sequence[str],
    types: bytes,
    find: Callable[[str], int | None],
    rows: int | None,
) -> Vocabulary:
    sentencepiece = metadata[_PREFIX + "model"] == "llama"
    bos = _id(metadata, "bos_token_id", len(tokens))
    eos = _id(metadata, "eos_token_id", len(tokens))
    # Files before 2024 lack add_bos_token; SentencePiece models then want it.
    add_bos = bool(metadata.get(_PREFIX + "add_bos_token", sentencepiece))
    added = {index: tokens[index] for index in (found.start() for found in _ADDED.finditer(types))}
    return Vocabulary(
        kind="sentencepiece" if sentencepiece else "byte_level",
        tokens=tokens,
        added={
            token.replace(" ", SPACE) if sentencepiece else token: index
            for index, token in added.items()
        },
        special_ids=frozenset(index for index in added if types[index] != USER_DEFINED),
        find=find,
        bos_id=bos,
        eos_id=eos,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        strip_space=sentencepiece and bool(metadata.get(_PREFIX + "add_space_prefix", True)),
        rows=rows,
    )


def _types(values: list[int]) -> bytes:
    try:
        return bytes(values)
    except ValueError:
        raise ModelFileError(
            f"{_PREFIX}token_type has a number outside of 0 to 255; types are {NORMAL} to {BYTE}",
            param=_PREFIX + "token_type",
        ) from None


def _list(
    metadata: dict[str, Any], name: str, kind: type, *, default: list[Any] | None = None
) -> list[Any]:
    """Return a metadata array as a list."""
    return list(_array(metadata, name, kind, default=default))


def _array(
    metadata: dict[str, Any], name: str, kind: type, *, default: list[Any] | None = None
) -> Sequence[Any]:
    """Return a metadata array, its first element checked: the GGUF reader gives arrays of one type.
    A plain list of texts, which only tests pass, is checked element by element.

    Float arrays may come as integers; the reverse is an error.
    """
    values = metadata.get(_PREFIX + name, default)
    if values is None:
        raise ModelFileError(f"the file has no {_PREFIX}{name}", param=_PREFIX + name)
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ModelFileError(f"{_PREFIX}{name} must be an array", param=_PREFIX + name)
    allowed = (int, float) if kind is float else (kind,)
    looked_at = values if kind is str and isinstance(values, list) else values[:1]
    if not all(isinstance(value, allowed) for value in looked_at):
        raise ModelFileError(
            f"{_PREFIX}{name} must be an array of {kind.__name__}", param=_PREFIX + name
        )
    return values


def _id(metadata: dict[str, Any], name: str, count: int) -> int | None:
    value = metadata.get(_PREFIX + name)
    if value is None or value == 2**32 - 1:
        return None
    if not isinstance(value, int) or not 0 <= value < count:
        raise ModelFileError(
            f"{_PREFIX}{name} is {value!r}, outside the vocabulary of {count}", param=_PREFIX + name
        )
    return value
