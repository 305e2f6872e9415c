"""Speech synthesis (TTS) files of a folder with a language model: `speech.json`, and its codec.

Such a model (Orpheus' form) is a language model whose vocabulary ends with the codes of a codec:
all codes of a frame's first place, then of the next, and so on. It writes a frame code by code, in
the order of `CodecFiles.levels`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import HeadraceError, InvalidRequest, ModelFileError
from ..base.names import nearest
from ..base.sampling import SamplingParams
from ..loader.jsonfile import read_json
from .codec_files import CodecFiles, open_codec

FILE = "speech.json"
_FIELDS = {"codec", "voices", "prompt", "first_code", "end", "sampling"}
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_MOST_VOICES, _MOST_PROMPT = 1_024, 64
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True)
class VoiceFiles:
    """Prompt format of a folder's model, and the meaning of its tokens."""

    codec: CodecFiles
    voices: tuple[str, ...]
    prompt: tuple[int | str, ...]
    """Token ids, and texts in which {voice} and {text} stand for the request's own."""
    first_code: int
    """Token of code 0 of a frame's first place."""
    end: int
    """Token that ends a sound."""
    sampling: Mapping[str, Any]
    """Sampling that the authors recommend: fields of `SamplingParams`."""

    @property
    def last_code(self) -> int:
        return self.first_code + len(self.codec.levels) * self.codec.codes - 1

    def ids(self, encode: Callable[[str], list[int]], voice: str, text: str) -> list[int]:
        """Return the prompt of a request. Raises `InvalidRequest` for an unknown voice."""
        check_voice(voice, self.voices)
        found: list[int] = []
        for part in self.prompt:
            if isinstance(part, int):
                found.append(part)
            else:
                # The request's text is inserted last, because it may contain braces.
                head, mark, rest = part.replace("{voice}", voice).partition("{text}")
                found += encode(head + text * bool(mark) + rest)
        return found


def check_voice(voice: str, voices: Sequence[str]) -> None:
    """Raise `InvalidRequest` for an unknown voice."""
    if voice not in voices:
        shown = ", ".join(voices[:20]) + (", …" if len(voices) > 20 else "")
        raise InvalidRequest(
            f"there is no voice {voice!r:.100}{nearest(voice, voices)}; there are {shown}",
            param="voice",
        )


def open_voices(folder: Path, vocabulary: int) -> VoiceFiles:
    """Read `speech.json` and open its codec. `vocabulary`: size of the language model's. Raises
    `ModelFileError`, `UnsupportedModel`."""
    said = read_json(folder / FILE)
    unknown = sorted(set(said) - _FIELDS)
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise ModelFileError(f"{FILE}: {unknown[0]!r:.60} is none of its fields: {known}")
    name = said.get("codec")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        raise ModelFileError(f"{FILE}: codec must name a folder beside it")
    codec = open_codec(folder / name)
    voices = said.get("voices")
    if (
        not isinstance(voices, list)
        or not 0 < len(voices) <= _MOST_VOICES
        or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in voices)
    ):
        raise ModelFileError(f"{FILE}: voices must be a list of names (letters, digits, _ . -)")
    prompt = said.get("prompt")
    if not isinstance(prompt, list) or not 0 < len(prompt) <= _MOST_PROMPT:
        raise ModelFileError(f"{FILE}: prompt must be a list of token ids and texts")
    for part in prompt:
        if not isinstance(part, str):
            _token(part, "prompt", vocabulary)
    if sum(isinstance(part, str) and part.count("{text}") for part in prompt) != 1:
        raise ModelFileError(f"{FILE}: prompt must have {{text}} in one of its texts, once")
    first = _token(said.get("first_code"), "first_code", vocabulary)
    found = VoiceFiles(
        codec,
        tuple(dict.fromkeys(voices)),
        tuple(prompt),
        first,
        _token(said.get("end"), "end", vocabulary),
        _sampling(said.get("sampling", {})),
    )
    if found.last_code >= vocabulary:
        raise ModelFileError(
            f"{FILE}: first_code: the last code is token {found.last_code:,}, and the vocabulary "
            f"has {vocabulary:,}"
        )
    return found


def _token(value: object, name: str, vocabulary: int) -> int:
    if type(value) is not int or not 0 <= value < vocabulary:
        raise ModelFileError(f"{FILE}: {name} must be a token id below {vocabulary:,}")
    return value


def _sampling(value: object) -> dict[str, Any]:
    if not isinstance(value, dict) or not set(value) <= _SAMPLING:
        raise ModelFileError(f"{FILE}: sampling may have {', '.join(sorted(_SAMPLING))}")
    try:
        SamplingParams(**value).verify()
    except HeadraceError as error:
        raise ModelFileError(f"{FILE}: sampling: {error.message}") from None
    return value


class FrameReader:
    """Converter of one sound's tokens to frames of codes.

    A token that is not a code of the next place is dropped and counted; the model continues at the
    same place.
    """

    def __init__(self, files: VoiceFiles) -> None:
        self._first, self._codes = files.first_code, files.codec.codes
        self._places = len(files.codec.levels)
        self._open: list[int] = []
        self.dropped = 0
        """Number of tokens that were not codes of their place, except the one that ends a sound."""
        self._end = files.end

    def take(self, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the frames [n, places] that these tokens complete."""
        for token in tokens:
            code = token - self._first - len(self._open) % self._places * self._codes
            if 0 <= code < self._codes:
                self._open.append(code)
            elif token != self._end:
                self.dropped += 1
        whole = len(self._open) // self._places * self._places
        found = np.array(self._open[:whole], np.int64).reshape(-1, self._places)
        del self._open[:whole]
        return found
