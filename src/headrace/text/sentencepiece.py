"""SentencePiece's BPE, from the pieces and scores that a GGUF file carries.

The algorithm is that of Sennrich et al. 2016 as SentencePiece runs it: start from characters,
join the neighbours whose joined piece has the highest score, the leftmost first among equals,
until no neighbours form a piece; a character that is no piece becomes its UTF-8 bytes.

Written here and not handed to `tokenizers`, which wants a ranked list of merges: for a vocabulary
of 262,144 pieces there are half a million, and making and loading them takes two seconds at every
start, against a tenth of a second for this. See `docs/adr/0035`.
"""

from __future__ import annotations

import functools
import heapq
import re
from collections.abc import Mapping

from .pieces import SPACE

CACHE_WORDS = 65_536
"""Words whose ids are remembered; when it is full it is emptied."""
CACHE_LENGTH = 64
"""Longer words are not worth remembering."""

_WORD = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")


class SentencePieceEncoder:
    """Plain text (no special tokens) to ids.

    `pieces` maps each piece that merges may form to (score, id); `byte_ids` are the ids of
    `<0x00>` … `<0xFF>`, or empty; then `unknown` stands for a character that is no piece.
    """

    def __init__(
        self, pieces: Mapping[str, tuple[float, int]], *, byte_ids: list[int], unknown: int | None
    ) -> None:
        assert len(byte_ids) in (0, 256)
        self._pieces = pieces
        self._byte_ids = byte_ids
        self._unknown = unknown
        # Words may be encoded one by one where no piece reaches over a border between them.
        self._by_word = not any(SPACE in piece.lstrip(SPACE) for piece in pieces if SPACE in piece)
        self._cache: dict[str, list[int]] = {}

    @functools.cached_property
    def longest(self) -> int:
        """UTF-8 bytes of text that one id stands for, at most; an unknown one for a character."""
        return max(4, *(len(piece.encode()) for piece in self._pieces))

    def encode(self, text: str) -> list[int]:
        """`text` has its spaces written as "▁"."""
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
