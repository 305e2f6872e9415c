"""The tokenizer of a model in an engine process, where something needs it: a draft model of another
vocabulary, grammars, a catalogue of items."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...base.modelfiles import ModelFiles
from ...loader import open_model

if TYPE_CHECKING:
    from ...text import Tokenizer


def tokenizer_of(files: ModelFiles) -> Tokenizer:
    """Open the tokenizer of a model, also for files that came over the wire without it (see
    `messages.WireFiles`)."""
    from ...text import load_tokenizer  # Local: most engine processes, which start here, have none.

    source = files.tokenizer or open_model(str(files.path), offline=True).tokenizer
    return load_tokenizer(source, files.arch.vocab_size)
