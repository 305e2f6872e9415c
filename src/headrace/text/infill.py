"""Infill: the marks between which a code model was trained to write missing text.

The tokens are read from the file (`tokenizer.ggml.fim_*_token_id`) or found in the vocabulary by
the names that model families use. These lists, and the order of parts, are llama.cpp's. A user's
text never becomes one of them, nor any other control token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .tokenizer import Tokenizer

_FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, GLM
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Marks before the prefix, before the suffix, and before the missing text."""
_REPOSITORY = ("<|repo_name|>", "<reponame>", "<|fim_repo|>", "<REPO>", "<fim-repo>")
_FILE = ("<|file_sep|>", "<filename>", "<fim-file-sep>")
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>")
_FIELDS = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class Infill:
    """Ids of a model's marks."""

    prefix: int
    suffix: int
    middle: int
    repository: int | None = None
    file: int | None = None
    padding: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens after which the missing text has ended."""
        found = (self.prefix, self.suffix, self.middle, self.repository, self.file, self.padding)
        return tuple(token for token in found if token is not None)

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: Any) -> Infill | None:
        """Find a model's marks; return None if it has none. `source`: `ModelFiles.tokenizer`."""
        metadata = source if isinstance(source, dict) else {}
        added = tokenizer.vocabulary.added
        marks = _named(metadata, tokenizer, ("prefix", "suffix", "middle"))
        for family in _FAMILIES:
            if marks is None and all(name in added for name in family):
                marks = (added[family[0]], added[family[1]], added[family[2]])
        if marks is None:
            return None

        def one(field: str, names: Sequence[str]) -> int | None:
            given = _id(metadata, field, tokenizer)
            return (
                given
                if given is not None
                else next((added[name] for name in names if name in added), None)
            )

        return cls(
            *marks,
            repository=one("fim_rep_token_id", _REPOSITORY),
            file=one("fim_sep_token_id", _FILE),
            padding=one("fim_pad_token_id", _PADDING),
        )

    def prompt(
        self,
        encode: Callable[[str], list[int]],
        prefix: str,
        suffix: str,
        *,
        start: Sequence[int] = (),
        extra: Sequence[tuple[str, str]] = (),
        room: int | None = None,
        written: str = "",
    ) -> list[int]:
        """Make the ids that ask for the text between prefix and suffix.

        `encode`: text to ids without control tokens. `start`: ids that the model wants before any
        text. `extra`: (file name, text) of other files, cut from their beginning so that the total
        has at most `room` ids. `written`: the beginning of the missing text.
        """
        ids = [self.prefix, *encode(prefix), self.suffix, *encode(suffix), self.middle]
        ids += encode(written)
        before: list[int] = []
        if extra and self.file is not None:
            if self.repository is not None:
                before += [self.repository, *encode("myproject\n")]
            for name, text in extra:
                before += [self.file, *encode(f"{name}\n{text}")]
            ids = [self.file, *encode("filename\n"), *ids]
        elif extra:
            before = encode("".join(f"{text}\n" for _, text in extra))
        spare = len(before) if room is None else max(0, room - len(ids) - len(start))
        before = before[max(0, len(before) - spare) :]
        return [*start, *before, *ids]


def plain_encoder(tokenizer: Tokenizer, marks: Infill) -> Callable[[str], list[int]]:
    """Make an encoder of text to ids without control tokens, even if the text spells one out.

    The tokenizer itself leaves control tokens alone. A mark that a file declares as another kind of
    token is found in any text, so a text with such a mark is encoded in two halves.
    """
    vocabulary = tokenizer.vocabulary
    own = [
        name
        for name, index in vocabulary.added.items()
        if index in marks.ends and index not in vocabulary.special_ids
    ]

    def encode(text: str) -> list[int]:
        cuts = {0, len(text)}
        for name in own:
            at = text.find(name)
            while at >= 0:
                cuts.add(at + 1 + len(name) // 2)
                at = text.find(name, at + 1)
        edges = sorted(cuts)
        return [
            token
            for begin, end in pairwise(edges)
            for token in tokenizer.encode(text[begin:end], special=False)
        ]

    return encode


def _named(
    metadata: dict[str, Any], tokenizer: Tokenizer, names: tuple[str, str, str]
) -> tuple[int, int, int] | None:
    """Return the file's own fields, by their newer or their older names."""
    for pattern in ("fim_{:.3}_token_id", "{}_token_id"):
        found = [_id(metadata, pattern.format(name), tokenizer) for name in names]
        whole = [token for token in found if token is not None]
        if len(whole) == len(names) and len(set(whole)) == len(names):
            return whole[0], whole[1], whole[2]
    return None


def _id(metadata: dict[str, Any], field: str, tokenizer: Tokenizer) -> int | None:
    value = metadata.get(_FIELDS + field)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < tokenizer.vocab_size else None
