"""Workloads: sessions of turns, made from a seed before the clock starts.

A session is one user. Each turn follows the previous answer and a think time. A single-turn
workload has sessions of one turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..base.errors import InvalidRequest, one_of
from .drawings import QUESTIONS, drawing
from .lengths import Lengths
from .material import Material
from .natural import CLASSES, SYSTEM

ROLE_SYSTEM, ROLE_USER = "system", "user"


SIDES = Lengths("uniform", 128, 1024)


@dataclass(slots=True)
class Turn:
    """One request of a session."""

    text: str
    """Text that the user adds."""
    output_tokens: int
    think_seconds: float = 0.0
    """Pause after the previous answer."""
    cancel_after: int | None = None
    """Chunks after which to cancel the request."""
    role: str = ROLE_USER
    ids: list[int] | None = None
    """The prompt as token ids, if the workload is exact and single-turn."""
    prompt_tokens: int = 0
    """Tokens of `ids` or `text` (without a chat template), if known."""
    answer: str | None = None
    """Assistant's text in the history, used instead of the server's answer."""
    picture: str = ""
    """Data URL of a picture that comes before the text."""
    right: str = ""
    """Right answer to the question about it, in one word."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request's body."""


@dataclass(slots=True)
class Session:
    """One user."""

    turns: list[Turn]
    system: str = ""
    group: int = 0
    """Number of its shared prefix."""
    at: float | None = None
    """Offset of its first request in a trace, in seconds."""
    shared_tokens: int = 0
    """Tokens shared with earlier sessions of its group."""
    repeats: bool = False
    """Whether `shared_tokens` are shared with any earlier session, of any group (known from a
    trace)."""


@dataclass(slots=True)
class Wish:
    """Parameters of a workload."""

    sessions: int
    seed: int
    input: Lengths
    output: Lengths
    material: Material
    ids: bool
    """Prompts as token ids (exact) rather than text."""
    groups: int = 8
    prefix_tokens: int = 1024
    zipf: float = 1.0
    turns: int = 4
    think_seconds: float = 2.0
    cancel_share: float = 0.1
    picture: Lengths = SIDES
    """Width and height of pictures, in pixels."""


def fixed(wish: Wish) -> list[Session]:
    """Make single requests with lengths from the two distributions."""
    rng = random.Random(wish.seed)
    return [Session([_turn(wish, rng)]) for _ in range(wish.sessions)]


def shared_prefix(wish: Wish) -> list[Session]:
    """Make `groups` prefixes of `prefix_tokens`; group k is drawn with weight 1 / k ** zipf."""
    rng = random.Random(wish.seed)
    weights = [1 / rank**wish.zipf for rank in range(1, wish.groups + 1)]
    prefixes = [
        wish.material.tokens(wish.prefix_tokens, rng)
        if wish.ids
        else wish.material.text(wish.prefix_tokens, rng)
        for _ in weights
    ]
    sessions = []
    for _ in range(wish.sessions):
        group = rng.choices(range(wish.groups), weights)[0]
        turn = _turn(wish, rng)
        prefix = prefixes[group]
        if isinstance(prefix, list):
            turn.ids = prefix + (turn.ids or [])
        else:
            turn.text = f"{prefix} {turn.text}"
        turn.prompt_tokens += wish.prefix_tokens
        sessions.append(Session([turn], group=group, shared_tokens=wish.prefix_tokens))
    return sessions


def chat(wish: Wish) -> list[Session]:
    """Make users with their group's system prompt, who think (exponential) between turns."""
    rng = random.Random(wish.seed)
    systems = [wish.material.text(wish.prefix_tokens, rng) for _ in range(wish.groups)]
    weights = [1 / rank**wish.zipf for rank in range(1, wish.groups + 1)]
    sessions = []
    for _ in range(wish.sessions):
        group = rng.choices(range(wish.groups), weights)[0]
        turns = [_turn(wish, rng, text_only=True) for _ in range(wish.turns)]
        for turn in turns[1:]:
            turn.think_seconds = _think(wish, rng)
        sessions.append(Session(turns, systems[group], group, shared_tokens=wish.prefix_tokens))
    return sessions


def agentic(wish: Wish) -> list[Session]:
    """Make a coding agent: long tool results return at once, context grows, some turns are
    cancelled.

    One system prompt with tools for all; each turn after the first is a tool's result of three
    times the input length; `cancel_share` of the turns are cancelled after a quarter of the answer.
    """
    rng = random.Random(wish.seed)
    system = wish.material.text(wish.prefix_tokens, rng)
    sessions = []
    for _ in range(wish.sessions):
        turns = []
        for number in range(wish.turns):
            turn = _turn(wish, rng, text_only=True, factor=3 if number else 1)
            # Tools answer in tens of milliseconds to seconds.
            turn.think_seconds = 0.0 if number == 0 else rng.lognormvariate(-2.0, 1.0)
            if rng.random() < wish.cancel_share:
                turn.cancel_after = max(1, turn.output_tokens // 4)
            turns.append(turn)
        sessions.append(Session(turns, system, shared_tokens=wish.prefix_tokens))
    return sessions


def long_context(wish: Wish) -> list[Session]:
    """Make single requests of eight times the input length that end in a short question."""
    rng = random.Random(wish.seed)
    return [Session([_turn(wish, rng, factor=8)]) for _ in range(wish.sessions)]


def structured(wish: Wish) -> list[Session]:
    """Make single requests whose answer must match a JSON schema."""
    rng = random.Random(wish.seed)
    schema = {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 40},
            "score": {"type": "integer", "minimum": 0, "maximum": 100},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["title", "score", "tags"],
        "additionalProperties": False,
    }
    sessions = []
    for _ in range(wish.sessions):
        turn = _turn(wish, rng, text_only=True)
        turn.extra = {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            }
        }
        sessions.append(Session([turn]))
    return sessions


def embeddings(wish: Wish) -> list[Session]:
    """Make single inputs to be embedded; nothing is generated."""
    rng = random.Random(wish.seed)
    sessions = []
    for _ in range(wish.sessions):
        turn = _turn(wish, rng)
        turn.output_tokens = 0
        sessions.append(Session([turn]))
    return sessions


def pictures(wish: Wish) -> list[Session]:
    """Make users with a drawn picture each, who ask for its shape, colour and count in turn."""
    rng = random.Random(wish.seed)
    sessions = []
    for _ in range(wish.sessions):
        made = drawing(wish.picture.draw(rng), wish.picture.draw(rng), rng)
        turns, first = [], rng.randrange(len(QUESTIONS))
        for number in range(wish.turns):
            asked = tuple(QUESTIONS)[(first + number) % len(QUESTIONS)]
            turn = Turn(QUESTIONS[asked], wish.output.draw(rng), right=made.answer(asked))
            turn.think_seconds = _think(wish, rng) if number else 0.0
            turns.append(turn)
        turns[0].picture = made.url
        sessions.append(Session(turns))
    return sessions


def natural(name: str, wish: Wish) -> list[Session]:
    """Make real text of one class of `bench/natural.py`, with natural prompt lengths."""
    rng = random.Random(f"{wish.seed} {name}")
    sessions = []
    for _ in range(wish.sessions):
        turns = [Turn(text, wish.output.draw(rng)) for text in CLASSES[name](rng)]
        for turn in turns:
            turn.prompt_tokens = wish.material.count(turn.text)
        sessions.append(Session(turns, SYSTEM.get(name, "")))
    return sessions


WORKLOADS: dict[str, Callable[[Wish], list[Session]]] = {
    "fixed": fixed,
    "shared-prefix": shared_prefix,
    "chat": chat,
    "agentic": agentic,
    "long-context": long_context,
    "structured": structured,
    "embeddings": embeddings,
    "pictures": pictures,
    **{name: partial(natural, name) for name in CLASSES},
}
PICTURES = "pictures"
"""Name of the workload with pictures."""
CHAT_ONLY = ("chat", "agentic", "structured", PICTURES, *CLASSES)
EMBEDDING = "embeddings"
"""Name of the workload and of the endpoint that only it uses."""


def make_workload(name: str, wish: Wish) -> list[Session]:
    """Make the sessions of a named workload; `InvalidRequest` lists the names."""
    one_of(name, WORKLOADS, "workload")
    for field_, value, low in (
        ("sessions", wish.sessions, 1),
        ("groups", wish.groups, 1),
        ("turns", wish.turns, 1),
        ("prefix_tokens", wish.prefix_tokens, 1),
    ):
        if value < low:
            raise InvalidRequest(f"{field_} must be at least {low}, not {value}", param=field_)
    return WORKLOADS[name](wish)


def shareable_tokens(sessions: list[Session]) -> int:
    """Count prompt tokens of single-turn requests shared with an earlier one of the same group."""
    seen: set[int] = set()
    total = 0
    for session in sessions:
        if session.shared_tokens and (session.repeats or session.group in seen):
            total += session.shared_tokens
        seen.add(session.group)
    return total


def _turn(wish: Wish, rng: random.Random, *, text_only: bool = False, factor: int = 1) -> Turn:
    tokens = wish.input.draw(rng) * factor
    output = wish.output.draw(rng)
    if wish.ids and not text_only:
        return Turn("", output, ids=wish.material.tokens(tokens, rng), prompt_tokens=tokens)
    return Turn(wish.material.text(tokens, rng), output, prompt_tokens=tokens)


def _think(wish: Wish, rng: random.Random) -> float:
    if not wish.think_seconds:
        return 0.0
    seconds = rng.expovariate(1 / wish.think_seconds)
    return min(seconds, wish.think_seconds * math.log(1000))
