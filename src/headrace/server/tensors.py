"""Tensors of the Open Inference Protocol (KServe v2): JSON, and the binary extension.

Pure functions from bytes to arrays and back. The extension puts the elements of tensors after the
JSON; the header `Inference-Header-Content-Length` has the JSON's length. Everything is checked
before it is allocated: sizes are those of the body, never those that a shape claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.foreign import Undecodable, json_reader

Array = npt.NDArray[Any]
LENGTH_HEADER = "Inference-Header-Content-Length"
DATATYPES = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    "BYTES": "object",
}
"""Datatype → numpy's name; `BYTES` are Python's `bytes`."""
_NAMES = {numpy: name for name, numpy in DATATYPES.items()}
MOST_TENSORS = 256
MOST_NAME = 256
MOST_RANK = 32
_SHARED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array."""

    name: str
    array: Array = field(repr=False)
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that the request asks for."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True)
class Inference:
    """A request."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Wanted, ...]
    """Empty: all."""
    binary: bool
    """Whether outputs that are not named come as binary."""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


_read = json_reader(_Request)


def read_request(body: bytes | memoryview, length: str | int | None = None) -> Inference:
    """Read a request; `length` is the value of `LENGTH_HEADER`, if there is one.

    Arrays of binary inputs are views of the body. Raises `InvalidRequest` that names the field.
    """
    view = memoryview(body)
    head = _length(length, len(view))
    try:
        said = _read(bytes(view[:head]))
    except Undecodable as error:
        raise InvalidRequest(f"the request is no inference request: {error}") from None
    for what, tensors in (("inputs", said.inputs), ("outputs", said.outputs)):
        names = [one.name for one in tensors]
        if len(names) > MOST_TENSORS:
            raise InvalidRequest(f"{len(names)} tensors; at most {MOST_TENSORS}", param=what)
        for name in names:
            if not name or len(name) > MOST_NAME or names.count(name) > 1:
                raise InvalidRequest(
                    f"the name {name!r:.80} is empty, longer than {MOST_NAME} or there twice",
                    param=what,
                )
    binary = _flag(said.parameters, "binary_data_output", "parameters")
    inputs = []
    for at, one in enumerate(said.inputs):
        param = f"inputs[{at}]"
        array, head = _array(one, view, head, param)
        inputs.append(Tensor(one.name, array, one.parameters))
    if head != len(view):
        raise InvalidRequest(
            f"{len(view) - head:,} bytes after the last input; each binary input has a "
            "binary_data_size",
            param="inputs",
        )
    outputs = tuple(_wanted(one, at, binary) for at, one in enumerate(said.outputs))
    return Inference(tuple(inputs), outputs, binary, said.id, said.parameters)


def _length(length: str | int | None, size: int) -> int:
    if length is None:
        return size
    text = str(length)
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and 0 < int(text) <= size):
        raise InvalidRequest(
            f"{LENGTH_HEADER} is {text!r:.40}; allowed is 1 to {size}, the length of the body",
            param=LENGTH_HEADER,
        )
    return int(text)


def _array(one: _Input, view: memoryview, at: int, param: str) -> tuple[Array, int]:
    """Return an input's array, and the place after its bytes in the body."""
    if one.datatype not in DATATYPES:
        raise InvalidRequest(
            f"datatype {one.datatype!r:.40}; allowed: {', '.join(DATATYPES)}",
            param=f"{param}.datatype",
        )
    if len(one.shape) > MOST_RANK or any(not 0 <= dim < 2**31 for dim in one.shape):
        raise InvalidRequest(
            f"shape {one.shape!r:.80}; allowed are at most {MOST_RANK} sizes from 0 to 2^31 - 1",
            param=f"{param}.shape",
        )
    for name in _SHARED:
        if name in one.parameters:
            raise InvalidRequest(
                f"{name}: shared memory is not read; send the data", param=f"{param}.parameters"
            )
    size = one.parameters.get("binary_data_size")
    if size is None:
        if one.data is None:
            raise InvalidRequest("neither data nor binary_data_size", param=param)
        return _from_json(one, f"{param}.data"), at
    if one.data is not None:
        raise InvalidRequest("both data and binary_data_size; allowed is one", param=param)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(view) - at:
        raise InvalidRequest(
            f"binary_data_size is {size!r:.40}; {len(view) - at:,} bytes are left in the body",
            param=f"{param}.parameters",
        )
    return _from_bytes(one, view[at : at + size], f"{param}.parameters"), at + size


def _from_bytes(one: _Input, raw: memoryview, param: str) -> Array:
    count = prod(one.shape)
    if one.datatype == "BYTES":
        return _strings(raw, count, param).reshape(one.shape)
    kind = np.dtype(DATATYPES[one.datatype])
    if count * kind.itemsize != len(raw):
        raise InvalidRequest(
            f"binary_data_size is {len(raw):,}; {one.datatype} {one.shape} has "
            f"{count * kind.itemsize:,} bytes",
            param=param,
        )
    array = np.frombuffer(raw, np.uint8 if kind.kind == "b" else kind.newbyteorder("<"))
    if kind.kind == "b":
        if array.size and array.max() > 1:
            raise InvalidRequest("a BOOL is neither 0 nor 1", param=param)
        array = array.view(bool)
    return array.reshape(one.shape)


def _strings(raw: memoryview, count: int, param: str) -> Array:
    """Read elements, each after its length in four bytes."""
    if 4 * count > len(raw):
        raise InvalidRequest(
            f"{count:,} BYTES in {len(raw):,} bytes; each has a length of four bytes", param=param
        )
    found = np.empty(count, object)
    at = 0
    for place in range(count):
        length = int.from_bytes(raw[at : at + 4], "little")
        at += 4
        if at > len(raw) or length > len(raw) - at:
            raise InvalidRequest(
                f"element {place} has a length of {length:,}; {max(0, len(raw) - at):,} bytes "
                "are left",
                param=param,
            )
        found[place] = bytes(raw[at : at + length])
        at += length
    if at != len(raw):
        raise InvalidRequest(f"{len(raw) - at:,} bytes after the last element", param=param)
    return found


def _from_json(one: _Input, param: str) -> Array:
    flat = _flat(one.data, param)
    count = prod(one.shape)
    if len(flat) != count:
        raise InvalidRequest(
            f"{len(flat):,} elements; the shape {one.shape} has {count:,}", param=param
        )
    kind = DATATYPES[one.datatype]
    types = set(map(type, flat))
    kinds: dict[str, set[type]] = {"b": {bool}, "f": {int, float}, "O": {str}}
    allowed = kinds.get(np.dtype(kind).kind, {int})
    if kind == "float16" or types - allowed:
        how = (
            "only as binary"
            if kind == "float16"
            else "as " + " or ".join(sorted(_WORDS[one] for one in allowed))
        )
        raise InvalidRequest(f"elements of {one.datatype} come {how}", param=param)
    if kind == "object":
        array = np.empty(count, object)
        array[:] = [text.encode() for text in flat]
        return array.reshape(one.shape)
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, kind)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise OverflowError
    except OverflowError:
        raise InvalidRequest(f"a number does not fit in {one.datatype}", param=param) from None
    return array.reshape(one.shape)


_WORDS: dict[type, str] = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}


def _flat(data: Any, param: str) -> list[Any]:
    """Return the elements of flat or nested lists, row by row."""
    if not isinstance(data, list):
        raise InvalidRequest("the data is no list", param=param)
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(part, list) and len(part) == len(flat[0]) for part in flat):
            raise InvalidRequest("lists of unequal length", param=param)
        flat = [one for part in flat for one in part]
    if any(isinstance(one, list) for one in flat):
        raise InvalidRequest("lists of unequal depth", param=param)
    return flat


def _wanted(one: _Output, at: int, binary: bool) -> Wanted:
    param = f"outputs[{at}].parameters"
    for name in ("classification", *_SHARED):
        if one.parameters.get(name):
            raise InvalidRequest(f"{name} is not supported; take the tensor", param=param)
    return Wanted(one.name, _flag(one.parameters, "binary_data", param, binary))


def _flag(parameters: Mapping[str, Any], name: str, param: str, default: bool = False) -> bool:
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise InvalidRequest(f"{name} is {found!r:.40}; allowed: true, false", param=param)
    return found


def write_response(
    request: Inference, outputs: Mapping[str, Array], model: str, version: str = ""
) -> tuple[bytes, int | None]:
    """Write the answer: its body, and the value of `LENGTH_HEADER` if a tensor is binary.

    Raises `InvalidRequest` for an output that is not there, or that JSON cannot hold.
    """
    wanted = request.outputs or tuple(Wanted(name, request.binary) for name in outputs)
    told: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for at, one in enumerate(wanted):
        array = outputs.get(one.name)
        if array is None:
            raise InvalidRequest(
                f"no output {one.name!r:.80}; the outputs are: {', '.join(outputs)}",
                param=f"outputs[{at}].name",
            )
        entry: dict[str, Any] = {
            "name": one.name,
            "datatype": _NAMES[array.dtype.name],
            "shape": list(array.shape),
        }
        if one.binary:
            blobs.append(_raw(array))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = _json(array, one.name, f"outputs[{at}]")
        told.append(entry)
    said = {"model_name": model, "outputs": told}
    said |= {"model_version": version} if version else {}
    said |= {"id": request.id} if request.id else {}
    head = msgspec.json.encode(said)
    return b"".join([head, *blobs]), len(head) if blobs else None


def _raw(array: Array) -> bytes:
    if array.dtype != object:
        return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    parts = []
    for one in array.reshape(-1):
        parts += [len(one).to_bytes(4, "little"), one]
    return b"".join(parts)


def _json(array: Array, name: str, param: str) -> list[Any]:
    if array.dtype == object:
        try:
            return [one.decode() for one in array.reshape(-1)]
        except UnicodeDecodeError:
            raise _unfit(name, "bytes that are no UTF-8", param) from None
    if array.dtype == np.float16:
        raise _unfit(name, "FP16", param)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise _unfit(name, "NaN or an infinity", param)
    found: list[Any] = array.reshape(-1).tolist()
    return found


def _unfit(name: str, what: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"output {name:.80} has {what}, which JSON cannot hold; ask for it with binary_data",
        param=param,
    )
