"""Route `/v1/images/generations`: pictures of a class or a text, in OpenAI's form."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.denoising import MOST_GUIDANCE, MOST_PARTIAL, MOST_PICTURES, Denoiser
from ...base.errors import InvalidRequest
from ...engine.clients.drawing import (
    PictureOrder,
    denoiser_of,
    drawn,
    predicted,
    read_drawing,
    size_of,
    submit,
)
from ..caller import engine_id
from ..connection import EventStream, while_connected
from ..entry import entered
from ..fields import Body, Integer
from ..generation import Usage, deltas
from ..openapi import replies, takes
from ..service import Service
from ..wire import large_response, named_frame

BEGINS = "image_generation"
"""Beginning of the names of a stream's events."""


class ImagesBody(Body, neglects="images"):
    model: str | None = Field(None, description="Served name; null: the served model.")
    prompt: str = Field(max_length=4000, description="A text, or a class's name or number.")
    negative_prompt: str | None = Field(
        None, max_length=4000, description="Text that guidance leads away from; null: none."
    )
    n: Integer | None = Field(None, description=f"Pictures, from 1 to {MOST_PICTURES}.")
    size: str | None = Field(
        None, max_length=40, description="auto, or the one size that the model draws, as 8x8."
    )
    seed: Integer | None = Field(None, ge=0, description="Same seed, same pictures.")
    steps: Integer | None = Field(
        None, description="Denoising steps, from 1 to those of the model's training; null: 20."
    )
    guidance: float | None = Field(
        None,
        description=f"Weight of the class, from 0 to {MOST_GUIDANCE:g}; at most 1: half the work, "
        "without guidance; null: 4.",
    )
    response_format: Literal["b64_json"] | None = Field(
        None, description="Pictures come in the answer alone."
    )
    output_format: Literal["png"] | None = None
    stream: bool | None = Field(None, description="Pictures as events; with n of 1 alone.")
    partial_images: Integer | None = Field(
        None, description=f"Unfinished pictures of a stream, from 0 to {MOST_PARTIAL}."
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first (policy priority)."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")


class ImageData(TypedDict):
    b64_json: str


class ImagesUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    denoising_steps: int
    predicted_seconds: float | None


class ImagesReply(TypedDict):
    created: int
    data: list[ImageData]
    output_format: str
    size: str
    seed: int
    usage: ImagesUsage


router = APIRouter(tags=["OpenAI"])


@router.post("/v1/images/generations", responses=replies(ImagesReply, stream=True))
@takes(ImagesBody)
async def generations(request: Request) -> Response:
    """Draw pictures of a class or a text. `usage` has the patches that all steps compute, and the
    seconds that the roofline predicts for all; null on an unknown machine."""
    service, body = await entered(request, ImagesBody)
    service.check_model(body.model)
    denoiser = denoiser_of(service.engine.files, service.name)
    if body.partial_images and not body.stream:
        raise InvalidRequest("partial_images needs stream", param="partial_images")
    if body.stream and body.n not in (None, 1):
        raise InvalidRequest("a stream has one picture: n must be 1", param="n")
    order = read_drawing(
        service.engine,
        denoiser,
        body.prompt,
        negative=body.negative_prompt,
        n=body.n,
        size=body.size,
        seed=body.seed,
        steps=body.steps,
        guidance=body.guidance,
        partial=body.partial_images,
    )
    seconds = predicted(service.engine, order)
    request.scope["headrace.usage"] = usage = Usage(service.name)
    about = _about(denoiser, order, seconds)
    name = f"img-{body.request_id or request.scope['headrace.request_id']}"
    work = _OrderedPictures(service, denoiser, order, usage, name, body.priority or 0)
    if body.stream:
        return EventStream(_events(work, about), keep_alive=service.keep_alive)
    found = await while_connected(request.receive, work.all())
    return await large_response({"created": int(time.time()), "data": found, **about})


def _about(denoiser: Denoiser, order: PictureOrder, seconds: float | None) -> dict[str, Any]:
    patches = order.entries * denoiser.tokens
    counted = {
        "input_tokens": order.inputs,
        "output_tokens": patches,
        "total_tokens": order.inputs + patches,
        "denoising_steps": sum(one.steps for one in order.wishes),
        "predicted_seconds": seconds,
    }
    return {"output_format": "png", "size": size_of(denoiser), "seed": order.seed, "usage": counted}


class _OrderedPictures:
    """Pictures of one request; they end when their reader leaves."""

    def __init__(
        self,
        service: Service,
        denoiser: Denoiser,
        order: PictureOrder,
        usage: Usage,
        name: str,
        priority: int,
    ) -> None:
        self._service, self._denoiser, self._order = service, denoiser, order
        self._usage, self._name, self._priority = usage, name, priority

    def _deltas(self, *, whole: bool) -> Any:
        names = [engine_id(f"{self._name}-{at}") for at in range(len(self._order.wishes))]
        given = self._service.engine, self._order, names
        streams = submit(*given, whole=whole, priority=self._priority)
        # Only now: nothing is charged for pictures that the engine refuses.
        self._usage.known_prompt(0, self._order.inputs)
        self._usage.completion = self._order.entries * self._denoiser.tokens
        return deltas(streams)

    async def all(self) -> list[dict[str, str]]:
        """Return all finished pictures, in their order."""
        found: dict[int, str] = {}
        async with aclosing(self._deltas(whole=True)) as parts:
            async for one in drawn(self._denoiser, parts):
                found[one.number] = await _text_of(one.png)
        return [{"b64_json": found[at]} for at in range(len(found))]

    async def pieces(self) -> AsyncGenerator[tuple[bool, str]]:
        """Yield (whether it is finished, the picture after a step) of the only picture, each step
        once even if a preempted picture starts again."""
        seen = 0
        async with aclosing(self._deltas(whole=False)) as parts:
            async for one in drawn(self._denoiser, parts):
                if one.step > seen:
                    seen = one.step
                    yield one.final, await _text_of(one.png)


async def _text_of(png: bytes) -> str:
    """Return a file in base64, written in a thread: it may have megabytes."""
    return (await asyncio.to_thread(base64.b64encode, png)).decode()


async def _events(work: _OrderedPictures, about: dict[str, Any]) -> AsyncGenerator[bytes]:
    usage, place = about.pop("usage"), 0
    async with aclosing(work.pieces()) as pieces:
        async for final, picture in pieces:
            kind = "completed" if final else "partial_image"
            event: dict[str, Any] = {"type": f"{BEGINS}.{kind}", "b64_json": picture}
            event |= {"created_at": int(time.time()), **about}
            event |= {"usage": usage} if final else {"partial_image_index": place}
            place += 1
            yield named_frame(f"{BEGINS}.{kind}", event)
