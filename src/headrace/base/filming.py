"""Frames that a model's processor takes of a video, as transformers' video processors choose them:
"even" is Qwen2-VL's choice, "spread" Qwen3-VL's, "centred" SmolVLM's."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

_SKIPPED = 1.0
"""Seconds left out at both ends of a long video by "centred"."""


class Sampling(NamedTuple):
    """Choice of frames."""

    rule: Literal["even", "spread", "centred"]
    rate: float
    """Frames of a second of the video; 0: `most` are taken."""
    least: int
    """Fewest frames, if the video has them."""
    most: int
    together: int = 1
    """Frames of an encoder's patch: one tile is made of this many."""

    def lowered(self, most: int) -> Sampling:
        """Return the rule with at most `most` frames; no bound is raised."""
        return self._replace(least=min(self.least, most), most=min(self.most, most))


class Film(NamedTuple):
    """A video and its chosen frames."""

    total: int
    """Frames of the file."""
    rate: float
    """Frames of a second of the file."""
    frames: tuple[int, ...]
    """Numbers of the chosen frames, ascending."""

    @property
    def seconds(self) -> float:
        return self.total / self.rate

    @property
    def times(self) -> list[float]:
        """Seconds of the frames."""
        return [frame / self.rate for frame in self.frames]

    def tiles(self, together: int) -> int:
        """Return the number of tiles; the last one repeats its last frame if it lacks some."""
        return -(-len(self.frames) // together)


def filmed(total: int, rate: float, rule: Sampling) -> Film:
    """Choose the frames of a video of `total` frames, `rate` of them a second; both are positive,
    and at least one frame is taken."""
    chosen = {"even": _even, "spread": _spread, "centred": _centred}[rule.rule]
    frames = sorted({frame for frame in chosen(total, rate, rule) if frame < total})
    return Film(total, rate, tuple(frames))


def written(rule: Sampling) -> list[Any]:
    """Return a rule as JSON values; `Sampling(*…)` reads it."""
    return list(rule)


def _even(total: int, rate: float, rule: Sampling) -> Sequence[int]:
    together = rule.together
    if rule.rate:
        most = min(rule.most, total) // together * together
        count = min(max(total / rate * rule.rate, rule.least), most, total)
        count = math.floor(count / together) * together
    else:
        count = min(round(rule.most / together) * together, total)
    if not count:
        return range(min(total, together))
    step = total / count
    return [int(single(number * step)) for number in range(math.ceil(total / step))]


def _spread(total: int, rate: float, rule: Sampling) -> Sequence[int]:
    wish = int(total / rate * rule.rate) if rule.rate else rule.most
    count = min(max(wish, rule.least), rule.most, total)
    return [round(place) for place in _line(0, total - 1, count)]


def _centred(total: int, rate: float, rule: Sampling) -> Sequence[int]:
    seconds = total / rate
    count = max(1, min(round(rule.rate * seconds) if rule.rate else rule.most, rule.most))
    first, last = 0, total - 1
    if seconds - 2 * _SKIPPED > rule.most * rule.rate:
        first, last = int(_SKIPPED * rate), min(last, int(total - _SKIPPED * rate))
    if first >= last:
        first, last = 0, total - 1
    return [math.floor(place) for place in _line(first, last, count)]


def _line(first: int, last: int, count: int) -> list[float]:
    """Return `count` places from first to last at equal distances, as `numpy.linspace`."""
    if count < 2:
        return [float(first)] * count
    step = (last - first) / (count - 1)
    return [number * step + first for number in range(count - 1)] + [float(last)]


def single(number: float) -> float:
    """Round to fp32, in which torch counts."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
