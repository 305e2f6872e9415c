"""Loading of a model's tokenizer, from either kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import clip
from .from_gguf import tokenizer_from_gguf
from .json_bpe import own_tokenizer, read
from .tokenizer import Tokenizer


def load_tokenizer(source: Path | dict[str, Any], rows: int | None = None) -> Tokenizer:
    """Load the tokenizer of a model. Pass `ModelFiles.tokenizer`, and the `vocab_size` of its
    architecture as `rows`.

    An added token without a row of the model's matrices is text like any other.

    `source` is a `tokenizer.json` (or its folder; a `tokenizer_config.json` next to it is read
    too), or the metadata of a GGUF file (keys outside `tokenizer.` are ignored). Raises
    `ModelFileError` for a damaged file and `UnsupportedModel` for an unknown kind.
    """
    if isinstance(source, dict):
        return tokenizer_from_gguf(source, rows)
    path = source / "tokenizer.json" if source.is_dir() else source
    text, config = clip.text_of(path) if clip.in_parts(path) else None, dict[str, Any]()
    if text is None:
        state, config = read(path)
        own = own_tokenizer(state, config, rows)
        if own is not None:
            return own
    from .from_json import tokenizer_from_file  # Local: most files do without the library.

    return tokenizer_from_file(path, config, rows, text)
