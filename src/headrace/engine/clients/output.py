"""The step from `SequenceDelta` (ids) to `OutputDelta` (text): detokenised, cut at stop strings."""

from __future__ import annotations

from ...base.drafted import Drafted
from ...base.request import CompletionOutput, OutputDelta, Request, RequestOutput, SequenceDelta
from ...base.step import TokenLogprobs
from ...text import IncrementalDetokenizer, StopStrings, Tokenizer


class ChoiceOutput:
    """The text of one choice while it grows."""

    __slots__ = ("_detokenizer", "_include", "_min_tokens", "_stops", "_unasked", "ended", "tokens")

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.spec.sampling
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special=sampling.skip_special_tokens, keep=frozenset(request.keep_ids)
        )
        self._stops = (
            StopStrings(sampling.stop, include=sampling.include_stop_str_in_output)
            if sampling.stop
            else None
        )
        self._include = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._unasked = frozenset(request.spec.stop_ids) - frozenset(sampling.stop_token_ids)
        self.tokens = 0
        self.ended = False

    def feed(self, delta: SequenceDelta) -> OutputDelta | None:
        """Turn a delta into text; return None once the choice has ended.

        If a stop string is found, the result has a finish reason that the delta lacks: the caller
        must make the engine stop this choice.
        """
        if self.ended:
            return None
        ids, finish = delta.tokens, delta.finish
        out = OutputDelta(
            delta.request_id,
            delta.choice,
            logprobs=delta.logprobs,
            cached_tokens=delta.cached,
            output=delta.output,
            preemptions=delta.preemptions,
        )
        if self._stops is None:
            out.text = self._plain(ids, delta)
            out.token_ids = ids
        else:
            self._until_stop(out, ids, delta)
        self.tokens += len(out.token_ids)
        if self._stops is not None and self._stops.matched is not None:
            out.finish_reason, out.stop_reason = "stop", self._stops.matched
        elif finish is not None:
            out.text += self._rest()
            out.finish_reason = finish
            if delta.stop_token is not None and delta.stop_token not in self._unasked:
                out.stop_reason = delta.stop_token
        self.ended = out.finish_reason is not None
        return out

    def _plain(self, ids: list[int], delta: SequenceDelta) -> str:
        """Return the text of ids, without a stop id that is not to be shown."""
        if delta.stop_token is not None and not self._include:
            ids = ids[:-1]
        return self._detokenizer.feed(ids)

    def _until_stop(self, out: OutputDelta, ids: list[int], delta: SequenceDelta) -> None:
        stops = self._stops
        assert stops is not None
        hidden = delta.stop_token is not None and not self._include
        for place, index in enumerate(ids):
            out.token_ids.append(index)
            if hidden and place == len(ids) - 1:
                return
            text = self._detokenizer.feed((index,))
            if self.tokens + place + 1 > self._min_tokens:
                text = stops.feed(text)
            out.text += text
            if stops.matched is not None:
                if out.logprobs is not None:
                    out.logprobs = out.logprobs[: place + 1]
                return

    def _rest(self) -> str:
        """Return the text that was held back, at the end."""
        text = self._detokenizer.finish()
        if self._stops is None:
            return text
        return self._stops.feed(text) + self._stops.finish()


class RequestOutputs:
    """All choices of one request."""

    __slots__ = ("_choices", "_ended", "_prompt_logprobs", "_tokenizer", "drafted", "request")

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._choices: list[ChoiceOutput | None] = [None] * request.spec.sampling.n
        self._ended = 0
        self.drafted: Drafted | None = None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        if request.spec.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        return self._ended == len(self._choices)

    @property
    def longest(self) -> int:
        """Tokens of the longest choice so far."""
        return max((choice.tokens for choice in self._choices if choice is not None), default=0)

    def feed(self, delta: SequenceDelta) -> OutputDelta | None:
        """Hand a delta to its choice; prompt log-probabilities are gathered for choice 0."""
        choice = self._choices[delta.choice]
        if choice is None:
            choice = self._choices[delta.choice] = ChoiceOutput(self.request, self._tokenizer)
        gathered = self._prompt_logprobs
        if gathered is not None and delta.choice == 0 and delta.prompt_logprobs:
            gathered += delta.prompt_logprobs
        if delta.verified is not None:
            self.drafted = self.drafted or Drafted()
            self.drafted.add(delta.verified)
        if not delta.tokens and delta.finish is None and delta.output is None:
            return None  # A chunk of the prompt, with log-probabilities only.
        first = not choice.tokens
        out = choice.feed(delta)
        if out is None:
            return None
        if first:
            out.prompt_tokens = len(self.request.prompt)
            out.queue_seconds = max(0.0, delta.scheduled - self.request.arrival)
            if delta.choice == 0 and gathered is not None:
                out.prompt_logprobs = gathered
        if choice.ended:
            self._ended += 1
            if self.finished:
                out.drafted = self.drafted
        return out


class Answer:
    """The deltas of a request, gathered into its `RequestOutput`."""

    def __init__(self, request: Request, prompt: str | None) -> None:
        choices = [CompletionOutput(index) for index in range(request.spec.sampling.n)]
        self.output = RequestOutput(request.id, prompt, request.prompt, choices)
        self._texts: list[list[str]] = [[] for _ in choices]

    def add(self, delta: OutputDelta) -> None:
        output = self.output
        if delta.void is not None:
            self._texts[delta.index] = []
            output.outputs[delta.index] = CompletionOutput(delta.index)
        choice = output.outputs[delta.index]
        if delta.text:
            self._texts[delta.index].append(delta.text)
        choice.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = []
            choice.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        output.cached_tokens = max(output.cached_tokens, delta.cached_tokens)
        output.drafted = delta.drafted or output.drafted
        if delta.finish_reason is not None:
            choice.text = "".join(self._texts[delta.index])
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            output.finished = all(each.finish_reason is not None for each in output.outputs)

    def fail(self, choice: int, message: str) -> None:
        """Note that one choice ended with an error."""
        self.output.outputs[choice].error = message
