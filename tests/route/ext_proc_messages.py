"""The messages of external processing as the `protobuf` package makes them of their descriptions:
what the product writes by hand is held against them."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

KINDS = {"int": 13, "bool": 8, "bytes": 12, "str": 9, "enum": 5}
MESSAGES = {
    "HeaderValue": "1 key str; 2 value str; 3 raw_value bytes",
    "HeaderMap": "1 headers *HeaderValue",
    "HeaderValueOption": "1 header HeaderValue; 3 append_action enum",
    "HeaderMutation": "1 set_headers *HeaderValueOption",
    "StreamedBodyResponse": "1 body bytes; 2 end_of_stream bool",
    "BodyMutation": "3 streamed_response StreamedBodyResponse",
    "CommonResponse": "2 header_mutation HeaderMutation; 3 body_mutation BodyMutation; "
    "5 clear_route_cache bool",
    "Response": "1 response CommonResponse",
    "TrailersResponse": "1 header_mutation HeaderMutation",
    "HttpStatus": "1 code enum",
    "ImmediateResponse": "1 status HttpStatus; 2 headers HeaderMutation; 3 body bytes; "
    "5 details str",
    "ProcessingResponse": "1 request_headers Response; 2 response_headers Response; "
    "3 request_body Response; 4 response_body Response; 5 request_trailers TrailersResponse; "
    "6 response_trailers TrailersResponse; 7 immediate_response ImmediateResponse; "
    "8 dynamic_metadata Struct",
    "HttpHeaders": "1 headers HeaderMap; 3 end_of_stream bool",
    "HttpBody": "1 body bytes; 2 end_of_stream bool",
    "HttpTrailers": "1 trailers HeaderMap",
    "Space": "1 key str; 2 value Struct",  # An entry of a map is a message like others.
    "Metadata": "1 filter_metadata *Space",
    "ProtocolConfiguration": "1 request_body_mode enum; 2 response_body_mode enum",
    "ProcessingRequest": "2 request_headers HttpHeaders; 3 response_headers HttpHeaders; "
    "4 request_body HttpBody; 5 response_body HttpBody; 6 request_trailers HttpTrailers; "
    "7 response_trailers HttpTrailers; 8 metadata_context Metadata; 10 observability_mode bool; "
    "11 protocol_config ProtocolConfiguration",
    "HealthCheckRequest": "1 service str",
    "HealthCheckResponse": "1 status enum",
}
"""Messages of `envoy/service/ext_proc/v3`, `envoy/config/core/v3` and `grpc/health/v1`, as far as
they are used."""


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="ext_proc.proto", package="t", syntax="proto3")
    file.dependency.append("google/protobuf/struct.proto")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for one in fields.split("; "):
            number, field, kind = one.split()
            made = message.field.add(name=field, number=int(number), label=1 + 2 * (kind[0] == "*"))
            kind = kind.removeprefix("*")
            if kind in KINDS:
                made.type = KINDS[kind]  # type: ignore[assignment]
            else:
                made.type = 11  # type: ignore[assignment]
                made.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".t.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}"))
        for name in MESSAGES
    }


MADE = _made()


def request(
    part: str,
    *,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    ends: bool = False,
    subset: object = None,
    modes: tuple[int, int] | None = None,
) -> bytes:
    """A message as Envoy sends it."""
    message = MADE["ProcessingRequest"]()
    inner = getattr(message, part)
    inner.SetInParent()
    if part.endswith("body"):
        inner.body, inner.end_of_stream = body, ends
    else:
        where = inner.trailers if part.endswith("trailers") else inner.headers
        for key, value in (headers or {}).items():
            where.headers.add(key=key, raw_value=value.encode())
        if part.endswith("headers"):
            inner.end_of_stream = ends
    if subset is not None:
        space = message.metadata_context.filter_metadata.add(key="envoy.lb.subset_hint")
        space.value.update({"x-gateway-destination-endpoint-subset": subset})
    if modes is not None:
        message.protocol_config.request_body_mode = modes[0]
        message.protocol_config.response_body_mode = modes[1]
    return message.SerializeToString()


def response(data: bytes) -> Any:
    """An answer as Envoy reads it; a field that Envoy does not know of fails."""
    message = MADE["ProcessingResponse"]()
    message.ParseFromString(data)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == size
    return message


def endpoint(message: Any, part: str) -> str:
    """The endpoint that an answer chooses; asserts that header and metadata agree."""
    common = getattr(message, part).response
    (option,) = common.header_mutation.set_headers
    assert option.append_action == 2
    assert option.header.key == "x-gateway-destination-endpoint"
    assert common.clear_route_cache
    found = option.header.raw_value.decode()
    assert message.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == found
    return str(found)
