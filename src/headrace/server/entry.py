"""How a request comes in: refused early, its body read, and only then counted as in work.

A body may take half a minute to arrive (`protocol.BODY_SECONDS`). Its sender holds a connection
meanwhile, never one of the places of those who wait for the engine.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from ..base.text_prefixes import PATHS, secret_of, text_prefixes
from .body import parse, read_json
from .caller import PREFIXES, RECEIVE
from .service import Service, of

Model = TypeVar("Model", bound=BaseModel)


async def entered(request: Request, model: type[Model]) -> tuple[Service, Model]:
    """The service and the body, with the request in work (`Service.enter`).

    Raises what `Service.check_open`, `body.read_model` and `Service.enter` raise.
    """
    service, body = await entered_raw(request)
    # Python runs for each message of a conversation, so others get their turn meanwhile.
    return service, await service.hands.beside(parse, body, model)


async def entered_raw(request: Request) -> tuple[Service, bytearray]:
    """Like `entered`, with the body as it came: for a route that parses it by what is in it."""
    service = of(request)
    service.check_open(request.scope)
    body = await read_json(request, service.options.max_body)
    if request.scope["path"] in PATHS:
        secret = secret_of(request.scope["headers"])
        PREFIXES.set(await service.hands.beside(text_prefixes, body, secret))
    service.enter(request.scope)
    RECEIVE.set(request.receive)
    return service, body
