"""From what a step gave a sequence to what its reader is told."""

from __future__ import annotations

from headrace.base.request import FinishReason, SequenceDelta
from headrace.base.step import TokenLogprobs

from .sequence import Sequence


def accept(
    sequence: Sequence, new: list[int], logprobs: list[TokenLogprobs] | None
) -> SequenceDelta:
    """Append new tokens up to the first that ends the sequence; what follows it is dropped."""
    tokens, stops = sequence.tokens, sequence.stops
    limit, min_length = sequence.limit, sequence.min_length
    delta = SequenceDelta(sequence.request.id, sequence.choice, new, logprobs)
    for taken, token in enumerate(new, start=1):
        tokens.append(token)
        if token in stops and len(tokens) >= min_length:
            delta.finish, delta.stop_token = "stop", token
        elif len(tokens) >= limit:
            delta.finish = "length"
        else:
            continue
        if taken < len(new):
            delta.tokens = new[:taken]
            delta.logprobs = None if logprobs is None else logprobs[:taken]
        break
    return delta


def new_prompt_logprobs(
    sequence: Sequence, start: int, scores: list[TokenLogprobs]
) -> list[TokenLogprobs]:
    """Those of a chunk from `start` that were not delivered before a preemption."""
    first = max(start, 1)
    fresh = scores[sequence.scored - first :]
    sequence.scored += len(fresh)
    return fresh


def end(sequence: Sequence, finish: FinishReason, error: str | None = None) -> SequenceDelta:
    """The last news of a sequence that was ended from outside."""
    return SequenceDelta(
        sequence.request.id,
        sequence.choice,
        [],
        finish=finish,
        error=error,
        cached=sequence.cached,
        scheduled=sequence.scheduled_at,
        preemptions=sequence.preemptions,
    )
