"""Bytes of a token, by kind of vocabulary.

A vocabulary writes its tokens as text, each kind in its own way:

- *byte level* (GPT-2): one printable character per byte, by a fixed table of 256;
- *SentencePiece*: text in which "▁" is a space, and `<0x0A>` for single bytes;
- *WordPiece* (BERT): text, "##" where it continues a word.
"""

from __future__ import annotations

import re
from typing import Literal

PieceKind = Literal["byte_level", "sentencepiece", "wordpiece"]

SPACE = "▁"
"""U+2581, SentencePiece's space."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def _byte_alphabet() -> dict[int, str]:
    """Make GPT-2's table: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in table)
    table.update((byte, chr(256 + index)) for index, byte in enumerate(hidden))
    return table


BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_LATIN = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}


def byte_level_piece(token: str) -> bytes:
    """Return the bytes of a byte-level token; one with characters outside the table is its own
    text."""
    if all(ord(char) in _CHAR_TO_LATIN for char in token):
        return token.translate(_CHAR_TO_LATIN).encode("latin-1")
    return token.encode("utf-8", "replace")


def sentencepiece_piece(token: str) -> bytes:
    match = _BYTE_PIECE.match(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace(SPACE, " ").encode("utf-8", "replace")


def wordpiece_piece(token: str) -> bytes:
    """Return the bytes of a WordPiece token, a space before a word: exact text cannot be
    recovered."""
    text = token[2:] if token.startswith("##") else " " + token
    return text.encode("utf-8", "replace")


PIECE_READERS = {
    "byte_level": byte_level_piece,
    "sentencepiece": sentencepiece_piece,
    "wordpiece": wordpiece_piece,
}
