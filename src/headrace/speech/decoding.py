"""Decoding of a window to tokens: greedy, by beams or sampled, as a generator of wishes.

A job (walk) is a generator. It yields the computations that it needs (`Encode`, `Decode`) and is
sent the results. So the scheduler can compute the wishes of many walks in one step; a walk knows
nothing of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .files import WhisperFiles
from .network import Chunk
from .rules import Rules, log_softmax

Floats = npt.NDArray[np.float32]
MOST_BEAMS = 8
"""Widest search."""
LONGEST = 224
"""Largest number of tokens of a window: half of the decoder's context."""


class Encode(NamedTuple):
    """Wish to fill the window's slot from samples."""

    samples: Floats
    window: int
    short: bool = False
    words: bool = False
    """Keep what the times of words need."""


class Decode(NamedTuple):
    """Wish for a step; the answer is logits [R, vocab], valid until the next yield."""

    chunks: list[Chunk]


class Copy(NamedTuple):
    """Wish to copy the first `length` positions of sequence `source` to `target`."""

    source: int
    target: int
    length: int


Wish = Encode | Decode | Copy
Walk = Generator[Wish, Floats, "Utterance"]


@dataclass(frozen=True, slots=True)
class DecodingOptions:
    """Decoding options of a window; the defaults are OpenAI's."""

    language: str | None = None
    """Language code; None: detected from the first window."""
    task: str = "transcribe"
    prompt: str = ""
    times: bool = True
    beams: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    """Temperatures, tried in order until a text is neither a loop nor unlikely."""
    seed: int = 0
    most_compression: float = 2.4
    least_log_share: float = -1.0
    most_silence: float = 0.6
    """Probability of silence above which an unlikely text is left out."""
    sure_silence: float = 0.75
    sure_log_share: float = -0.7
    """Probabilities with which a sure silence also leaves out likelier texts: "you" is one of
    them."""
    condition: bool = True
    """Condition a window on the earlier text."""
    short: bool = False
    """Encode a window no longer than its sound. That is cheaper, but the model did not learn it:
    for text shown while the speaker still speaks."""


@dataclass(slots=True)
class Utterance:
    """Transcription of a window."""

    tokens: list[int] = field(default_factory=list)
    """Tokens with timestamps, without the end."""
    log_share: float = 0.0
    """Mean log probability of the tokens, the end among them."""
    no_speech: float = 0.0
    temperature: float = 0.0
    compression: float = 1.0
    log_shares: list[float] = field(default_factory=list)
    """Log probability of each token."""

    def silent(self, options: DecodingOptions) -> bool:
        """Tell whether the text was invented in silence, by OpenAI's rule or the one for a sure
        silence."""
        if self.no_speech > options.sure_silence and self.log_share <= options.sure_log_share:
            return True
        return self.no_speech > options.most_silence and self.log_share <= options.least_log_share


def compression(text: str) -> float:
    """Return a text's bytes divided by its zlib-compressed bytes: high for repetition."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def detect(
    files: WhisperFiles, window: int, sequence: int
) -> Generator[Wish, Floats, tuple[str, float]]:
    """Detect the likeliest language of an encoded window; return it and its probability."""
    languages = files.special.languages
    if not languages:
        return "en", 1.0
    logits = yield Decode([Chunk(sequence, window, 0, [files.special.start], [0])])
    ids = np.fromiter(languages.values(), np.int64)
    shares = np.exp(log_softmax(logits[0][ids]))
    best = int(shares.argmax())
    return list(languages)[best], float(shares[best])


def decode_window(
    files: WhisperFiles,
    options: DecodingOptions,
    language: str,
    before: Sequence[int],
    window: int,
    sequences: Sequence[int],
    place: int,
) -> Walk:
    """Decode an encoded window, at the first temperature with an acceptable text.

    `before`: earlier tokens, the last of them are used; `sequences`: slots of its own, one for each
    beam; `place`: number of the window in its sound, which sets the random draws.
    """
    prefix = _prefix(files, options, language, before)
    spoken = Utterance()
    for temperature in options.temperatures:
        rules = Rules(files, times=options.times)
        if temperature == 0 and options.beams > 1:
            spoken = yield from _beams(files, rules, prefix, options.beams, window, sequences)
        else:
            draw = np.random.default_rng((options.seed, place, round(temperature * 1000)))
            spoken = yield from _one(files, rules, prefix, window, sequences[0], temperature, draw)
        spoken.temperature = temperature
        text = files.tokenizer.decode(spoken.tokens, skip_special_tokens=True)
        spoken.compression = compression(text)
        if spoken.silent(options):
            break
        loops = spoken.compression > options.most_compression
        if not loops and spoken.log_share >= options.least_log_share:
            break
    return spoken


def _prefix(
    files: WhisperFiles, options: DecodingOptions, language: str, before: Sequence[int]
) -> list[int]:
    special = files.special
    prefix = [special.start]
    if special.languages:
        task = special.translate if options.task == "translate" else special.transcribe
        prefix += [special.languages[language], task]
    if not options.times:
        prefix.append(special.no_timestamps)
    if before:
        prefix = [special.previous, *before[-(files.positions // 2 - 1) :], *prefix]
    return prefix


def _begin(
    files: WhisperFiles, prefix: list[int], window: int, sequence: int
) -> Generator[Wish, Floats, tuple[float, Floats]]:
    """Process the prefix; return the probability of silence, and the logits after the prefix."""
    start = prefix.index(files.special.start)
    wanted = sorted({start, len(prefix) - 1})
    logits = yield Decode([Chunk(sequence, window, 0, prefix, wanted)])
    silence = float(np.exp(log_softmax(logits[0])[files.special.no_speech]))
    return silence, logits[-1].copy()


def _longest(files: WhisperFiles, prefix: list[int]) -> int:
    return min(LONGEST, files.positions // 2, files.positions - len(prefix))


def _one(
    files: WhisperFiles,
    rules: Rules,
    prefix: list[int],
    window: int,
    sequence: int,
    temperature: float,
    draw: np.random.Generator,
) -> Walk:
    """Choose the likeliest token each time, or at a temperature above 0 a sampled one."""
    spoken = Utterance()
    spoken.no_speech, logits = yield from _begin(files, prefix, window, sequence)
    total = 0.0
    for at in range(_longest(files, prefix)):
        shares = rules.log_shares(logits, spoken.tokens)
        if temperature:
            noise = -np.log(-np.log(draw.uniform(1e-12, 1.0 - 1e-12, len(shares))))
            token = int(np.argmax(shares / temperature + noise))
        else:
            token = int(shares.argmax())
        total += float(shares[token])
        if token == files.special.end:
            break
        spoken.tokens.append(token)
        spoken.log_shares.append(float(shares[token]))
        chunk = Chunk(sequence, window, len(prefix) + at, [token], [0])
        logits = (yield Decode([chunk]))[0]
    spoken.log_share = total / (len(spoken.tokens) + 1)
    return spoken


class _Beam(NamedTuple):
    tokens: list[int]
    shares: list[float]
    """Log probability of each token."""
    sequence: int
    total: float = 0.0


def _beams(
    files: WhisperFiles,
    rules: Rules,
    prefix: list[int],
    width: int,
    window: int,
    sequences: Sequence[int],
) -> Walk:
    """Search with beams like OpenAI's code, patience 1: stop when `width` texts have ended; the
    best is the one of the highest mean."""
    silence, logits = yield from _begin(files, prefix, window, sequences[0])
    beams = [_Beam([], [], sequences[0])]
    rows = logits[None]
    ended: list[tuple[float, _Beam]] = []
    for at in range(_longest(files, prefix)):
        found = []
        for beam, row in zip(beams, rows, strict=True):
            shares = rules.log_shares(row, beam.tokens)
            for token in np.argpartition(-shares, width)[: width + 1]:
                if shares[token] > -np.inf:
                    found.append((beam.total + float(shares[token]), int(token), beam))
        found.sort(key=lambda one: (-one[0], one[1]))
        chosen: list[tuple[float, int, _Beam]] = []
        for total, token, beam in found:
            if token == files.special.end:
                ended.append((total, beam))
            else:
                chosen.append((total, token, beam))
            if len(chosen) == width:
                break
        if len(ended) >= width or not chosen:
            break
        beams = yield from _place(chosen, sequences, len(prefix) + at)
        chunks = [
            Chunk(beam.sequence, window, len(prefix) + at, [beam.tokens[-1]], [0]) for beam in beams
        ]
        rows = (yield Decode(chunks)).copy()
    ended = ended or [(beam.total, beam) for beam in beams]
    total, best = max(ended, key=lambda one: one[0] / (len(one[1].tokens) + 1))
    return Utterance(best.tokens, total / (len(best.tokens) + 1), silence, log_shares=best.shares)


def _place(
    chosen: Sequence[tuple[float, int, _Beam]], sequences: Sequence[int], length: int
) -> Generator[Wish, Floats, list[_Beam]]:
    """Place beams in slots: the first child of a beam keeps its slot, others get a copy in a free
    slot."""
    stay: dict[int, int] = {}
    for i, (_, _, beam) in enumerate(chosen):
        stay.setdefault(beam.sequence, i)
    free = [slot for slot in sequences if slot not in stay]
    placed = []
    for i, (total, token, beam) in enumerate(chosen):
        slot = beam.sequence
        if stay[slot] != i:
            slot = free.pop()
            yield Copy(beam.sequence, slot, length)
        shares = [*beam.shares, total - beam.total]
        placed.append(_Beam([*beam.tokens, token], shares, slot, total))
    return placed
