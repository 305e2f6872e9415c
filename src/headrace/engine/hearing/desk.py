"""The request queue of a transcription model in the engine process: sounds, and their messages."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ...base.errors import EngineFault, HeadraceError
from ...base.request import SequenceDelta
from ...speech.decoding import DecodingOptions
from ..messages import Hear, HeardSoFar, HearingLoad, Refused, WireError
from .records import HeardSegment, HearOptions, SoundEnd

if TYPE_CHECKING:
    from ...speech.transcript import Segment, Transcriber, Transcript

log = logging.getLogger("headrace.engine")
Floats = npt.NDArray[np.float32]
DeskNews = HeardSoFar | HearingLoad | Refused
BEAT_SECONDS = 0.5
"""Seconds between two reports of the load if it does not change."""
AT_ONCE = 16
"""Most sounds transcribed at the same time; further ones wait, except live ones."""


def warming(transcriber: Transcriber) -> Iterator[None]:
    """Transcribe one window of noise, which runs all the steps of a request; yield after each
    step."""
    noise = np.random.default_rng(1).normal(0, 0.05, 16_000).astype(np.float32)
    language = next(iter(transcriber.files.special.languages), None)
    options = _decoding(HearOptions(language=language, live=True))
    for _ in transcriber.sequential(noise, options, words=False, told=lambda new, upto: None):
        transcriber.jobs.turn()
        yield


class SoundUnderWay:
    """One sound that is being transcribed."""

    def __init__(self, wanted: Hear, walk: Generator[None, None, Transcript]) -> None:
        self.wanted = wanted
        self.walk = walk


class Desk:
    """The request queue: sounds that wait or are transcribed, and their unsent messages."""

    def __init__(self, transcriber: Transcriber) -> None:
        self.transcriber = transcriber
        self.languages = list(transcriber.files.special.languages)
        self.running: deque[SoundUnderWay] = deque()
        self.waiting: deque[Hear] = deque()
        self.seconds = 0.0
        """Seconds of its model's steps since the start."""
        self._load = (0, 0)
        """Sounds in the latest load report."""
        self._reported = 0.0
        self._unsent: list[DeskNews] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, wanted: Hear) -> None:
        """Begin a live sound at once; put any other at the end of the queue."""
        if wanted.options.live:
            self._begin(wanted)
        else:
            self.waiting.append(wanted)

    def drop(self, request_id: str) -> None:
        """Forget a sound that is no longer wanted; no message is sent about it."""
        self.waiting = deque(w for w in self.waiting if w.request_id != request_id)
        for sound in self.running:
            if sound.wanted.request_id == request_id:
                self.running.remove(sound)
                sound.walk.close()
                return

    def take(self, deltas: list[SequenceDelta], seconds: float) -> None:
        """Take the deltas of a step of its model, which took `seconds`."""
        self.seconds += seconds
        self.transcriber.jobs.take(deltas)

    def turn(self) -> list[DeskNews]:
        """Let every sound ask for its next computation; return the messages since the last call."""
        ended = True
        while ended:  # An ended sound frees its window and place, which another may need.
            while self.waiting and len(self.running) < AT_ONCE:
                self._begin(self.waiting.popleft())
            count = len(self.running)
            for sound in sorted(self.running, key=lambda sound: not sound.wanted.options.live):
                self._step(sound)
            ended = len(self.running) < count
        if self.running:
            self.running.rotate(-1)  # Each in turn is the first to get a slot.
        now, load = time.monotonic(), (len(self.running), len(self.waiting))
        if load != self._load or (self.busy and now - self._reported >= BEAT_SECONDS):
            self._load, self._reported = load, now
            self._unsent.append(HearingLoad(*load, self.seconds))
        unsent, self._unsent = self._unsent, []
        return unsent

    def _begin(self, wanted: Hear) -> None:
        def report(segments: list[Segment], upto: float) -> None:
            # The last segments of a transcript come with its end.
            if segments:
                self._unsent.append(
                    HeardSoFar(wanted.request_id, self._pieces(wanted, segments), upto)
                )

        try:
            samples = _samples(Path(wanted.path), wanted.count)
            options, given = _decoding(wanted.options), wanted.options
            if given.pauses is None:
                walk = self.transcriber.sequential(samples, options, words=given.words, told=report)
            else:
                walk = self.transcriber.chunked(
                    samples, options, words=given.words, told=report, pauses=given.pauses
                )
        except Exception as fault:  # noqa: BLE001 - one sound's fault is not the others'
            self._refuse(wanted, fault)
        else:
            self.running.append(SoundUnderWay(wanted, walk))

    def _step(self, sound: SoundUnderWay) -> None:
        try:
            next(sound.walk)
        except StopIteration as end:
            self.running.remove(sound)
            found: Transcript = end.value
            left_out = [(one.start, one.end, one.reason) for one in found.left_out]
            last = SoundEnd(found.language, found.seconds, left_out)
            self._unsent.append(HeardSoFar(sound.wanted.request_id, [], found.seconds, last))
        except Exception as fault:  # noqa: BLE001 - one sound's fault is not the others'
            self.running.remove(sound)
            self._refuse(sound.wanted, fault)

    def _refuse(self, wanted: Hear, fault: Exception) -> None:
        error = fault
        if not isinstance(error, HeadraceError):
            log.error("a sound could not be transcribed", exc_info=fault)
            error = EngineFault(f"hearing failed: {type(fault).__name__}")
        self._unsent.append(Refused(wanted.request_id, WireError.of(error)))

    def _pieces(self, wanted: Hear, segments: list[Segment]) -> list[HeardSegment]:
        return [
            HeardSegment(
                one.start,
                one.end,
                one.text,
                one.tokens,
                one.temperature,
                one.log_share,
                one.no_speech,
                one.compression,
                [(word.text, word.start, word.end) for word in one.words],
                self._logprobs(one) if wanted.options.logprobs else [],
            )
            for one in segments
        ]

    def _logprobs(self, segment: Segment) -> list[tuple[str, float, bytes]]:
        files = self.transcriber.files
        said = [
            (token, share)
            for token, share in zip(segment.tokens, segment.log_shares, strict=True)
            if token < files.special.end
        ]
        return [
            (text.decode("utf-8", "replace"), share, text)
            for text, (_, share) in zip(
                files.bytes_of([token for token, _ in said]), said, strict=True
            )
        ]


def _samples(path: Path, count: int) -> Floats:
    return np.memmap(path, np.float32, "r", shape=(count,))


def _decoding(given: HearOptions) -> DecodingOptions:
    options = DecodingOptions(
        language=given.language, task=given.task, prompt=given.prompt, beams=given.beams
    )
    if given.live:
        return replace(options, times=False, temperatures=(0.0,), short=True)
    steps = [t for t in options.temperatures if t > given.temperature]
    return replace(options, temperatures=(given.temperature, *steps))
