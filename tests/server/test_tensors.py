"""Infer requests of KServe v2: `tritonclient` writes what we read and reads what we write, and what
is wrong is refused by its field before anything is allocated."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import InvalidRequest
from headrace.server.tensors import DATATYPES, Inference, read_infer, write_outputs

http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]")
DRAW = np.random.default_rng(3)


def array(datatype: str, *shape: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(DATATYPES[datatype])
    if kind.kind == "f":
        return DRAW.standard_normal(shape).astype(kind)
    if kind.kind == "b":
        return DRAW.integers(0, 2, shape).astype(bool)
    bounds = np.iinfo(kind)
    return DRAW.integers(bounds.min, bounds.max, shape, kind, endpoint=True)


def theirs(arrays: dict[str, np.ndarray[Any, Any]], types: dict[str, str], binary: bool) -> Any:
    """The body and the header's value that `tritonclient` sends."""
    inputs = []
    for name, value in arrays.items():
        one = http.InferInput(name, list(value.shape), types[name])
        one.set_data_from_numpy(value, binary_data=binary)
        inputs.append(one)
    outputs = [http.InferRequestedOutput("y", binary_data=binary)]
    return http.InferenceServerClient.generate_request_body(
        inputs, outputs=outputs, request_id="r1", priority=2, timeout=5
    )


def same(ours: np.ndarray[Any, Any], given: np.ndarray[Any, Any]) -> bool:
    return ours.shape == given.shape and ours.dtype == given.dtype and bool((ours == given).all())


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_their_requests_are_read(datatype: str, binary: bool) -> None:
    if datatype == "FP16" and not binary:
        return  # The protocol has no FP16 in JSON; it is among `WRONG`.
    arrays = {"a": array(datatype, 2, 3), "b": array("INT32", 4), "c": array("FP32", 0, 2)}
    types = {"a": datatype, "b": "INT32", "c": "FP32"}
    body, length = theirs(arrays, types, binary)
    found = read_infer(body, length)
    assert list(found.inputs) == ["a", "b", "c"]
    assert all(same(value, arrays[name]) for name, value in found.inputs.items())
    assert found.outputs == {"y": binary}
    assert (found.id, found.parameters["priority"], found.parameters["timeout"]) == ("r1", 2, 5)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_they_read_our_answers(datatype: str, binary: bool) -> None:
    if datatype == "FP16" and not binary:
        return  # The protocol has no FP16 in JSON; it is among `WRONG`.
    arrays = {"y": array(datatype, 3, 2), "z": array("UINT64", 2), "e": array("INT8", 0)}
    request = Inference({}, {}, binary, "r2")
    body, length = write_outputs(request, arrays, "detector", "7")
    assert (length is None) is not binary
    result = http.InferenceServerClient.parse_response_body(body, header_length=length)
    for name, value in arrays.items():
        given = result.as_numpy(name)
        assert given.shape == value.shape
        assert (given == value).all()
    said = result.get_response()
    assert (said["id"], said["model_name"], said["model_version"]) == ("r2", "detector", "7")


def test_outputs_are_binary_one_by_one() -> None:
    arrays = {"y": array("FP32", 2), "z": array("FP32", 2)}
    request = Inference({}, {"z": True, "y": False}, False)
    body, length = write_outputs(request, arrays, "m")
    result = http.InferenceServerClient.parse_response_body(body, header_length=length)
    assert [one["name"] for one in result.get_response()["outputs"]] == ["z", "y"]
    assert all((result.as_numpy(name) == value).all() for name, value in arrays.items())


def request(**changed: Any) -> dict[str, Any]:
    one = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, 2.0]} | changed
    return {"inputs": [{name: value for name, value in one.items() if value is not None}]}


def binary(size: Any, **changed: Any) -> dict[str, Any]:
    return request(data=None, parameters={"binary_data_size": size}, **changed)


HUGE = 2**31
WRONG: dict[str, tuple[dict[str, Any], bytes, str, str]] = {
    "−1": (request(shape=[-1]), b"", "inputs[0].shape", "from 0 to"),
    "shape × size is beyond int64": (
        binary(8, shape=[2**31 - 1] * 3),
        b"\0" * 8,
        "inputs[0].parameters",
        "has 39,614,081",
    ),
    "a dimension beyond int32": (request(shape=[HUGE]), b"", "inputs[0].shape", "2^31 - 1"),
    "a dimension beyond int64": (request(shape=[2**70]), b"", "inputs[0].shape", "2^31 - 1"),
    "rank 40": (request(shape=[1] * 40), b"", "inputs[0].shape", "at most 32"),
    "more elements": (request(data=[1.0] * 3), b"", "inputs[0].data", "3 elements"),
    "fewer elements": (request(shape=[HUGE - 1, 9]), b"", "inputs[0].data", "2 elements"),
    "ragged": (request(data=[[1.0], []]), b"", "inputs[0].data", "unequal length or depth"),
    "deeper later": (request(data=[1.0, [2.0]]), b"", "inputs[0].data", "unequal length or depth"),
    "no list": (request(data=1.0), b"", "inputs[0].data", "no list"),
    "text for a number": (
        request(data=["1", "2"]),
        b"",
        "inputs[0].data",
        "as numbers",
    ),
    "a fraction for an integer": (
        request(datatype="INT32", data=[1, 1.5]),
        b"",
        "inputs[0].data",
        "as integers",
    ),
    "a boolean for an integer": (
        request(datatype="INT32", data=[1, True]),
        b"",
        "inputs[0].data",
        "as integers",
    ),
    "300 in eight bits": (request(datatype="UINT8", data=[1, 300]), b"", "inputs[0].data", "fit"),
    "−1 without a sign": (request(datatype="UINT64", data=[0, -1]), b"", "inputs[0].data", "fit"),
    "1e39 in FP32": (request(data=[1.0, 1e39]), b"", "inputs[0].data", "does not fit"),
    "FP16 in JSON": (request(datatype="FP16"), b"", "inputs[0].data", "only as binary"),
    "unknown type": (request(datatype="FP8"), b"", "inputs[0].datatype", "allowed: BOOL"),
    "BF16": (binary(4, datatype="BF16"), b"1234", "inputs[0].datatype", "allowed: BOOL"),
    "BYTES, undecoded": (
        binary(8, datatype="BYTES", shape=[HUGE - 1]),
        (HUGE - 1).to_bytes(4, "little") + b"abcd",
        "inputs[0].datatype",
        "datatype 'BYTES'; allowed: BOOL",
    ),
    "BYTES in JSON": (
        request(datatype="BYTES", data=["a", "b"]),
        b"",
        "inputs[0].datatype",
        "datatype 'BYTES'; allowed: BOOL",
    ),
    "BOOL 7": (binary(2, datatype="BOOL"), b"\1\7", "inputs[0].parameters", "neither 0 nor 1"),
    "size beyond the body": (binary(HUGE), b"", "inputs[0].parameters", "0 bytes are left"),
    "size −1": (binary(-1), b"", "inputs[0].parameters", "binary_data_size is -1"),
    "size is text": (binary("8"), b"12345678", "inputs[0].parameters", "is '8'"),
    "size is true": (binary(True), b"1", "inputs[0].parameters", "is True"),
    "bytes that no input has": (
        binary(8),
        b"1" * 9,
        "inputs",
        "1 bytes after the last binary_data_size",
    ),
    "neither": (request(data=None), b"", "inputs[0]", "neither"),
    "both": (request(parameters={"binary_data_size": 0}), b"", "inputs[0]", "or both"),
    "shared memory": (
        request(parameters={"shared_memory_region": "r"}),
        b"",
        "inputs[0].parameters",
        "not read",
    ),
    "classes": (
        request() | {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        b"",
        "outputs[0].parameters",
        "not supported",
    ),
    "twice": ({"inputs": request()["inputs"] * 2}, b"", "inputs", "there twice"),
    "no name": (request(name=""), b"", "inputs", "empty"),
    "300 inputs": (
        {"inputs": [request(name=f"x{at}")["inputs"][0] for at in range(300)]},
        b"",
        "inputs",
        "at most 256",
    ),
    "no inputs": ({}, b"", "", "no inference request"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_by_its_field(case: str) -> None:
    said, blob, param, message = WRONG[case]
    head = json.dumps(said).encode()
    with pytest.raises(InvalidRequest, match=re.escape(message)) as refused:
        read_infer(head + blob, len(head) if blob else None)
    assert (refused.value.param or "") == param


@pytest.mark.parametrize("length", ["-1", "9999", "1e3", "², ", "", str(2**70), " 5"])
def test_a_wrong_length_of_the_header_is_refused(length: str) -> None:
    with pytest.raises(InvalidRequest, match="Inference-Header-Content-Length is"):
        read_infer(json.dumps(request()).encode(), length)


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b'{"inputs": [NaN]}', b"\xff"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no inference request"):
        read_infer(text)


def test_nan_in_json_is_refused_both_ways() -> None:
    said = json.dumps(request(data=[1.0, float("nan")])).encode()
    with pytest.raises(InvalidRequest, match="no inference request"):
        read_infer(said)
    values = {"y": np.array([1.0, np.nan], np.float32)}
    with pytest.raises(InvalidRequest, match="NaN or an infinity, which JSON cannot hold"):
        write_outputs(Inference({}, {}, False), values, "m")
    body, length = write_outputs(Inference({}, {}, True), values, "m")
    result = http.InferenceServerClient.parse_response_body(body, header_length=length)
    assert np.array_equal(result.as_numpy("y"), values["y"], equal_nan=True)


def test_an_unknown_output_is_named() -> None:
    asked = Inference({"x": np.zeros(1)}, {"q": False}, False)
    with pytest.raises(InvalidRequest, match="no output 'q'; the outputs are: y"):
        write_outputs(asked, {"y": np.zeros(1)}, "m")


def test_a_binary_input_is_a_view_of_the_body() -> None:
    head = json.dumps(binary(8)).encode()
    body = head + np.array([1, 2], np.float32).tobytes()
    (one,) = read_infer(body, len(head)).inputs.values()
    assert not one.flags.owndata
    assert one.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("seed", range(60))
def test_mutated_bodies_are_requests_or_one_refusal(seed: int) -> None:
    draw = np.random.default_rng(seed)
    arrays = {"a": array("INT16", 3), "b": array("FP32", 2, 2)}
    body, length = theirs(arrays, {"a": "INT16", "b": "FP32"}, bool(seed % 2))
    data = bytearray(body)
    for at in draw.integers(0, len(data), 1 + seed % 5):
        data[at] = draw.integers(0, 256)
    try:
        found = read_infer(bytes(data), length)
    except InvalidRequest:
        return
    assert sum(one.size for one in found.inputs.values()) < len(data)


@pytest.mark.parametrize("how", [{"data": []}, {"parameters": {"binary_data_size": 0}}])
@pytest.mark.parametrize("datatype", ["FP32", "BOOL"])
def test_an_empty_tensor_has_a_shape_that_arrays_can_have(how: Any, datatype: str) -> None:
    """numpy multiplies all sizes, those of an empty array too."""
    for shape, fits in (([3, 0, 2], True), ([2**31 - 1] * 3 + [0], False)):
        head = {"inputs": [{"name": "x", "shape": shape, "datatype": datatype, **how}]}
        body = json.dumps(head).encode()
        if fits:
            assert list(read_infer(body, len(body)).inputs["x"].shape) == shape
            continue
        with pytest.raises(InvalidRequest, match="the sizes above 0 multiply to less than") as one:
            read_infer(body, len(body))
        assert one.value.param == "inputs[0].shape"
