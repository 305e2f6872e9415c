"""Models by hub id: choice of a repository's files, and their download into the cache.

The first download pins a repository to its commit at that time. Cached files are used without
asking the hub again, until they are removed.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..base import environment
from ..base.errors import DownloadError, ModelFileError, ModelNotFound
from .cache import Record, hub_folder, is_hub_id, locked
from .catalog import HubSource
from .download import fetch_file
from .folder import MORE_TEMPLATES, MOST_TEMPLATES
from .hub import Hub, HubFile
from .progress import Progress, Silent
from .shards import PICKLES
from .source import SourceFailed

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "modules.json",
    "1_Pooling/config.json",
    "sentence_bert_config.json",
)
_TEMPLATE = re.compile(rf"{MORE_TEMPLATES}/[\w-]{{1,64}}\.jinja")
CONFIG = "config.json"
"""Selector that takes only this file of a repository."""
PREFERRED_QUANT = "q4_k_m"


def split_hub_name(name: str) -> tuple[str, str] | None:
    """Split `org/name[:file.gguf or quantisation]` into (repository, selector); None for other
    names."""
    repo, _, selector = name.partition(":")
    return (repo, selector) if is_hub_id(repo) and len(selector) <= 200 else None


def fetch_hub(
    repo: str,
    selector: str,
    *,
    cache_dir: str | Path | None = None,
    offline: bool = False,
    progress: Progress | None = None,
    hub: Hub | None = None,
) -> Path:
    """Return the repository's folder, or the chosen `.gguf` file in it; download it if needed."""
    folder = hub_folder(repo, cache_dir)
    found = _cached(folder, selector)
    if found is not None:
        return found
    if offline or environment.offline():
        raise DownloadError(
            f"{repo} is not in the cache and the network is forbidden (offline)", param="model"
        )
    watcher = progress or Silent()
    hub = hub or Hub()
    try:
        # Asked before the folder is made: a model that does not exist leaves no traces.
        pinned = Record(folder).data.get("commit")
        commit, listing = hub.listing(repo, pinned if isinstance(pinned, str) else "main")
        wanted = choose(listing, repo, selector)
        with locked(folder, watcher):
            found = _cached(folder, selector)
            if found is not None:
                return found
            record = Record(folder)
            for file in wanted:
                if record.knows(file.path, file.size, file.sha256):
                    continue
                source = HubSource(repo, file.path, commit)
                sha256 = fetch_file(
                    folder / file.path,
                    file.size,
                    file.sha256,
                    [(f"hub {repo}", lambda part, meter, s=source: hub.append(s, part, meter))],  # type: ignore[misc]
                    watcher,
                )
                record.add(file.path, sha256)
            record.data.update(repo=repo, commit=commit, complete=True)
            record.data.setdefault("sets", {})[selector] = [file.path for file in wanted]
            record.save()
    except SourceFailed as failed:
        raise DownloadError(f"{repo}: {failed}", param="model") from None
    finally:
        hub.close()
    return _result(folder, [file.path for file in wanted])


def choose(listing: list[HubFile], repo: str, selector: str) -> list[HubFile]:
    """Choose the files that a model of this repository needs: one `.gguf`, or a whole folder."""
    by_path = {file.path: file for file in listing}
    ggufs = sorted(path for path in by_path if path.endswith(".gguf"))
    if selector == CONFIG and CONFIG in by_path:
        return [by_path[CONFIG]]
    shards = [p for p in by_path if p.endswith(".safetensors") and "/" not in p]
    if selector or (ggufs and not shards):
        return [by_path[_choose_gguf(ggufs, repo, selector)]]
    if not shards:
        pickles = sorted(path for path in by_path if path.endswith(PICKLES))
        if pickles:
            raise ModelFileError(
                f"{repo}: its weights are pickled ({pickles[0]}), which Headrace never reads: "
                "loading one runs code that the file brings along; take a safetensors or GGUF "
                "release of the model"
            )
        raise ModelFileError(f"{repo}: neither a safetensors nor a GGUF file in it")
    index = "model.safetensors.index.json"
    if index not in by_path and "model.safetensors" in shards:
        shards = ["model.safetensors"]
    elif index in by_path:
        # Files outside the index (a consolidated copy) would double the download.
        shards = [path for path in shards if path.startswith("model-")] or shards
    templates = sorted(path for path in by_path if _TEMPLATE.fullmatch(path))[:MOST_TEMPLATES]
    wanted = (*SMALL_FILES, *templates, *sorted(shards))
    return [by_path[path] for path in wanted if path in by_path]


def _choose_gguf(ggufs: list[str], repo: str, selector: str) -> str:
    if selector in ggufs:
        return selector
    wanted = selector.lower() or PREFERRED_QUANT
    fits = [path for path in ggufs if _has_word(path.lower(), wanted)]
    if not selector and len(ggufs) == 1:
        fits = ggufs
    if len(fits) == 1:
        return fits[0]
    some = ", ".join(ggufs[:12]) or "none"
    if selector and not fits:
        raise ModelNotFound(f"{repo}: no GGUF file {selector!r:.80}; it has: {some}", param="model")
    raise ModelNotFound(
        f"{repo} has several GGUF files: name one as {repo}:FILE; it has: {some}", param="model"
    )


def _has_word(path: str, word: str) -> bool:
    """Return whether the quantisation `word` is in the file's name, bounded by - . or _."""
    stem = path.rsplit("/", 1)[-1].removesuffix(".gguf")
    return any(stem == word or stem.endswith(mark + word) for mark in "-._")


def _cached(folder: Path, selector: str) -> Path | None:
    record = Record(folder)
    sets = record.data.get("sets")
    paths = sets.get(selector) if isinstance(sets, dict) else None
    if not isinstance(paths, list) or not paths:
        return None
    for path in paths:
        entry = record.data["files"].get(path)
        size = entry.get("size") if isinstance(entry, dict) else None
        if not isinstance(size, int) or not record.knows(path, size, None):
            return None
    return _result(folder, paths)


def _result(folder: Path, paths: list[str]) -> Path:
    return folder / paths[0] if paths[0].endswith(".gguf") else folder
