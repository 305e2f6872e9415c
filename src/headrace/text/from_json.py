"""A tokenizer from a `tokenizer.json` and the `tokenizer_config.json` next to it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from headrace.base.config import Decision
from headrace.base.errors import ModelFileError, UnsupportedModel

from .json_bpe import MAX_ID, named_ends
from .pieces import PieceKind
from .tokenizer import Tokenizer, Vocabulary


class LibraryEncoder:
    """All of a `tokenizer.json`, run by the library."""

    def __init__(self, library: LibraryTokenizer, rows: int | None = None) -> None:
        """Use a library object; `rows`: see `load_tokenizer`."""
        self._rows = MAX_ID if rows is None else rows
        self._made = {(True, False): library}
        self._lock = threading.Lock()

    def encode_with_specials(self, text: str, *, special: bool) -> list[int]:
        """Encode a text; see `Tokenizer.encode`."""
        ids: list[int] = self._library(special).encode(text, add_special_tokens=False).ids
        if max(ids, default=0) >= self._rows:
            ids = self._library(special, kept=True).encode(text, add_special_tokens=False).ids
        return ids

    def _library(self, special: bool, *, kept: bool = False) -> LibraryTokenizer:
        """Return the object for a kind of text, made at first use. `kept`: without the added tokens
        that have no row.

        Treating special tokens as text is a state of the library's object, and two requests may
        want it both ways at once.
        """
        with self._lock:
            if (special, kept) not in self._made:
                state = self._made[True, False].to_str()
                made = LibraryTokenizer.from_str(self._without(state) if kept else state)
                made.encode_special_tokens = not special
                self._made[special, kept] = made
            return self._made[special, kept]

    def _without(self, state: str) -> str:
        """Drop the added tokens of a `tokenizer.json` that have no row."""
        whole = json.loads(state)
        whole["added_tokens"] = [one for one in whole["added_tokens"] if one["id"] < self._rows]
        return json.dumps(whole)


def tokenizer_from_file(
    path: Path, config: dict[str, Any], rows: int | None = None, text: str | None = None
) -> Tokenizer:
    """Make the tokenizer of a `tokenizer.json` that `json_bpe.read` has read; `rows`: see
    `load_tokenizer`; `text`: its content if there is no such file. Raises `ModelFileError` and
    `UnsupportedModel`."""
    try:
        kind = LibraryTokenizer
        library = kind.from_file(str(path)) if text is None else kind.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ModelFileError(f"{path} cannot be read: {error}", param="tokenizer") from None
    # Files of sentence encoders carry the truncation and the padding of their training.
    library.no_truncation()
    library.no_padding()
    _add_missing(library, config)
    served = Decision(
        "tokenizer", "tokenizers library", "a tokenizer.json is run as its authors meant it"
    )
    vocabulary = _vocabulary(library, config, rows)
    return Tokenizer(vocabulary, LibraryEncoder(library, rows), served)


def _add_missing(library: LibraryTokenizer, config: dict[str, Any]) -> None:
    """Add tokens that only `tokenizer_config.json` names, at its ids."""
    listed = config.get("added_tokens_decoder") or {}
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    if not isinstance(listed, dict) or not all(
        key.isdecimal()
        and len(key) < 10
        and isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        for key, entry in listed.items()
    ):
        raise ModelFileError(
            "tokenizer_config.json: added_tokens_decoder must have tokens by their ids",
            param="tokenizer",
        )
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        if entry["content"] in known:
            continue
        token = AddedToken(
            entry["content"],
            special=bool(entry.get("special")),
            lstrip=bool(entry.get("lstrip")),
            rstrip=bool(entry.get("rstrip")),
            single_word=bool(entry.get("single_word")),
            normalized=bool(entry.get("normalized", True)),
        )
        (library.add_special_tokens if token.special else library.add_tokens)([token])
        if library.token_to_id(token.content) != int(key):
            raise ModelFileError(
                f"tokenizer_config.json puts {token.content!r} at id {key}; "
                f"tokenizer.json leaves id {library.token_to_id(token.content)} for it",
                param="tokenizer",
            )


def _vocabulary(library: LibraryTokenizer, config: dict[str, Any], rows: int | None) -> Vocabulary:
    ids = library.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(ids.values(), default=-1) + 1)
    for token, index in ids.items():
        tokens[index] = token
    added = library.get_added_tokens_decoder()
    kind, strip_space = _decoding(library)
    prefix, suffix = _wrapping(library)
    bos, eos, prefix = named_ends(config, ids.get, prefix, kind)
    return Vocabulary(
        kind=kind,
        tokens=tokens,
        added={token.content: index for index, token in added.items()},
        special_ids=frozenset(index for index, token in added.items() if token.special),
        find=library.token_to_id,
        bos_id=bos,
        eos_id=eos,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strip_space=strip_space,
        rows=rows,
    )


def _wrapping(library: LibraryTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the file's post-processor puts before and after a text."""
    if library.post_processor is None:
        return (), ()
    mask = library.encode("a", add_special_tokens=True)
    ids, special = mask.ids, mask.special_tokens_mask
    inner = [place for place, flag in enumerate(special) if not flag]
    if not inner:
        return (), ()
    return tuple(ids[: inner[0]]), tuple(ids[inner[-1] + 1 :])


def _decoding(library: LibraryTokenizer) -> tuple[PieceKind, bool]:
    """Return, from the file's decoder, the kind of the pieces and whether decoding drops one
    leading space."""
    decoder = library.decoder
    if decoder is None:
        raise UnsupportedModel("tokenizer.json names no decoder", param="tokenizer")
    state = json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    types = {step["type"]: step for step in steps}
    if "ByteLevel" in types:
        return "byte_level", False
    if "ByteFallback" in types or "Metaspace" in types:
        strip = types.get("Strip", {}).get("start", 0) > 0
        metaspace = types.get("Metaspace", {})
        strip = strip or metaspace.get("prepend_scheme", "never") != "never"
        return "sentencepiece", strip
    if "WordPiece" in types:
        return "wordpiece", True
    raise UnsupportedModel(
        f"tokenizer.json decodes with {', '.join(sorted(types))}; supported are ByteLevel, "
        "ByteFallback, Metaspace and WordPiece",
        param="tokenizer",
    )
