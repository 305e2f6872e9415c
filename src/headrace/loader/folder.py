"""A folder in Hugging Face layout as a `ModelFiles`."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.errors import ModelFileError
from ..base.modelfiles import TOOL_USE, ModelFiles
from ..models.reader import from_hf
from ..quant.schemes import scheme_of
from .gguf_model import end_of_turn, with_rows
from .headers import hold
from .jsonfile import read_json, read_optional
from .pooling import read_pooling
from .sealed import check_shards
from .shards import find_shards

MAX_TEMPLATE = 1 << 20
NO_TEXT = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>"],
    "tokenizer.ggml.scores": [0.0],
    "tokenizer.ggml.token_type": [2],
    "tokenizer.ggml.unknown_token_id": 0,
}
"""Tokenizer of a model that reads no text."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder of the named chat templates."""
MOST_TEMPLATES = 32
MAX_TOKENIZER = 256 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_LICENCE = re.compile(r"\A---\n.*?^license:[ \t]*['\"]?([\w.+-]+)", re.DOTALL | re.MULTILINE)


def open_folder(folder: Path, name: str, licence: str | None = None) -> ModelFiles:
    """Read the small files of a model folder, and the headers of its weights."""
    if not (folder / "config.json").is_file():
        raise ModelFileError(f"{folder}: no config.json in it, so it is not a model folder")
    config = read_json(folder / "config.json")
    arch = from_hf(config)
    scheme_of(config)  # raises here if it cannot be loaded
    shards = find_shards(folder)
    arch, decisions = hold(arch, shards)
    check_shards(shards)
    if arch.ranker is not None:
        made = ModelFiles(name, "safetensors", folder, shards, arch, NO_TEXT, None)
        return replace(made, licence=licence or licence_of(folder), decisions=decisions)
    if not (folder / "tokenizer.json").is_file():
        raise ModelFileError(
            f"{folder}: no tokenizer.json in it (a tokenizer.model alone is not read; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one)"
        )
    tokenizer = _Tokenizer(folder)
    generation = read_optional(folder / "generation_config.json")
    bos_id = _ids(config, generation, key="bos_token_id")
    bos = tokenizer.special.get("bos_token")
    if bos in tokenizer.added:
        bos_id = [tokenizer.added[bos]]
    templates = tokenizer.templates()
    default = templates.pop("default", None) or templates.get(TOOL_USE)
    return ModelFiles(
        name=name,
        format="safetensors",
        path=folder,
        weights=shards,
        arch=arch,
        tokenizer=folder / "tokenizer.json",
        chat_template=default,
        named_templates=templates,
        special=tokenizer.special,
        bos_id=next((index for index in bos_id if index < arch.vocab_size), None),
        add_bos=tokenizer.adds_bos(),
        eos_ids=with_rows(_end_ids(config, generation, tokenizer), arch),
        generation=_sampling(generation),
        licence=licence or licence_of(folder),
        pooling=read_pooling(folder, config, arch),
        decisions=decisions,
    )


class _Tokenizer:
    """Content of `tokenizer_config.json` and of the head of `tokenizer.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_optional(folder / "tokenizer_config.json")
        named = {**read_optional(folder / "special_tokens_map.json"), **self.config}
        self.special = {key: text for key in _SPECIAL if (text := _content(named.get(key)))}
        path = folder / "tokenizer.json"
        if path.stat().st_size > MAX_TOKENIZER:
            raise ModelFileError(f"{path.name}: larger than {MAX_TOKENIZER >> 20} MiB")
        self.text = path.read_text(encoding="utf-8", errors="replace")
        self.added = self._added()

    def _member(self, key: str) -> Any:
        """Return one member of tokenizer.json, without parsing its vocabulary of megabytes."""
        match = re.search(rf'"{key}"\s*:\s*', self.text)
        if match is None:
            return None
        try:
            return json.JSONDecoder().raw_decode(self.text, match.end())[0]
        except (ValueError, RecursionError):
            raise ModelFileError(f"{self.folder.name}/tokenizer.json: {key} is not JSON") from None

    def _added(self) -> dict[str, int]:
        """Return text → id of the tokens added to the vocabulary."""
        added = self._member("added_tokens") or []
        return {
            token["content"]: token["id"]
            for token in added
            if isinstance(token, dict)
            and isinstance(token.get("content"), str)
            and isinstance(token.get("id"), int)
        }

    def adds_bos(self) -> bool:
        """Return whether a text begins with bos, by the config or by the tokenizer's
        post-processor."""
        stated = self.config.get("add_bos_token")
        if isinstance(stated, bool):
            return stated and "bos_token" in self.special
        bos = self.special.get("bos_token")
        return bos is not None and _begins_with(self._member("post_processor"), bos)

    def templates(self) -> dict[str, str]:
        """Return chat templates by name: from files, or from the config if there is no default
        file."""
        found, named = self.config.get("chat_template"), dict[str, str]()
        one = [] if found is None else [{"name": "default", "template": found}]
        for entry in found if isinstance(found, list) else one:
            match entry:
                case {"name": str(name), "template": str(text)}:
                    named[name] = text
                case _:
                    raise ModelFileError(
                        "tokenizer_config.json: chat_template must be text, or a list of objects "
                        "with name and template"
                    )
        paths = sorted((self.folder / MORE_TEMPLATES).glob("*.jinja"))
        if len(paths) > MOST_TEMPLATES:
            raise ModelFileError(
                f"{MORE_TEMPLATES}: {len(paths)} templates; at most {MOST_TEMPLATES} are read"
            )
        files = {path.stem: _template(path) for path in paths}
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return {"default": _template(path), **files}
        return {**named, **files}


def _template(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE:
        raise ModelFileError(f"{path.name}: larger than {MAX_TEMPLATE >> 20} MiB")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name}: not UTF-8: {error}") from None


def _begins_with(processor: object, token: str) -> bool:
    """Return whether a post-processor of tokenizer.json puts `token` before a single text."""
    if not isinstance(processor, dict):
        return False
    if processor.get("type") == "Sequence":
        return any(_begins_with(each, token) for each in processor.get("processors") or [])
    single = processor.get("single")
    first = single[0] if isinstance(single, list) and single else None
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    return isinstance(special, dict) and special.get("id") == token


def _content(value: object) -> str | None:
    """Return a special token as text; it is a string, or an object that describes it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(*configs: dict[str, Any], key: str) -> list[int]:
    found: list[int] = []
    for config in configs:
        value = config.get(key)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool) and each >= 0:
                found.append(each)
    return found


def _end_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: _Tokenizer
) -> tuple[int, ...]:
    """List ids that end a turn: of both configs, of the tokenizer, and the well-known ones."""
    text = config.get("text_config")
    found = _ids(generation, config, text if isinstance(text, dict) else {}, key="eos_token_id")
    for token in (tokenizer.special.get("eos_token"), *end_of_turn(tokenizer.added.__contains__)):
        if token in tokenizer.added:
            found.append(tokenizer.added[token])
    return tuple(dict.fromkeys(found))


def _sampling(generation: dict[str, Any]) -> dict[str, Any]:
    """Return the authors' default sampling; explicit greedy is temperature 0."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    return {
        key: value
        for key in _SAMPLING
        if isinstance(value := generation.get(key), int | float) and not isinstance(value, bool)
    }


def licence_of(folder: Path) -> str | None:
    """Return the licence that a folder's README states in its head."""
    readme = folder / "README.md"
    if not readme.is_file() or readme.stat().st_size > MAX_TEMPLATE:
        return None
    match = _LICENCE.search(readme.read_text(encoding="utf-8", errors="replace"))
    return match[1] if match else None
