"""From what a step gave a sequence to what its reader is told."""

from __future__ import annotations

from headrace.base.request import FinishReason, SequenceDelta
from headrace.base.step import TokenLogprobs

from .sequence import Sequence


def accept(
    sequence: Sequence,
    new: list[int],
    logprobs: list[TokenLogprobs] | None,
    delta: SequenceDelta | None = None,
) -> SequenceDelta:
    """Append new tokens up to the first that ends the sequence; what follows it is dropped.

    `delta`: what the same step said of the sequence's prompt, to be completed.
    """
    if delta is None:
        delta = news(sequence)
    delta.tokens, delta.logprobs = new, logprobs
    tokens, stops = sequence.tokens, sequence.stops
    for taken, token in enumerate(new, start=1):
        tokens.append(token)
        if token in stops and len(tokens) >= sequence.min_length:
            delta.finish, delta.stop_token = "stop", token
        elif len(tokens) >= sequence.limit:
            delta.finish = "length"
        else:
            continue
        if taken < len(new):
            delta.tokens = new[:taken]
            delta.logprobs = None if logprobs is None else logprobs[:taken]
        break
    return delta


def score(sequence: Sequence, start: int, scores: list[TokenLogprobs]) -> SequenceDelta | None:
    """Log-probabilities of a chunk from `start`, without those delivered before a preemption."""
    fresh = scores[sequence.scored - max(start, 1) :]
    if not fresh:
        return None
    sequence.scored += len(fresh)
    delta = news(sequence)
    delta.prompt_logprobs = fresh
    return delta


def end(sequence: Sequence, finish: FinishReason, error: str | None = None) -> SequenceDelta:
    """The last news of a sequence that does not end with a token."""
    delta = news(sequence)
    delta.finish, delta.error = finish, error
    return delta


def news(sequence: Sequence) -> SequenceDelta:
    """A delta without news. By position: this is made for every sequence in every step."""
    return SequenceDelta(
        sequence.request.id, sequence.choice, [], None, None, None, None, None, 500,
        sequence.cached, sequence.scheduled_at, sequence.preemptions,
    )  # fmt: skip
