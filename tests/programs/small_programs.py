"""Small ONNX graphs, made by the `onnx` package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
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


def written(folder: Path, files: dict[str, bytes]) -> Path:
    """The folder, with a file of each program."""
    for name, data in files.items():
        (folder / f"{name}.onnx").write_bytes(data)
    return folder


def double(*dims: int | str | None) -> bytes:
    """y = 2 x."""
    return model(
        [node("Mul", "x two", "y")],
        [port("x", dims)],
        [port("y", dims)],
        [stored("two", np.float32(2))],
    )


def summing() -> bytes:
    """y = the sum of all x so far, a state."""
    return model(
        [node("Add", "state x", "stateN"), node("Identity", "stateN", "y")],
        [port("x", [1, 2]), port("state", [1, 2])],
        [port("y", [1, 2]), port("stateN", [1, 2])],
    )


def logarithm() -> bytes:
    """y = log(x), n = the same as an integer."""
    return model(
        [node("Log", "x", "y"), node("Cast", "y", "n", to=INT64)],
        [port("x", ["n"], FLOAT)],
        [port("y", ["n"]), port("n", ["n"], INT64)],
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


def piper() -> bytes:
    """A program of Piper's form: 100 samples for each id, as its number sounds, and noise."""
    return model(
        [
            node("Cast", "input", "x", to=FLOAT),
            node("Unsqueeze", "x two", "u"),
            node("Gather", "scales one", "length"),
            node("Mul", "length hundred", "count"),
            node("Cast", "count", "whole", to=INT64),
            node("Concat", "ones whole", "shape", axis=0),
            node("Expand", "u shape", "e"),
            node("Sin", "e", "s"),
            node("RandomNormalLike", "e", "r"),
            node("Gather", "scales zero", "noise"),
            node("Mul", "r noise", "rn"),
            node("Add", "s rn", "loud"),
            node("Mul", "loud tenth", "y"),
            node("Reshape", "y flat", "output"),
        ],
        [
            port("input", ["b", "n"], INT64),
            port("input_lengths", ["b"], INT64),
            port("scales", [3]),
        ],
        [port("output", None)],
        [
            stored("zero", np.array([0])),
            stored("one", np.array([1])),
            stored("two", np.array([2])),
            stored("ones", np.array([1, 1])),
            stored("hundred", np.float32(100)),
            stored("tenth", np.float32(0.1)),
            stored("flat", np.array([1, 1, -1])),
        ],
    )


PIPER: dict[str, Any] = {
    "audio": {"sample_rate": 16_000},
    "espeak": {"voice": "en-us"},
    "inference": {"noise_scale": 0.5, "length_scale": 1, "noise_w": 0.8},
    "phoneme_type": "espeak",
    "num_speakers": 1,
    "speaker_id_map": {},
    "dataset": "ann",
    "phoneme_id_map": {one: [at] for at, one in enumerate("_^$ .,!?abcdeə")},
}
"""Config beside `piper`."""


def kokoro() -> bytes:
    """A program of Kokoro's form: 100 samples for each id, fewer with more speed."""
    return model(
        [
            node("Cast", "tokens", "x", to=FLOAT),
            node("ReduceSum", "style", "voice", keepdims=0),
            node("Add", "x voice", "v"),
            node("Unsqueeze", "v two", "u"),
            node("Div", "hundred speed", "count"),
            node("Cast", "count", "whole", to=INT64),
            node("Concat", "ones whole", "shape", axis=0),
            node("Expand", "u shape", "e"),
            node("Sin", "e", "s"),
            node("Reshape", "s flat", "audio"),
        ],
        [port("tokens", [1, "n"], INT64), port("style", [1, 4]), port("speed", [1])],
        [port("audio", ["samples"])],
        [
            stored("two", np.array([2])),
            stored("ones", np.array([1, 1])),
            stored("hundred", np.float32(100)),
            stored("flat", np.array([-1])),
        ],
    )


def voices(folder: Path) -> dict[str, Path]:
    """Write the two programs and the files beside them."""
    (folder / "kana").mkdir()
    found = {"ann": folder / "ann.onnx", "kana": folder / "kana" / "kana.onnx"}
    found["ann"].write_bytes(piper())
    (folder / "ann.onnx.json").write_text(json.dumps(PIPER))
    found["kana"].write_bytes(kokoro())
    ids = {one: 1 + at for at, one in enumerate(".,!?“” aiɯeokɡstndhbpmjɾɕʨʥɲçɴŋʣʦɨβːʔʲᵝɸ")}
    (folder / "kana" / "vocab.json").write_text(json.dumps({"vocab": ids}))
    draw = np.random.default_rng(0)
    styles = {one: draw.standard_normal((40, 1, 4), np.float32) for one in ("jf_one", "jm_two")}
    np.savez(folder / "kana" / "voices.npz", **styles, af_three=styles["jf_one"])
    return found
