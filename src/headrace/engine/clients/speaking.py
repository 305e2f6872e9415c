"""Speech synthesis by a language model with its codec, or by a program.

A `Speaker` begins texts; a `Speaking` is one text, whose samples are yielded as they are made.
Routes and commands use no other interface.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, Counter, Histogram

from ...base.errors import InvalidRequest

Floats = npt.NDArray[np.float32]
MOST_CHARACTERS = 4_096
"""Longest text that is spoken, as in OpenAI's API."""
SECONDS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class SpeechClient:
    """The sender of a text."""

    owner: str = ""
    request_id: str = "speak"
    cache_salt: str = ""


class Speaker(Protocol):
    """A source of speech. Its methods belong to the event loop of its engine."""

    @property
    def rate(self) -> int:
        """Samples a second."""

    @property
    def voices(self) -> tuple[str, ...]:
        """Names of its voices."""

    def speak(
        self, text: str, voice: str, given: Mapping[str, Any], client: SpeechClient
    ) -> Speaking:
        """Begin to speak a text. `given`: the speaker's own fields that are set.

        Raises, before any work, `InvalidRequest` for an empty or too long text, an unknown voice,
        and a field that it does not take or that is out of bounds.
        """


class SpokenMetrics(NamedTuple):
    """Instruments of one model."""

    spoken: Any
    first: Any


class SpeakingMetrics:
    """Instruments in addition to those of an engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._spoken = Counter(
            "headrace_spoken_seconds", "Seconds of sound made.", ["model_name"], registry=registry
        )
        self._first = Histogram(
            "headrace_first_sound_seconds",
            "From a text's submission to the first samples of its sound.",
            ["model_name"],
            registry=registry,
            buckets=SECONDS,
        )

    def of(self, model_name: str) -> SpokenMetrics:
        """Return the instruments of a model."""
        return SpokenMetrics(self._spoken.labels(model_name), self._first.labels(model_name))


class Speaking(ABC):
    """One text on its way: samples as they come."""

    def __init__(self, metrics: SpokenMetrics, rate: int) -> None:
        self._metrics, self._rate = metrics, rate
        self._begun = time.monotonic()
        self.prompt_tokens = self.tokens = self.samples = 0
        self.finish_reason = "stop"
        """stop: the sound is complete; length: the context or the limit ended it."""

    @abstractmethod
    def cancel(self) -> None:
        """End the work, if it still goes on."""

    @abstractmethod
    def made(self) -> AsyncGenerator[Floats]:
        """Yield samples, fp32 from -1 to 1, in order. Raises the error that ended the sound."""

    async def pieces(self) -> AsyncGenerator[Floats]:
        """Yield the samples and count them, as `made`; leaving ends the work."""
        try:
            async with aclosing(self.made()) as made:
                async for samples in made:
                    if len(samples):
                        if not self.samples:
                            self._metrics.first.observe(time.monotonic() - self._begun)
                        self.samples += len(samples)
                        yield samples
        finally:
            self.cancel()
            self._metrics.spoken.inc(self.samples / self._rate)


def check_text(text: str) -> None:
    """Raise `InvalidRequest` for a text that is empty or too long."""
    if not text.strip() or len(text) > MOST_CHARACTERS:
        raise InvalidRequest(
            f"input must have 1 to {MOST_CHARACTERS:,} characters, not only spaces", param="input"
        )


def taken(given: Mapping[str, Any], fields: Collection[str], name: str) -> dict[str, Any]:
    """Return the given fields. Raises `InvalidRequest` for one that this speaker does not take."""
    for one in given:
        if one not in fields:
            raise InvalidRequest(
                f"{name} takes no {one}; beside input and voice it takes {', '.join(fields)}",
                param=one,
                code="unsupported_parameter",
            )
    return dict(given)
