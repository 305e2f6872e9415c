"""The text of a calibration: documents of a file, cut into windows of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest, file_errors
from ..base.foreign import any_json
from ..base.modelfiles import ModelFiles
from ..loader.partial import file_sha256
from ..text.load import load_tokenizer
from ..text.template import ChatTemplates
from .imatrix import Importance, is_imatrix, read_imatrix
from .statistic import Windows

MOST_BYTES = 256 << 20
"""Bytes of a file of text, at most."""
WINDOW = 512
"""Tokens of a window."""
TOKENS = 32_768
"""Tokens of a calibration, unless the user says another number."""
LEAST = 16
"""Tokens of a window, at least, unless the text has only that one."""


@dataclass(frozen=True, slots=True)
class Text:
    """Documents with their origin."""

    name: str
    licence: str
    """Licence of the text, or "the user's"."""
    documents: tuple[str | tuple[Mapping[str, Any], ...], ...]
    """Plain texts, and conversations that go through the model's chat template."""
    digest: str
    """SHA-256 of the file, or of the text."""
    importance: Mapping[str, Importance] | None = None
    """Importance matrix in place of documents: no text goes through the model."""


@dataclass(frozen=True, slots=True)
class TextSample:
    """The windows that a calibration reads, and how many there are."""

    windows: Windows
    documents: int
    available: int
    """Tokens of the whole text."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows))

    def said(self) -> dict[str, int]:
        """Return the counts, as plain JSON."""
        longest = max(map(len, self.windows), default=0)
        return {
            "documents": self.documents, "tokens": self.tokens, "of": self.available,
            "windows": len(self.windows), "longest": longest,
        }  # fmt: skip


def read_text(path: Path) -> Text:
    """Read a file: plain UTF-8, `.jsonl` with a `text` or `messages` in each line, or an importance
    matrix of llama.cpp in GGUF.

    Raises `InvalidRequest` naming the file and the line; `ModelFileError` for a damaged matrix.
    """
    if is_imatrix(path):
        return Text(path.name, "the user's", (), file_sha256(path), read_imatrix(path))
    with file_errors(InvalidRequest, f"{path} cannot be read", "text"):
        size = path.stat().st_size
        data = path.read_bytes() if path.is_file() and size <= MOST_BYTES else None
    if data is None:
        raise InvalidRequest(
            f"{path} must be a file of at most {MOST_BYTES >> 20} MiB", param="text"
        )
    digest = hashlib.sha256(data).hexdigest()
    try:
        whole = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{path} is not UTF-8 at byte {error.start}; a text or JSONL file is needed",
            param="text",
        ) from None
    if "\0" in whole:
        raise InvalidRequest(f"{path} holds NUL bytes; a text file is needed", param="text")
    found: tuple[Any, ...] = (whole,)
    if path.suffix == ".jsonl":
        lines = enumerate(whole.split("\n"), 1)
        found = tuple(_document(line, path, at) for at, line in lines if line.strip())
    return Text(path.name, "the user's", found, digest)


def _document(line: str, path: Path, at: int) -> str | tuple[Mapping[str, Any], ...]:
    try:
        row = any_json(line.encode())
    except ValueError as error:
        raise InvalidRequest(f"{path}:{at}: not JSON: {error}", param="text") from None
    if isinstance(row, dict):
        if isinstance(text := row.get("text"), str):
            return text
        messages = row.get("messages")
        if isinstance(messages, list) and all(isinstance(one, dict) for one in messages):
            return tuple(messages)
    raise InvalidRequest(
        f"{path}:{at}: must be an object with a string `text` or a list `messages`", param="text"
    )


def sample(text: Text, files: ModelFiles, tokens: int = TOKENS) -> TextSample:
    """Cut the documents into windows and choose some, evenly over the text, of about `tokens`
    tokens in all: at least that number if the text has it, and less than a window more. Raises
    `InvalidRequest` for a text without two tokens, and what encoding raises.
    """
    length = min(WINDOW, files.arch.max_context)
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    before = list(tokenizer.encode("", add_bos=True))
    cut, available = [], 0
    for piece in _rendered(text.documents, files):
        # A rendered conversation has its own first token.
        ids, chat = tokenizer.encode(piece[0]), piece[1]
        available += len(ids)
        start = [] if chat else before
        step = max(1, length - len(start))
        cut += [[*start, *ids[at : at + step]] for at in range(0, len(ids), step)]
    long = [one for one in cut if len(one) >= LEAST] or cut[:1]
    windows = tuple(np.array(one, np.int64) for one in _evenly(long, tokens))
    if sum(map(len, windows)) < 2:
        raise InvalidRequest(
            f"{text.name} has {available} tokens; calibration needs at least 2", param="text"
        )
    return TextSample(windows, len(text.documents), available)


def _evenly(cut: Sequence[Sequence[int]], tokens: int) -> Iterator[Sequence[int]]:
    """Yield each window at whose end the chosen tokens would fall short of their share."""
    total, end, chosen = sum(map(len, cut)), 0, 0
    for one in cut:
        end += len(one)
        if chosen * total < tokens * end:
            chosen += len(one)
            yield one


def _rendered(documents: Sequence[Any], files: ModelFiles) -> Iterator[tuple[str, bool]]:
    templates = None
    for one in documents:
        if isinstance(one, str):
            yield one, False
            continue
        templates = templates or ChatTemplates(files)
        yield templates.render(list(one), add_generation_prompt=False), True
