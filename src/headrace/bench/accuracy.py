"""Output quality: perplexity on a text, over HTTP, of any server that echoes prompts.

`reference.py` compares answers with another run's, `tasks.py` has questions with known answers,
`gate.py` decides whether the results are good enough.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest
from ..base.foreign import any_json
from .http import Address, ConnectionLost, Pool, parse_url, request_bytes
from .job import Target

CORPUS_MODULES = tuple(
    """
    argparse asyncio collections contextlib csv datetime decimal difflib email fractions
    functools heapq http inspect itertools json logging pathlib pickle random shelve socket
    statistics string subprocess tarfile textwrap threading trace zipfile
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp(-mean log-probability) over all tokens except the first of each window."""

    value: float
    tokens: int
    windows: int
    corpus: str


def stdlib_corpus() -> tuple[str, str]:
    """Return (text, name): the docstrings of Python's own library, available on every machine."""
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
    """Cut at line ends into pieces of about `characters` characters, at most `limit` pieces."""
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
    target: Target,
    text: str,
    corpus: str,
    *,
    characters: int = 1500,
    limit: int = 64,
    concurrency: int = 4,
) -> Perplexity:
    """Request the log-probabilities of the text itself: `echo`, and one token that is dropped."""
    pieces = windows(text, characters, limit)
    if not pieces:
        raise InvalidRequest("the corpus is empty", param="corpus")
    bodies = [
        {
            "model": target.model,
            "prompt": piece,
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        }
        for piece in pieces
    ]
    answers = asyncio.run(ask_all(target, "/v1/completions", bodies, concurrency))
    total, tokens = 0.0, 0
    for answer in answers:
        try:
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
        except (KeyError, IndexError, TypeError):
            raise HeadraceError(
                "the server gives no log-probabilities of the prompt (echo with logprobs)"
            ) from None
        # The first token has no log-probability; the last one was generated.
        known = [value for value in found[:-1] if value is not None]
        total += sum(known)
        tokens += len(known)
    if not tokens:
        raise HeadraceError("the server told no log-probability at all")
    return Perplexity(math.exp(-total / tokens), tokens, len(pieces), corpus)


def default_prompts(count: int = 32) -> list[str]:
    """Return the beginnings of documentation texts, as prompts."""
    text, _ = stdlib_corpus()
    pieces = windows(text, 400, count)
    return [piece[: int(len(piece) * 0.6)] for piece in pieces]


async def ask_all(
    target: Target, path: str, bodies: Sequence[dict[str, Any]], concurrency: int
) -> list[dict[str, Any]]:
    """Return all answers in the order of the bodies; the first failure raises `HeadraceError`."""
    pool = Pool(parse_url(target.url))
    turns = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        async with turns:
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
            reply = await pool.request(data, lambda _when, part: parts.append(part))
    except TimeoutError:
        raise HeadraceError(f"no answer within {target.timeout:g} s") from None
    except ConnectionLost as error:
        raise HeadraceError(str(error)) from None
    text = b"".join(parts)
    if reply.status != 200:
        raise HeadraceError(f"HTTP {reply.status}: {text[:300].decode(errors='replace')}")
    try:
        found: dict[str, Any] = any_json(text)
    except ValueError as error:
        raise HeadraceError(f"the answer is not JSON: {error}") from None
    return found
