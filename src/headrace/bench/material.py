"""Text with a given number of tokens.

With a tokenizer: words of its own vocabulary (pieces of a space and lower-case letters), trimmed
until encoding gives exactly the wanted count. Without one: the plain words of `words.txt`; common
tokenizers make one token of each, and the server's usage has the real count. Nothing is downloaded.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Protocol

WORDS = tuple(Path(__file__).with_name("words.txt").read_text(encoding="utf-8").split())


class Encoder(Protocol):
    """The part of a tokenizer that is needed here (`text.Tokenizer` has it)."""

    @property
    def vocab_size(self) -> int: ...
    def encode(self, text: str) -> list[int]: ...
    def piece(self, token_id: int) -> bytes: ...


class Material:
    """Maker of texts and token lists, the same for the same seed."""

    def __init__(self, tokenizer: Encoder | None = None) -> None:
        self.tokenizer = tokenizer
        self.words = list(WORDS)
        self.ids: list[int] = []
        if tokenizer is not None:
            self._read_vocabulary(tokenizer)

    @property
    def exact(self) -> bool:
        """Whether counts are exact, not estimated as one token per word."""
        return self.tokenizer is not None

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text)) if self.tokenizer else len(text.split())

    def text(self, tokens: int, rng: random.Random) -> str:
        """Return words that encode to `tokens` tokens."""
        words = rng.choices(self.words, k=tokens)
        if self.tokenizer is None:
            return " ".join(words)
        for _ in range(16):
            text = " ".join(words)
            found = len(self.tokenizer.encode(text))
            if found == tokens:
                return text
            # Number of words to change, at this text's tokens per word.
            step = max(1, round(abs(found - tokens) * len(words) / found))
            if found > tokens:
                words = words[: max(1, len(words) - step)]
            else:
                words += rng.choices(self.words, k=step)
        return " ".join(words)

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        """Return token ids of ordinary words; needs a tokenizer."""
        assert self.ids, "token ids need a tokenizer"
        return rng.choices(self.ids, k=count)

    def _read_vocabulary(self, tokenizer: Encoder) -> None:
        words, ids = [], []
        for token in range(min(tokenizer.vocab_size, 60_000)):
            try:
                piece = tokenizer.piece(token).decode()
            except (UnicodeDecodeError, KeyError, ValueError, IndexError):
                continue
            word = piece[1:]
            if len(word) > 2 and piece[0] == " " and word.isascii() and word.isalpha():
                if not word.islower():
                    continue
                words.append(word)
                ids.append(token)
        if len(words) >= 100:
            self.words, self.ids = words, ids


class AnyIds(Material):
    """Fast maker of token lists with arbitrary values, for simulated engines."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = list(range(2, 258))

    def tokens(self, count: int, rng: random.Random) -> list[int]:
        return [*rng.randbytes(count)]
