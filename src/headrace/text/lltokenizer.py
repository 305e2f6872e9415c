"""Our tokenizer as llguidance needs it: the bytes of every token. Torch-free; made when the first
grammar comes, because it takes most of a second for a large vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from llguidance import LLTokenizer

from .tokenizer import Tokenizer


class _Wrapper:
    """Interface that llguidance looks for on an object."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.piece(index) for index in range(tokenizer.vocab_size)]
        # Ids that end a sequence are not text, even if the vocabulary has text for them. Inside a
        # string such an id would match as text, and then end the answer there.
        self.special_token_ids = sorted({*tokenizer.special_ids, *ends})
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        ids = self._tokenizer.encode(text, special=False)
        # A library that gets an id without a row ends the process.
        return list(takewhile(lambda index: index < len(self.tokens), ids))


def grammar_tokenizer(
    tokenizer: Tokenizer, *, vocab_size: int | None = None, eos_ids: Sequence[int] = ()
) -> Any:
    """Make an `llguidance.LLTokenizer`.

    `vocab_size`: rows of the model's logits, which may be more than the tokens. `eos_ids`: ids that
    end a sequence, allowed where the grammar may end. Raises `ValueError` without any.
    """
    ends = list(eos_ids) or ([tokenizer.eos_id] if tokenizer.eos_id is not None else [])
    if not ends:
        raise ValueError("a grammar needs an end-of-text token, and this tokenizer has none")
    rows = max(vocab_size or 0, tokenizer.vocab_size)
    wrapper: Any = _Wrapper(tokenizer, ends)
    return LLTokenizer(wrapper, n_vocab=rows, eos_token=ends)
