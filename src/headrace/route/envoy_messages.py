"""Messages of Envoy's external processing.

Only the fields needed to pick an endpoint are described, because Envoy's files import a hundred
others. Numbers are those of `envoy/service/ext_proc/v3/external_processor.proto`. Each part of a
request is declared as bytes.
"""

from __future__ import annotations

from ..base.protobuf import MessageTypes

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
TYPES = MessageTypes("envoy", _FIELDS, "endpoint pickers")
new, parsed = TYPES.new, TYPES.parsed
