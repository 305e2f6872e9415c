"""Conversion of a sound of any length to segments with times.

In order (`sequential`), as OpenAI's code does: a window of 30 s begins where the last complete
segment of the previous window ended, and is conditioned on the earlier text. By chunks (`chunked`):
stretches with speech, cut at quiet places, independent of each other, many in one step. Times are
counted in samples from the sound's start, so errors do not add up over windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.outputs import Alignment
from ..base.sampling import SamplingParams
from ..base.spec import AlignmentWish, InputSpan, RequestSpec
from ..loader.whisper_files import WhisperFiles
from .conductor import Jobs, WalkUnderWay
from .decoding import (
    Ask,
    DecodingOptions,
    Utterance,
    WindowAnswer,
    decode_window,
    detect,
    task_prefix,
)
from .features import RATE, WINDOW
from .pauses import USUAL_PAUSES, Pauses
from .rules import TICK
from .voice import chunks
from .windows import Windows
from .words import FRAME, Word, split_words

Floats = npt.NDArray[np.float32]
_TICK_SAMPLES = round(TICK * RATE)
INAUDIBLE = 1e-4
"""Peak below which a window is not decoded: -80 dBFS, below a recording's noise."""
AT_ONCE = 8
"""Most chunks of one sound decoded at the same time."""


@dataclass(slots=True)
class Segment:
    """Text between two times, in seconds from the sound's begin."""

    start: float
    end: float
    text: str
    tokens: list[int]
    log_shares: list[float] = field(default_factory=list)
    """Log probability of each token."""
    temperature: float = 0.0
    log_share: float = 0.0
    no_speech: float = 0.0
    compression: float = 1.0
    words: list[Word] = field(default_factory=list)


class LeftOut(NamedTuple):
    """A stretch without a segment, in seconds from the sound's start, with the reason."""

    start: float
    end: float
    reason: str
    """Reason: inaudible; quiet: too quiet compared with the rest, by `voice`; no speech: the
    model's decision."""


@dataclass(slots=True)
class Transcript:
    """Transcript of a whole sound."""

    language: str
    """Language; empty if none was given and none was detected."""
    seconds: float
    segments: list[Segment] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    def leave_out(self, begin: int, end: int, reason: str) -> None:
        """Record that these samples gave no text; adjoining stretches with one reason are
        merged."""
        new = LeftOut(begin / RATE, end / RATE, reason)
        if self.left_out and self.left_out[-1][1:] == (new.start, reason):
            new = new._replace(start=self.left_out.pop().start)
        self.left_out.append(new)


Told = Callable[[list[Segment], float], None]
"""Callback with new segments, and the seconds of the sound that are done."""


def _untold(new: list[Segment], upto: float) -> None:
    pass


class WindowWanted(NamedTuple):
    """A window to decode."""

    samples: Floats
    before: list[int]
    """Tokens of the text before it."""
    place: int
    """Number of the window in its sound."""


class WindowHeard(NamedTuple):
    """A window's transcription."""

    place: int
    spoken: Any
    """Result of the job: an `Utterance`, or another model's own kind."""
    words: list[Word]


@dataclass(slots=True)
class _Begun:
    """A job and the window lent to it; None: returned."""

    job: WalkUnderWay[WindowHeard]
    window: int | None


class Transcriber:
    """Transcriber of sounds by windows, for one Whisper."""

    at_once = False
    """Whether many windows run at the same time even without a known language."""
    files: Any
    jobs: Jobs

    def __init__(self, files: WhisperFiles, jobs: Jobs) -> None:
        """`jobs`: runner of jobs that send requests about windows to an engine."""
        self.files, self.jobs = files, jobs
        self._windows = Windows(files)

    def close(self) -> None:
        """Release the network or engine."""
        self.jobs.close()

    def transcribe(
        self,
        samples: Floats,
        options: DecodingOptions | None = None,
        *,
        words: bool = False,
        chunked: bool = False,
        told: Told = _untold,
    ) -> Transcript:
        """Return the whole transcript. Raises a job's errors."""
        work = self.chunked if chunked else self.sequential
        running = work(samples, options or DecodingOptions(), words=words, told=told)
        try:
            while True:
                next(running)
                self.jobs.turn()
        except StopIteration as end:
            found: Transcript = end.value
            return found
        finally:
            running.close()

    def sequential(
        self, samples: Floats, options: DecodingOptions, *, words: bool, told: Told
    ) -> Generator[None, None, Transcript]:
        """Yield until its windows have been decoded in sequence, by the scheduler."""
        transcript = Transcript(options.language or "", len(samples) / RATE)
        seek = place = 0
        before, share = self._prompt(options), self.jobs.share()
        while seek < len(samples):
            window = samples[seek : seek + WINDOW]
            end = seek + len(window)
            if np.abs(window).max() <= INAUDIBLE:
                transcript.leave_out(seek, end, "inaudible")
                seek = end
                yield  # Hours of silence must not be a single computation.
                continue
            wanted = [WindowWanted(window, before, place)]
            spoken, said = Utterance(), list[Word]()
            with closing(self._run(wanted, share, options, transcript, words)) as running:
                for found in running:
                    if found is None:
                        yield
                    else:
                        spoken, said = found.spoken, found.words
            place += 1
            if spoken.silent(options):
                transcript.leave_out(seek, end, "no speech")
                seek = end
            else:
                segments, used = self._segments(spoken, said, window, seek)
                transcript.segments += segments
                told(segments, min(len(samples), seek + used) / RATE)
                seek += used
                fresh = [token for segment in segments for token in segment.tokens]
                before = [*before, *fresh] if options.condition else []
                if spoken.temperature > 0.5:
                    before = []
                before = before[-self.files.positions :]
        told([], transcript.seconds)
        return transcript

    def chunked(
        self,
        samples: Floats,
        options: DecodingOptions,
        *,
        words: bool,
        told: Told,
        pauses: Pauses = USUAL_PAUSES,
    ) -> Generator[None, None, Transcript]:
        """Yield until its chunks have been decoded, many at the same time."""
        transcript = Transcript(options.language or "", len(samples) / RATE)
        spans = yield from chunks(samples, pauses)
        done = 0
        for begin, end in [*spans, (len(samples), len(samples))]:
            if begin > done:
                transcript.leave_out(done, begin, "quiet")
            done = end
        before, share = self._prompt(options), self.jobs.share()
        wanted = [WindowWanted(samples[a:b], before, i) for i, (a, b) in enumerate(spans)]
        with closing(self._run(wanted, share, options, transcript, words)) as running:
            for found in running:
                if found is None:
                    yield
                    continue
                begin, end = spans[found.place]
                if found.spoken.silent(options):
                    transcript.leave_out(begin, end, "no speech")
                    continue
                segments, _ = self._segments(found.spoken, found.words, samples[begin:end], begin)
                transcript.segments += segments
                told(segments, end / RATE)
        transcript.left_out.sort()
        told([], transcript.seconds)
        return transcript

    def _prompt(self, options: DecodingOptions) -> list[int]:
        text = options.prompt.strip()
        if not text:
            return []
        # Special tokens in a prompt are text, so their marks are broken up.
        text = text.replace("<|", "< |")
        found: list[int] = self.files.tokenizer.encode(" " + text, add_special_tokens=False).ids
        return found

    def _run(
        self,
        windows: Sequence[WindowWanted],
        share: Any,
        options: DecodingOptions,
        transcript: Transcript,
        words: bool,
    ) -> Generator[WindowHeard | None, None, None]:
        """Yield each window's transcription, in order; None if the caller must run a turn first.

        At most `AT_ONCE` are in progress, each as a separate job. Without a given language, the
        first runs alone and detects it for the others.
        """
        jobs, waiting = self.jobs, deque(windows)
        begun: deque[_Begun] = deque()
        try:
            while waiting or begun:
                running = sum(one.window is not None for one in begun)
                most = AT_ONCE if transcript.language or self.at_once else 1
                while waiting and running < most:
                    window = jobs.lend(share)
                    if window is None:
                        break
                    walk = self._walk(waiting.popleft(), options, transcript, words, window)
                    begun.append(_Begun(WalkUnderWay(walk, share), window))
                    jobs.add(begun[-1].job)
                    running += 1
                if begun:
                    yield None
                for one in begun:
                    if one.job.done and one.window is not None:
                        jobs.take_back(share, one.window)
                        one.window = None
                while begun and begun[0].job.done:
                    job = begun.popleft().job
                    if job.error is not None:
                        raise job.error
                    assert job.result is not None
                    yield job.result
                if waiting and not begun:
                    yield None
        finally:
            for one in begun:
                jobs.drop(one.job)
                if one.window is not None:
                    jobs.take_back(share, one.window)

    def _walk(
        self,
        wanted: WindowWanted,
        options: DecodingOptions,
        transcript: Transcript,
        words: bool,
        window: int,
    ) -> Generator[Any, Any, WindowHeard]:
        """Ask for everything wanted of a window; `window`: its number, if the network has slots for
        windows."""
        samples, before, place = wanted
        with self._windows.open(samples, short=options.short, aligns=words) as span:
            if not transcript.language:
                transcript.language = yield from detect(self.files, span)
            language = transcript.language
            spoken = yield from decode_window(self.files, options, language, before, span, place)
            said = []
            if words and not spoken.silent(options):
                said = yield from self._words(spoken, language, options, span, len(samples))
        return WindowHeard(place, spoken, said)

    def _words(
        self,
        spoken: Utterance,
        language: str,
        options: DecodingOptions,
        window: InputSpan,
        length: int,
    ) -> Generator[list[Ask], list[WindowAnswer], list[Word]]:
        """Ask for the words of a window, in seconds from its start."""
        files = self.files
        special = files.special
        text = [token for token in spoken.tokens if token < special.end]
        if not text:
            return []
        prefix = [*task_prefix(files, options, language), special.no_timestamps]
        tokens = [*prefix, *text, special.end][: files.positions]
        frames = max(1, min(window.units, -(-length // _TICK_SAMPLES)))
        wish = AlignmentWish(len(prefix), frames)
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        spec = RequestSpec(sampling, 0, task="alignment", inputs=(window,), alignment=wish)
        (answer,) = yield [Ask(tokens, spec)]
        assert isinstance(answer.output, Alignment)
        begins, found, at = answer.output.starts, [], 0
        for word, own in split_words(files, text, language):
            start, end = begins[at] * FRAME, begins[at + len(own)] * FRAME
            found.append(Word(word, start, end))
            at += len(own)
        return found

    def _segments(
        self, spoken: Utterance, said: list[Word], window: Floats, offset: int
    ) -> tuple[list[Segment], int]:
        """Make the segments of a window; return them and the number of samples consumed."""
        files = self.files
        first, tokens = files.special.first_timestamp, spoken.tokens
        is_time = [token >= first for token in tokens]
        cuts = [i for i in range(1, len(tokens)) if is_time[i] and is_time[i - 1]]
        length = len(window)
        single_end = is_time[-2:] == [False, True]
        found: list[tuple[int, int, list[int]]] = []
        heard = 0
        used = length
        if cuts:
            if single_end:
                cuts.append(len(tokens))
            last = 0
            for cut in cuts:
                part = tokens[last:cut]
                begin, end = ((one - first) * _TICK_SAMPLES for one in (part[0], part[-1]))
                found.append((begin, end, part))
                last = cut
            if not single_end:
                used = (tokens[last - 1] - first) * _TICK_SAMPLES
        elif tokens:
            times = [token for token in tokens if token > first]
            end = (times[-1] - first) * _TICK_SAMPLES if times else length
            found.append((0, end, tokens))
        segments = []
        for begin, end, part in found:
            shares = spoken.log_shares[heard : heard + len(part)]
            heard += len(part)
            own = [token for token in part if token < files.special.end]
            text = files.tokenizer.decode(own, skip_special_tokens=True)
            start, stop = (min(each, length) + offset for each in (begin, end))
            if not text.strip() or start >= stop:
                continue
            segments.append(
                Segment(
                    start / RATE,
                    stop / RATE,
                    text,
                    part,
                    shares,
                    spoken.temperature,
                    spoken.log_share,
                    spoken.no_speech,
                    spoken.compression,
                )
            )
        _give_words(segments, said, files.special.end, offset / RATE)
        return segments, max(used, _TICK_SAMPLES) if used < length else length


def _give_words(segments: list[Segment], said: list[Word], end: int, offset: float) -> None:
    """Give each word to the segment of its tokens, in order."""
    rest = list(said)
    for segment in segments:
        text = segment.text
        while rest and text.strip():
            if not text.startswith(rest[0].text) and not text.lstrip().startswith(
                rest[0].text.lstrip()
            ):
                break
            word = rest.pop(0)
            text = text.lstrip()[len(word.text.lstrip()) :]
            segment.words.append(moved_by(word, offset))


def moved_by(word: Word, offset: float) -> Word:
    """Shift a word by `offset` seconds."""
    return word._replace(start=round(word.start + offset, 3), end=round(word.end + offset, 3))
