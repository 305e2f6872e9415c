"""SentencePiece's BPE, from the pieces and scores in a GGUF file.

The algorithm is that of Sennrich et al. 2016 as SentencePiece runs it. It starts from characters.
It joins the neighbours whose joined piece has the highest score, the leftmost among equals, until
no neighbours form a piece. A character that is not a piece becomes its UTF-8 bytes.

It is our own code because `tokenizers` wants a ranked list of merges. For a vocabulary of 262,144
pieces there are half a million; making and loading them takes two seconds at every start, compared
with a tenth of a second here. See `docs/adr/0035`.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Mapping

from .pieces import SPACE

CACHE_WORDS = 65_536
"""Largest number of words whose ids are remembered; a full cache is emptied."""
CACHE_LENGTH = 64
"""Longest word worth remembering."""

_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SentencePieceEncoder:
    """Encoder of plain text (no special tokens) to ids.

    `pieces` maps each piece that merges may form to (score, id). `byte_ids` are the ids of `<0x00>`
    … `<0xFF>`, or empty; then `unknown` stands for a character that is not a piece.
    """

    def __init__(
        self, pieces: Mapping[str, tuple[float, int]], *, byte_ids: list[int], unknown: int | None
    ) -> None:
        assert len(byte_ids) in (0, 256)
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._unknown = unknown
        # Words may be encoded one by one if no piece reaches over a border between them.
        self._by_word = not any(SPACE in piece.lstrip(SPACE) for piece in pieces if SPACE in piece)
        self._cache: dict[str, list[int]] = {}

    @functools.cached_property
    def longest(self) -> int:
        """Return the largest number of UTF-8 bytes of text that one id stands for; an unknown id
        stands for a character."""
        return max(4, *(len(piece.encode()) for piece in self._pieces))

    def encode(self, text: str) -> list[int]:
        """Encode a text whose spaces are written as "▁"."""
        if not self._by_word:
            return self._word(text)
        ids: list[int] = []
        cache = self._cache
        for word in _WORD.findall(text):
            known = cache.get(word)
            if known is None:
                known = self._word(word)
                if len(word) <= CACHE_LENGTH:
                    if len(cache) >= CACHE_WORDS:
                        cache.clear()
                    cache[word] = known
            ids += known
        return ids

    def _word(self, word: str) -> list[int]:
        pieces = self._pieces
        symbols: list[str] = list(word)
        count = len(symbols)
        after = list(range(1, count + 1))
        before = list(range(-1, count - 1))
        # (-score, left, right, length of both): an entry is stale when a side has changed.
        queue: list[tuple[float, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            found = pieces.get(symbols[left] + symbols[right])
            if found is not None:
                size = len(symbols[left]) + len(symbols[right])
                heapq.heappush(queue, (-found[0], left, right, size))

        for index in range(count - 1):
            offer(index, index + 1)
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not symbols[left] or not symbols[right]:
                continue
            if len(symbols[left]) + len(symbols[right]) != size:
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            following = after[left] = after[right]
            if following < count:
                before[following] = left
                offer(left, following)
            if before[left] >= 0:
                offer(before[left], left)
        ids: list[int] = []
        for symbol in symbols:
            if symbol:
                found = pieces.get(symbol)
                if found is not None:
                    ids.append(found[1])
                elif self._byte_ids:
                    ids += [self._byte_ids[byte] for byte in symbol.encode()]
                elif self._unknown is not None:
                    ids.append(self._unknown)
        return ids
