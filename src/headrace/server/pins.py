"""Prompts that an operator wants kept in the context cache.

Each pin is requested periodically: one token, with its prompt retained at the highest priority. So
it is evicted only after everything else, and is then loaded or recomputed by the next request. An
unpinned prompt loses its place within the hour. It is never locked.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from ..base.foreign import Undecodable, any_json
from .inside import Answer, Inside, post

log = logging.getLogger("headrace.server")

KEPT = 3600.0
"""Seconds for which each request retains a prompt."""
AGAIN = 1200.0
"""Seconds between two requests of a pin."""
MOST = 256
"""Maximum pins of a server."""
FIELDS = {"prompt", "messages", "tools"}
"""Fields of a pin that belong to the request."""


@dataclass(slots=True)
class Pin:
    """A pinned prompt and the outcome of its last request."""

    name: str
    key: str
    """Name of the API key whose callers can use it; empty if there are no keys."""
    request: dict[str, Any]
    tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were still cached."""
    problem: str = ""
    """Reason why the request failed, or ""."""


class Pins:
    """All pins of one server."""

    def __init__(self, app: Inside, file: Path | None = None) -> None:
        """Read the pins.

        `file`: JSON lines with `name`, `key` if there are keys, and the fields of `read_prompts`.
        Raises `InvalidRequest` for an invalid line.
        """
        self._app = app
        self._pins: dict[str, Pin] = {}
        for number, one in enumerate(() if file is None else read_prompts(file), start=1):
            request = {name: value for name, value in one.items() if name in FIELDS}
            pin = Pin(str(one.get("name", number)), str(one.get("key", "")), request)
            self._check(pin)
            self._pins[pin.name] = pin

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    async def add(self, pin: Pin) -> Answer:
        """Request a prompt now; it is pinned if that succeeds. Raises `InvalidRequest`."""
        self._check(pin)
        answer: Answer = await self._app.state.service.tasks.errand("pin", self._ask(pin))
        if answer.status == 200:
            self._pins[pin.name] = pin
        return answer

    def remove(self, name: str) -> bool:
        """Unpin a prompt; return False if there is no such name."""
        return self._pins.pop(name, None) is not None

    async def keep(self) -> None:
        """Request all pins periodically, for ever. Started when the engine is ready."""
        while True:
            for pin in list(self):
                # In a task of its own: the caller is stored in the task's context.
                await self._app.state.service.tasks.errand("pin", self._ask(pin))
                if pin.problem:
                    log.warning("the prompt %s is not in the cache: %s", pin.name, pin.problem)
            await asyncio.sleep(AGAIN)

    def _check(self, pin: Pin) -> None:
        accounts = self._app.state.accounts
        if accounts is None and pin.key:
            raise InvalidRequest("this server has no keys", param="key")
        if accounts is not None and accounts.named(pin.key) is None:
            raise InvalidRequest(
                f"a prompt is pinned for the callers of one key: {pin.key[:200]!r} is none of "
                "this server's",
                param="key",
            )
        if len(self._pins) >= MOST and pin.name not in self._pins:
            raise InvalidRequest(f"at most {MOST} prompts are pinned", param="name")

    async def _ask(self, pin: Pin) -> Answer:
        chat = "messages" in pin.request
        body = {
            **pin.request,
            **({"add_generation_prompt": False} if chat else {}),
            "max_tokens": 1,
            "temperature": 0.0,
            "retention": [{"seconds": KEPT, "priority": 100}],
        }
        accounts = self._app.state.accounts
        answer = await post(
            self._app,
            self._app.inside,
            "/v1/chat/completions" if chat else "/v1/completions",
            json.dumps(body).encode(),
            request_id=f"pin-{pin.name}",
            account=None if accounts is None else accounts.named(pin.key),
            owner=pin.key,
        )
        reply = json.loads(answer.body)
        if answer.status == 200:
            usage = reply["usage"]
            pin.tokens, pin.problem = usage["prompt_tokens"], ""
            pin.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        else:
            pin.problem = reply["error"]["message"]
        return answer


def read_prompts(file: Path, param: str = "pinned_prompts") -> Iterator[dict[str, Any]]:
    """Yield objects with `prompt`, or `messages` and `tools`, one per line. Raises
    `InvalidRequest`."""
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as wrong:
        raise InvalidRequest(f"{file} cannot be read: {wrong}", param=param) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = any_json(line)
        except Undecodable:
            one = None
        if not isinstance(one, dict) or not ({"prompt", "messages"} & one.keys()):
            raise InvalidRequest(
                f"{file}, line {number}, is no object with prompt or messages", param=param
            )
        yield one
