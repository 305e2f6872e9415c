"""Decoding of windows: greedy, sampled or with beams, at the first acceptable temperature.

A job is a generator. It yields lists of requests about its window (`Ask`) and is sent the answers.
So the engine computes the requests of many jobs in one step; a job knows nothing of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..base.outputs import Output
from ..base.sampling import SamplingParams
from ..base.spec import InputSpan, RequestSpec
from ..base.step import TokenLogprobs
from ..loader.whisper_files import WhisperFiles
from .rules import rules_of

MOST_BEAMS = 8
"""Most beams of a search."""
LONGEST = 224
"""Largest number of tokens of a window: half of the decoder's context."""


class Ask(NamedTuple):
    """A request about a window: `base.request.Request` without a name."""

    prompt: list[int]
    spec: RequestSpec


class WindowAnswer(NamedTuple):
    """The answer to a request."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]
    """Log-probabilities of each token; empty unless requested."""
    scores: list[TokenLogprobs]
    """Log-probabilities of each token of the prompt except the first; empty unless requested."""
    output: Output | None = None


Asking = Generator[list[Ask], list[WindowAnswer], "Utterance"]


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
    """Thresholds for a sure silence, which also drops likelier texts, such as "you"."""
    condition: bool = True
    """Condition a window on the earlier text."""
    short: bool = False
    """Encode a window only as long as its sound. This is cheaper, but the model was not trained for
    it: use it for text shown while the speaker still speaks."""


@dataclass(slots=True)
class Utterance:
    """Transcription of a window."""

    tokens: list[int] = field(default_factory=list)
    """Tokens with timestamps, without the end."""
    log_share: float = 0.0
    """Mean log probability of the tokens, including the end."""
    no_speech: float = 0.0
    temperature: float = 0.0
    compression: float = 1.0
    log_shares: list[float] = field(default_factory=list)
    """Log probability of each token."""

    def silent(self, options: DecodingOptions) -> bool:
        """Return whether the text was hallucinated in silence, by OpenAI's rule or the one for a
        sure silence."""
        if self.no_speech > options.sure_silence and self.log_share <= options.sure_log_share:
            return True
        return self.no_speech > options.most_silence and self.log_share <= options.least_log_share


def compression(text: str) -> float:
    """Return a text's bytes divided by its zlib-compressed bytes: high for repetition."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 0.0


def detect(files: WhisperFiles, window: InputSpan) -> Generator[list[Ask], list[WindowAnswer], str]:
    """Detect the likeliest language of a window."""
    languages = files.special.languages
    if not languages:
        return "en"
    (said,) = yield [_one_of(window, [files.special.start], [*languages.values()])]
    return next(code for code, token in languages.items() if token == said.tokens[0])


def _one_of(window: InputSpan, prompt: list[int], allowed: list[int]) -> Ask:
    """Ask for the likeliest token of a list, with its log-probability among all tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=allowed, logprobs=0)
    return Ask(prompt, RequestSpec(sampling, 0, inputs=(window,)))


def decode_window(
    files: WhisperFiles,
    options: DecodingOptions,
    language: str,
    before: Sequence[int],
    window: InputSpan,
    place: int,
) -> Asking:
    """Decode a window, at the first temperature with an acceptable text.

    `before`: earlier tokens, of which the last are used; `place`: number of the window in its
    sound, which sets the random draws.
    """
    prefix = _prefix(files, options, language, before)
    spoken, silence = Utterance(), None
    for temperature in options.temperatures:
        asking = _Asking(files, prefix, window, options.times, silence)
        if temperature == 0 and options.beams > 1:
            spoken = yield from _beams(asking, options.beams)
        else:
            seed = (options.seed << 40) + (place << 12) + round(temperature * 1000)
            spoken = yield from _one(asking, temperature, seed % 2**64)
        silence, spoken.temperature = spoken.no_speech, temperature
        text = files.tokenizer.decode(spoken.tokens, skip_special_tokens=True)
        spoken.compression = compression(text)
        if spoken.silent(options):
            break
        loops = spoken.compression > options.most_compression
        if not loops and spoken.log_share >= options.least_log_share:
            break
    return spoken


def task_prefix(files: WhisperFiles, options: DecodingOptions, language: str) -> list[int]:
    """Return the tokens that state language and task."""
    special = files.special
    if not special.languages:
        return [special.start]
    task = special.translate if options.task == "translate" else special.transcribe
    return [special.start, special.languages[language], task]


def _prefix(
    files: WhisperFiles, options: DecodingOptions, language: str, before: Sequence[int]
) -> list[int]:
    special = files.special
    prefix = task_prefix(files, options, language)
    if not options.times:
        prefix.append(special.no_timestamps)
    if before:
        prefix = [special.previous, *before[-(files.positions // 2 - 1) :], *prefix]
    return prefix


@dataclass(frozen=True, slots=True)
class _Asking:
    """A window and the tokens before its text."""

    files: WhisperFiles
    prefix: list[int]
    window: InputSpan
    times: bool
    silence: float | None
    """Probability of silence, if known."""

    @property
    def longest(self) -> int:
        positions = self.files.positions
        return min(LONGEST, positions // 2, positions - len(self.prefix))

    def text(
        self, said: list[int], most: int, *, temperature: float = 0.0, seed: int = 0, top: int = 0
    ) -> Ask:
        """Ask for at most `most` tokens after `said`; `top`: number of likeliest ids reported with
        each."""
        rules = rules_of(self.files, times=self.times, begin=len(self.prefix), most=top)
        sampling = SamplingParams(temperature=temperature, max_tokens=most)
        stops = (self.files.special.end,)
        spec = RequestSpec(sampling, seed, stops, inputs=(self.window,), rules=rules)
        return Ask(self.prefix + said, spec)

    def begin(
        self, first: Ask
    ) -> Generator[list[Ask], list[WindowAnswer], tuple[float, WindowAnswer]]:
        """Ask at the same time for the probability of silence, unless known; return both."""
        if self.silence is not None:
            (said,) = yield [first]
            return self.silence, said
        special = self.files.special
        before = self.prefix[: self.prefix.index(special.start) + 1]
        silent, said = yield [_one_of(self.window, before, [special.no_speech]), first]
        return float(np.exp(silent.logprobs[0].logprob)), said


def _one(asking: _Asking, temperature: float, seed: int) -> Asking:
    """Choose the likeliest token each time, or at a temperature above 0 a sampled one."""
    ask = asking.text([], asking.longest, temperature=temperature, seed=seed)
    silence, said = yield from asking.begin(ask)
    shares = [one.logprob for one in said.logprobs]
    tokens, total = said.tokens, sum(shares)
    if tokens[-1] == asking.files.special.end:
        tokens, shares = tokens[:-1], shares[:-1]
    return Utterance(tokens, total / (len(tokens) + 1), silence, log_shares=shares)


class _Beam(NamedTuple):
    tokens: list[int]
    shares: list[float]
    """Log probability of each token."""
    total: float = 0.0


def _beams(asking: _Asking, width: int) -> Asking:
    """Search with beams like OpenAI's code, patience 1: stop when `width` texts have ended; the
    best has the highest mean. Each beam is a request for one token, whose prompt is in the prefix
    index."""
    end, top = asking.files.special.end, width + 1
    silence, first = yield from asking.begin(asking.text([], 1, top=top))
    beams, rows = [_Beam([], [])], [first]
    ended: list[tuple[float, _Beam]] = []
    for at in range(asking.longest):
        found = []
        for beam, row in zip(beams, rows, strict=True):
            (likely,) = row.logprobs
            for token, share in zip(likely.top_ids, likely.top_logprobs, strict=True):
                if share > -np.inf:
                    found.append((beam.total + share, token, share, beam))
        found.sort(key=lambda one: (-one[0], one[1]))
        chosen: list[_Beam] = []
        for total, token, share, beam in found:
            if token == end:
                ended.append((total, beam))
            else:
                chosen.append(_Beam([*beam.tokens, token], [*beam.shares, share], total))
            if len(chosen) == width:
                break
        if len(ended) >= width or not chosen:
            break
        beams = chosen
        if at + 1 < asking.longest:
            rows = yield [asking.text(beam.tokens, 1, top=top) for beam in beams]
    ended = ended or [(beam.total, beam) for beam in beams]
    total, best = max(ended, key=lambda one: one[0] / (len(one[1].tokens) + 1))
    return Utterance(best.tokens, total / (len(best.tokens) + 1), silence, log_shares=best.shares)
