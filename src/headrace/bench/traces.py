"""Workloads recorded elsewhere, from local files.

ShareGPT-like JSON, Mooncake's JSONL (timestamp, lengths, hash ids of 512-token blocks), the Azure
LLM inference trace (CSV) and BurstGPT (CSV). Formats are as documented by their publishers.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest, one_of
from .material import Material
from .workload import Session, Turn

ANSWER_TOKENS = 128
"""Answer length for user prompts that have none."""
HASH_TOKENS = 512
"""Tokens of one hashed block in Mooncake's traces."""


def load_trace(
    kind: str, path: Path, material: Material, *, limit: int | None = None, seed: int = 0
) -> list[Session]:
    """Load the sessions of a trace, in order of time; `InvalidRequest` names line and column."""
    one_of(kind, TRACES, "trace")
    if not path.is_file():
        raise InvalidRequest(f"no such trace file: {path}", param="trace")
    try:
        sessions = TRACES[kind](path, material, random.Random(seed), limit)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} is not text: {error}", param="trace") from None
    if not sessions:
        raise InvalidRequest(f"{path} holds no request", param="trace")
    sessions.sort(key=lambda session: session.at or 0.0)
    return sessions


def _sharegpt(
    path: Path, material: Material, rng: random.Random, limit: int | None
) -> list[Session]:
    """Read [{"conversations": [{"from": "human" | "gpt", "value": …}, …]}, …].

    Each question is followed by its answer; a system prompt, or an answer without a question, is
    left out.
    """
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", param="trace") from None
    if not isinstance(data, list):
        raise InvalidRequest(f"{path}: expected a list of conversations", param="trace")
    sessions = []
    for number, item in enumerate(data[:limit]):
        talk = item.get("conversations") or item.get("messages") if isinstance(item, dict) else None
        if not isinstance(talk, list):
            raise InvalidRequest(
                f"{path}, entry {number}: needs a list 'conversations' (or 'messages')",
                param="trace",
            )
        said = [
            (str(part.get("from", part.get("role"))), str(part.get("value", part.get("content"))))
            for part in talk
            if isinstance(part, dict)
        ]
        turns = [
            Turn(
                question,
                max(1, material.count(answer)),
                prompt_tokens=material.count(question),
                answer=answer,
            )
            for (asker, question), (answerer, answer) in itertools.pairwise(said)
            if asker in ("human", "user") and answerer in ("gpt", "assistant") and question
        ]
        if turns:
            sessions.append(Session(turns))
    return sessions


def _mooncake(
    path: Path, material: Material, rng: random.Random, limit: int | None
) -> list[Session]:
    """Read lines of {"timestamp" (ms), "input_length", "output_length", "hash_ids"}.

    A hash id always becomes the same 512 tokens within the run. So prefixes are shared as recorded,
    but not with a run of another seed.
    """
    blocks: dict[int, list[int] | str] = {}
    seen: set[int] = set()
    salt = rng.random()
    sessions = []
    for number, line in enumerate(path.read_text().splitlines()[:limit], 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            length, output = int(item["input_length"]), int(item["output_length"])
            at = float(item["timestamp"]) / 1000
            hashes = [int(value) for value in item.get("hash_ids", [])]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _bad(path, number, error) from None
        parts: list[Any] = []
        for index, name in enumerate(hashes):
            wanted = min(HASH_TOKENS, length - index * HASH_TOKENS)
            if wanted <= 0:
                break
            block = blocks.get(name)
            if block is None:
                own = random.Random(f"{salt} {name}")
                block = blocks[name] = _some(material, HASH_TOKENS, own)
            if isinstance(block, str):
                # Without a tokenizer a word stands for a token, so a part of a block is its words.
                parts.append(" ".join(block.split()[:wanted]))
            else:
                parts.append(block[:wanted])
        covered = min(length, len(parts) * HASH_TOKENS)
        if length > covered:
            parts.append(_some(material, length - covered, rng))
        known = len(list(itertools.takewhile(seen.__contains__, hashes)))
        seen.update(hashes)
        shared = min(length, known * HASH_TOKENS)
        turn = _joined(parts, length, output)
        sessions.append(Session([turn], at=at, shared_tokens=shared, repeats=True))
    return sessions


def _prompts(
    path: Path, material: Material, rng: random.Random, limit: int | None
) -> list[Session]:
    """Read the user's own prompts, one session per line.

    Lines are {"text" or "prompt": …}, {"turns": [{"text": …}, …]} or recorded {"messages":
    [{"role": …, "content": …}, …]}, whose answers are kept. A session or a turn may also have
    "output_tokens" (or "max_tokens"), a turn "delay" (ms after the previous answer), a session
    "system" and "timestamp" (ms).
    """
    sessions = []
    for number, line in enumerate(path.read_text().splitlines()[:limit], 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            if "messages" in item:
                system, turns = _recorded(item["messages"], material)
            else:
                said = item.get("turns", [item])
                system, turns = str(item.get("system", "")), []
                for part in said:
                    text = str(part["text"] if "text" in part else part["prompt"])
                    think = float(part.get("delay", 0)) / 1000
                    turns.append(Turn(text, 0, think, prompt_tokens=material.count(text)))
                for turn, part in zip(turns, said, strict=True):
                    turn.output_tokens = _wished(part) or _wished(item) or ANSWER_TOKENS
            if not turns:
                raise ValueError("there is no question in it")
            at = float(item["timestamp"]) / 1000 if "timestamp" in item else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _bad(path, number, error) from None
        sessions.append(Session(turns, system, at=at))
    return sessions


def _wished(item: dict[str, Any]) -> int:
    return int(item.get("output_tokens", item.get("max_tokens", 0)))


def _recorded(messages: list[dict[str, Any]], material: Material) -> tuple[str, list[Turn]]:
    """Return (system prompt, turns) of a conversation or an agent's run.

    All messages between two answers, including tools' results, are one turn.
    """
    system, asked, turns = "", list[str](), list[Turn]()
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(str(part.get("text", "")) for part in content)
        if role == "system" and not turns and not asked:
            system = content
        elif role != "assistant":
            asked.append(content)
        elif asked:
            answer = content + "".join(map(json.dumps, message.get("tool_calls") or ()))
            text = "\n".join(asked)
            turns.append(
                Turn(
                    text,
                    max(1, material.count(answer)),
                    answer=answer or None,
                    prompt_tokens=material.count(text),
                )
            )
            asked = []
    return system, turns


def _columns(
    when: str, given: str, made: str, seconds: Callable[[str], float]
) -> Callable[[Path, Material, random.Random, int | None], list[Session]]:
    """Make a reader of CSV files with these columns: time, prompt tokens, answer tokens.

    `seconds` parses the time. Requests without either count have failed and are left out.
    """
    needed = when, given, made

    def read(
        path: Path, material: Material, rng: random.Random, limit: int | None
    ) -> list[Session]:
        sessions = []
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            missing = [name for name in needed if name not in columns]
            if missing:
                raise InvalidRequest(
                    f"{path} lacks the column {missing[0]!r}; it has "
                    f"{', '.join(columns) or 'none'}",
                    param="trace",
                )
            for number, row in enumerate(itertools.islice(reader, limit), 2):
                if any(row.get(name) is None for name in needed):
                    raise InvalidRequest(f"{path}, line {number}: too few columns", param="trace")
                try:
                    at, length, output = seconds(row[when]), int(row[given]), int(row[made])
                except ValueError as error:
                    raise _bad(path, number, error) from None
                if length > 0 and output > 0:
                    turn = _joined([_some(material, length, rng)], length, output)
                    sessions.append(Session([turn], at=at))
        return sessions

    return read


def _instant(text: str) -> float:
    return datetime.fromisoformat(text[:26].strip()).timestamp()


TRACES: dict[str, Callable[[Path, Material, random.Random, int | None], list[Session]]] = {
    "sharegpt": _sharegpt,
    "mooncake": _mooncake,
    "azure": _columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", _instant),
    "burstgpt": _columns("Timestamp", "Request tokens", "Response tokens", float),
    "prompts": _prompts,
}


def _some(material: Material, tokens: int, rng: random.Random) -> list[int] | str:
    return material.tokens(tokens, rng) if material.ids else material.text(tokens, rng)


def _joined(parts: list[Any], length: int, output: int) -> Turn:
    if parts and isinstance(parts[0], list):
        return Turn(
            "", output, ids=[token for part in parts for token in part], prompt_tokens=length
        )
    return Turn(" ".join(parts), output, prompt_tokens=length)


def _bad(path: Path, number: int, error: Exception) -> InvalidRequest:
    what = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
    if isinstance(error, json.JSONDecodeError):
        what = 'it is no JSON; a line is an object, in prompts such as {"text": "Why is rain wet?"}'
    return InvalidRequest(f"{path}, line {number}: {what}", param="trace")
