"""Byte-level BPE in a small library of our own, where it was built: see `csrc/bpe.cpp`.

Without it, and for patterns that it does not know, the `tokenizers` library does the same, with 0.3
s more at each start.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.base.strings import StringArray
from headrace.base.textlibrary import library

SAFE = "\u0300"
"""First combining mark; a text of smaller characters is in Unicode normal form C."""
COMPOSED_BYTES = 3
"""Largest number of UTF-8 bytes of a text that become one in normal form C (U+0390 has six for
two)."""


@dataclass(frozen=True, slots=True)
class WordRules:
    """Rules that cut text into words: a pattern of `csrc/words.h` and its parameter."""

    pattern: int
    """Pattern 0: GPT-2's; 1: that of cl100k and its successors."""
    digits: int = 1
    """Most digits of one word, of pattern 1."""


class NativeBpe:
    """A byte-level BPE; safe to share between threads. Made by `native_bpe`."""

    def __init__(self, loaded: ctypes.CDLL, handle: int, tokens: StringArray) -> None:
        self._tokens = tokens  # The library reads their texts in place.
        self._handle = handle
        self._find, self._encode = loaded.hrt_bpe_find, loaded.hrt_bpe_encode
        self.longest: int = loaded.hrt_bpe_longest(handle)
        """Largest number of UTF-8 bytes of text that one id stands for."""
        weakref.finalize(self, loaded.hrt_bpe_free, handle).atexit = False

    def find(self, token: str) -> int | None:
        """Return the id of a token as the file writes it."""
        raw = token.encode("utf-8", "surrogatepass")
        found: int = self._find(self._handle, raw, len(raw))
        return None if found < 0 else found

    def encode(self, text: str) -> list[int]:
        """Encode plain text to ids. Raises `MemoryError`."""
        raw = text.encode()
        ids = array("i", [0]) * len(raw)
        count: int = self._encode(self._handle, raw, len(raw), ids.buffer_info()[0])
        if count < 0:
            raise MemoryError("no memory for the tokens of a text")
        return ids[:count].tolist()


class ComposedBpe(NativeBpe):
    """A `NativeBpe` for text brought into Unicode normal form C, by the tables of the `tokenizers`
    library (Python's own are of another Unicode version)."""

    def __init__(self, loaded: ctypes.CDLL, handle: int, tokens: StringArray) -> None:
        super().__init__(loaded, handle, tokens)
        self.longest *= COMPOSED_BYTES

    @functools.cached_property
    def _compose(self) -> Any:
        from tokenizers import normalizers  # Local: most texts do without, and so does a start.

        return normalizers.NFC().normalize_str

    def encode(self, text: str) -> list[int]:
        if not text.isascii() and max(text) >= SAFE:
            text = self._compose(text)
        return super().encode(text)


def native_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    rules: WordRules,
    *,
    ignore_merges: bool,
    composed: bool,
) -> NativeBpe | None:
    """Make an encoder of a vocabulary in a GGUF file's form; None if the library is absent
    (`textlibrary.absence` says why) or rejects it: bytes without a token, merges that do not fit,
    invalid text.

    `ignore_merges`: a word that is a token is taken as it is. `composed`: to normal form C.
    """
    loaded = library()
    if loaded is None:
        return None
    try:
        packed, merging = _packed(tokens), _packed(merges)
    except UnicodeEncodeError:
        return None
    handle = loaded.hrt_bpe_new(
        *packed.arguments,
        *merging.arguments,
        rules.pattern,
        rules.digits,
        ignore_merges,
        int.from_bytes(os.urandom(8), "little"),
    )
    if not handle:
        return None
    return (ComposedBpe if composed else NativeBpe)(loaded, handle, packed)


def _packed(values: Sequence[str]) -> StringArray:
    """Pack texts. Raises `UnicodeEncodeError` for invalid text."""
    return values if isinstance(values, StringArray) else StringArray.of(values, "a vocabulary")
