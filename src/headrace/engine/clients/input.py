"""The step from user input to a `Request`: tokenised, every field verified, limits resolved."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ...base.denoising import PictureWish
from ...base.errors import ContextOverflow, InvalidRequest
from ...base.items import RetrievalWish
from ...base.modelfiles import ModelFiles
from ...base.ranking import RankingInput
from ...base.request import Request, Retained
from ...base.sampling import SamplingParams
from ...base.spec import (
    GENERATING,
    SEEDS,
    WORKER_FEATURES,
    InputSpan,
    ReasoningBudget,
    RequestSpec,
    Task,
)
from ...base.text_prefixes import NOTHING, TextPrefixes
from ...text.reasoning import detect_reasoning
from ...text.tokenizer import Tokenizer

_AUTHORS_FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
_ELSE = {
    "vector": "this model embeds and does not generate; use /v1/embeddings or embed()",
    "score": "this model scores pairs of texts and does not generate; use /rerank, /score or "
    "score()",
    "rank": "this model ranks candidates and does not generate; use /v1/recommend",
    "picture": "this model draws pictures of a class; use /v1/images/generations",
}
"""Refusals of a text, by the task of the model."""


def default_sampling(files: ModelFiles) -> SamplingParams:
    """Return the sampling that the model's authors ship, with our defaults for missing fields."""
    given = {name: files.generation[name] for name in _AUTHORS_FIELDS if name in files.generation}
    if files.generation.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingParams(**given)


class InputProcessor:
    """Maker of requests for one model."""

    def __init__(
        self,
        files: ModelFiles,
        tokenizer: Tokenizer,
        max_context: int,
        features: Collection[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = files.arch.vocab_size
        self._task = files.arch.task
        self._eos_ids = files.eos_ids
        self._max_context = max_context
        self._features = features
        found = map(detect_reasoning, files.used_templates)
        self._marks = next((marks for marks in found if marks is not None), None)

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: str | None = None,
        grammar: str | None = None,
        task: Task = "tokens",
        second_at: int = 0,
        keep_ids: Collection[int] = (),
        expected: Sequence[int] = (),
        retained: Sequence[Retained] = (),
        prefixes: TextPrefixes = NOTHING,
        inputs: Sequence[InputSpan] = (),
        given: RankingInput | PictureWish | RetrievalWish | None = None,
    ) -> Request:
        """Resolve a request: its tokens, its limits, its seed.

        `grammar`: the form that the answer must match, made by `text.grammar` or
        `text.toolgrammar`. `keep_ids`: special tokens kept in the text although special tokens are
        skipped. `expected`: the answer that the client expects, a hint for drafts, cut to the
        longest possible answer. `retained`: prefixes of the prompt to keep in the context cache.
        `prefixes`: names of its prefixes; the engine reports those that it holds. `inputs`: places
        in the prompt that stand for inputs other than text, each with a handle. For a `task` not in
        `spec.GENERATING` nothing is sampled; with `second_at` the prompt is a pair of texts, and
        the second begins there. `given`: for the task "rank" the features (the prompt has a 0 for
        each candidate). For "picture" the wish (the prompt is the label, the seed is the
        sampling's); for "items" the wish.

        Raises `InvalidRequest` naming the field, or `ContextOverflow`.
        """
        arrival = time.monotonic()
        pooling = task not in GENERATING
        if not pooling and self._task != "tokens":
            raise InvalidRequest(_ELSE[self._task], param="model")
        sampling.verify(self._vocab_size)
        # In the worker it could only fail its step, with all other requests of the step.
        for name, wish in (
            ("adapter", adapter),
            ("grammar", grammar),
            (WORKER_FEATURES.get(task, "pooling"), pooling),
            ("inputs", inputs),
            ("sound", task == "sound"),
        ):
            if wish and name not in self._features:
                raise InvalidRequest(f"this engine has no support for {name}", param=name)
        if pooling:
            return self._pooled(
                prompt,
                task,
                request_id=request_id,
                priority=priority,
                adapter=adapter,
                second_at=second_at,
                arrival=arrival,
                given=given,
                seed=sampling.seed,
                cache_salt=cache_salt,
            )
        ids = self.tokenise(prompt)
        # The step of the last token may be a plain decode, which reads ids only.
        if any(span.first < 0 or span.first + span.length >= len(ids) for span in inputs):
            raise InvalidRequest("a prompt must end in text", param="prompt")
        room = self._max_context - len(ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens; with at least one token of output it must fit "
                f"into a context of {self._max_context}",
                param="prompt",
            )
        for name, most in (
            ("max_tokens", sampling.max_tokens),
            ("min_tokens", sampling.min_tokens),
        ):
            if most is not None and most > room:
                raise ContextOverflow(
                    f"the prompt has {len(ids)} tokens and {name} is {most}; "
                    f"together they must fit into a context of {self._max_context}",
                    param=name,
                )
        # A copy: the caller may use its object again, and change it.
        sampling = replace(sampling, max_tokens=sampling.max_tokens or room)
        stop_ids = () if sampling.ignore_eos else self._eos_ids
        if grammar is not None:
            if sampling.allowed_token_ids is not None:
                raise InvalidRequest(
                    "a grammar and allowed_token_ids together could leave nothing to write; use "
                    "one of them",
                    param="allowed_token_ids",
                )
            # The form decides the end, so `ignore_eos` cannot apply.
            stop_ids = self._ends()
        return Request(
            id=request_id,
            prompt=ids,
            spec=RequestSpec(
                sampling,
                seed=resolve_seed(sampling.seed),
                task=task,
                stop_ids=tuple(dict.fromkeys((*stop_ids, *sampling.stop_token_ids))),
                adapter=adapter,
                grammar=grammar,
                bad_words=self._bad_words(sampling.bad_words),
                reasoning=self._reasoning(sampling, ids),
                # Each may become a draft, which is read from the embedding.
                expected=tuple(takewhile(self._has_row, expected[: sampling.max_tokens])),
                inputs=tuple(inputs),
            ),
            priority=_integer("priority", priority),
            cache_salt=cache_salt,
            arrival=arrival,
            keep_ids=tuple(keep_ids),
            marks=prefixes.marks(len(ids)),
            retained=tuple(retained),
        )

    def _has_row(self, index: int) -> bool:
        return index < self._vocab_size

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids of each word as vLLM has them: at the beginning of a text, and after a
        space if that changes the first token but not the number of tokens. A word without ids is
        dropped."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = word.lstrip()
            start = tuple(self._tokenizer.encode(plain))
            inside = tuple(self._tokenizer.encode(f" {plain}"))
            found[start] = None
            if start and inside[:1] != start[:1] and len(inside) == len(start):
                found[inside] = None
        # Ids without logits are never drawn.
        return tuple(ids for ids in found if ids and max(ids) < self._vocab_size)

    def _reasoning(self, sampling: SamplingParams, prompt: list[int]) -> ReasoningBudget | None:
        """Make the budget with the model's reasoning marks. They must be single tokens, so that the
        tokens between them can be counted exactly."""
        budget = sampling.thinking_token_budget
        if budget is None:
            return None
        marks = self._marks
        if marks is None:
            raise InvalidRequest(
                "this model's template knows no reasoning, so there is none to limit",
                param="thinking_token_budget",
            )
        ids = [self._tokenizer.encode(mark) for mark in (marks.open, marks.close)]
        if any(len(each) != 1 for each in ids):
            raise InvalidRequest(
                f"{marks.open} and {marks.close} are no tokens of this model, so its reasoning "
                "cannot be limited to a number of tokens",
                param="thinking_token_budget",
            )
        (opening,), (closing,) = ids
        allowed = sampling.allowed_token_ids
        if allowed is not None and closing not in allowed:
            raise InvalidRequest(
                f"the end of reasoning ({closing}) must be one of allowed_token_ids",
                param="allowed_token_ids",
            )
        # A prompt may end in the middle of reasoning (an answer to continue). Control tokens begin
        # and end turns; a mark in an earlier turn is the user's text, or was left open.
        deciding = {opening, closing, *self._eos_ids, *self._tokenizer.special_ids}
        last = next((index for index in reversed(prompt) if index in deciding), None)
        return ReasoningBudget(budget, opening, closing, last == opening)

    def _pooled(
        self,
        prompt: str | Sequence[int],
        task: Task,
        *,
        request_id: str,
        priority: int,
        adapter: str | None,
        second_at: int,
        arrival: float,
        given: RankingInput | PictureWish | RetrievalWish | None,
        seed: int | None,
        cache_salt: str,
    ) -> Request:
        if (task == "score") != (self._task == "score"):
            raise InvalidRequest(
                "this model makes vectors of texts, which are compared by their cosine"
                if task == "score"
                else "this model scores pairs of texts; use /rerank, /score or score()",
                param="model",
            )
        if isinstance(prompt, str) and task != "items":
            prompt = self._tokenizer.encode_with_specials(prompt)
        ids = self.tokenise(prompt)
        if len(ids) > self._max_context:
            raise ContextOverflow(
                f"the input has {len(ids)} tokens; at most {self._max_context} are allowed "
                "(truncate_prompt_tokens cuts it)",
                param="input",
            )
        if not 0 <= second_at < len(ids):
            raise InvalidRequest(
                f"second_at must be from 0 to {len(ids) - 1}, not {second_at}", param="second_at"
            )
        return Request(
            id=request_id,
            prompt=ids,
            spec=RequestSpec(
                SamplingParams(max_tokens=1, temperature=0.0),
                seed=resolve_seed(seed),
                task=task,
                adapter=adapter,
                second_at=second_at,
                ranking=given if isinstance(given, RankingInput) else None,
                picture=given if isinstance(given, PictureWish) else None,
                retrieval=given if isinstance(given, RetrievalWish) else None,
            ),
            priority=_integer("priority", priority),
            cache_salt=cache_salt if task == "items" else "",
            arrival=arrival,
        )

    def _ends(self) -> tuple[int, ...]:
        """Return the tokens that end a constrained answer, as `text.lltokenizer` has it."""
        ends = self._eos_ids or tuple(
            index for index in (self._tokenizer.eos_id,) if index is not None
        )
        if not ends:
            raise InvalidRequest(
                "this model has no end-of-text token, which a grammar needs", param="grammar"
            )
        return ends

    def tokenise(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the ids of a prompt: text gets the model's begin-of-text, ids are taken as they
        are.

        Raises `InvalidRequest` for an id without a row of the model's matrices, also from a text: a
        file's own vocabulary may be larger than the model.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt, add_bos=True)
        elif isinstance(prompt, list | tuple):
            ids = list(prompt)
        else:
            raise InvalidRequest(
                f"a prompt is text or a list of token ids, not {type(prompt).__name__}",
                param="prompt",
            )
        for index in ids:
            if type(index) is not int or not 0 <= index < self._vocab_size:
                raise InvalidRequest(
                    f"token ids must be integers from 0 to {self._vocab_size - 1}, "
                    f"not {index!r:.40}",
                    param="prompt",
                )
        if not ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        return ids


def resolve_seed(wish: int | None) -> int:
    """Return the seed of a request's random streams: the user's as 64 bits, or one drawn here,
    once."""
    return secrets.randbits(64) if wish is None else wish % SEEDS


def _integer(name: str, value: Any) -> int:
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise InvalidRequest(f"{name} must be a 32-bit integer, not {value!r:.40}", param=name)
    return value
