"""Voices of foreign programs: the files next to an ONNX file, and the inputs of its runs.

Two kinds are recognised by their files and inputs. *Piper* (VITS): NAME.onnx.json has the id of
each phoneme; phonemes come from espeak-ng. *Kokoro*: vocab.json has the ids, voices.npz a style for
each number of phonemes; those of Japanese voices come from kana.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from ..loader.jsonfile import read_json
from ..programs.files import read
from ..programs.onnx import Port
from .espeak import LANGUAGE, phonemes
from .kana import kana_phonemes

Floats = npt.NDArray[np.float32]
Spoken = Callable[..., str]
"""Makes the phonemes of a piece of text. If it starts a process, `on_child` gets it."""
PIPER_INPUTS = ("input", "input_lengths", "scales")
KOKORO_INPUTS = ("tokens", "style", "speed")
MOST_SYMBOLS = {"piper": 480, "kokoro": 150}
"""Most phonemes of a run, since memory and time grow with them: an 8-bit Kokoro takes a processor
second per second of sound, and a run has a time limit."""
_MOST_RATE, _MOST_IDS, _MOST_VOICES, _MOST_STYLES = 192_000, 65_536, 1_024, 256 << 20
_NAME = re.compile(r"[\w.+-]{1,64}")
_START, _PAD, _END = "^", "_", "$"


class ProgramVoice(Protocol):
    """One program's voices."""

    @property
    def rate(self) -> int:
        """Samples a second."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def pause(self) -> float:
        """Seconds of silence between two sentences."""

    @property
    def most(self) -> int:
        """Most phonemes of a run at speed 1."""

    @property
    def sample(self) -> str:
        """A text that it can speak, as an example."""

    def spoken(self, voice: str) -> Spoken:
        """Return the function that converts text to phonemes for a voice. Raises `InvalidRequest`
        if there is none for its language."""

    def check(self, text: str) -> None:
        """Raise `InvalidRequest` for a text without phonemes, if no other process detects it."""

    def unknown(self, symbols: str) -> str:
        """Return the first symbol without an id, or ""."""

    def feed(self, symbols: str, voice: str, speed: float) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs of a run; symbols without an id are left out."""


@dataclass(frozen=True, slots=True)
class PiperVoice:
    """A VITS of Piper, of one or several speakers."""

    rate: int
    names: tuple[str, ...]
    language: str
    """Voice of espeak-ng."""
    ids: Mapping[str, tuple[int, ...]]
    scales: tuple[float, float, float]
    """Noise, length, noise of durations."""
    speakers: Mapping[str, int]
    """Number of each voice; empty: the program has a single voice."""
    pause: float = 0.2
    most: int = MOST_SYMBOLS["piper"]
    sample: str = "1, 2, 3."

    def spoken(self, voice: str) -> Spoken:
        return partial(phonemes, language=self.language)

    def check(self, text: str) -> None:
        """Do nothing: espeak-ng spells unknown characters."""

    def unknown(self, symbols: str) -> str:
        return next((one for one in symbols if one not in self.ids), "")

    def feed(self, symbols: str, voice: str, speed: float) -> dict[str, npt.NDArray[Any]]:
        found = [*self.ids[_START], *self.ids[_PAD]]
        for one in symbols:
            if own := self.ids.get(one):
                found += [*own, *self.ids[_PAD]]
        found += self.ids[_END]
        noise, length, durations = self.scales
        fed: dict[str, npt.NDArray[Any]] = {
            "input": np.array([found], np.int64),
            "input_lengths": np.array([len(found)], np.int64),
            "scales": np.array([noise, length / speed, durations], np.float32),
        }
        if self.speakers:
            fed["sid"] = np.array([self.speakers[voice]], np.int64)
        return fed


@dataclass(frozen=True, slots=True, eq=False)
class KokoroVoice:
    """A Kokoro with the styles of its voices."""

    ids: Mapping[str, int]
    styles: Mapping[str, Floats]
    """Style [rows, size] of each voice; row n - 1 is for n phonemes."""
    rate: int = 24_000
    pause: float = 0.0
    sample: str = "1, 2, 3."

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.styles)

    @property
    def most(self) -> int:
        return min(MOST_SYMBOLS["kokoro"], *(len(one) for one in self.styles.values()))

    def spoken(self, voice: str) -> Spoken:
        if not voice.startswith("j"):  # By the authors' names: jf_alpha is Japanese.
            raise InvalidRequest(
                f"no phonemes can be made here for the language of {voice}; send phonemes",
                param="voice",
            )
        return _of_kana

    def check(self, text: str) -> None:
        kana_phonemes(text)

    def unknown(self, symbols: str) -> str:
        return next((one for one in symbols if one not in self.ids), "")

    def feed(self, symbols: str, voice: str, speed: float) -> dict[str, npt.NDArray[Any]]:
        found = [self.ids[one] for one in symbols if one in self.ids]
        style = self.styles[voice]
        return {
            "tokens": np.array([[0, *found, 0]], np.int64),
            "style": style[None, min(max(1, len(found)), len(style)) - 1],
            "speed": np.array([speed], np.float32),
        }


def _of_kana(text: str, *, on_child: object = None) -> str:
    return kana_phonemes(text)


def open_program_voice(path: Path, inputs: Mapping[str, Port]) -> ProgramVoice | None:
    """Open the voice of an ONNX file with these inputs; None: its files are not a voice's.

    Raises `ModelFileError` and `UnsupportedModel` for a voice's files with errors.
    """
    config = path.with_name(f"{path.name}.json")
    if set(PIPER_INPUTS) <= inputs.keys() and config.is_file():
        return _piper(config, inputs)
    vocabulary, styles = path.with_name("vocab.json"), path.with_name("voices.npz")
    if set(KOKORO_INPUTS) <= inputs.keys() and vocabulary.is_file() and styles.is_file():
        return _kokoro(vocabulary, styles, inputs)
    return None


def _takes(name: str, inputs: Mapping[str, Port], wanted: Mapping[str, tuple[str, int]]) -> None:
    """Raise `UnsupportedModel` unless the inputs are these, by type and number of dimensions."""
    for one, (kind, rank) in wanted.items():
        port = inputs.get(one)
        if port is None or port.type != kind or len(port.dims or ()) != rank:
            raise UnsupportedModel(f"{name}: the program takes no {one} of {kind} in {rank} sizes")
    if strange := inputs.keys() - wanted.keys():
        raise UnsupportedModel(f"{name}: nothing is known of the program's input {min(strange)}")


def _piper(path: Path, inputs: Mapping[str, Port]) -> PiperVoice:
    said, name = read_json(path), path.name
    wanted = {"input": ("int64", 2), "input_lengths": ("int64", 1), "scales": ("float32", 1)}
    speakers = said.get("speaker_id_map") or {}
    if several := said.get("num_speakers", 1) != 1:
        wanted["sid"] = ("int64", 1)
    _takes(name, inputs, wanted)
    kind = said.get("phoneme_type", "espeak")
    if kind != "espeak":
        raise UnsupportedModel(f"{name}: phoneme_type {kind!r:.40} is not read; allowed: 'espeak'")
    language = _at(said, name, "espeak", "voice")
    if not isinstance(language, str) or not LANGUAGE.fullmatch(language):
        raise ModelFileError(f"{name}: espeak.voice must be a voice of espeak-ng, such as en-us")
    rate = _at(said, name, "audio", "sample_rate")
    if type(rate) is not int or not 8_000 <= rate <= _MOST_RATE:
        raise ModelFileError(f"{name}: audio.sample_rate must be from 8,000 to {_MOST_RATE:,}")
    inference = said.get("inference")
    numbers = inference if isinstance(inference, dict) else {}
    scales = (
        _number(numbers.get("noise_scale", 0.667), f"{name}: inference.noise_scale", 0.0),
        _number(numbers.get("length_scale", 1.0), f"{name}: inference.length_scale", 0.05),
        _number(numbers.get("noise_w", 0.8), f"{name}: inference.noise_w", 0.0),
    )
    if not isinstance(speakers, dict) or len(speakers) > _MOST_VOICES:
        raise ModelFileError(f"{name}: speaker_id_map must have at most {_MOST_VOICES:,} names")
    if several:
        if not speakers or not all(_NAME.fullmatch(one) for one in speakers):
            raise ModelFileError(f"{name}: speaker_id_map must name the speakers")
        numbered = {one: _id(number, f"{name}: speaker_id_map") for one, number in speakers.items()}
    else:
        numbered = {}
    own = said.get("dataset")
    named = own if isinstance(own, str) and _NAME.fullmatch(own) else "default"
    return PiperVoice(
        rate, tuple(numbered) or (named,), language, _piper_ids(said, name), scales, numbered
    )


def _piper_ids(said: Mapping[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    listed = said.get("phoneme_id_map")
    what = f"{name}: phoneme_id_map"
    if not isinstance(listed, dict) or not {_START, _PAD, _END} <= listed.keys():
        raise ModelFileError(f"{what} must have ids of phonemes, and of {_START} {_PAD} {_END}")
    found = {}
    for symbol, ids in listed.items():
        if len(symbol) != 1 or not isinstance(ids, list) or not 0 < len(ids) <= 8:
            raise ModelFileError(f"{what} must have lists of ids for single characters")
        found[symbol] = tuple(_id(one, what) for one in ids)
    return found


def _kokoro(vocabulary: Path, styles: Path, inputs: Mapping[str, Port]) -> KokoroVoice:
    name = vocabulary.name
    _takes(name, inputs, {"tokens": ("int64", 2), "style": ("float32", 2), "speed": ("float32", 1)})
    said = read_json(vocabulary)
    listed = said.get("vocab", said)
    if not isinstance(listed, dict) or not 0 < len(listed) <= _MOST_IDS:
        raise ModelFileError(f"{name} must have the ids of symbols")
    ids = {}
    for symbol, one in listed.items():
        if len(symbol) != 1:
            raise ModelFileError(f"{name}: {symbol!r:.40} is no single character")
        ids[symbol] = _id(one, name)
    size = (inputs["style"].dims or ())[-1]
    return KokoroVoice(ids, _styles(styles, size if isinstance(size, int) else 256))


def _styles(path: Path, size: int) -> dict[str, Floats]:
    data, name = read(path, _MOST_STYLES), path.name
    found: dict[str, Floats] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if len(members) > _MOST_VOICES or sum(m.file_size for m in members) > _MOST_STYLES:
                raise ValueError
        for voice, value in np.load(io.BytesIO(data), allow_pickle=False).items():
            kind = value.dtype, value.shape[-1:]
            if not _NAME.fullmatch(voice) or kind != (np.float32, (size,)):
                raise ValueError
            rows = np.ascontiguousarray(value.reshape(-1, size))
            if not len(rows) or not np.isfinite(rows).all():
                raise ValueError
            found[voice] = rows
    except Exception:  # noqa: BLE001 - headers are Python's syntax, and fail in many ways
        found = {}
    if not found:
        raise ModelFileError(
            f"{name} must have float32 styles of {size} numbers by the names of voices, in at most "
            f"{_MOST_STYLES >> 20} MiB"
        )
    return found


def _at(said: Mapping[str, Any], name: str, outer: str, inner: str) -> Any:
    held = said.get(outer)
    if not isinstance(held, dict) or inner not in held:
        raise ModelFileError(f"{name}: {outer}.{inner} is missing")
    return held[inner]


def _number(value: object, what: str, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelFileError(f"{what} must be a number")
    if not least <= value <= 20:  # NaN is not.
        raise ModelFileError(f"{what} must be from {least:g} to 20, not {value!r:.40}")
    return float(value)


def _id(value: object, what: str) -> int:
    if type(value) is not int or not 0 <= value < _MOST_IDS:
        raise ModelFileError(f"{what}: an id must be a number below {_MOST_IDS:,}")
    return value
