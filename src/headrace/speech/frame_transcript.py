"""Conversion of a sound to segments by a model that transcribes each stretch independently:
Parakeet, with a frame for each token, and Moonshine, without.

Stretches with speech are transcribed independently, many at the same time: no stretch depends on
earlier text. Words have the times of their tokens; a segment ends after a sentence, or before a
pause.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from .conductor import Conductor, Encode
from .decoding import DecodingOptions
from .features import RATE, WINDOW
from .moonshine import MoonshineNetwork
from .parakeet import ParakeetNetwork
from .pauses import USUAL_PAUSES, Pauses
from .transcript import (
    INAUDIBLE,
    Segment,
    Told,
    Transcriber,
    Transcript,
    WindowHeard,
    WindowWanted,
    moved_by,
)
from .transducers import Emission
from .voice import chunks
from .words import Word

Floats = npt.NDArray[np.float32]
PAUSE = 1.0
"""Seconds between two words that separate segments."""
_ENDS = (".", "?", "!", "。", "？", "！")


class FrameTranscriber(Transcriber):
    """Transcriber with a network that transcribes by frames."""

    at_once = True

    def __init__(self, network: ParakeetNetwork | MoonshineNetwork) -> None:
        self.network, self.files = network, network.files
        self.jobs = self.conductor = Conductor(network)

    def sequential(
        self, samples: Floats, options: DecodingOptions, *, words: bool, told: Told
    ) -> Generator[None, None, Transcript]:
        """Transcribe like `chunked`; a sound that fits in a window is one stretch, with any number
        of speakers."""
        return self.chunked(samples, options, words=words, told=told, pauses=None)

    def chunked(
        self,
        samples: Floats,
        options: DecodingOptions,
        *,
        words: bool,
        told: Told,
        pauses: Pauses | None = USUAL_PAUSES,
    ) -> Generator[None, None, Transcript]:
        """Yield until all stretches are transcribed.

        Raises `InvalidRequest` for options that such a model lacks: translation, a prompt, times of
        words.
        """
        if options.task == "translate":
            raise InvalidRequest("this model does not translate", param="model")
        if options.prompt.strip():
            raise InvalidRequest("this model takes no prompt", param="prompt")
        if words and not self.files.frame:
            raise InvalidRequest(
                "this model knows no times of words", param="timestamp_granularities"
            )
        transcript = Transcript(options.language or "", len(samples) / RATE)
        if pauses is None and len(samples) <= WINDOW:
            spans = [(0, len(samples))]
        else:
            spans = yield from chunks(samples, pauses or USUAL_PAUSES)
        done = 0
        for begin, end in [*spans, (len(samples), len(samples))]:
            if begin > done:
                transcript.leave_out(done, begin, "quiet")
            done = end
        audible = []
        for number, (begin, end) in enumerate(spans):
            if begin < end and np.abs(samples[begin:end]).max() > INAUDIBLE:
                audible.append((begin, end))
            if number % 16 == 15:
                yield  # Hours must not be a single computation.
        for begin, end in sorted(set(spans) - set(audible)):
            if begin < end:
                transcript.leave_out(begin, end, "inaudible")
        wanted = [WindowWanted(samples[a:b], [], i) for i, (a, b) in enumerate(audible)]
        with closing(self._run(wanted, self.jobs.share(), options, transcript, words)) as running:
            for found in running:
                if found is None:
                    yield
                    continue
                begin, end = audible[found.place]
                segments = self._spoken(found, begin / RATE, end / RATE, words)
                if not segments:
                    transcript.leave_out(begin, end, "no speech")
                transcript.segments += segments
                told(segments, end / RATE)
        transcript.left_out.sort()
        told([], transcript.seconds)
        return transcript

    def _walk(
        self,
        wanted: WindowWanted,
        options: DecodingOptions,
        transcript: Transcript,
        words: bool,
        window: int,
    ) -> Generator[Any, Any, WindowHeard]:
        yield Encode(wanted.samples, window)
        return WindowHeard(wanted.place, self.network.heard[window], [])

    def _spoken(self, found: WindowHeard, begin: float, end: float, words: bool) -> list[Segment]:
        """Make the segments of a window between two times of its sound."""
        files = self.files
        said: list[Emission] = found.spoken
        frame = files.frame
        if not frame:
            tokens = [one.token for one in said]
            shares = [one.log_share for one in said]
            text = files.tokenizer.decode(tokens).strip()
            mean = float(np.mean(shares)) if shares else 0.0
            whole = Segment(begin, end, " " + text, tokens, shares, log_share=mean)
            return [whole] if text else []
        runs: list[list[Emission]] = []
        pieces = files.bytes_of([one.token for one in said])
        for one, piece in zip(said, pieces, strict=True):
            opens = piece.startswith(b" ") or not runs
            if opens:
                runs.append([])
            runs[-1].append(one)
        segments: list[Segment] = []
        for run in runs:
            text = files.tokenizer.decode([one.token for one in run])
            start = run[0].frame * frame
            stop = max(start + frame, (run[-1].frame + run[-1].frames) * frame)
            word = moved_by(Word(" " + text.strip(), start, stop), begin)
            word = word._replace(end=min(word.end, round(end, 3)))
            before = segments[-1] if segments else None
            if before is None or before.text.endswith(_ENDS) or word.start - before.end > PAUSE:
                segments.append(Segment(word.start, word.end, "", []))
            now = segments[-1]
            now.text += word.text
            now.end = word.end
            now.tokens += [one.token for one in run]
            now.log_shares += [one.log_share for one in run]
            if words:
                now.words.append(word)
        kept = [one for one in segments if one.text.strip()]
        for segment in kept:
            segment.log_share = float(np.mean(segment.log_shares))
        return kept
