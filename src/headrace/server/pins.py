"""Prompts that an operator wants to stay in the context cache.

A pin is asked for again and again, as a request of one token whose prompt is retained with the
highest priority: it goes when nothing else is left to give up, is loaded or computed anew by the
next asking, and loses its place within the hour once it is pinned no more. It is never locked.
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
"""Seconds for which each asking retains a prompt."""
AGAIN = 1200.0
"""Seconds between two askings."""
MOST = 256
"""Pins of a server."""
FIELDS = {"prompt", "messages", "tools"}
"""What of a pin is the request's."""


@dataclass(slots=True)
class Pin:
    """A pinned prompt, and what became of it when it was asked for last."""

    name: str
    key: str
    """Name of the API key whose callers find it; empty where there are none."""
    request: dict[str, Any]
    tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that were there."""
    problem: str = ""
    """Why it could not be asked for; empty: it could."""


class Pins:
    """All pins of one server."""

    def __init__(self, app: Inside, file: Path | None = None) -> None:
        """`file`: lines of JSON with `name`, `key` where there are keys, and what `read_prompts`
        takes. Raises `InvalidRequest` for what is none."""
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
        """Ask for a prompt now; it is pinned where the answer is good. Raises `InvalidRequest`."""
        self._check(pin)
        answer: Answer = await self._app.state.service.tasks.errand("pin", self._ask(pin))
        if answer.status == 200:
            self._pins[pin.name] = pin
        return answer

    def remove(self, name: str) -> bool:
        """Ask no more; False: nothing has that name."""
        return self._pins.pop(name, None) is not None

    async def keep(self) -> None:
        """Ask for all of them, for ever. Begun when the engine is ready."""
        while True:
            for pin in list(self):
                # In a task of its own: who asks is kept in the task's context.
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
        said = json.loads(answer.body)
        if answer.status == 200:
            usage = said["usage"]
            pin.tokens, pin.problem = usage["prompt_tokens"], ""
            pin.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        else:
            pin.problem = said["error"]["message"]
        return answer


def read_prompts(file: Path, param: str = "pinned_prompts") -> Iterator[dict[str, Any]]:
    """Objects with `prompt`, or `messages` and `tools`, a line each. Raises `InvalidRequest`."""
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
