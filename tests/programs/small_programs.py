"""Small ONNX graphs, made by the `onnx` package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")

helper = onnx.helper
FLOAT, INT64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
Dims = Sequence[int | str | None] | None


def port(name: str, dims: Dims, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    name = f"{op} of {outputs}"
    return helper.make_node(op, inputs.split(), outputs.split(), name=name, **attributes)


def stored(name: str, value: Any) -> Any:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    tensors: Sequence[Any] = (),
    *,
    opset: int = 17,
    domains: Sequence[str] = (),
    functions: Sequence[Any] = (),
) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(tensors))
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(one, 1) for one in domains)]
    made = helper.make_model(
        graph, opset_imports=imports, ir_version=9, functions=list(functions), producer_name="tests"
    )
    return bytes(made.SerializeToString())


def double(*dims: int | str | None) -> bytes:
    """y = 2 x."""
    return model(
        [node("Mul", "x two", "y")],
        [port("x", dims)],
        [port("y", dims)],
        [stored("two", np.float32(2))],
    )


def one_long_node() -> bytes:
    """One node that no flag can stop: with a picture of 2,000 by 2,000 it takes hours."""
    size = 2001
    pool = node("MaxPool", "x", "y", kernel_shape=[size, size], pads=[size - 1] * 4)
    return model([pool], [port("x", [1, 1, "h", "w"])], [port("y", None)])


def endless(size: int | str = 1) -> bytes:
    """A loop over `size` numbers that goes on while its input `go` is true."""
    body = helper.make_graph(
        [node("Identity", "c", "c2"), node("Identity", "v", "v2")],
        "body",
        [port("i", [], INT64), port("c", [], BOOL), port("v", [size])],
        [port("c2", [], BOOL), port("v2", [size])],
    )
    loop = helper.make_node("Loop", ["", "go", "x"], ["y"], body=body)
    return model([loop], [port("x", [size]), port("go", [], BOOL)], [port("y", [size])])
