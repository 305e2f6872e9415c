"""Reader of `tokenizer.json`, and our own tokenizer for files with byte-level BPE.

The `tokenizers` library takes 0.7 s and 96 MiB for 152,000 tokens. Our own tokenizer serves files
that it knows completely: pre-tokenization by `pretokenize`, added tokens without conditions, ids
without gaps. The library serves all others (`from_json`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.config import Decision
from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.base.strings import StringArray

from ..base.foreign import Undecodable, json_reader
from .from_gguf import CONTROL, NORMAL, UNUSED, USER_DEFINED
from .native import native_bpe
from .pieces import PieceKind
from .pretokenize import GPT2, PRE_TOKENIZERS, PreTokenizer
from .tokenizer import Tokenizer, Vocabulary

MAX_FILE = 256 * 2**20
"""Largest size of a `tokenizer.json` in bytes; the largest known ones have 40 MB."""
MAX_ID = 2**24
"""Bound of token ids; the largest known vocabularies have 2^18 to 2^20."""
Ends = tuple[tuple[int, ...], tuple[int, ...]]


class Model(msgspec.Struct):
    type: Any = None
    vocab: dict[str, int] | list[Any] | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    dropout: Any = None
    continuing_subword_prefix: Any = None
    end_of_word_suffix: Any = None
    byte_fallback: Any = False
    ignore_merges: Any = False


class Added(msgspec.Struct):
    id: int = 0
    content: Any = None
    special: Any = False
    normalized: Any = True
    single_word: Any = False
    lstrip: Any = False
    rstrip: Any = False


class TokenizerFile(msgspec.Struct):
    """A `tokenizer.json`: its ids are numbers; all else is compared with the known forms."""

    model: Model = msgspec.field(default_factory=Model)
    added_tokens: list[Added] = []
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


_tokenizer_file = json_reader(TokenizerFile)
_merges = json_reader(list[str | tuple[str, str]])


def read(path: Path) -> tuple[TokenizerFile, dict[str, Any]]:
    """Read a `tokenizer.json` and the `tokenizer_config.json` next to it. Raises `ModelFileError`,
    also for ids that would need gigabytes: lists are as long as the largest id."""
    if not path.is_file():
        raise ModelFileError(f"there is no tokenizer at {path}", param="tokenizer")
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise ModelFileError(f"{path} has {size} bytes; at most {MAX_FILE}", param="tokenizer")
        state = _tokenizer_file(path.read_bytes())
    except (Undecodable, OSError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}", param="tokenizer") from None
    ids = [token.id for token in state.added_tokens]
    if isinstance(state.model.vocab, dict):
        ids += state.model.vocab.values()
    for index in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= index < MAX_ID:
            raise ModelFileError(
                f"{path} has a token of the id {index}; ids are from 0 to {MAX_ID - 1}",
                param="tokenizer",
            )
    return state, read_settings(path.with_name("tokenizer_config.json"))


def read_settings(path: Path) -> dict[str, Any]:
    """Read a `tokenizer_config.json`; {} if it is absent. Raises `ModelFileError`."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise ModelFileError(f"{path} cannot be read: {error}", param="tokenizer") from None
    if not isinstance(config, dict):
        raise ModelFileError(f"{path} is not a JSON object", param="tokenizer")
    return config


def own_tokenizer(
    state: TokenizerFile, config: dict[str, Any], rows: int | None = None
) -> Tokenizer | None:
    """Make our own tokenizer from a file; None if its parts are not all known, or not sound.
    `rows`: see `load_tokenizer`."""
    model, rules, ends = state.model, _cut(state.pre_tokenizer), _ends(state.post_processor)
    odd = model.dropout, model.continuing_subword_prefix, model.end_of_word_suffix
    if model.type != "BPE" or any(odd) or model.byte_fallback or rules is None or ends is None:
        return None
    if _type(state.decoder) != "ByteLevel" or state.normalizer not in (None, {"type": "NFC"}):
        return None
    tokens, added = _in_order(model.vocab), _plain(state)
    if not tokens or added is None or not _known(config, added):
        return None
    for token, index in added.items():
        # The library numbers them itself, after the vocabulary and one after the other.
        if index == len(tokens) and token not in model.vocab:  # type: ignore[operator]
            tokens.append(token)
        elif index >= len(tokens) or tokens[index] != token:
            return None
    try:
        pairs = _merges(model.merges)
    except Undecodable:  # Raw bytes are parsed only here.
        return None
    merges = [one if isinstance(one, str) else " ".join(one) for one in pairs]
    try:
        held = StringArray.of(tokens, "the vocabulary")
    except UnicodeEncodeError:
        return None
    words = held.first(len(model.vocab))  # type: ignore[arg-type]
    whole, composed = bool(model.ignore_merges), state.normalizer is not None
    own = native_bpe(words, merges, rules, ignore_merges=whole, composed=composed)
    if own is None:
        return None
    find_word = own.find

    def find(token: str) -> int | None:
        found = added.get(token)
        return find_word(token) if found is None else found

    special = frozenset(one.id for one in state.added_tokens if one.special)
    bos, eos, prefix = named_ends(config, find, ends[0], "byte_level")
    vocabulary = Vocabulary(
        kind="byte_level",
        tokens=held,
        added=added,
        special_ids=special,
        find=find,
        bos_id=bos,
        eos_id=eos,
        prefix_ids=prefix,
        suffix_ids=ends[1],
        rows=rows,
    )
    why = "a tokenizer.json of which it knows all parts"
    return Tokenizer(vocabulary, own, Decision("tokenizer", "own byte-level BPE", why))


def gguf_vocabulary(path: Path, rows: int) -> dict[str, Any]:
    """Return the `tokenizer.ggml.*` metadata of a `tokenizer.json` with `rows` ids. Raises
    `UnsupportedModel` if GGUF has no name for its kind."""
    state, config = read(path)
    known = next((name for name, one in PRE_TOKENIZERS.items() if _is(one, state)), None)
    own = None if known is None else own_tokenizer(state, config)
    merges = state.model.merges
    if own is None or known is None:
        raise UnsupportedModel(
            f"{path.name} cannot move to a GGUF: it must be a byte-level BPE that cuts words as "
            f"one of {', '.join(PRE_TOKENIZERS)}",
            param="tokenizer",
        )
    vocabulary = own.vocabulary
    tokens = [*vocabulary.tokens]
    types = [NORMAL] * len(tokens)
    for index in vocabulary.added.values():
        types[index] = CONTROL if index in vocabulary.special_ids else USER_DEFINED
    padding = range(len(tokens), rows)
    pairs = [one if isinstance(one, str) else " ".join(one) for one in _merges(merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": known,
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{index}]" for index in padding)],
        "tokenizer.ggml.token_type": [*types, *[UNUSED] * len(padding)],
        "tokenizer.ggml.merges": pairs,
    }


def _is(known: PreTokenizer, state: TokenizerFile) -> bool:
    """Return whether a GGUF's pre-tokenizer does what a file says."""
    rules, composed = _cut(state.pre_tokenizer), state.normalizer is not None
    if rules is None or known.native != rules:
        return False
    return known.ignore_merges == bool(state.model.ignore_merges) and known.nfc == composed


def named_ends(
    config: dict[str, Any],
    find: Callable[[str], int | None],
    prefix: tuple[int, ...],
    kind: PieceKind,
) -> tuple[int | None, int | None, tuple[int, ...]]:
    """Return (bos, eos, ids before a text) by the config, for a file that puts `prefix` there."""

    def named(name: str) -> int | None:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        return find(value) if isinstance(value, str) else None

    bos, eos = named("bos_token"), named("eos_token")
    if bos is None and len(prefix) == 1:
        bos = prefix[0]
    add_bos = config.get("add_bos_token")
    if isinstance(add_bos, bool) and bos is not None and kind != "wordpiece":
        prefix = (bos,) if add_bos else ()
    return bos, eos, prefix


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _steps(part: Any, name: str) -> list[Any]:
    """Return the parts of a sequence; a single part is a sequence of one."""
    steps = part.get(name) if _type(part) == "Sequence" else [part]
    return steps if isinstance(steps, list) else [None]


def _cut(part: Any) -> Any:
    """Return the file's pre-tokenization as rules of our library; None if unknown to it."""
    *splits, last = _steps(part, "pretokenizers") or [None]
    if _type(last) != "ByteLevel" or last.get("add_prefix_space") is not False:
        return None
    if last.get("use_regex", True):
        return PreTokenizer((GPT2,)).native if not splits else None
    if len(splits) != 1 or _type(splits[0]) != "Split":
        return None
    split = splits[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    pattern = split.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    return PreTokenizer((regex,)).native if isinstance(regex, str) else None


def _ends(part: Any) -> Ends | None:
    """Return the ids before and after a text; None for an unknown kind."""
    found: Ends = (), ()
    for step in [] if part is None else _steps(part, "processors"):
        if _type(step) == "ByteLevel":
            continue
        if _type(step) != "TemplateProcessing" or any(found):
            return None
        ids: list[int] = []
        before: list[int] | None = None
        try:
            for item in step["single"]:
                if "Sequence" in item:
                    if before is not None:
                        return None
                    before, ids = ids, []
                else:
                    ids += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        except (KeyError, TypeError):
            return None
        if before is None or not all(type(each) is int for each in [*before, *ids]):
            return None
        found = tuple(before), tuple(ids)
    return found


def _in_order(vocab: Any) -> list[str] | None:
    """Return the words by their ids; None if the ids are not all from 0 on, each once."""
    if not isinstance(vocab, dict) or set(vocab.values()) != set(range(len(vocab))):
        return None
    return sorted(vocab, key=vocab.__getitem__)


def _plain(state: TokenizerFile) -> dict[str, int] | None:
    """Return the added tokens, in the file's order; None if some have conditions."""
    ways = {one.normalized for one in state.added_tokens}
    if len(ways) > 1 or (state.normalizer is not None and ways - {False}):
        return None
    added: dict[str, int] = {}
    for one in state.added_tokens:
        odd = one.single_word or one.lstrip or one.rstrip
        if odd or not isinstance(one.content, str) or not one.content or one.content in added:
            return None
        added[one.content] = one.id
    return added


def _known(config: dict[str, Any], added: dict[str, int]) -> bool:
    """Return whether `tokenizer_config.json` adds no token of its own."""
    listed = config.get("added_tokens_decoder") or {}
    entries = listed.values() if isinstance(listed, dict) else [None]
    return all(isinstance(one, dict) and one.get("content") in added for one in entries)
