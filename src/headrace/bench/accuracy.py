"""Is the output right? Perplexity on a text, and agreement of greedy answers with a reference.

Both over HTTP, so any server can be measured and any other can be the reference. What the
completions interface tells of log-probabilities is all that is used.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest
from .http import Address, ConnectionLost, Pool, parse_url, request_bytes
from .job import Target

CORPUS_MODULES = (
    "argparse", "asyncio", "collections", "contextlib", "csv", "datetime", "decimal", "difflib",
    "email", "fractions", "functools", "heapq", "http", "inspect", "itertools", "json", "logging",
    "pathlib", "pickle", "random", "shelve", "socket", "statistics", "string", "subprocess",
    "tarfile", "textwrap", "threading", "trace", "zipfile",
)  # fmt: skip
GATES = (0.99, 0.999)
"""Shares of the reference that MLPerf asks of an optimised model."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(-mean log-probability) over all tokens but the first of each window."""

    value: float
    tokens: int
    windows: int
    corpus: str


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy answers against those of a reference."""

    prompts: int
    equal: int
    """Answers that are the same to the last character."""
    token_match: float
    """Mean share of a reference answer's pieces that come before the first difference."""
    first_difference: float | None
    """Median place of the first difference, in pieces, where there is one."""


def stdlib_corpus() -> tuple[str, str]:
    """(text, name): the documentation strings of this Python's library, which every machine has."""
    parts = []
    for name in CORPUS_MODULES:
        members = sorted(inspect.getmembers(import_module(name)), key=lambda pair: pair[0])
        for _, member in members:
            if getattr(member, "__module__", None) == name:
                text = inspect.getdoc(member)
                if text and len(text) > 200:
                    parts.append(text)
    version = ".".join(map(str, sys.version_info[:3]))
    name = f"docstrings of the standard library, Python {version}"
    return "\n\n".join(dict.fromkeys(parts)), name


def windows(text: str, characters: int, limit: int) -> list[str]:
    """Cut at line ends into pieces of about so many characters."""
    found: list[str] = []
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= characters:
            found.append(piece)
            piece = ""
            if len(found) == limit:
                return found
    return [*found, piece] if piece.strip() else found


def perplexity(
    target: Target, text: str, corpus: str, *, characters: int = 1500, limit: int = 64,
    concurrency: int = 4,
) -> Perplexity:  # fmt: skip
    """Ask for the log-probabilities of the text itself: `echo`, and one token that is dropped."""
    pieces = windows(text, characters, limit)
    if not pieces:
        raise InvalidRequest("the corpus is empty", param="corpus")
    bodies = [
        {"model": target.model, "prompt": piece, "max_tokens": 1, "temperature": 0.0,
         "echo": True, "logprobs": 1}
        for piece in pieces
    ]  # fmt: skip
    answers = asyncio.run(ask_all(target, "/v1/completions", bodies, concurrency))
    total, tokens = 0.0, 0
    for answer in answers:
        try:
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise HeadraceError(
                "the server gives no log-probabilities of the prompt (echo with logprobs)"
            ) from None
        # The first token has none, the last one was generated.
        known = [value for value in found[:-1] if value is not None]
        total += sum(known)
        tokens += len(known)
    if not tokens:
        raise HeadraceError("the server told no log-probability at all")
    return Perplexity(math.exp(-total / tokens), tokens, len(pieces), corpus)


def answers_of(
    target: Target, prompts: Sequence[str], tokens: int, concurrency: int = 4
) -> list[list[str]]:
    """Greedy answers as their tokens' texts."""
    bodies = [
        {"model": target.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
         "logprobs": 0, "seed": 0}
        for prompt in prompts
    ]  # fmt: skip
    found = []
    for answer in asyncio.run(ask_all(target, "/v1/completions", bodies, concurrency)):
        choice = answer["choices"][0]
        pieces = (choice.get("logprobs") or {}).get("tokens")
        found.append(list(pieces) if pieces else choice["text"].split(" "))
    return found


def agreement(answers: Sequence[list[str]], reference: Sequence[list[str]]) -> Agreement:
    """Compare answer by answer."""
    if len(answers) != len(reference):
        raise InvalidRequest(
            f"{len(answers)} answers cannot be held against {len(reference)}", param="reference"
        )
    equal, shares, places = 0, [], []
    for ours, theirs in zip(answers, reference, strict=True):
        length = next(
            (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        if ours == theirs:
            equal += 1
        else:
            places.append(length)
        shares.append(length / len(theirs) if theirs else float(not ours))
    places.sort()
    return Agreement(
        len(answers), equal, sum(shares) / len(shares) if shares else 0.0,
        float(places[len(places) // 2]) if places else None,
    )  # fmt: skip


def default_prompts(count: int = 32) -> list[str]:
    """Beginnings of documentation to be continued."""
    text, _ = stdlib_corpus()
    pieces = windows(text, 400, count)
    return [piece[: int(len(piece) * 0.6)] for piece in pieces]


def save_reference(path: Path, prompts: list[str], answers: list[list[str]]) -> None:
    path.write_text(json.dumps({"prompts": prompts, "answers": answers}))


def load_reference(path: Path) -> tuple[list[str], list[list[str]]]:
    """What `save_reference` wrote; `InvalidRequest` says what is wrong with it."""
    try:
        data = json.loads(path.read_text())
        return list(data["prompts"]), [list(answer) for answer in data["answers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is no reference: {error}", param="reference") from None


def as_json(value: Perplexity | Agreement) -> dict[str, Any]:
    return asdict(value)


async def ask_all(
    target: Target, path: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> list[dict[str, Any]]:
    """All answers in the order of the bodies; the first failure raises `HeadraceError`."""
    pool = Pool(parse_url(target.url))
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        async with gate:
            return await _ask(pool, target, path, body)

    try:
        return list(await asyncio.gather(*(one(body) for body in bodies)))
    finally:
        pool.close()


async def _ask(pool: Pool, target: Target, path: str, body: dict[str, Any]) -> dict[str, Any]:
    address: Address = pool.address
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else None
    data = request_bytes(address, "POST", path, json.dumps(body).encode(), headers)
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(target.timeout):
            connection = await pool.take()
            reply = await connection.send(data, lambda _when, part: parts.append(part))
            pool.give(connection)
    except TimeoutError:
        raise HeadraceError(f"no answer within {target.timeout:g} s") from None
    except ConnectionLost as error:
        raise HeadraceError(str(error)) from None
    text = b"".join(parts)
    if reply.status != 200:
        raise HeadraceError(f"HTTP {reply.status}: {text[:300].decode(errors='replace')}")
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise HeadraceError(f"the answer is not JSON: {error}") from None
    return found
