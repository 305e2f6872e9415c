"""Entry of a request: refused early, its body read, and only then counted as in work.

A body may take half a minute to arrive (`protocol.BODY_SECONDS`). Meanwhile its sender holds a
connection, but no place in the engine's queue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from ..base.text_prefixes import PATHS, secret_of, text_prefixes
from .body import parse, read_json
from .caller import PREFIXES, RECEIVE
from .service import Service, of

Model = TypeVar("Model", bound=BaseModel)


async def entered(
    request: Request, model: type[Model], *, wakes: Callable[[Model], bool] = lambda body: True
) -> tuple[Service, Model]:
    """Return the service of the model that the body names (`chosen`), and the parsed body, with the
    request in work (`Service.enter`). `wakes`: whether this body loads a model that rests.

    Raises the errors of `Service.check_open`, `body.read_model` and `Service.enter`.
    """
    service, body = await entered_raw(request)
    # Parsing runs Python code per message of a conversation, so it runs off the event loop.
    parsed = await service.hands.beside(parse, body, model)
    named = getattr(parsed, "model", None) or getattr(parsed, "name", None)
    if not wakes(parsed):
        return service.choose(named, resting=True), parsed
    return await chosen(service, named), parsed


async def chosen(service: Service, name: str | None) -> Service:
    """Return the service for this model name (`Service.choose`); reload a resting model first."""
    residents = service.residents
    if residents is None:
        return service.choose(name)
    if name:
        await residents.wanted(name)
    found = service.choose(name)
    residents.used(found)
    return found


def hearing(service: Service) -> Service:
    """Return the service for a transcription request without a model name: this one, or the first
    that transcribes, loaded or at rest."""
    resting = [] if service.residents is None else service.residents.resting
    every = (service, *service.models, *resting)
    return next((one for one in every if hasattr(one.served, "hear")), service)


async def entered_raw(request: Request) -> tuple[Service, bytearray]:
    """Do as `entered`, but return the unparsed body: for routes that choose the parser by its
    content."""
    service = of(request)
    service.check_open(request.scope)
    body = await read_json(request, service.options.max_body)
    if request.scope["path"] in PATHS:
        secret = secret_of(request.scope["headers"])
        PREFIXES.set(await service.hands.beside(text_prefixes, body, secret))
    service.enter(request.scope)
    RECEIVE.set(request.receive)
    return service, body
