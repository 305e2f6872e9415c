"""The messages of Envoy's external processing, as far as a choice of endpoints needs them.

Numbers of fields are those of `envoy/service/ext_proc/v3/external_processor.proto`; names of
headers and metadata those of the endpoint picker protocol (Gateway API Inference Extension,
proposal 004).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from .protobuf import MalformedMessage, Message, field

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
ENDPOINT = "x-gateway-destination-endpoint"
"""Header, and key of the metadata `ENDPOINT_SPACE`, that name the endpoint of a request."""
ENDPOINT_SPACE = "envoy.lb"
SUBSET = "x-gateway-destination-endpoint-subset"
"""Key of the metadata `SUBSET_SPACE`: the endpoints that may be chosen."""
SUBSET_SPACE = "envoy.lb.subset_hint"
PIECE = 60 * 1024
"""Bytes of a body in one message: Envoy asks for at most 64 kB."""
_OVERWRITE = 2
"""How a header is set: what a client sent under that name is not kept."""


class Part(IntEnum):
    """What of an exchange a message has, by its field; that of its answer is one less."""

    REQUEST_HEADERS = 2
    RESPONSE_HEADERS = 3
    REQUEST_BODY = 4
    RESPONSE_BODY = 5
    REQUEST_TRAILERS = 6
    RESPONSE_TRAILERS = 7


class BodyMode(IntEnum):
    """How Envoy sends bodies: not, as they pass, whole, or as they pass and are given back."""

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
    """Nothing of this request or answer follows."""
    subset: frozenset[str] | None
    """The addresses (`ip:port`) that may be chosen; None: any."""
    modes: tuple[BodyMode, BodyMode] | None
    """How bodies of requests and of answers come; told in the first message, if at all."""
    observes: bool
    """Envoy does not wait for an answer and would not heed it."""


def read(data: bytes) -> Processing:
    """A message from Envoy. Raises `MalformedMessage`."""
    message = Message(data)
    part = next((part for part in Part if message.has(part)), None)
    if part is None:
        raise MalformedMessage("the message has no part of a request or an answer")
    inner = message.message(part)
    headers, body = [], b""
    if part in (Part.REQUEST_BODY, Part.RESPONSE_BODY):
        body = inner.bytes(1)
        ends = bool(inner.number(2))
    else:
        for one in inner.message(1).messages(1):
            headers.append((one.bytes(1).lower(), one.bytes(3) or one.bytes(2)))
        ends = bool(inner.number(3))
    subset = None
    hint = message.message(8).entry(SUBSET_SPACE)
    if hint is not None and (value := hint.entry(SUBSET)) is not None:
        texts = [value.text(3), *(one.text(3) for one in value.message(6).messages(1))]
        named = (address.strip() for text in texts for address in text.split(","))
        subset = frozenset(address for address in named if address)
    modes = None
    if message.has(11):
        told = message.message(11)
        try:
            modes = BodyMode(told.number(1)), BodyMode(told.number(2))
        except ValueError:
            raise MalformedMessage("a body mode is unknown") from None
    return Processing(part, headers, body, ends, subset, modes, bool(message.number(10)))


def nothing_changed(part: Part) -> bytes:
    """The answer to a part: go on with it as it is."""
    return field(part - 1, b"")


def given_back(part: Part, body: bytes, ends: bool) -> Iterator[bytes]:
    """A body, or what there is of it, as Envoy wants it back (`FULL_DUPLEX_STREAMED`)."""
    for begin in range(0, max(len(body), 1 if ends else 0), PIECE):
        piece = field(1, body[begin : begin + PIECE])
        if ends and begin + PIECE >= len(body):
            piece += field(2, 1)
        # Body answer → common answer → body mutation → streamed answer.
        yield field(part - 1, field(1, field(3, field(3, piece))))


def chosen(part: Part, address: str) -> bytes:
    """The answer to a request's headers or body: its endpoint, as a header and as metadata."""
    common = field(2, _headers({ENDPOINT: address})) + field(5, 1)  # The route is looked up again.
    value = field(1, ENDPOINT) + field(2, field(3, address))
    space = field(1, ENDPOINT_SPACE) + field(2, field(5, field(1, value)))
    return field(part - 1, field(1, common)) + field(8, field(1, space))


def refused(status: int, headers: Mapping[str, str], body: bytes, details: str) -> bytes:
    """The answer that Envoy is to give in place of any server. `details`: for its access log."""
    reply = field(1, field(1, status)) + field(2, _headers(headers))
    return field(7, reply + field(3, body) + field(5, details))


def _headers(headers: Mapping[str, str]) -> bytes:
    return b"".join(
        field(1, field(1, field(1, name) + field(3, value)) + field(3, _OVERWRITE))
        for name, value in headers.items()
    )
