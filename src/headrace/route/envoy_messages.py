"""Messages of Envoy's external processing, built from descriptions by `protobuf`.

Only the fields needed to pick an endpoint are described, because Envoy's files import a hundred
others. Numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`. Each part of a
request is declared as bytes, its form on the wire, so its size is known before anything in it is
read.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..base.errors import HeadraceError
from ..base.extras import needed

_TYPES = {"number": 5, "bool": 8, "text": 9, "bytes": 12}
"""Field types of `google.protobuf.FieldDescriptorProto`; any other is a message's name."""
_MESSAGE = 11
_FIELDS = {
    "ProcessingRequest": "2 request_headers bytes, 3 response_headers bytes, 4 request_body bytes, "
    "5 response_body bytes, 6 request_trailers bytes, 7 response_trailers bytes, "
    "8 metadata_context Metadata, 10 observability_mode bool, "
    "11 protocol_config ProtocolConfiguration",
    "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
    "HttpBody": "1 body bytes, 2 end_of_stream bool",
    "HttpTrailers": "1 headers HeaderMap",
    "HeaderMap": "1 headers *HeaderValue",
    "HeaderValue": "1 key bytes, 2 value bytes, 3 raw_value bytes",
    "Metadata": "1 filter_metadata *Space",
    "Space": "1 key text, 2 value Struct",  # An entry of a map is encoded as a message.
    "ProtocolConfiguration": "1 request_body_mode number, 2 response_body_mode number",
    "ProcessingResponse": "1 request_headers PartResponse, 2 response_headers PartResponse, "
    "3 request_body PartResponse, 4 response_body PartResponse, 5 request_trailers PartResponse, "
    "6 response_trailers PartResponse, 7 immediate_response ImmediateResponse, "
    "8 dynamic_metadata Struct",
    "PartResponse": "1 response CommonResponse",
    "CommonResponse": "2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, "
    "5 clear_route_cache bool",
    "HeaderMutation": "1 set_headers *HeaderValueOption",
    "HeaderValueOption": "1 header HeaderValue, 3 append_action number",
    "BodyMutation": "3 streamed_response StreamedBodyResponse",
    "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
    "ImmediateResponse": "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, "
    "5 details text",
    "HttpStatus": "1 code number",
    "HealthCheckRequest": "1 service text",
    "HealthCheckResponse": "1 status number",
}
"""Number, name and type of each field; `*`: it is repeated."""


class MalformedMessage(HeadraceError):
    """Bytes that are not a message, or a message that is not allowed now."""

    status = 400
    code = "malformed_message"


@cache
def _classes() -> dict[str, Any]:
    """Make the classes. Raises `PackageAbsent`."""
    who, extra = "endpoint pickers", "picker"
    descriptors = needed("google.protobuf.descriptor_pb2", who, extra)
    pools = needed("google.protobuf.descriptor_pool", who, extra)
    factory = needed("google.protobuf.message_factory", who, extra)
    struct = needed("google.protobuf.struct_pb2", who, extra)
    # proto2 distinguishes an absent field from an empty one; on the wire they are alike.
    file = descriptors.FileDescriptorProto(name="envoy", package="envoy", syntax="proto2")
    file.dependency.append(struct.DESCRIPTOR.name)
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for one in fields.split(", "):
            number, field, kind = one.split()
            made = message.field.add(name=field, number=int(number), label=1 + 2 * (kind[0] == "*"))
            kind = kind.removeprefix("*")
            made.type = _TYPES.get(kind, _MESSAGE)
            if kind not in _TYPES:
                made.type_name = (
                    f".google.protobuf.{kind}" if kind == "Struct" else f".envoy.{kind}"
                )
    pool = pools.DescriptorPool()
    pool.AddSerializedFile(struct.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: factory.GetMessageClass(pool.FindMessageTypeByName(f"envoy.{name}"))
        for name in _FIELDS
    }


def new(name: str) -> Any:
    """Make an empty message."""
    return _classes()[name]()


def parsed(name: str, data: bytes) -> Any:
    """Parse a message. Raises `MalformedMessage`."""
    failures = needed("google.protobuf.message", "endpoint pickers", "picker")
    try:
        return _classes()[name].FromString(data)
    except failures.DecodeError:
        raise MalformedMessage(f"the bytes are no {name}") from None
