"""The catalogue of a model that retrieves items, as both processes open it."""

from __future__ import annotations

from pathlib import Path

from ..base.config import EngineOptions
from ..base.errors import OptionError
from ..base.items import Catalogue, read_catalogue
from ..base.modelfiles import ModelFiles
from ..loader import open_model
from ..text import Tokenizer, load_tokenizer


def open_catalogue(
    options: EngineOptions, files: ModelFiles, tokenizer: Tokenizer | None = None
) -> Catalogue | None:
    """Open the catalogue that the options name; None without one. `tokenizer`: the model's, if it
    is open. Raises `OptionError`."""
    if options.items is None:
        return None
    arch = files.arch
    if arch.task != "tokens" or arch.cross is not None:
        raise OptionError("only a language model retrieves items", param="items")
    if not options.prefix_cache:
        why = "items are retrieved with prefix_cache on: it shares the prompt among beams"
        raise OptionError(why, param="items")
    opened = [] if tokenizer is None else [tokenizer]

    def token_id(token: str) -> int | None:
        if not opened:
            # The engine process gets its files without it.
            source = files.tokenizer or open_model(str(files.path), offline=True).tokenizer
            opened.append(load_tokenizer(source, arch.vocab_size))
        return opened[0].token_to_id(token)

    found = read_catalogue(Path(options.items).expanduser(), arch.vocab_size, token_id)
    most = options.max_context or arch.max_context
    if found.levels + 2 > most:
        raise OptionError(
            f"an item has {found.levels} ids; a context of {most} has no room for it", param="items"
        )
    return found
