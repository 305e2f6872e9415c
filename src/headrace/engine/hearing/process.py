"""The transcription process: `python -m headrace.engine.hearing.process ADDRESS FOLDER`.

Its one thread takes messages between two turns of the scheduler. A turn is a slice of one window's
encoding and a decoding step of all sounds that are decoded.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Generator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...base.errors import EngineFault, HeadraceError
from ...dist.channel import Channel
from ...speech.decoding import DecodingOptions
from .. import messages
from ..aside import come_back
from ..entered import enter
from ..messages import WireError
from .messages import (
    Hear,
    HeardSegment,
    HeardSoFar,
    HearingLoad,
    HearOptions,
    Listening,
    OpenHearing,
    SoundEnd,
    ToHearing,
)

if TYPE_CHECKING:
    from ...speech.transcript import Segment, Transcriber, Transcript

Floats = npt.NDArray[np.float32]
BEAT_SECONDS = 0.5
"""Time between two signs of life."""
AT_ONCE = 16
"""Sounds that are transcribed at the same time; further ones wait, live ones never."""


def main() -> None:
    enter(ToHearing, lambda channel, arguments, _: run(channel, arguments.worker))


def run(channel: Channel, worker: str) -> None:
    """Get the model, load it, transcribe until `Stop` comes."""
    begin = time.monotonic()
    gc.disable()
    module, _, function = worker.partition(":")
    opening = getattr(import_module(module), function)
    channel.send(messages.Phase("import_engine", time.monotonic() - begin))
    told = channel.receive_one(None)
    if not isinstance(told, OpenHearing):
        return
    begin = time.monotonic()
    transcriber, decisions = opening(told.options, Path(told.folder))
    channel.send(messages.Phase("load_weights", time.monotonic() - begin))
    begin = time.monotonic()
    warm_up(transcriber)
    channel.send(messages.Phase("warm_up", time.monotonic() - begin))
    gc.freeze()
    gc.enable()
    languages = list(transcriber.files.special.languages)
    come_back()
    channel.send(Listening(languages, decisions))
    serve(channel, Desk(transcriber))


def warm_up(transcriber: Transcriber) -> None:
    """Warm up: transcribe one window of noise before reporting ready."""
    noise = np.random.default_rng(1).normal(0, 0.05, 16_000).astype(np.float32)
    language = next(iter(transcriber.files.special.languages), None)
    transcriber.transcribe(noise, _decoding(HearOptions(language=language, live=True)))


def serve(channel: Channel, desk: Desk) -> None:
    """Repeat accept → turn → report, until `Stop` comes."""
    beaten = 0.0
    while True:
        for message in channel.receive(0.0 if desk.busy else BEAT_SECONDS):
            match message:
                case messages.Stop():
                    return
                case Hear():
                    desk.add(message)
                case messages.Abort(request_id):
                    desk.drop(request_id)
        if desk.busy:
            desk.turn()
        for said in desk.told():
            channel.send(said)
        now = time.monotonic()
        if now - beaten >= BEAT_SECONDS or not desk.busy:
            beaten = now
            channel.send(messages.Beat(desk.turns))
            channel.send(HearingLoad(len(desk.running), len(desk.waiting), desk.seconds))


class SoundUnderWay:
    """One sound that is being transcribed."""

    def __init__(self, wanted: Hear, walk: Generator[None, None, Transcript]) -> None:
        self.wanted = wanted
        self.walk = walk


class Desk:
    """The request queue: the sounds that wait or are transcribed, and their unsent messages."""

    def __init__(self, transcriber: Transcriber) -> None:
        self.transcriber = transcriber
        self.running: deque[SoundUnderWay] = deque()
        self.waiting: deque[Hear] = deque()
        self.turns = 0
        self.seconds = 0.0
        self._told: list[Any] = []

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

    def turn(self) -> None:
        """Let every sound ask for its next computation, and compute a part of it."""
        begin = time.monotonic()
        while self.waiting and len(self.running) < AT_ONCE:
            self._begin(self.waiting.popleft())
        for sound in list(self.running):
            self._step(sound)
        if self.running:
            self.transcriber.jobs.turn()
            self.running.rotate(-1)  # Each in turn is the first to have a slot.
        self.turns += 1
        self.seconds += time.monotonic() - begin

    def told(self) -> list[Any]:
        """Return the messages since the last call."""
        told, self._told = self._told, []
        return told

    def _begin(self, wanted: Hear) -> None:
        def told(segments: list[Segment], upto: float) -> None:
            # The last segments of a transcript come with its end.
            if segments:
                self._told.append(
                    HeardSoFar(wanted.request_id, self._pieces(wanted, segments), upto)
                )

        try:
            samples = _samples(Path(wanted.path), wanted.count)
            options, given = _decoding(wanted.options), wanted.options
            if given.pauses is None:
                walk = self.transcriber.sequential(samples, options, words=given.words, told=told)
            else:
                walk = self.transcriber.chunked(
                    samples, options, words=given.words, told=told, pauses=given.pauses
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
            told = SoundEnd(found.language, found.seconds, left_out)
            self._told.append(HeardSoFar(sound.wanted.request_id, [], found.seconds, told))
        except Exception as fault:  # noqa: BLE001 - one sound's fault is not the others'
            self.running.remove(sound)
            self._refuse(sound.wanted, fault)

    def _refuse(self, wanted: Hear, fault: Exception) -> None:
        error = (
            fault
            if isinstance(fault, HeadraceError)
            else EngineFault(f"hearing failed: {type(fault).__name__}")
        )
        self._told.append(messages.Refused(wanted.request_id, WireError.of(error)))

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


if __name__ == "__main__":
    main()
