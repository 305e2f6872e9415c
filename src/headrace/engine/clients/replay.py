"""Replay of recorded requests: answers them again and compares, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...base.errors import HeadraceError, InvalidRequest
from ...base.step import TokenLogprobs
from ...text import Tokenizer
from ..loop.core import EngineCore
from .output import RequestOutputs
from .records import Choice, Record


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an answer differs from its record."""

    choice: int
    place: int
    """Index among the tokens of the answer."""
    recorded: int | None
    """Token id; None: the recorded answer had ended."""
    replayed: int | None
    what: str
    """One line for a reader."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one record."""

    record: Record
    tokens: int
    """Tokens compared."""
    difference: Difference | None
    refused: str | None = None
    """The reason why this engine refused the request or could not finish it."""

    @property
    def equal(self) -> bool:
        return self.difference is None and self.refused is None


def replay(
    core: EngineCore,
    tokenizer: Tokenizer,
    records: Iterable[Record],
    *,
    vocab_size: int,
    on_token: Callable[[int], None] = lambda number: None,
    on_end: Callable[[], None] = lambda: None,
) -> list[Verdict]:
    """Answer all records, in one batch as far as possible, and compare each with its recorded
    answer.

    The batch differs from the recorded one on purpose. A recorded adapter must be loaded under the
    name in its spec. `on_token` gets the number of tokens that came; `on_end` is called for each
    answer that is complete.
    """
    listed = list(records)
    verdicts: dict[int, Verdict] = {}
    again: dict[str, tuple[int, RequestOutputs, list[Choice]]] = {}
    for place, record in enumerate(listed):
        request = record.request(f"replay-{place}")
        try:
            _verify(record, core.max_context, vocab_size)
            core.add(request)
        except HeadraceError as refused:
            verdicts[place] = Verdict(record, 0, None, refused.message)
            continue
        choices = [Choice() for _ in range(request.spec.sampling.n)]
        again[request.id] = (place, RequestOutputs(request, tokenizer), choices)
    while again:
        for delta in core.turn():
            if delta.request_id not in again:
                continue
            place, outputs, choices = again[delta.request_id]
            if delta.error is not None:
                verdicts[place] = Verdict(listed[place], 0, None, delta.error)
                core.abort(delta.request_id)
                del again[delta.request_id]
                continue
            out = outputs.feed(delta)
            if out is None:
                continue
            choice = choices[out.index]
            choice.tokens += out.token_ids
            on_token(len(out.token_ids))
            if out.logprobs is not None:
                choice.logprobs = (choice.logprobs or []) + out.logprobs
            if out.finish_reason is not None:
                choice.finish = out.finish_reason
                if delta.finish is None:
                    core.abort_choice(delta.request_id, delta.choice)
            if outputs.finished:
                verdicts[place] = compare(listed[place], choices)
                on_end()
                del again[delta.request_id]
    while core.has_work:  # Stopped choices give back their blocks.
        core.turn()
    return [verdicts[place] for place in range(len(listed))]


def compare(record: Record, choices: list[Choice]) -> Verdict:
    """Compare an answer with its record: tokens, log-probabilities and reason of its end. If a
    failure cut the recorded answer off, only its tokens are compared."""
    tokens = 0
    for index, (before, after) in enumerate(zip(record.choices, choices, strict=True)):
        tokens += len(before.tokens)
        difference = _first_difference(index, before, after)
        if difference is not None:
            return Verdict(record, tokens, difference)
    return Verdict(record, tokens, None)


def _first_difference(index: int, before: Choice, after: Choice) -> Difference | None:
    whole = before.finish is not None
    for place in range(max(len(before.tokens), len(after.tokens) if whole else 0)):
        recorded, replayed = _at(before.tokens, place), _at(after.tokens, place)
        if recorded != replayed:
            what = f"recorded token {recorded}, now {replayed}"
            return Difference(index, place, recorded, replayed, what)
        one, other = _scores(before, place), _scores(after, place)
        if one is not None and one != other:
            what = f"recorded log-probability {one.logprob!r}, now {other and other.logprob!r}"
            return Difference(index, place, recorded, replayed, what)
    if whole and before.finish != after.finish:
        end = len(before.tokens)
        return Difference(
            index, end, None, None, f"recorded end {before.finish!r}, now {after.finish!r}"
        )
    return None


def _at(tokens: list[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None


def _scores(choice: Choice, place: int) -> TokenLogprobs | None:
    if choice.logprobs is None or place >= len(choice.logprobs):
        return None
    return choice.logprobs[place]


def _verify(record: Record, max_context: int, vocab_size: int) -> None:
    """Raise `InvalidRequest` unless a record, which may come from anywhere, is within this engine's
    bounds."""
    record.spec.sampling.verify(vocab_size)
    ids = (*record.prompt, *record.spec.stop_ids)
    if not record.prompt or any(not 0 <= index < vocab_size for index in ids):
        raise InvalidRequest(
            f"its token ids are not of this model's vocabulary of {vocab_size}", param="prompt"
        )
    most = record.spec.sampling.max_tokens
    if most is None or len(record.prompt) + most > max_context:
        raise InvalidRequest(
            f"its {len(record.prompt)} prompt tokens and max_tokens {most} do not fit into a "
            f"context of {max_context}",
            param="prompt",
        )
    if len(record.choices) != record.spec.sampling.n:
        raise InvalidRequest(
            f"it has {len(record.choices)} answers of n = {record.spec.sampling.n}", param="n"
        )
