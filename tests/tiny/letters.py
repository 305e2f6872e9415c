"""A tokenizer with a token for each byte, for tiny models of families with marks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_tokenizer(
    specials: Sequence[Any], words: Sequence[str] = (), merges: Sequence[tuple[str, str]] = ()
) -> Tokenizer:
    """Tokens of the bytes, then `words` that come of `merges`, then `specials`."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    places = {one: place for place, one in enumerate((*letters, *words))}
    found = Tokenizer(models.BPE(places, list(merges)))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(list(specials))
    return found
