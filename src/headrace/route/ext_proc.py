"""Envoy's external processing protocol, as far as picking an endpoint needs it.

Names of headers and metadata are those of the endpoint picker protocol (Gateway API Inference
Extension, proposal 004).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..base.protobuf import MalformedMessage
from ..server.protocol import MAX_HEAD, HeadTooLarge
from .envoy_messages import new, parsed

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT = "x-gateway-destination-endpoint"
"""Header, and key of the metadata `ENDPOINT_SPACE`, that name a request's endpoint."""
ENDPOINT_SPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key of the metadata `SUBSET_SPACE`: the endpoints that may be chosen."""
SUBSET_SPACE = "envoy.lb.subset_hint"
PIECE = 60 * 1024
"""Bytes of a body in one message: Envoy asks for at most 64 kB."""
MOST_MESSAGE = 2**20 + MAX_HEAD
"""Bytes of a message. Envoy sends bodies in pieces of 64 kB, or whole (`BUFFERED`) up to its buffer
limit, 1 MiB by default."""
MOST_HEADERS = 1024
"""Headers of a request or an answer: Envoy allows 100 by default."""
_OVERWRITE = 2
"""Append action that discards any value the client sent under the header's name."""


class Part(IntEnum):
    """Part of an exchange in a message, by field number; its answer's number is one less."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7

    @property
    def field(self) -> str:
        """Name of the field, in a message and in its answer."""
        return self.name.lower()

    @property
    def kind(self) -> str:
        """Name of the message type in that field."""
        return f"Http{self.name.partition('_')[2].capitalize()}"


class BodyMode(IntEnum):
    """Ways in which Envoy sends bodies: not, streamed, buffered whole, or streamed and handed
    back."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4


@dataclass(frozen=True, slots=True)
class Processing:
    """One message from Envoy."""

    part: Part
    headers: list[tuple[bytes, bytes]]
    """Headers of the request or the answer, names in lower case."""
    body: bytes
    ends: bool
    """Whether this request or answer ends here."""
    subset: frozenset[str] | None
    """Addresses (`ip:port`) that may be chosen; None: any."""
    modes: tuple[BodyMode, BodyMode] | None
    """Body modes of requests and answers; only in the first message, if at all."""
    observes: bool
    """Whether Envoy only observes: it neither waits for an answer nor heeds it."""


def read(data: bytes) -> Processing:
    """Read a message from Envoy. Raises `MalformedMessage` and `HeadTooLarge`."""
    message = parsed("ProcessingRequest", data)
    part = next((part for part in Part if message.HasField(part.field)), None)
    if part is None:
        raise MalformedMessage("the message has no part of a request or an answer")
    packed = getattr(message, part.field)
    has_body = part in (Part.REQUEST_BODY, Part.RESPONSE_BODY)
    if len(data) - len(packed) * has_body > MAX_HEAD:
        raise HeadTooLarge(f"the headers of the message are larger than {MAX_HEAD} bytes")
    inner = parsed(part.kind, packed)
    headers: list[tuple[bytes, bytes]] = []
    if not has_body:
        given = inner.headers.headers
        if len(given) > MOST_HEADERS:
            raise HeadTooLarge(f"the message has more than {MOST_HEADERS} headers")
        headers = [(one.key.lower(), one.raw_value or one.value) for one in given]
    ends = part not in (Part.REQUEST_TRAILERS, Part.RESPONSE_TRAILERS) and inner.end_of_stream
    modes = None
    if message.HasField("protocol_config"):
        config = message.protocol_config
        try:
            modes = BodyMode(config.request_body_mode), BodyMode(config.response_body_mode)
        except ValueError:
            raise MalformedMessage("a body mode is unknown") from None
    body = inner.body if has_body else b""
    return Processing(
        part, headers, body, ends, _subset(message), modes, message.observability_mode
    )


def _subset(message: Any) -> frozenset[str] | None:
    """Return the addresses that a message allows, or None if it names none."""
    for space in message.metadata_context.filter_metadata:
        if space.key == SUBSET_SPACE and SUBSET in space.value.fields:
            value = space.value.fields[SUBSET]
            texts = [value.string_value, *(one.string_value for one in value.list_value.values)]
            named = (address.strip() for text in texts for address in text.split(","))
            return frozenset(address for address in named if address)
    return None


def nothing_changed(part: Part) -> bytes:
    """Answer a part: continue with it unchanged."""
    message = new("ProcessingResponse")
    getattr(message, part.field).SetInParent()
    return _bytes(message)


def given_back(part: Part, body: bytes, ends: bool) -> Iterator[bytes]:
    """Send a body, or part of it, back as Envoy expects it (`FULL_DUPLEX_STREAMED`)."""
    for begin in range(0, max(len(body), 1 if ends else 0), PIECE):
        message = new("ProcessingResponse")
        piece = getattr(message, part.field).response.body_mutation.streamed_response
        piece.body = body[begin : begin + PIECE]
        if ends and begin + PIECE >= len(body):
            piece.end_of_stream = True
        yield _bytes(message)


def chosen(part: Part, address: str) -> bytes:
    """Answer a request's headers or body with its endpoint, as header and as metadata."""
    message = new("ProcessingResponse")
    common = getattr(message, part.field).response
    _set(common.header_mutation, {ENDPOINT: address})
    common.clear_route_cache = True  # Envoy then looks up the route again.
    message.dynamic_metadata.get_or_create_struct(ENDPOINT_SPACE)[ENDPOINT] = address
    return _bytes(message)


def refused(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """Answer instead of a server. `details`: for Envoy's access log."""
    message = new("ProcessingResponse")
    reply = message.immediate_response
    reply.status.code, reply.body, reply.details = status, body, details
    _set(reply.headers, headers)
    return _bytes(message)


def asked_health(data: bytes) -> str:
    """Read the name of the service whose health is queried. Raises `MalformedMessage`."""
    return str(parsed("HealthCheckRequest", data).service)


def health(status: int) -> bytes:
    """Answer a health check."""
    message = new("HealthCheckResponse")
    message.status = status
    return _bytes(message)


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    mutation.SetInParent()
    for name, value in headers.items():
        one = mutation.set_headers.add(append_action=_OVERWRITE)
        one.header.key, one.header.raw_value = name.encode(), value.encode()


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
