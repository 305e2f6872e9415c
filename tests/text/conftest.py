"""Tokenizers over the small vocabularies."""

from __future__ import annotations

import pytest
from vocabularies import byte_level_metadata, sentencepiece_metadata

from headrace.text import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return load_tokenizer(byte_level_metadata())


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    """Without a space put before the text, as Gemma."""
    return load_tokenizer(sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))


@pytest.fixture(scope="session")
def spaced_sentencepiece() -> Tokenizer:
    """With a space put before the text, as Llama 2."""
    return load_tokenizer(sentencepiece_metadata())
