"""The codec of a language model that speaks, in the loop: a part with a lane of its own.

The model's lane gives each token of a request for a sound to `SpokenSounds.take`; whole frames wait
for the codec's lane, whose step decodes a slice of one sound's next piece. The samples are outputs
of the request, which ends with the last of them. The sounds take turns, piece by piece.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...base.errors import ModelFileError, UnsupportedModel
from ...base.facts import WorkerFacts
from ...base.outputs import Samples
from ...base.request import Request, SequenceDelta
from ...base.step import StepPlan, StepResult
from ...kernels.cpu.library import LibraryAbsent, Team
from ...speech.codec import Codec, Floats, SoundStream
from ...speech.voices import FrameReader, VoiceFiles
from .executor import Executor, InlineExecutor
from .lane import Lane
from .sliced import SlicePlanner, SliceWorker
from .spoken_plan import CodecPlan

PIECE = 2
"""Frames that the codec takes at a time: its rows stay in the processor's cache."""
SLICE_SECONDS = 0.01
"""Time after which a slice ends with its layer."""


@dataclass(slots=True, eq=False)
class _SpokenSound:
    """One sound: its frames that wait, and its end."""

    id: str
    reader: FrameReader
    seed: int
    frames: npt.NDArray[np.int64]
    stream: SoundStream | None = None
    """None: nothing of it is decoded yet."""
    end: SequenceDelta | None = None
    """The end of its text, once that is there."""
    scheduled: float = 0.0
    dropped: int = 0
    """Dropped tokens that were reported."""
    queued: bool = False

    @property
    def works(self) -> bool:
        return self.end is not None or len(self.frames) > 0


class _SoundPiece(NamedTuple):
    sound: _SpokenSound
    slices: Iterator[Floats | None]
    last: bool


class SpokenSounds:
    """The sounds of one model. `turn` alone may run in the worker's thread."""

    def __init__(self, codec: Codec, files: VoiceFiles, rows: int) -> None:
        """`rows`: sounds that are decoded at the same time, for which there is memory."""
        self._codec, self._files, self._rows = codec, files, rows
        self._sounds: dict[str, _SpokenSound] = {}
        self._queue: deque[_SpokenSound] = deque()
        """Sounds that are decoded and have work."""
        self._coming: deque[_SpokenSound] = deque()
        """Sounds that have work for the first time."""
        self._begun = 0
        """Sounds that are decoded, with work or without."""
        self._piece: _SoundPiece | None = None
        self._made: Floats | None = None

    # The text's side

    def begin(self, request: Request) -> None:
        """Begin the sound of a request that the text's lane has taken."""
        frames = np.zeros((0, len(self._files.codec.levels)), np.int64)
        self._sounds[request.id] = _SpokenSound(
            request.id, FrameReader(self._files), request.spec.seed, frames
        )

    def take(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Take what the text's lane reports; return the deltas that are to be told now. The end of
        a text that has a sound waits for the sound's."""
        return [self._taken(delta) for delta in deltas]

    def _taken(self, delta: SequenceDelta) -> SequenceDelta:
        sound = self._sounds.get(delta.request_id)
        if sound is None:
            return delta
        if delta.finish in ("abort", "error"):
            self._forget(sound)
            return delta
        sound.scheduled = delta.scheduled or sound.scheduled
        if len(frames := sound.reader.take(delta.tokens)):
            sound.frames = np.concatenate([sound.frames, frames])
        if delta.finish is not None:
            sound.end = delta
        self._enqueue(sound)
        return replace(delta, finish=None, stop_token=None)

    # The codec's side

    @property
    def idle(self) -> bool:
        """Whether no sound has anything to decode, or may begin."""
        return self._piece is None and not self._queue and not self._begins

    @property
    def _begins(self) -> bool:
        return bool(self._coming) and self._begun < self._rows

    def choose(self) -> None:
        """Choose the next sound, unless its piece is under way: one that may begin, or else the
        one that has waited longest."""
        if self._piece is None:
            sound = (self._coming if self._begins else self._queue).popleft()
            sound.queued = False
            if sound.stream is None:
                sound.stream = self._codec.stream(sound.seed)
                self._begun += 1
            frames, sound.frames = sound.frames[:PIECE], sound.frames[PIECE:]
            last = sound.end is not None and not len(sound.frames)
            self._piece = _SoundPiece(sound, sound.stream.slices(frames, last=last), last)

    def turn(self) -> None:
        """Compute layers of the chosen piece, for a slice's time."""
        assert self._piece is not None
        end = time.perf_counter() + SLICE_SECONDS
        self._made = next(self._piece.slices)
        while self._made is None and time.perf_counter() < end:
            self._made = next(self._piece.slices)

    def news(self) -> list[SequenceDelta]:
        """Return the samples of the piece, once all its layers are computed."""
        piece, made = self._piece, self._made
        if piece is None or made is None:
            return []
        self._piece = self._made = None
        sound = piece.sound
        if self._sounds.get(sound.id) is not sound:
            return []  # It was dropped meanwhile; another may have its name.
        dropped, sound.dropped = sound.reader.dropped - sound.dropped, sound.reader.dropped
        delta = SequenceDelta(sound.id, 0, [], scheduled=sound.scheduled)
        delta.output = Samples([made.tobytes()] if len(made) else [], dropped)
        if piece.last:
            assert sound.end is not None
            delta.finish, delta.stop_token = sound.end.finish, sound.end.stop_token
            self._forget(sound)
        else:
            self._enqueue(sound)
        return [delta] if piece.last or len(made) or dropped else []

    def failed(self, message: str) -> list[SequenceDelta]:
        """Return the end of the sound whose piece failed."""
        piece, self._piece, self._made = self._piece, None, None
        if piece is None or self._sounds.get(piece.sound.id) is not piece.sound:
            return []
        self._forget(piece.sound)
        error = f"the codec failed: {message}"
        return [SequenceDelta(piece.sound.id, 0, [], finish="error", error=error)]

    def abort(self, request_id: str) -> list[SequenceDelta]:
        """End a sound whose text has ended; the end of another comes from the text's lane."""
        sound = self._sounds.get(request_id)
        if sound is None or sound.end is None:
            return []
        self._forget(sound)
        return [SequenceDelta(request_id, 0, [], finish="abort")]

    def _enqueue(self, sound: _SpokenSound) -> None:
        chosen = self._piece is not None and self._piece.sound is sound
        if sound.works and not sound.queued and not chosen:
            sound.queued = True
            self._line(sound).append(sound)

    def _line(self, sound: _SpokenSound) -> deque[_SpokenSound]:
        return self._coming if sound.stream is None else self._queue

    def _forget(self, sound: _SpokenSound) -> None:
        del self._sounds[sound.id]
        if sound.queued:
            self._line(sound).remove(sound)
        self._begun -= sound.stream is not None


class SpokenPlanner(SlicePlanner):
    """Control plane of the codec's lane."""

    def __init__(self, spoken: SpokenSounds) -> None:
        super().__init__(spoken)
        self._spoken = spoken

    def abort(self, request_id: str) -> list[SequenceDelta]:
        return self._spoken.abort(request_id)

    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan is not None:
            self._spoken.choose()
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        super().update(plan, result)
        return self._spoken.news()

    def fail(self, plan: StepPlan, message: str, *, again: bool = False) -> list[SequenceDelta]:
        super().fail(plan, message, again=again)
        return self._spoken.failed(message)


class CodecPart(NamedTuple):
    """The loaded codec of a model."""

    spoken: SpokenSounds
    lane: Lane


def load_codec(plan: CodecPlan, beside: Executor | None, threads: int) -> CodecPart:
    """Load a codec; it computes in the thread of the model's worker if that is in this process.
    Raises `ModelFileError`, and `UnsupportedModel` without the CPU kernels."""
    other = beside if isinstance(beside, InlineExecutor) else None

    def loaded() -> tuple[SliceWorker, WorkerFacts]:
        return SliceWorker(spoken), WorkerFacts(plan.bytes, 0)

    try:
        codec = Codec(plan.voices.codec, Team(threads))
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"the codec runs on the CPU kernels: {absent}") from absent
    levels = len(plan.voices.codec.levels)
    samples = codec.stream().push(np.zeros((1, levels), np.int64), last=True)
    if not np.isfinite(samples).all():
        raise ModelFileError("the codec computes no numbers: its weights are damaged")
    spoken = SpokenSounds(codec, plan.voices, plan.rows)
    executor = InlineExecutor(loaded, beside=other)
    executor.load()
    return CodecPart(spoken, Lane(SpokenPlanner(spoken), executor))
