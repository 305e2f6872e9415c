"""Messages of KServe v2 over gRPC, and their translation to and from the form with binary tensors.

Numbers of fields are those of Triton's `grpc_service.proto`, which has KServe's, and
`ModelStreamInfer`. A request becomes the JSON and the bytes that `tensors.read_infer` takes, so
there is one reader of tensors, with one set of bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from ..base.errors import InvalidRequest
from ..base.foreign import any_json
from ..base.protobuf import MalformedMessage, MessageTypes
from ..programs.rows import MOST_RANK
from .tensors import DATATYPES, LENGTH_HEADER, MOST_NAME, MOST_TENSORS

SERVICE = "inference.GRPCInferenceService"
TYPES = MessageTypes(
    "inference",
    {
        "Named": "1 name text, 2 version text",
        "Truth": "1 truth bool",
        "ServerMetadataResponse": "1 name text, 2 version text, 3 extensions *text",
        "ModelMetadataResponse": "1 name text, 2 versions *text, 3 platform text, "
        "4 inputs *TensorMetadata, 5 outputs *TensorMetadata",
        "TensorMetadata": "1 name text, 2 datatype text, 3 shape *int64",
        "RepositoryIndexResponse": "1 models *ModelIndex",
        "ModelIndex": "1 name text, 2 version text, 3 state text, 4 reason text",
        "ModelInferRequest": "1 model_name text, 2 model_version text, 3 id text, "
        "4 parameters *bytes, 5 inputs *bytes, 6 outputs *bytes, 7 raw_input_contents *bytes",
        # An entry of a map is encoded as a message.
        "Parameter": "1 key text, 2 value ParameterValue",
        "ParameterValue": "1 bool_param bool, 2 int64_param int64, 3 string_param text, "
        "4 double_param double, 5 uint64_param uint64",
        "InferInputTensor": "1 name text, 2 datatype text, 3 shape *int64, 4 parameters *bytes, "
        "5 contents TensorContents",
        "TensorContents": "1 bool_contents *bool, 2 int_contents *number, 3 int64_contents *int64, "
        "4 uint_contents *uint32, 5 uint64_contents *uint64, 6 fp32_contents *float, "
        "7 fp64_contents *double",
        "InferRequestedOutputTensor": "1 name text, 2 parameters *bytes",
        "ModelInferResponse": "1 model_name text, 2 model_version text, 3 id text, "
        "5 outputs *TensorMetadata, 6 raw_output_contents *bytes",
        "ModelStreamInferResponse": "1 error_message text, 2 infer_response ModelInferResponse",
    },
    "KServe v2 over gRPC",
)
"""`Named` is ModelReadyRequest and ModelMetadataRequest, `Truth` each answer of one flag."""
_WIDTHS = {"int8": "int", "int16": "int", "int32": "int", "uint8": "uint", "uint16": "uint"}
_WIDTHS |= {"uint32": "uint", "float32": "fp32", "float64": "fp64"}
"""numpy's name → prefix of a field's name in `TensorContents`, where the two differ."""


@dataclass(frozen=True, slots=True)
class InferCall:
    """A request in the form with binary tensors."""

    path: str
    id: str
    head: dict[str, Any]
    """JSON."""
    tensors: list[bytes]
    """Elements of the inputs, which follow the JSON."""

    def pieces(self, microseconds: int | None) -> tuple[list[bytes], int]:
        """Return the body in pieces, and the length of its JSON. `microseconds`: time left until
        the call's deadline (an earlier one of the request stays); None: no deadline."""
        parameters = self.head["parameters"]
        if microseconds is not None:
            given = parameters.get("timeout")
            if given in (None, 0) or (isinstance(given, int) and given > microseconds):
                parameters["timeout"] = microseconds
        head = msgspec.json.encode(self.head)
        return [head, *self.tensors], len(head)


def model_path(name: str, version: str, last: str = "") -> str:
    """Return the path of a model. Raises `InvalidRequest` for a name that a path cannot hold."""
    for param, text in (("model_name", name), ("model_version", version)):
        if len(text) > MOST_NAME or "/" in text or (param == "model_name" and not text):
            allowed = f"allowed are 1 to {MOST_NAME} characters without a slash"
            raise InvalidRequest(f"{param} is {text!r:.80}; {allowed}", param=param)
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "") + last


def read_named(data: bytes) -> tuple[str, str]:
    """Read name and version of a model. Raises `MalformedMessage`."""
    message = _parsed("Named", data)
    return message.name, message.version


def read_call(data: bytes) -> InferCall:
    """Read a request. Raises `MalformedMessage`, and `InvalidRequest` that names the field."""
    message = _parsed("ModelInferRequest", data)
    inputs, raw = message.inputs, message.raw_input_contents
    for name, many in (("inputs", inputs), ("outputs", message.outputs)):
        if len(many) > MOST_TENSORS:
            raise InvalidRequest(f"{len(many)} tensors; at most {MOST_TENSORS}", param=name)
    if raw and len(raw) != len(inputs):
        wrong = f"{len(raw)} raw contents of {len(inputs)} inputs"
        raise InvalidRequest(f"{wrong}; allowed are none, or one each", param="raw_input_contents")
    tensors: list[bytes] = []
    described: list[dict[str, Any]] = []
    for place, data in enumerate(inputs):
        one, param = _parsed("InferInputTensor", data), f"inputs[{place}]"
        # With one size above the maximum the reader refuses the shape.
        shape = list(one.shape[: MOST_RANK + 1])
        if raw and one.HasField("contents"):
            wrong = "both contents and raw_input_contents; allowed is one"
            raise InvalidRequest(wrong, param=param)
        tensors.append(raw[place] if raw else _elements(one, shape, param))
        parameters = _parameters(one.parameters, f"{param}.parameters")
        parameters["binary_data_size"] = len(tensors[-1])
        tensor = {"name": one.name, "datatype": one.datatype, "shape": shape}
        described.append({**tensor, "parameters": parameters})
    outputs = []
    for place, data in enumerate(message.outputs):
        asked = _parsed("InferRequestedOutputTensor", data)
        parameters = _parameters(asked.parameters, f"outputs[{place}].parameters")
        outputs.append({"name": asked.name, "parameters": {**parameters, "binary_data": True}})
    parameters = {**_parameters(message.parameters, "parameters"), "binary_data_output": True}
    head = {"id": message.id, "parameters": parameters, "inputs": described, "outputs": outputs}
    path = model_path(message.model_name, message.model_version, "/infer")
    return InferCall(path, message.id, head, tensors)


def _parameters(entries: Any, param: str) -> dict[str, Any]:
    if len(entries) > MOST_TENSORS:
        raise InvalidRequest(f"{len(entries)} parameters; at most {MOST_TENSORS}", param=param)
    found: dict[str, Any] = {}
    for data in entries:
        entry = _parsed("Parameter", data)
        given = entry.value.ListFields()
        if not given:
            raise InvalidRequest(f"the parameter {entry.key!r:.80} has no value", param=param)
        found[entry.key] = _text(given[-1][1])
    return found


def _parsed(name: str, data: bytes) -> Any:
    """Parse a message. Raises `MalformedMessage`, also for a text that is not UTF-8."""
    message = TYPES.parsed(name, data)
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            _text(value)
    return message


def _text(value: Any) -> Any:
    """Return a value. Raises `MalformedMessage` for bytes: a text that is not UTF-8."""
    if isinstance(value, bytes):
        raise MalformedMessage("a text of the message is not UTF-8")
    return value


def _elements(one: Any, shape: list[int], param: str) -> bytes:
    """Return the elements of a tensor that come as numbers of the message."""
    kind = DATATYPES.get(one.datatype)
    if kind is None:
        return b""  # The reader refuses the datatype.
    if kind == "float16":
        raise InvalidRequest("elements of FP16 come only in raw_input_contents", param=param)
    field = f"{_WIDTHS.get(kind, kind)}_contents"
    values = getattr(one.contents, field)
    if min(shape, default=0) >= 0 and len(shape) <= MOST_RANK and len(values) != prod(shape):
        wrong = f"{field} has {len(values):,} elements; the shape {shape!r:.80} has {prod(shape):,}"
        raise InvalidRequest(wrong, param=f"{param}.contents")
    wide = {"int": "int32", "uint": "uint32"}.get(_WIDTHS.get(kind, ""), kind)
    array = np.fromiter(values, wide, len(values))
    narrow = array.astype(kind, copy=False)
    if narrow is not array and not np.array_equal(narrow, array):
        wrong = f"a number of {field} does not fit in {one.datatype}"
        raise InvalidRequest(wrong, param=f"{param}.contents")
    return narrow.astype(narrow.dtype.newbyteorder("<"), copy=False).tobytes()


def infer_response(headers: Mapping[str, str], body: bytes) -> Any:
    """Return a `ModelInferResponse` from an answer with binary tensors."""
    at = int(headers.get(LENGTH_HEADER.lower(), len(body)))
    head = any_json(body[:at])
    sizes: Iterable[int] = [
        one.get("parameters", {}).get("binary_data_size", 0) for one in head["outputs"]
    ]
    message = TYPES.filled("ModelInferResponse", head)
    for size in sizes:
        message.raw_output_contents.append(body[at : at + size])
        at += size
    return message


def stream_response(answer: Any, error: str = "", request_id: str = "") -> bytes:
    """Return a message of `ModelStreamInfer`: an answer, or an error and the request's id."""
    message = TYPES.new("ModelStreamInferResponse")
    if answer is None:
        message.error_message = error
        message.infer_response.id = request_id
    else:
        message.infer_response.CopyFrom(answer)
    data: bytes = message.SerializeToString()
    return data
