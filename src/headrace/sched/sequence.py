"""A sequence: text that grows token by token, one of the n choices of a request."""

from __future__ import annotations

from headrace.base.request import Request, SequenceDelta
from headrace.base.step import StepPlan, StepResult, TokenLogprobs

from .work import Work


class Sequence(Work):
    """Text whose units are tokens; each that a step samples is one more to compute, but for the
    last."""

    __slots__ = ("length", "min_length", "scored", "stops")

    def __init__(
        self, id: int, request: Request, choice: int, length: int, rank: tuple[float, int]
    ) -> None:
        super().__init__(id, request, choice, length - 1, rank)
        spec = request.spec
        self.length = length
        """Total length, prompt and output, at which it finishes with "length"."""
        least = spec.sampling.min_tokens if spec.grammar is None else 0
        self.min_length = self.prompt_length + least
        """Total length below which a stop id does not count. A grammar may be complete before
        `min_tokens`: the grammar alone decides when a token that ends an answer is allowed."""
        self.stops = frozenset(spec.stop_ids)
        self.scored = 1
        """Prompt positions whose log-probability was delivered; nothing predicts the first."""

    @property
    def scores_prompt(self) -> bool:
        """Whether it still owes log-probabilities of prompt tokens. Choice 0 delivers for all."""
        return (
            self.choice == 0
            and self.request.spec.sampling.prompt_logprobs is not None
            and self.scored < self.prompt_length
        )

    @property
    def reads(self) -> bool:
        return self.chain is not None and not self.scores_prompt

    def oldest_query(self) -> int:
        if not self.in_flight:
            return self.scheduled
        # Once a token came back, the step in flight starts at the last one known; with drafts its
        # planned start is only an upper bound of that.
        return self.chunk_start if len(self.tokens) == self.admitted else len(self.tokens) - 1

    def take(
        self, plan: StepPlan, result: StepResult, entry: int, *, grows: bool
    ) -> SequenceDelta | None:
        """Append new tokens up to the first that ends it; later ones are dropped."""
        new, delta = result.tokens[entry], None
        if result.proposed is not None:
            self.drafts, drafting = result.proposed[entry], result.drafting
            self.promised = drafting is not None and entry in drafting.entries
        if grows:
            # Rejected drafts are not computed after all.
            self.scheduled -= plan.counts[entry] - len(new)
        elif result.prompt_logprobs is not None and self.scores_prompt:
            delta = self._score(plan.starts[entry], result.prompt_logprobs[entry])
        if not new:
            return delta
        if delta is None:
            delta = self.news()
        logprobs = None if result.logprobs is None else result.logprobs[entry]
        delta.tokens, delta.logprobs = new, logprobs
        if result.verified is not None:
            delta.verified = result.verified.get(entry)
        tokens, stops = self.tokens, self.stops
        for taken, token in enumerate(new, start=1):
            tokens.append(token)
            if token in stops and len(tokens) >= self.min_length:
                delta.finish, delta.stop_token = "stop", token
            elif len(tokens) >= self.length:
                delta.finish = "length"
            else:
                continue
            if taken < len(new):
                delta.tokens = new[:taken]
                delta.logprobs = None if logprobs is None else logprobs[:taken]
            break
        return delta

    def goes_on(self, new: list[int]) -> bool:
        tokens = self.tokens
        if len(new) != 1 or new[0] in self.stops or len(tokens) + 1 >= self.length:
            return False
        tokens += new
        return True

    def _score(self, start: int, scores: list[TokenLogprobs]) -> SequenceDelta | None:
        """Return a chunk's log-probabilities from `start` that were not delivered before a
        preemption."""
        fresh = scores[self.scored - max(start, 1) :]
        if not fresh:
            return None
        self.scored += len(fresh)
        delta = self.news()
        delta.prompt_logprobs = fresh
        return delta
