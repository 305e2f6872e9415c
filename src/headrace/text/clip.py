"""CLIP's tokenizer: pieces in two files where there is no `tokenizer.json`, and its padding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..base.errors import ModelFileError
from ..base.foreign import Undecodable, json_reader
from .json_bpe import read, read_settings

BEGIN, END = "<|startoftext|>", "<|endoftext|>"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
MOST = 64 * 2**20
"""Largest size of a file in bytes; those of CLIP have 1 MB."""
_CUT = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
)
_vocabulary = json_reader(dict[str, int])


def in_parts(path: Path) -> bool:
    """Return whether a `tokenizer.json` is not there, but the two files of its pieces are."""
    others = (path.with_name(name) for name in (VOCABULARY, MERGES))
    return not path.is_file() and all(one.is_file() for one in others)


def text_of(path: Path) -> str:
    """Return what the `tokenizer.json` at this path would say. Raises `ModelFileError`."""
    vocabulary, lines = _ids(path), _read(path.with_name(MERGES)).splitlines()
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(merge) != 2 for merge in merges):
        raise ModelFileError(f"{path.with_name(MERGES)}: a line is no pair", param="tokenizer")
    ends = {token: _id(vocabulary, path, token) for token in (BEGIN, END)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": at, "content": one, "special": True, **flags} for one, at in ends.items()]
    split = {"type": "Split", "pattern": {"Regex": _CUT}, "behavior": "Removed", "invert": True}
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    spaces = {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}
    around = {"sep": [END, ends[END]], "cls": [BEGIN, ends[BEGIN]]}
    state = {
        "version": "1.0", "added_tokens": added, "decoder": level,
        "normalizer": {
            "type": "Sequence", "normalizers": [{"type": "NFC"}, spaces, {"type": "Lowercase"}],
        },
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "RobertaProcessing", "trim_offsets": False, "add_prefix_space": False, **around,
        },
        "model": {
            "type": "BPE", "unk_token": END, "end_of_word_suffix": "</w>", "vocab": vocabulary,
            "merges": merges,
        },
    }  # fmt: skip
    return json.dumps(state)


def pad_of(folder: Path, most: object) -> int:
    """Return the token that pads texts to `most` tokens. Raises `ModelFileError`."""
    path = folder / "tokenizer.json"
    settings = read_settings(path.with_name("tokenizer_config.json"))
    longest = settings.get("model_max_length")
    if isinstance(longest, int) and isinstance(most, int) and longest < most:
        raise ModelFileError(
            f"tokenizer_config.json: model_max_length is {longest}; texts are padded to {most}",
            param="model_max_length",
        )
    named = settings.get("pad_token") or END
    return _id(_ids(path), path, named.get("content") if isinstance(named, dict) else named)


def _ids(path: Path) -> dict[str, int]:
    """Read the pieces of a tokenizer, with its added tokens."""
    if in_parts(path):
        try:
            found: dict[str, int] = _vocabulary(_read(path.with_name(VOCABULARY)).encode())
        except Undecodable as error:
            raise ModelFileError(
                f"{path.parent / VOCABULARY}: {error}", param="tokenizer"
            ) from None
        return found
    state = read(path)[0]
    pieces = state.model.vocab if isinstance(state.model.vocab, dict) else {}
    return {**pieces, **{str(one.content): one.id for one in state.added_tokens}}


def _id(ids: Mapping[str, int], path: Path, token: object) -> int:
    found = ids.get(token) if isinstance(token, str) else None
    if found is None or not 0 <= found < 2**20:
        raise ModelFileError(
            f"{path.parent}: its tokenizer has no token {token!r:.80}", param="tokenizer"
        )
    return found


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MOST:
            raise ModelFileError(f"{path} has {size} bytes; at most {MOST}", param="tokenizer")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}", param="tokenizer") from None
