"""The parts of a model that the API process opens before it can serve: files, tokenizer,
template."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...base.config import EngineOptions
from ...base.items import ItemCatalogue
from ...base.modelfiles import ModelFiles
from ...loader import open_model
from ...loader.panels import kept_path, panel_folder
from ...speech.finding import listens, sees
from ...text import ChatTemplates, Tokenizer, load_tokenizer
from ..catalogue import open_catalogue
from ..preload import give_back


@dataclass(frozen=True, slots=True)
class OpenModel:
    files: ModelFiles
    tokenizer: Tokenizer
    template: ChatTemplates | None
    phases: dict[str, float]
    """Seconds of each part."""
    items: ItemCatalogue | None = None


async def open_for_serving(
    options: EngineOptions, progress: Any, on_files: Callable[[ModelFiles], None]
) -> OpenModel:
    """Open a model. `on_files` is called as soon as the files are open, before the slow tokenizer.

    Raises `ModelNotFound`, `DownloadError`, `ModelFileError`, `UnsupportedModel`, and `OptionError`
    for a catalogue.
    """
    begin = time.monotonic()
    files = await asyncio.to_thread(
        open_model,
        options.model,
        cache_dir=Path(options.cache_dir) if options.cache_dir else None,
        offline=options.offline,
        progress=progress,
    )
    opened = time.monotonic()
    on_files(files)
    _read_ahead(files, options)
    await asyncio.to_thread(check_beside, files)
    read = time.monotonic()
    tokenizer = await asyncio.to_thread(load_tokenizer, files.tokenizer, files.arch.vocab_size)
    phases = {"open_files": opened - begin, "tokenizer": time.monotonic() - read}
    give_back()
    template = ChatTemplates(files) if files.used_templates else None
    items = await asyncio.to_thread(open_catalogue, options, files, lambda: tokenizer)
    return OpenModel(files, tokenizer, template, phases, items)


def check_beside(files: ModelFiles) -> None:
    """Raise the errors of files next to a language model: codec and voices, encoders of sounds or
    pictures."""
    if (files.path / "speech.json").is_file():
        voices = import_module("headrace.speech.voices")
        voices.open_voices(files.path, files.arch.vocab_size)
    if listens(files.path) or sees(files.path):
        import_module("headrace.loader.towers").open_tower(files)


def _read_ahead(files: ModelFiles, options: EngineOptions) -> None:
    """Have the system read the weights while the engine process still imports. If repacked weights
    are kept, it reads those: then little of the model's file is needed."""
    kept = kept_path(files, panel_folder(options.cache_dir)) if options.keep_packed else None
    paths = (kept,) if kept else files.weights
    if hasattr(os, "posix_fadvise"):
        for path in paths:
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
