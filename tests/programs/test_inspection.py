"""What may be loaded: operators, functions, sizes, external data, and files of other kinds."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from small_programs import FLOAT, double, endless, helper, model, node, onnx, port, stored

from headrace.base.errors import (
    DoesNotFit,
    HeadraceError,
    InvalidRequest,
    ModelFileError,
    OptionError,
    UnsupportedModel,
)
from headrace.programs import ForeignProgram, ProgramLimits, inspected, inspection
from headrace.programs.drawn import random_nodes
from headrace.programs.inspection import LIMITS, inspected_bytes
from headrace.programs.onnx import Call, Net, OnnxModel, Port, description
from headrace.programs.wire import encoded


def refused(
    data: bytes, error: type[HeadraceError], match: str, limits: ProgramLimits = LIMITS
) -> None:
    with pytest.raises(error, match=match):
        inspected_bytes(data, "m.onnx", limits)


def single(op: str, *, domain: str = "", opset: int = 17, inputs: str = "x") -> bytes:
    one = helper.make_node(op, inputs.split(), ["y"], domain=domain)
    ports = [port(name, [2]) for name in dict.fromkeys(inputs.split())]
    return model([one], ports, [port("y", None)], opset=opset, domains=[domain] if domain else [])


def test_a_report() -> None:
    found = inspected_bytes(double("batch", 3), "m.onnx")
    assert str(found.described.inputs[0]) == "x float32 [batch, 3]"
    assert found.operators == {"Mul": 1}
    assert (found.weights, found.loops, found.states) == (4, 0, ())
    assert inspected_bytes(endless(), "m.onnx").loops == 1
    assert inspected_bytes(single("Gelu", domain="com.microsoft"), "m.onnx").operators == {
        "com.microsoft.Gelu": 1
    }


def test_operators_of_other_libraries_are_refused() -> None:
    refused(
        single("Evil", domain="my.ops"), UnsupportedModel, "operator my.ops.Evil needs a library"
    )
    refused(single("EPContext", domain="com.microsoft"), UnsupportedModel, "a compiled binary")
    refused(single("ImageDecoder", opset=20), UnsupportedModel, "confined process")
    refused(single("Relu", opset=6), UnsupportedModel, "opset 6; allowed: 7 and later")


def test_a_refused_operator_is_found_wherever_it_is() -> None:
    inner = helper.make_node("Evil", ["x"], ["b"], domain="my.ops")
    branch = helper.make_graph([inner], "then", [], [port("b", None)])
    plain = helper.make_graph([node("Identity", "x", "b")], "else", [], [port("b", None)])
    choice = helper.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=plain)
    ports = [port("x", [2]), port("go", [], onnx.TensorProto.BOOL)]
    refused(model([choice], ports, [port("y", None, FLOAT)]), UnsupportedModel, "my.ops.Evil")
    function = helper.make_function(
        "own", "F", ["a"], ["b"], [inner], [helper.make_opsetid("my.ops", 1)]
    )
    call = helper.make_node("F", ["x"], ["y"], domain="own")
    data = model([call], [port("x", [2])], [port("y", [2])], domains=["own"], functions=[function])
    refused(data, UnsupportedModel, "my.ops.Evil")


def calls(depth: int, *, last: str) -> bytes:
    """Functions that call the next one ten times."""
    functions = []
    for at in range(depth):
        name = f"F{at + 1}" if at + 1 < depth else last
        domain = "own" if name.startswith("F") else ""
        nodes = [helper.make_node(name, [f"v{i}"], [f"v{i + 1}"], domain=domain) for i in range(10)]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        functions.append(helper.make_function("own", f"F{at}", ["v0"], ["v10"], nodes, imports))
    call = helper.make_node("F0", ["x"], ["y"], domain="own")
    return model([call], [port("x", [2])], [port("y", [2])], domains=["own"], functions=functions)


def test_functions_are_counted_as_they_expand() -> None:
    inspected_bytes(calls(4, last="Relu"), "m.onnx")
    refused(calls(9, last="Relu"), UnsupportedModel, "1,000,000,000 nodes, at most 100,000")
    refused(calls(3, last="F1"), ModelFileError, "function F1 calls itself")


def test_sizes_are_bounded_before_anything_is_allocated() -> None:
    weights = model(
        [node("Add", "x w", "y")],
        [port("x", [1])],
        [port("y", None)],
        [stored("w", np.ones(999, "f"))],
    )
    refused(
        weights,
        DoesNotFit,
        "its weights of 3,996 bytes, the limit is 1,000",
        ProgramLimits(memory=1000),
    )
    refused(double(1 << 20, 1 << 20), DoesNotFit, "value x of 4,398,046,511,104 bytes")
    huge = node("ConstantOfShape", "s", "c")
    data = model(
        [huge, node("Add", "x c", "y")],
        [port("x", [1])],
        [port("y", None)],
        [stored("s", np.array([1 << 40]))],
    )
    refused(data, DoesNotFit, "a constant of 8,796,093,022,208 bytes")


def test_inputs_and_outputs_are_tensors_of_numbers() -> None:
    text = model(
        [node("Identity", "x", "y")],
        [port("x", [1], onnx.TensorProto.STRING)],
        [port("y", [1], onnx.TensorProto.STRING)],
    )
    refused(text, UnsupportedModel, "input x is of string elements; allowed: bool, float16")
    sequence = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    data = model([node("SequenceConstruct", "x", "y")], [port("x", [1])], [sequence])
    refused(data, UnsupportedModel, "output y is of no tensor elements")


def with_outside(folder: Path, location: str, *, offset: int = 0, length: int = 16) -> Path:
    """A model whose weights lie in another file."""
    weights = onnx.TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=1)
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        weights.external_data.add(key=key, value=str(value))
    data = model([node("Add", "x w", "y")], [port("x", [4])], [port("y", [4])], [weights])
    path = folder / "m.onnx"
    path.write_bytes(data)
    return path


def test_external_data_below_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "w.bin").write_bytes(b"12" + np.arange(4, dtype="f").tobytes())
    found = inspected(with_outside(tmp_path, "d/w.bin", offset=2))
    assert found.weights == 16
    before = found.sha256
    # What was read is what runs, whatever the file becomes.
    (tmp_path / "d" / "w.bin").write_bytes(b"\0" * 18)
    (tmp_path / "m.onnx").unlink()
    program = ForeignProgram(found)
    assert program.run({"x": np.ones(4, np.float32)})["y"].tolist() == [1, 2, 3, 4]
    changed = inspected(with_outside(tmp_path, "d/w.bin", offset=2))
    assert changed.sha256 != before


@pytest.mark.parametrize(
    "location",
    ["../w.bin", "/etc/passwd", "d/../../w.bin", "", "./w", "a//b", "*/_ORT_MEM_ADDR_/*"],
)
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    inner = tmp_path / "model"
    inner.mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    with pytest.raises(ModelFileError, match="allowed is a relative path below the model's folder"):
        inspected(with_outside(inner, location))


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    inner, outer = tmp_path / "model", tmp_path / "outer"
    inner.mkdir()
    outer.mkdir()
    (outer / "w.bin").write_bytes(b"\0" * 16)
    (inner / "file").symlink_to(outer / "w.bin")
    (inner / "folder").symlink_to(outer)
    os.mkfifo(inner / "pipe")
    for location in ("file", "folder/w.bin"):
        with pytest.raises(ModelFileError, match="links are not followed"):
            inspected(with_outside(inner, location))
    with pytest.raises(ModelFileError, match="pipe is no regular file"):
        inspected(with_outside(inner, "pipe"))
    with pytest.raises(ModelFileError, match="absent' cannot be read"):
        inspected(with_outside(inner, "absent"))


def test_external_data_in_a_branch_is_refused(tmp_path: Path) -> None:
    """ONNX Runtime would look for it below the current folder."""
    weights = onnx.TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=1)
    weights.external_data.add(key="location", value="w.bin")
    branch = helper.make_graph([node("Add", "x w", "b")], "t", [], [port("b", None)], [weights])
    plain = helper.make_graph([node("Identity", "x", "b")], "e", [], [port("b", None)])
    choice = helper.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=plain)
    ports = [port("x", [4]), port("go", [], onnx.TensorProto.BOOL)]
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    with pytest.raises(ModelFileError, match="tensor w has external data; allowed are init"):
        inspected_bytes(model([choice], ports, [port("y", None)]), "m.onnx", folder=tmp_path)


def test_external_data_has_the_size_of_its_shape(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(b"\0" * 16)
    with pytest.raises(ModelFileError, match=r"ends at byte 20 of w\.bin, which has 16"):
        inspected(with_outside(tmp_path, "w.bin", offset=4))
    with pytest.raises(ModelFileError, match="16 bytes by its shape, and 12 in"):
        inspected(with_outside(tmp_path, "w.bin", length=12))
    with pytest.raises(ModelFileError, match="offset -4"):
        inspected(with_outside(tmp_path, "w.bin", offset=-4))


def archive(*names: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as file:
        for name in names:
            file.writestr(name, b"0")
    return target.getvalue()


KINDS = {
    "a pickle": (pickle.dumps({"a": 1}), "m.onnx is a pickle, which runs code"),
    "TorchScript": (archive("m/data.pkl", "m/constants.pkl", "m/code/a.py"), "is TorchScript"),
    "torch.save": (archive("m/data.pkl", "m/data/0"), "is a pickle of PyTorch"),
    "another archive": (archive("a.txt"), "archive of another kind"),
    "half an archive": (b"PK\x03\x04half", "archive of another kind"),
    "TensorFlow Lite": (b"\x1c\0\0\0TFL3" + b"\0" * 8, "is a TensorFlow Lite file"),
    "an ORT dump": (b"\x1c\0\0\0ORTM" + b"\0" * 8, "an ONNX Runtime dump"),
    "a language model": (b"GGUF\3\0\0\0", "headrace serve"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    data, message = KINDS[kind]
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        inspected(path)


@pytest.mark.slow
def test_real_pickles_of_torch_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "m.pt"
    torch.save({"a": torch.ones(2)}, path)
    with pytest.raises(ModelFileError, match="is a pickle of PyTorch"):
        inspected(path)
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(exported, tmp_path / "m.pt2")
    with pytest.raises(ModelFileError, match=r"is a torch\.export archive"):
        inspected(tmp_path / "m.pt2")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such"):
        inspected(tmp_path / "absent")
    with pytest.raises(ModelFileError, match="no regular file"):
        inspected(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="no regular file"):
        inspected(tmp_path / "pipe")


def recurrent(*pairs: tuple[str, str], dims: tuple[int | str, ...] = (2, "batch", 4)) -> bytes:
    nodes = [node("Identity", old, new) for old, new in pairs]
    return model(
        nodes, [port(old, dims) for old, _ in pairs], [port(new, dims) for _, new in pairs]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("state", "stateN"),
        ("h", "hn"),
        ("h_in", "h_out"),
        ("in_c", "out_c"),
        ("past_0", "present_0"),
        ("cache", "new_cache"),
        ("cache", "cache_next"),
    ],
)
def test_states_are_found_by_their_names(old: str, new: str) -> None:
    (found,) = inspected_bytes(recurrent((old, new)), "m.onnx").states
    assert (found.input, found.output, found.axis) == (old, new, 1)


def test_a_state_has_one_size() -> None:
    assert not inspected_bytes(recurrent(("past_0", "present_0"), dims=("b", 4, "t")), "m").states
    different = model(
        [node("Concat", "h h", "hn", axis=0)], [port("h", [1, 2])], [port("hn", [2, 2])]
    )
    assert not inspected_bytes(different, "m").states
    two = inspected_bytes(recurrent(("h", "hn"), ("c", "cn")), "m").states
    assert [(one.input, one.output) for one in two] == [("h", "hn"), ("c", "cn")]


FLOATS = encoded([(1, encoded([(1, 1)]))])
"""The type of a tensor of float32 without a shape."""


def raw_model(nodes: list[bytes], *, inputs: int = 1) -> bytes:
    """A model of encoded nodes, from x0 … to y: what the `onnx` package does not write."""
    ports = [(11, encoded([(1, b"x%d" % at), (2, FLOATS)])) for at in range(inputs)]
    result = (12, encoded([(1, b"y"), (2, FLOATS)]))
    graph = encoded([*((1, one) for one in nodes), *ports, result])
    return encoded([(1, 9), (7, graph), (8, encoded([(2, 20)]))])


def test_functions_in_branches_of_functions_are_bounded() -> None:
    """64 functions with eight graphs in each are deeper than Python's stack."""
    functions = []
    for at in range(60):
        call = [helper.make_node(f"F{at + 1}", ["a"], ["b"], domain="own")]
        for _ in range(8):
            graph = helper.make_graph(call, "g", [], [port("b", None)])
            call = [helper.make_node("If", ["a"], ["b"], then_branch=graph)]
        opsets = [helper.make_opsetid("", 17)]
        functions.append(helper.make_function("own", f"F{at}", ["a"], ["b"], call, opsets))
    last = helper.make_function("own", "F60", ["a"], ["b"], [node("Relu", "a", "b")], opsets)
    data = model(
        [helper.make_node("F0", ["x"], ["y"], domain="own")],
        [port("x", [2])],
        [port("y", [2])],
        domains=["own"],
        functions=[*functions, last],
    )
    refused(data, ModelFileError, "nested more than 64 deep")


def test_sizes_and_counts_of_thousands_of_digits_are_refused() -> None:
    """Python writes no integer of more than 4,300 digits."""
    shape = stored("s", np.full(512, 1 << 62))
    data = model([node("ConstantOfShape", "s", "y")], [], [port("y", None)], [shape])
    refused(data, DoesNotFit, "a constant of")
    data = model([node("RandomNormal", "", "y", shape=[1 << 62] * 400)], [], [port("y", None)])
    refused(data, DoesNotFit, "the output of RandomNormal of")
    functions: dict[tuple[str, str], tuple[Call, ...]] = {}
    for at in range(15_000):
        call = Call(f"F{at + 1}" if at < 14_999 else "Relu", "own", "", (), (), {})
        functions["own", f"F{at}"] = (call, call)
    # The last first: no call is nested deep when it is counted.
    nodes = tuple(Call(name, "own", "", (), (), {}) for _, name in reversed(functions))
    described = OnnxModel(9, {}, "", Net(nodes, (), (), (), ()), functions, {})
    with pytest.raises(UnsupportedModel, match="nodes, at most 100,000"):
        inspection._expanded("m", described, LIMITS)


def test_a_refused_operator_hides_behind_no_field_and_no_function() -> None:
    """Libraries skip a field of another wire type, and prefer their operator to a function."""
    fixed = bytes([4 << 3 | 5]) + b"Relu"
    hidden = encoded([(1, b"x0"), (2, b"y"), (4, b"ImageDecoder")]) + fixed
    data = raw_model([hidden])
    assert onnx.ModelProto.FromString(data).graph.node[0].op_type == "ImageDecoder"
    refused(data, ModelFileError, "op_type is a number where bytes are due")
    opsets = [helper.make_opsetid("", 17)]
    plain = [node("Identity", "a", "b")]
    function = helper.make_function("com.microsoft", "Sampling", ["a"], ["b"], plain, opsets)
    call = helper.make_node("Sampling", ["x"], ["y"], domain="com.microsoft")
    ports = [port("x", [2])], [port("y", [2])]
    data = model([call], *ports, domains=["com.microsoft"], functions=[function])
    refused(data, UnsupportedModel, "com.microsoft.Sampling is not run")


@pytest.mark.parametrize("place", [1 << 32 | 1, 2, -1])
def test_external_data_hides_behind_no_number(place: int) -> None:
    """Libraries keep the low 32 bits of an enumeration: 2^32 + 1 is EXTERNAL."""
    outside = encoded([(1, b"location"), (2, b"secret")])
    tensor = encoded([(1, 1), (2, 1), (4, b"abcd"), (8, b"w"), (13, outside), (14, place)])
    graph = encoded([(5, tensor), (12, encoded([(1, b"w"), (2, FLOATS)]))])
    data = encoded([(1, 9), (7, graph), (8, encoded([(2, 17)]))])
    refused(data, ModelFileError, f"tensor w has the data location {place}; allowed: 0, 1")


def test_the_work_of_an_inspection_grows_with_the_file() -> None:
    """Inputs are not compared with one another, nor random nodes: comparisons are counted."""
    counted = Counted()
    ports = [Port(counted.text(f"x{at}"), "float32", (1,)) for at in range(300)]
    described = description(raw_model([encoded([(2, b"y"), (4, b"RandomNormal")])]))
    graph = dataclasses.replace(described.graph, inputs=tuple(ports))
    inspection._ports("m", dataclasses.replace(described, graph=graph), LIMITS)
    assert counted.comparisons < 3000


class Counted:
    """Texts that count how often they are compared."""

    comparisons = 0

    def text(self, value: str) -> str:
        outer = self

        class Text(str):
            def __eq__(self, other: object) -> bool:
                outer.comparisons += 1
                return str.__eq__(self, other)

            __hash__ = str.__hash__

        return Text(value)


@pytest.mark.parametrize("fields", [[(4, b"RandomNormal")], [(2, b"y"), (4, b"RandomUniformLike")]])
def test_a_random_node_without_ends_is_refused(fields: list[tuple[int, bytes]]) -> None:
    described = inspected_bytes(raw_model([encoded(fields)]), "m.onnx").described
    with pytest.raises(UnsupportedModel, match="it has no output, or no input"):
        random_nodes(described)


def test_many_external_files_are_loaded(tmp_path: Path) -> None:
    """Their names together are longer than an argument of a process may be."""
    names = [f"{at:0240d}" for at in range(600)]
    tensors = []
    for name in names:
        (tmp_path / name).write_bytes(np.float32(1).tobytes())
        one = stored(f"w{name}", np.ones(1, "f"))
        onnx.external_data_helper.set_external_data(one, name, 0, 4)
        one.ClearField("raw_data")
        one.data_location = onnx.TensorProto.EXTERNAL
        tensors.append(one)
    ends = " ".join(["x", *(one.name for one in tensors)])
    data = model([node("Sum", ends, "y")], [port("x", [1])], [port("y", [1])], tensors)
    (tmp_path / "m.onnx").write_bytes(data)
    program = ForeignProgram.load(tmp_path / "m.onnx")
    assert program.run({"x": np.zeros(1, "f")})["y"].item() == 600


@pytest.mark.parametrize(
    ("name", "value"),
    [("seconds", np.nan), ("seconds", np.inf), ("seconds", 0), ("memory", 0), ("memory", 1 << 60)],
)
def test_limits_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{name} is .*; allowed is more than 0, at most"):
        ProgramLimits(**{name: value})  # type: ignore[arg-type]
