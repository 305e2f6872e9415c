"""Streams of one HTTP request: merged, counted, and stopped when their reader stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from ..base.drafted import Drafted
from ..base.errors import Overloaded
from ..base.request import OutputDelta
from ..speculate import PredictedDrafter

if TYPE_CHECKING:
    from ..engine.clients.face import OutputStream


class Aborted(Overloaded):
    """Failure: the server itself ended the request (an operator, or the end of the drain)."""

    code = "aborted"


class Usage:
    """Token usage of one HTTP request, over all its prompts and choices."""

    __slots__ = (
        "_drafted", "_followed", "_prompts", "completion", "expected", "finishes", "first", "model",
        "pictures", "reasoning", "videos",
    )  # fmt: skip

    def __init__(self, model: str) -> None:
        """Start with nothing used; `model`: name of the model or adapter that does the work."""
        self.model = model
        self.first: float | None = None
        """Time of the first token, in seconds of `time.perf_counter`."""
        self.finishes: set[str] = set()
        """Finish reasons of its choices."""
        self._prompts: dict[int, tuple[int, int]] = {}
        self.completion = 0
        self.reasoning = 0
        self.pictures = 0
        """Tokens of the prompt that stand for pictures, and for videos."""
        self.videos = 0
        self.expected: list[int] = []
        """Answer that the client expects. The tokens that each choice keeps of it are counted on
        the answer itself, so speculation does not affect the number."""
        self._followed: dict[int, PredictedDrafter] = {}
        self._drafted = Drafted()

    def count(self, prompt: int, delta: OutputDelta) -> None:
        self.completion += len(delta.token_ids) - (delta.void or 0)
        if self.first is None and delta.token_ids:
            self.first = time.perf_counter()
        if delta.finish_reason is not None:
            self.finishes.add(delta.finish_reason)
        if self.expected:
            if delta.void is not None or delta.index not in self._followed:
                self._followed[delta.index] = PredictedDrafter(self.expected)
            self._followed[delta.index].extend(delta.token_ids)
        if delta.drafted is not None:
            self._drafted.join(delta.drafted)
        if delta.prompt_tokens:
            self._prompts[prompt] = (delta.prompt_tokens, delta.cached_tokens)

    def known_prompt(self, prompt: int, tokens: int) -> None:
        """Set the prompt's length, for cases in which no delta reports it."""
        self._prompts.setdefault(prompt, (tokens, 0))

    @property
    def prompt(self) -> int:
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def cached(self) -> int:
        return sum(cached for _, cached in self._prompts.values())

    def told(self) -> dict[str, Any]:
        """Return the usage fields of an answer: `usage`, and `metrics` of verified drafts under
        vLLM's names."""
        fields: dict[str, Any] = {"usage": self.as_openai()}
        if self._drafted.cases:
            fields["metrics"] = {"speculative_decoding": self._drafted.told()}
        return fields

    def as_openai(self) -> dict[str, Any]:
        prompt, completion = self.prompt, self.completion
        details = {"reasoning_tokens": self.reasoning}
        counted = {"image_tokens": self.pictures, "video_tokens": self.videos}
        seen = {name: count for name, count in counted.items() if count}
        if self.expected:
            most, choices = len(self.expected), self._followed.values()
            kept = sum(min(one.kept, most) for one in choices)
            details["accepted_prediction_tokens"] = kept
            details["rejected_prediction_tokens"] = most * len(choices) - kept
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, **seen},
            "completion_tokens_details": details,
        }


async def deltas(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, OutputDelta]]:
    """Yield (index of the stream, its delta) as they arrive; all work ends when this ends.

    Raises the first error of any stream, and `Aborted` if the server ended one.
    """
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                check_whole(delta)
                yield 0, delta
            return
        async for pair in _merged(streams):
            yield pair
    finally:
        for stream in streams:
            stream.cancel()


async def _merged(streams: Sequence[OutputStream]) -> AsyncIterator[tuple[int, OutputDelta]]:
    pending = {
        asyncio.ensure_future(_advance(stream)): index for index, stream in enumerate(streams)
    }
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                delta = task.result()
                if delta is None:
                    continue
                check_whole(delta)
                pending[asyncio.ensure_future(_advance(streams[index]))] = index
                yield index, delta
    finally:
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def _advance(stream: OutputStream) -> OutputDelta | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


def check_whole(delta: OutputDelta) -> None:
    """Raise `Aborted` if the server has ended the request."""
    if delta.finish_reason == "abort":
        raise Aborted("the server ended this request before it was complete", retry_after=1.0)
