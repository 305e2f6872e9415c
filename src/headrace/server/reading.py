"""Text of pictures over HTTP, by pipelines of foreign programs; imported only if programs are
served, since it needs numpy."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from ..base.errors import InvalidRequest, ModelNotFound
from ..base.names import nearest
from ..base.tiling import Reducing
from ..engine.programs.engine import ProgramEngine
from ..engine.programs.ocr import OcrPipeline, pipeline_names
from ..media import Picture, PictureLimits, decode_picture
from ..programs.ocr.steps import LONGEST
from ..sched.deadlines import CLASSES
from .caller import CALLER, RECEIVE
from .connection import while_connected
from .generation import Usage

if TYPE_CHECKING:
    from .program_fields import OcrBody
    from .service import Service

LIMITS = PictureLimits()


class OcrRoutes:
    """The pipelines of one server that read pictures."""

    def __init__(self, service: Service, engine: ProgramEngine) -> None:
        self._service, self.engine = service, engine
        self._pipelines: dict[str, OcrPipeline] = {}

    def find(self, name: str | None) -> OcrPipeline:
        """Return the named pipeline, or the only one if no name is given. Raises `ModelNotFound`,
        `InvalidRequest`, and `UnsupportedModel` if its programs are not PP-OCR."""
        programs = self.engine.programs
        names = pipeline_names(programs)
        if not names:
            raise InvalidRequest(
                "no program of this server reads pictures; headrace serve ocr-pp-v4 has some",
                param="model",
                code="unsupported_model",
            )
        if name is None and len(names) > 1:
            raise InvalidRequest(f"name one of: {', '.join(names)}", param="model")
        name = names[0] if name is None else name
        if name not in names:
            why = f"nothing named {name!r:.200} reads pictures here{nearest(name, names)}"
            raise ModelNotFound(f"{why}; this server has {', '.join(names)}", param="model")
        if name not in self._pipelines:
            self._pipelines[name] = OcrPipeline(name, programs)
        return self._pipelines[name]

    async def read(self, request: Request, body: OcrBody) -> dict[str, Any]:
        """Answer one request."""
        pipeline = self.find(body.model)
        request.scope["headrace.usage"] = Usage(pipeline.name)
        data = await self._service.hands.beside(picture_bytes, body.image)
        return await while_connected(request.receive, self._read(pipeline, data, body))

    async def _read(self, pipeline: OcrPipeline, data: bytes, body: OcrBody) -> dict[str, Any]:
        RECEIVE.set(None)  # The caller watches the connection during all steps.
        service, rule = self._service, Reducing(LONGEST)
        picture: Picture

        async def decode() -> None:
            nonlocal picture
            picture = await service.decoders.run(decode_picture, data, rule, LIMITS, "image")

        lines = await self.lines(
            pipeline,
            lambda: picture,
            urgency=CLASSES[body.urgency or "interactive"],
            timeout=math.inf if body.timeout is None else body.timeout,
            prepare=decode,
        )
        return {
            "object": "ocr",
            "model": pipeline.name,
            "width": picture.width,
            "height": picture.height,
            "text": "\n".join(one["text"] for one in lines),
            "lines": lines,
        }

    async def lines(
        self,
        pipeline: OcrPipeline,
        picture: Callable[[], Picture],
        *,
        urgency: int,
        timeout: float,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> list[dict[str, Any]]:
        """Read a picture's lines in a job. `timeout`: seconds to its deadline; `prepare`: work that
        precedes `picture()`. Raises as `ProgramJobs.begun` and `OcrPipeline.read`."""
        owner = CALLER.get().owner
        begun = self.engine.jobs.begun(
            pipeline.name, urgency=urgency, timeout=timeout, owner=owner, prepare=prepare
        )
        async with begun as job:
            # A small file may decode to a large picture.
            in_thread = partial(self._service.hands.run, large=True)
            return [asdict(one) for one in await pipeline.read(job, picture(), in_thread)]


def picture_bytes(text: str) -> bytes:
    """Return the bytes of a data URL, or of base64. Raises `InvalidRequest`."""
    head, comma, data = text.partition(",")
    named = comma and head[:5].lower() == "data:" and head.lower().endswith(";base64")
    if not named and ":" in text[:4096]:
        raise InvalidRequest(
            "a picture is taken as a data URL (data:image/png;base64,…) or in base64; nothing is "
            "fetched",
            param="image",
            code="unsupported_content",
        )
    try:
        return base64.b64decode(data if named else text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("the data is not base64", param="image") from None
