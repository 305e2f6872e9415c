"""Tensors of the Open Inference Protocol (KServe v2): JSON, and the binary extension.

Pure functions from bytes to arrays and back. The extension puts the elements of tensors after the
JSON; the header `Inference-Header-Content-Length` has the JSON's length. Everything is checked
before it is allocated: sizes are those of the body, never those that a shape claims.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.foreign import Undecodable, json_reader
from ..programs.rows import MOST_RANK, MOST_SIZE

Array = npt.NDArray[Any]
LENGTH_HEADER = "Inference-Header-Content-Length"
_INTEGERS = [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)]
DATATYPES = {"BOOL": "bool", **{name.upper(): name for name in _INTEGERS}}
DATATYPES |= {"FP16": "float16", "FP32": "float32", "FP64": "float64"}
"""Datatype → numpy's name. Programs take no `BYTES`."""
_NAMES = {numpy: name for name, numpy in DATATYPES.items()}
_JSON: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "as booleans"),
    "f": ({int, float}, "as numbers"),
}
"""Kind of a numpy type → types of its elements in JSON; others are integers."""
MOST_TENSORS, MOST_NAME = 256, 256
MOST_ELEMENTS = 2**48
_SHARED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")


@dataclass(frozen=True, slots=True)
class Inference:
    """A request."""

    inputs: dict[str, Array] = field(repr=False)
    outputs: dict[str, bool]
    """Wanted outputs → whether each comes as binary; empty: all of them, as `binary` says."""
    binary: bool
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


class _Infer(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


_read = json_reader(_Infer)


def _wrong(param: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, param=param)


def read_infer(body: bytes | memoryview, length: str | int | None = None) -> Inference:
    """Read a request; `length` is the value of `LENGTH_HEADER`, if there is one.

    Arrays of binary inputs are views of the body. Raises `InvalidRequest` that names the field.
    """
    view = memoryview(body)
    at = json_length(length, len(view))
    try:
        parsed = _read(bytes(view[:at]))
    except Undecodable as error:
        raise InvalidRequest(f"the request is no inference request: {error}") from None
    for what, tensors in (("inputs", parsed.inputs), ("outputs", parsed.outputs)):
        names = [one.name for one in tensors]
        if len(names) > MOST_TENSORS:
            raise _wrong(what, f"{len(names)} tensors; at most {MOST_TENSORS}")
        for name in names:
            if not 0 < len(name) <= MOST_NAME or names.count(name) > 1:
                why = f"is empty, longer than {MOST_NAME} or there twice"
                raise _wrong(what, f"the name {name!r:.80} {why}")
    binary = _flag(parsed.parameters, "binary_data_output", "parameters", False)
    inputs = {}
    for place, one in enumerate(parsed.inputs):
        inputs[one.name], at = _array(one, view, at, f"inputs[{place}]")
    if at != len(view):
        raise _wrong("inputs", f"{len(view) - at:,} bytes after the last binary_data_size")
    outputs = {}
    for place, asked in enumerate(parsed.outputs):
        param = f"outputs[{place}].parameters"
        for name in ("classification", *_SHARED):
            if asked.parameters.get(name):
                raise _wrong(param, f"{name} is not supported; take the tensor")
        outputs[asked.name] = _flag(asked.parameters, "binary_data", param, binary)
    return Inference(inputs, outputs, binary, parsed.id, parsed.parameters)


def json_length(length: str | int | None, size: int) -> int:
    """Return the length of a body's JSON; `length` is the value of `LENGTH_HEADER`. Raises
    `InvalidRequest`."""
    text = str(size if length is None else length)
    if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) <= size):
        allowed = f"allowed is 0 to {size}, the length of the body"
        raise _wrong(LENGTH_HEADER, f"{LENGTH_HEADER} is {text!r:.40}; {allowed}")
    return int(text)


def _flag(parameters: Mapping[str, Any], name: str, param: str, default: bool) -> bool:
    found = parameters.get(name, default)
    if not isinstance(found, bool):
        raise _wrong(param, f"{name} is {found!r:.40}; allowed: true, false")
    return found


def _array(one: _Input, view: memoryview, at: int, param: str) -> tuple[Array, int]:
    """Return an input's array, and the offset after its bytes in the body."""
    if one.datatype not in DATATYPES:
        allowed = ", ".join(DATATYPES)
        raise _wrong(f"{param}.datatype", f"datatype {one.datatype!r:.40}; allowed: {allowed}")
    if len(one.shape) > MOST_RANK or any(not 0 <= dim < MOST_SIZE for dim in one.shape):
        allowed = f"allowed are at most {MOST_RANK} sizes from 0 to 2^31 - 1"
        raise _wrong(f"{param}.shape", f"shape {one.shape!r:.80}; {allowed}")
    # numpy multiplies the sizes of an empty array too.
    if 0 in one.shape and prod(dim or 1 for dim in one.shape) >= MOST_ELEMENTS:
        allowed = f"the sizes above 0 multiply to less than {MOST_ELEMENTS:,}"
        raise _wrong(f"{param}.shape", f"shape {one.shape!r:.80}; {allowed}")
    if used := [name for name in _SHARED if name in one.parameters]:
        raise _wrong(f"{param}.parameters", f"{used[0]}: shared memory is not read; send the data")
    size = one.parameters.get("binary_data_size")
    if (size is None) == (one.data is None):
        raise _wrong(param, "neither data nor binary_data_size, or both; allowed is one")
    if size is None:
        return _from_json(one, f"{param}.data"), at
    param, left = f"{param}.parameters", len(view) - at
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= left:
        raise _wrong(param, f"binary_data_size is {size!r:.40}; {left:,} bytes are left")
    return _from_bytes(one, view[at : at + size], param), at + size


def _from_bytes(one: _Input, raw: memoryview, param: str) -> Array:
    count, kind = prod(one.shape), np.dtype(DATATYPES[one.datatype])
    if (size := count * kind.itemsize) != len(raw):
        due = f"{one.datatype} {one.shape} has {size:,} bytes"
        raise _wrong(param, f"binary_data_size is {len(raw):,}; {due}")
    if kind.kind != "b":
        return np.frombuffer(raw, kind.newbyteorder("<")).reshape(one.shape)
    flags = np.frombuffer(raw, np.uint8)
    if flags.size and flags.max() > 1:
        raise _wrong(param, "a BOOL is neither 0 nor 1")
    return flags.view(bool).reshape(one.shape)


def _from_json(one: _Input, param: str) -> Array:
    flat, kind = _flat(one.data, param), np.dtype(DATATYPES[one.datatype])
    if len(flat) != (count := prod(one.shape)):
        raise _wrong(param, f"{len(flat):,} elements; the shape {one.shape} has {count:,}")
    types, how = _JSON.get(kind.kind, ({int}, "as integers"))
    if kind == np.float16 or set(map(type, flat)) - types:
        how = "only as binary" if kind == np.float16 else how
        raise _wrong(param, f"elements of {one.datatype} come {how}")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, kind)
    except OverflowError:
        raise _wrong(param, f"a number does not fit in {one.datatype}") from None
    if kind.kind == "f" and not np.isfinite(array).all():
        raise _wrong(param, f"a number does not fit in {one.datatype}")
    return array.reshape(one.shape)


def _flat(data: Any, param: str) -> list[Any]:
    """Return the elements of flat or nested lists, row by row."""
    if not isinstance(data, list):
        raise _wrong(param, "the data is no list")
    flat: list[Any] = data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(part, list) and len(part) == len(flat[0]) for part in flat):
            raise _wrong(param, "lists of unequal length or depth")
        flat = [one for part in flat for one in part]
    if any(isinstance(one, list) for one in flat):
        raise _wrong(param, "lists of unequal length or depth")
    return flat


def write_outputs(
    request: Inference, outputs: Mapping[str, Array], model: str, version: str = ""
) -> tuple[bytes, int | None]:
    """Write the answer: its body, and the value of `LENGTH_HEADER` if a tensor is binary.

    Raises `InvalidRequest` for an output that is not there, or that JSON cannot hold.
    """
    described: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    wanted = request.outputs or dict.fromkeys(outputs, request.binary)
    for place, (name, binary) in enumerate(wanted.items()):
        array = outputs.get(name)
        if array is None:
            there = f"the outputs are: {', '.join(outputs)}"
            raise _wrong(f"outputs[{place}].name", f"no output {name!r:.80}; {there}")
        datatype, shape = _NAMES[array.dtype.name], list(array.shape)
        described.append({"name": name, "datatype": datatype, "shape": shape})
        if binary:
            blobs.append(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            described[-1]["parameters"] = {"binary_data_size": len(blobs[-1])}
            continue
        if unfit := _unfit(array):
            how = f"has {unfit}, which JSON cannot hold; ask for it with binary_data"
            raise _wrong(f"outputs[{place}]", f"output {name:.80} {how}")
        described[-1]["data"] = array.reshape(-1).tolist()
    answer = {"model_name": model, "outputs": described}
    answer |= {"model_version": version} if version else {}
    answer |= {"id": request.id} if request.id else {}
    head = msgspec.json.encode(answer)
    return b"".join([head, *blobs]), len(head) if blobs else None


def shown(name: str, array: Array, most: int) -> dict[str, Any]:
    """Return an output for JSON: its elements as numbers if JSON holds them and there are at most
    `most`, else its bytes in base64."""
    fields = {"name": name, "datatype": _NAMES[array.dtype.name], "shape": list(array.shape)}
    if array.size <= most and not _unfit(array):
        return {**fields, "data": array.reshape(-1).tolist()}
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {**fields, "base64": base64.b64encode(data).decode()}


def _unfit(array: Array) -> str:
    """Name the values that JSON cannot hold, or return "" if it can hold the array."""
    if array.dtype == np.float16:
        return "FP16"
    return "NaN or an infinity" if array.dtype.kind == "f" and not np.isfinite(array).all() else ""
