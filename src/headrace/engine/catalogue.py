"""The catalogue of a model that retrieves items, as both processes open it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.config import EngineOptions
from ..base.errors import OptionError
from ..base.items import ItemCatalogue, read_catalogue
from ..base.modelfiles import ModelFiles

if TYPE_CHECKING:
    from ..text import Tokenizer


def open_catalogue(
    options: EngineOptions, files: ModelFiles, tokenizer: Callable[[], Tokenizer]
) -> ItemCatalogue | None:
    """Open the catalogue that the options name; None without one. `tokenizer`: opens the model's;
    called if an id is given as a token. Raises `OptionError`."""
    if options.items is None:
        return None
    arch = files.arch
    if arch.task != "tokens" or arch.cross is not None:
        raise OptionError("only a language model retrieves items", param="items")
    if not options.prefix_cache:
        why = "items are retrieved with prefix_cache on: it shares the prompt among beams"
        raise OptionError(why, param="items")
    opened: list[Tokenizer] = []

    def token_id(token: str) -> int | None:
        if not opened:
            opened.append(tokenizer())
        return opened[0].token_to_id(token)

    found = read_catalogue(Path(options.items).expanduser(), arch.vocab_size, token_id)
    most = options.max_context or arch.max_context
    if found.levels + 2 > most:
        raise OptionError(
            f"an item has {found.levels} ids; a context of {most} has no room for it", param="items"
        )
    return found
