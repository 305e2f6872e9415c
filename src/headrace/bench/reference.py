"""Greedy answers compared with a reference run's: token match and divergence of the logits.

Both sides answer the same prompts greedily and report the log-probabilities of their likeliest
tokens. Up to and including the first different token both have the same context, so their
distributions can be compared there, but not after it. Tokens are compared by text: the completions
interface reports nothing else.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest
from .accuracy import Perplexity, ask_all
from .job import Target
from .store import write_text

SCHEMA = "headrace.bench.reference/1"
Top = dict[str, float]
"""Text of a token → its log-probability."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer, token by token."""

    tokens: list[str]
    top: list[Top]
    """The likeliest tokens at each place; empty if the server does not report them."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of greedy answers with those of a reference."""

    prompts: int
    equal: int
    """Answers that are equal to the last token."""
    token_match: float
    """Mean share of a reference answer's tokens before the first difference."""
    first_difference: float | None
    """Median place of the first difference, if there is one."""
    places: int = 0
    """Places at which distributions could be compared."""
    kl_mean: float | None = None
    """Mean over the places of KL(reference ‖ here), in nats; a lower bound, see `divergence`."""
    kl_max: float | None = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Prompts, answers and scores kept from a reference run."""

    model: str
    prompts: list[str]
    answers: list[Answer]
    perplexity: Perplexity | None = None
    tasks: dict[str, float] | None = None
    """`gate.task_key` of a task set (name and size; the seed is always 0) → score."""
    limit: int | None = None
    """Most tokens of each answer; None: not kept."""


def answers_of(
    target: Target,
    prompts: Sequence[str],
    tokens: int,
    *,
    alternatives: int = 20,
    concurrency: int = 4,
) -> list[Answer]:
    """Get greedy answers with the log-probabilities of the `alternatives` likeliest tokens."""
    bodies = [
        {
            "model": target.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "logprobs": alternatives,
            "seed": 0,
        }
        for prompt in prompts
    ]
    answers = asyncio.run(ask_all(target, "/v1/completions", bodies, concurrency))
    return [read_answer(answer) for answer in answers]


def read_answer(answer: dict[str, Any]) -> Answer:
    """Read a completion with OpenAI's old form of log-probabilities, or the chat form
    (llama.cpp)."""
    try:
        logprobs = answer["choices"][0].get("logprobs") or {}
        if "content" in logprobs:
            places = logprobs["content"]
            return Answer(
                [str(place["token"]) for place in places],
                [
                    {str(one["token"]): float(one["logprob"]) for one in place["top_logprobs"]}
                    for place in places
                ],
            )
        tokens = [str(token) for token in logprobs["tokens"]]
        top = [dict(place) for place in logprobs.get("top_logprobs") or [] if place]
    except (KeyError, IndexError, TypeError, AttributeError):
        raise HeadraceError(
            "the server tells no tokens of its answers (completions with logprobs)"
        ) from None
    return Answer(tokens, top if len(top) == len(tokens) else [])


def divergence(reference: Top, here: Top) -> float:
    """Return a lower bound of KL(reference ‖ here) in nats: only the likeliest tokens are known.

    Tokens that both report are compared one by one. All others count as one token with the rest of
    the probability. Merging outcomes can only reduce a Kullback-Leibler divergence (log-sum
    inequality).
    """
    total, rest, rest_here = 0.0, 1.0, 1.0
    for token, value in reference.items():
        other = here.get(token)
        if other is None:
            continue
        share = math.exp(value)
        total += share * (value - other)
        rest -= share
        rest_here -= math.exp(other)
    if rest > 0:
        total += rest * math.log(rest / max(rest_here, 1e-9))
    return max(0.0, total)


def agreement(
    answers: Sequence[Answer],
    reference: Sequence[Answer],
    *,
    limit: int | None = None,
    reference_limit: int | None = None,
) -> Agreement:
    """Compare answer by answer, up to the shorter limit.

    `limit` and `reference_limit`: most tokens of each side's answers; None if unknown.
    """
    common = min((each for each in (limit, reference_limit) if each is not None), default=None)
    answers, reference = (
        [Answer(one.tokens[:common], one.top[:common]) for one in side]
        for side in (answers, reference)
    )
    if len(answers) != len(reference):
        raise InvalidRequest(
            f"{len(answers)} answers cannot be held against {len(reference)}", param="reference"
        )
    equal, shares, places, divergences = 0, [], [], list[float]()
    for ours, theirs in zip(answers, reference, strict=True):
        pairs = list(zip(ours.tokens, theirs.tokens, strict=False))
        length = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        if ours.tokens == theirs.tokens:
            equal += 1
        else:
            places.append(length)
        shares.append(length / len(theirs.tokens) if theirs.tokens else float(not ours.tokens))
        # The first difference was chosen in the same context, so it counts.
        known = zip(theirs.top[: length + 1], ours.top[: length + 1], strict=False)
        divergences += [divergence(a, b) for a, b in known]
    places.sort()
    return Agreement(
        len(answers),
        equal,
        sum(shares) / len(shares) if shares else 0.0,
        float(places[len(places) // 2]) if places else None,
        len(divergences),
        math.fsum(divergences) / len(divergences) if divergences else None,
        max(divergences, default=None),
    )


def save_reference(path: Path, reference: Reference) -> None:
    """Write a reference, completely or not at all; raise `HeadraceError` if the disk is full."""
    write_text(path, json.dumps({"schema": SCHEMA, **asdict(reference)}))


def load_reference(path: Path) -> Reference:
    """Read a file of `save_reference`; `InvalidRequest` describes the error in it."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r}, not {SCHEMA!r}")
        theirs = data["perplexity"]
        found = Reference(
            str(data["model"]),
            [str(prompt) for prompt in data["prompts"]],
            [Answer(list(one["tokens"]), list(one["top"])) for one in data["answers"]],
            None if theirs is None else Perplexity(**theirs),
            data["tasks"],
            data.get("limit"),
        )
    except KeyError as error:
        raise InvalidRequest(
            f"{path} is no reference: {error} is missing", param="reference"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no reference: {error}", param="reference") from None
    if len(found.prompts) != len(found.answers):
        raise InvalidRequest(
            f"{path} is no reference: {len(found.prompts)} prompts, {len(found.answers)} answers",
            param="reference",
        )
    return found
