"""Words of a text, each from its tokens, as in OpenAI's code (`whisper/timing.py`, MIT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..loader.whisper_files import WhisperFiles

FRAME = 0.02
"""Seconds of a frame of the encoder's output."""
_APART = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages without spaces between words: each character is a word."""
_BEFORE = "\"'“¿([{-"
_BEHIND = "\"'.。,，!！?？:：”)]}、"


class Word(NamedTuple):
    text: str
    """Text with the space before it."""
    start: float
    """Time in seconds."""
    end: float


def split_words(
    files: WhisperFiles, tokens: Sequence[int], language: str
) -> list[tuple[str, list[int]]]:
    """Split tokens into words with their text; separate punctuation joins the word that it belongs
    to."""
    units: list[tuple[str, list[int]]] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = files.tokenizer.decode(held, skip_special_tokens=True)
        if "\ufffd" not in text:
            units.append((text, held))
            held = []
    if held:
        units.append((files.tokenizer.decode(held, skip_special_tokens=True), held))
    words: list[tuple[str, list[int]]] = []
    for text, own in units:
        alone = text.strip() and all(letter in _BEHIND for letter in text.strip())
        begins = text.startswith(" ") or language in _APART
        opens = words and all(letter in _BEFORE for letter in words[-1][0].strip())
        if words and (alone or not begins or (opens and not words[-1][0].endswith(" "))):
            words[-1] = (words[-1][0] + text, [*words[-1][1], *own])
        else:
            words.append((text, list(own)))
    return words
