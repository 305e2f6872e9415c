"""ONNX files are read as the `onnx` package reads them; what is damaged is one refusal."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from small_programs import FLOAT, INT64, double, endless, helper, model, node, onnx, port, stored

from headrace.base.errors import ModelFileError
from headrace.programs import onnx as ours
from headrace.programs.onnx import TYPES, description
from headrace.programs.wire import encoded


def test_element_types_are_those_of_onnx() -> None:
    theirs = onnx.TensorProto.DataType
    for code, (name, bits) in TYPES.items():
        official = theirs.Name(code).lower()
        assert official == {"float32": "float", "float64": "double"}.get(name, name)
        if bits >= 8 and code != onnx.TensorProto.BFLOAT16 and "float8" not in name:
            assert np.dtype(name).itemsize * 8 == bits


def big() -> bytes:
    """Attributes of every kind, branches, stored tensors in raw and typed form, functions."""
    branch = helper.make_graph(
        [node("Mul", "x w", "b")], "then", [], [port("b", None)], [stored("w", np.ones(3, "f"))]
    )
    other = helper.make_graph([node("Identity", "x", "b")], "else", [], [port("b", None)])
    typed = helper.make_tensor("typed", FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    packed = helper.make_tensor("packed", onnx.TensorProto.INT4, [5], [1, 2, 3, 4, 5])
    text = helper.make_tensor("text", onnx.TensorProto.STRING, [2], [b"ab", b"cde"])
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 17)]
    )
    return model(
        [
            helper.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=other),
            helper.make_node("Twice", ["y"], ["z"], domain="own"),
            node("Constant", "", "c", value=stored("v", np.arange(6).reshape(2, 3))),
            node("RandomNormal", "", "r", shape=[2, 3], mean=0.5, scale=0.25, dtype=1),
        ],
        [port("x", ["batch", 3, None]), port("go", [], onnx.TensorProto.BOOL)],
        [port("z", None), port("r", [2, 3]), port("c", [2, 3], INT64)],
        [typed, packed, text, stored("raw", np.zeros((4, 5), np.float16))],
        domains=["own"],
        functions=[function],
    )


def compare(graph: ours.Net, theirs: object) -> None:
    assert [(one.op, one.domain, one.inputs, one.outputs) for one in graph.nodes] == [
        (one.op_type, one.domain, tuple(one.input), tuple(one.output))
        for one in theirs.node  # type: ignore[attr-defined]
    ]
    for tensor, their in zip(graph.tensors, theirs.initializer, strict=True):  # type: ignore[attr-defined]
        assert (tensor.name, tensor.dims) == (their.name, tuple(their.dims))
        assert TYPES[their.data_type][0] == tensor.type
        array = onnx.numpy_helper.to_array(their)
        if tensor.type not in ("string", "int4"):
            assert tensor.bytes == array.nbytes
    for ported, their in (
        *zip(graph.inputs, theirs.input, strict=True),  # type: ignore[attr-defined]
        *zip(graph.outputs, theirs.output, strict=True),  # type: ignore[attr-defined]
    ):
        shape = their.type.tensor_type.shape
        dims = [one.dim_param or one.dim_value or None for one in shape.dim]
        assert (ported.name, ported.dims) == (
            their.name,
            tuple(dims) if their.type.tensor_type.HasField("shape") else None,
        )
    for ours_one, their in zip(graph.nodes, theirs.node, strict=True):  # type: ignore[attr-defined]
        for attribute in their.attribute:
            value = helper.get_attribute_value(attribute)
            read = ours_one.attributes[attribute.name]
            if attribute.type == attribute.INT:
                assert read.integer == value
            elif attribute.type == attribute.FLOAT:
                assert read.real == value
            elif attribute.type == attribute.INTS:
                assert list(read.integers) == list(value)
            elif attribute.type == attribute.GRAPH:
                compare(read.graphs[0], value)
            elif attribute.type == attribute.TENSOR:
                assert read.tensors[0].integers() == list(onnx.numpy_helper.to_array(value).flat)
            else:
                raise AssertionError(attribute.type)


@pytest.mark.parametrize("data", [big(), double("batch", 4), endless()], ids=["big", "2x", "loop"])
def test_a_file_is_read_as_onnx_reads_it(data: bytes) -> None:
    read, theirs = description(data), onnx.load_from_string(data)
    compare(read.graph, theirs.graph)
    assert read.opsets == {one.domain: one.version for one in theirs.opset_import}
    assert read.ir == theirs.ir_version
    assert list(read.functions) == [(one.domain, one.name) for one in theirs.functions]


def tensor(**changed: int | list[int] | bytes) -> bytes:
    """A model with one stored tensor, written field by field."""
    dims = changed.get("dims", [2])
    assert isinstance(dims, list)
    fields: list[tuple[int, int | bytes]] = [(1, dim) for dim in dims]
    fields += [(2, int(changed.get("type", 1))), (8, b"w")]  # type: ignore[arg-type]
    raw = changed.get("raw", b"12345678")
    assert isinstance(raw, bytes)
    fields.append((9, raw))
    graph = encoded([(5, encoded(fields)), (12, encoded([(1, b"w")]))])
    return encoded([(1, 9), (8, encoded([(2, 17)])), (7, graph)])


DAMAGED = {
    "a negative dimension": (tensor(dims=[-2]), "the shape"),
    "2^32 × 2^32": (tensor(dims=[2**32, 2**32]), "more than 2^63"),
    "less than its shape": (tensor(dims=[3]), "12 bytes by its shape, and 8"),
    "more than its shape": (tensor(dims=[1]), "4 bytes by its shape, and 8"),
    "nothing of 2^40": (tensor(dims=[2**40], raw=b""), "bytes by its shape"),
    "an unknown type": (tensor(type=99), "element type 99"),
    "rank 40": (tensor(dims=[1] * 40), "has the shape"),
    "no graph": (encoded([(1, 9)]), "no graph"),
    "two graphs": (tensor() + encoded([(7, b"")]), "graph occurs 2 times, allowed is once"),
    "a group": (b"\x3b\x3c", "wire type 3"),
    "field 0": (b"\x02\x00", "field number 0"),
    "a length beyond the end": (encoded([(1, 9)]) + b"\x3a\xff\x7f", "16,383 bytes"),
    "a number without an end": (b"\x08" + b"\xff" * 11, "without an end"),
    "a graph that is a number": (encoded([(7, 5)]), "where bytes are due"),
    "a name that is no UTF-8": (
        encoded([(7, encoded([(11, encoded([(1, b"\xff\xfe")]))]))]),
        "not UTF-8",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_refused(case: str) -> None:
    data, message = DAMAGED[case]
    with pytest.raises(ModelFileError, match=message.replace("^", r"\^")):
        description(data)


def nested(depth: int) -> bytes:
    """Branches in branches."""
    graph = b""
    for _ in range(depth):
        attribute = encoded([(1, b"then_branch"), (6, graph)])
        graph = encoded([(1, encoded([(4, b"If"), (5, attribute)]))])
    return encoded([(7, graph)])


def test_depth_is_bounded() -> None:
    description(nested(8))
    with pytest.raises(ModelFileError, match="nested more than 8 deep"):
        description(nested(9))
    with pytest.raises(ModelFileError, match="nested more than 8 deep"):
        description(nested(5000))


def test_fields_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MOST_FIELDS", 100)
    with pytest.raises(ModelFileError, match="more than 100 protobuf fields"):
        description(encoded([(7, encoded([(1, encoded([(4, b"A")])) for _ in range(60)]))]))
    with pytest.raises(ModelFileError, match="more than 100 protobuf fields"):
        description(tensor(raw=b"") + encoded([(14, b"")] * 100))


@pytest.mark.parametrize("seed", range(80))
def test_mutated_files_are_models_or_one_refusal(seed: int) -> None:
    draw = np.random.default_rng(seed)
    data = bytearray(big())
    for at in draw.integers(0, len(data), 1 + seed % 7):
        data[at] = draw.integers(0, 256)
    if seed % 3 == 0:
        data = data[: int(draw.integers(0, len(data)))]
    with suppress(ModelFileError):
        description(bytes(data))
