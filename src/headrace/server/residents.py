"""Models loaded and unloaded while a server runs.

An operator loads and unloads them. Ollama's `keep_alive` lets one rest: its memory is freed, its
names stay, and the next request for it reloads it. The first model stays loaded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..base.config import EngineOptions, parse_seconds
from ..base.errors import (
    DoesNotFit,
    InvalidRequest,
    ModelFileError,
    ModelNotFound,
    UnsupportedModel,
)
from ..base.several import OWN, ModelChoice, read_models

if TYPE_CHECKING:
    from ..engine.clients.group import EngineGroup, Member
    from .service import Service

LOOK_SECONDS = 0.25
"""Seconds between two checks for models whose time is up."""
GRACE_SECONDS = 0.5
"""Seconds allowed for requests that have chosen a model to reach its engine."""

LONGEST_SECONDS = 100 * 365.25 * 86400.0
"""Longest `keep_alive` that is counted: later dates cannot be written."""


class Residents:
    """The models of one server, loaded or at rest."""

    def __init__(
        self,
        service: Service,
        group: EngineGroup,
        attach: Callable[[Service, Member, Sequence[str]], None],
    ) -> None:
        """Manage a group. `attach`: opens a service with a ready engine, under names."""
        self.resting: list[Service] = []
        """Services of unloaded models that the next request reloads."""
        self._service = service
        self._group = group
        self._attach = attach
        self._numbers = {one: number for number, one in enumerate(service.models)}
        self._chosen = {one: group.chosen[number] for one, number in self._numbers.items()}
        self._turn = asyncio.Lock()
        """Lock: one model is loaded or unloaded at a time."""
        self._keep: dict[Service, float] = {}
        """Seconds that a model stays after its last request; a model without an entry stays."""
        self._used: dict[Service, float] = {}
        """Time at which a model was last seen to have a request."""

    def number(self, service: Service) -> int:
        """Return a loaded model's number in the group."""
        return self._numbers[service]

    async def load(self, word: str) -> Service:
        """Load `NAME[:option=value,...]`. Raises `ModelNotFound`, and `InvalidRequest` if it cannot
        be served; if it does not fit, the error has the missing bytes."""
        first = self._group.chosen[0].options
        plain: dict[str, Any] = {
            spec.name: spec.default for spec in fields(EngineOptions) if spec.name in OWN
        }
        (choice,) = read_models([word], replace(first, **plain))
        async with self._turn:
            for name in choice.served:
                if name in self._service.all_names or self._service.runs(name):
                    kind = "program" if self._service.runs(name) else "model"
                    raise InvalidRequest(
                        f"{name!r:.200} is a {kind} of this server; give the new one another name, "
                        "as in MODEL:name=OTHER",
                        param="model",
                    )
                if self._service.with_adapter(name) is not None:
                    raise InvalidRequest(f"{name!r:.200} is an adapter's name", param="model")
            return await self._load(choice, self._service.beside())

    async def _load(self, choice: ModelChoice, service: Service) -> Service:
        try:
            number = await self._group.load(choice)
        except (DoesNotFit, ModelFileError, UnsupportedModel) as error:
            code = "does_not_fit" if isinstance(error, DoesNotFit) else None
            raise InvalidRequest(error.message, param="model", code=code) from None
        names = self._group.names(number)
        self._attach(service, self._group.members[number], names)
        self._chosen[service] = replace(choice, names=tuple(names))
        self._numbers[service] = number
        self._service.models.append(service)
        return service

    async def unload(self, name: str, *, rest: bool = False) -> None:
        """Finish a model's requests and free its memory. `rest`: its names stay, and the next
        request reloads it.

        Raises `ModelNotFound`, and `InvalidRequest` for the first model.
        """
        async with self._turn:
            for one in self.resting:
                if name in one.names and not rest:
                    self.resting.remove(one)
                    del self._chosen[one]
                    return
            service = next((one for one in self._service.models if name in one.names), None)
            if service is None:
                raise ModelNotFound(f"there is no model {name[:200]!r} to unload", param="model")
            if service is self._service:
                raise InvalidRequest(
                    f"{service.name} is the server's first model, which stays", param="model"
                )
            self._service.models.remove(service)
            self._keep.pop(service, None)
            self._used.pop(service, None)
            if rest:
                self.resting.append(service)
            else:
                del self._chosen[service]
            await asyncio.sleep(GRACE_SECONDS)
            seconds = self._service.options.drain_seconds
            await self._group.unload(self._numbers.pop(service), seconds)

    async def wanted(self, name: str) -> None:
        """Reload the model of this name if it rests. Raises as `load`."""
        if self.at_rest(name) is not None:
            # An errand: it goes on for others if this caller leaves.
            loading = self._service.tasks.errand("load model", self._wake(name))
            await asyncio.shield(loading)

    async def _wake(self, name: str) -> None:
        async with self._turn:
            service = self.at_rest(name)
            if service is not None:  # Another caller may have loaded it meanwhile.
                await self._load(self._chosen[service], service)
                self.resting.remove(service)

    def at_rest(self, name: str) -> Service | None:
        """Return the service of a resting model."""
        spelt = {name, name.removesuffix(":latest")}
        return next((one for one in self.resting if spelt & set(one.names)), None)

    # Ollama's habit

    def keep(self, service: Service, seconds: float) -> None:
        """Let a model rest `seconds` after its last request; infinity: it stays."""
        self._keep.pop(service, None)
        if service in self._service.models[1:] and math.isfinite(seconds):
            self._keep[service] = seconds
            self._used[service] = time.monotonic()

    def used(self, service: Service) -> None:
        """Record a request for a model."""
        self._used[service] = time.monotonic()

    def expires_in(self, service: Service) -> float:
        """Return the seconds until a model rests if no request comes; infinity: it stays."""
        seconds = self._keep.get(service)
        if seconds is None:
            return math.inf
        return max(0.0, seconds - (time.monotonic() - self._used[service]))

    async def watch(self) -> None:
        """Let models rest when their time is up; never return."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = time.monotonic()
            for service in list(self._keep):
                number = self._numbers.get(service)
                if number is None or self._group.members[number].wanted:
                    self._used[service] = now
                elif now - self._used[service] >= max(GRACE_SECONDS, self._keep[service]):
                    with suppress(ModelNotFound):  # An operator has unloaded it meanwhile.
                        await self.unload(service.name, rest=True)


def kept_seconds(keep_alive: Any) -> float:
    """Return the seconds of Ollama's `keep_alive`: a number of seconds, or a text such as `5m`.
    Negative values and more than a century are infinity. Raises `InvalidRequest`."""
    if isinstance(keep_alive, bool) or not isinstance(keep_alive, int | float | str):
        raise InvalidRequest("keep_alive must be seconds, or a time as in 5m", param="keep_alive")
    text = str(keep_alive).strip()
    seconds = parse_seconds(text.removeprefix("-"), "keep_alive", bare=True)
    return math.inf if text.startswith("-") or seconds > LONGEST_SECONDS else seconds
