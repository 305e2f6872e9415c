"""JSON out: msgspec for everything that is sent, and the frames of server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Any plain value → UTF-8 JSON."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """One event with a name, as the Responses and Messages interfaces send them."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        encode(value), status_code=status, headers=headers, media_type="application/json"
    )
