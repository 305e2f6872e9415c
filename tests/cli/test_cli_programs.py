"""`headrace programs`: what it shows of a file, what it runs, and one line for what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")


@pytest.fixture
def detector(tmp_path: Path) -> Path:
    """y = x w, counted = x + state, and noise."""
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) * 2, "w")
    graph = onnx.helper.make_graph(
        [
            make("MatMul", ["x", "w"], ["y"]),
            make("Add", ["x", "state"], ["stateN"]),
            make("RandomNormalLike", ["x"], ["noise"]),
        ],
        "g",
        [value("x", 1, ["batch", 3]), value("state", 1, ["batch", 3])],
        [value(name, 1, ["batch", 3]) for name in ("y", "stateN", "noise")],
        [weights],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    path = tmp_path / "detector.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


def test_what_a_file_is_and_costs(run: Any, detector: Path) -> None:
    done = run("programs", "inspect", str(detector), "--input", "x=random:1x3", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["inputs"] == ["x float32 [batch, 3]", "state float32 [batch, 3]"]
    assert report["operators"] == "MatMul ×1, Add ×1, RandomNormalLike ×1"
    assert report["weights"] == "36 bytes"
    assert report["states"] == ["state ← stateN"]
    assert report["random"] == ["RandomNormalLike : from the seed"]
    assert report["4 rows"] == "one by one, it draws numbers, and each row has its own seed"
    assert report["run"].endswith("ms for x [1, 3], state [1, 3]")
    text = run("programs", "inspect", str(detector)).stdout
    assert "states        state ← stateN\n" in text


def test_a_run_prints_or_writes_its_outputs(run: Any, detector: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([[1, 2, 3]], np.float32))
    given = ("programs", "run", str(detector), "--input", f"x=@{tmp_path}/x.npy", "--seed", "4")
    first, again = (json.loads(run(*given).stdout)["outputs"] for _ in range(2))
    assert first == again
    assert first["y"] == {"datatype": "float32", "shape": [1, 3], "data": [2.0, 4.0, 6.0]}
    assert first["stateN"]["data"] == [1.0, 2.0, 3.0]
    done = run(*given, "--output", str(tmp_path / "out.npz"))
    assert done.stdout.strip() == f"{tmp_path}/out.npz: y, stateN, noise"
    with np.load(tmp_path / "out.npz") as found:
        assert found["y"].tolist() == [[2, 4, 6]]
        assert found["noise"].reshape(-1).tolist() == first["noise"]["data"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--input", "q=random"),
            "--input q=random; allowed is name=VALUE with a name of: x, state",
        ),
        (("--input", "x"), "allowed is name=VALUE"),
        (("--input", "x=[[1,2]]"), "input x has the shape [1, 2]; it takes x float32 [batch, 3]"),
        (("--input", "x=nonsense"), "allowed are @FILE.npy, a JSON number or list of float32"),
        (("--input", "x=random:99999999x9999"), "has more than 1.07 GB"),
        (("--input", "x=@absent.npy"), "absent.npy cannot be read: No such file"),
        (("--memory", "0.001", "--input", "x=random:900000x3"), "cannot run on these inputs"),
        (("--output", "/no/such/folder/o.npz"), "o.npz cannot be written: No such file"),
    ],
)
def test_what_is_wrong_is_one_line(
    run: Any, detector: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run("programs", "run", str(detector), *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_other_files_are_refused_by_name(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(b"\x80\x04K\x01.")
    done = run("programs", "inspect", str(path))
    assert done.returncode == 3
    assert done.stderr == (
        "error: m.pt is a pickle, which runs code as it is read, and is not loaded; a program is "
        "an ONNX file\n"
    )
    done = run("programs", "run", "ocr-pp-v4/rex.onnx")
    assert "did you mean rec.onnx?; it has: ocr-pp-v4/det.onnx" in done.stderr
    done = run("generate", "joe", "hello")
    assert "joe is a program: headrace programs" in done.stderr


def test_without_the_extra_a_file_is_still_inspected(
    detector: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from headrace.cli import programs
    from headrace.programs import library

    library.library.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    programs.inspect(str(detector), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == "36 bytes"
    assert report["not measured"].startswith("programs need onnxruntime, which is not installed")
    library.library.cache_clear()


def pooling(path: Path) -> None:
    """One node that no flag can stop: with a picture of 2,000 by 2,000 it takes hours."""
    value = onnx.helper.make_tensor_value_info
    size = 2001
    node = onnx.helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=[size, size], pads=[size - 1] * 4
    )
    ports = [value("x", 1, [1, 1, "h", "w"])], [value("y", 1, None)]
    graph = onnx.helper.make_graph([node], "g", *ports)
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)


def test_an_endless_node_is_killed_as_it_is_measured(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "pool.onnx"
    pooling(path)
    large = ("--input", "x=zeros:1x1x2000x2000", "--seconds", "0.5")
    done = run("programs", "inspect", str(path), *large)
    assert done.returncode != 0
    assert "did not stop within 0.5 s, its time limit, and was killed" in done.stderr
    rows = json.loads(run("programs", "inspect", str(path), "--json").stdout)["4 rows"]
    assert rows == "one by one, every input has a fixed first dimension: one row"


def test_the_processors_time_is_that_of_the_confined_runs(run: Any, tmp_path: Path) -> None:
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = onnx.numpy_helper.from_array(np.ones((512, 512), np.float32), "w")
    ports = [value("x", 1, ["batch", 512])], [value("y", 1, ["batch", 512])]
    graph = onnx.helper.make_graph([make("MatMul", ["x", "w"], ["y"])], "g", *ports, [weights])
    opset, path = [onnx.helper.make_opsetid("", 17)], tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    done = run("programs", "inspect", str(path), "--json")
    verdict = json.loads(done.stdout)["4 rows"]
    if "equal" in verdict:  # Else the library's bits differ on this processor.
        alone = float(verdict.partition("CPU, ")[2].partition(" ")[0])
        assert alone > 0.0


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_bad_arguments_are_one_line(run: Any, detector: Path, tmp_path: Path) -> None:
    files = {
        "archive": b"PK\x03\x04 and nothing",
        "text": header("{'descr': '''\n"),
        "types": header("{'descr': (), 'fortran_order': False, 'shape': (3,)}\n"),
    }
    np.savez(tmp_path / "many.npz", x=np.zeros(3))
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    for name in (*files, "many.npz"):
        done = run("programs", "inspect", str(detector), "--input", f"x=@{tmp_path / name}")
        assert f"{name} is no .npy file of numbers" in done.stderr
    many = "x".join(["1"] * 70)
    wrong = {
        (str(detector), "--input", f"x=zeros:{many}"): "has 70 dimensions, at most 32 are allowed",
        (str(detector), "--memory", "inf"): "--memory",
        (str(detector), "--seconds", "inf"): "--seconds",
        ("~nobody-of-this-name/x.onnx",): "cannot be read",
    }
    for given, message in wrong.items():
        done = run("programs", "run", *given)
        assert done.returncode, given
        assert message in done.stderr
        assert "internal error" not in done.stderr


def test_a_program_takes_no_profile(run: Any, detector: Path) -> None:
    done = run("serve", str(detector), "--profile", "one", "--port", "0")
    assert done.returncode == 2
    assert "a profile is of a model; a program takes none" in done.stderr


def test_names_of_a_file_are_data(run: Any, tmp_path: Path) -> None:
    """An output may have the name of numpy's own parameter; names do not steer the terminal."""
    value = onnx.helper.make_tensor_value_info
    strange = "x\x1b[31m"
    nodes = [onnx.helper.make_node("Identity", [strange], ["file"])]
    ports = [value(strange, 7, [1])], [value("file", 7, [1])]
    graph = onnx.helper.make_graph(nodes, "g", *ports)
    opset = [onnx.helper.make_opsetid("", 17)]
    path = tmp_path / "m.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    given = ("programs", "run", str(path), "--output", str(tmp_path / "o.npz"), "--input")
    done = run(*given, f"{strange}=[5]")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "o.npz") as found:
        assert found["file"].tolist() == [5]
    assert "a JSON number or list of int64" in run(*given, f"{strange}=[1.7]").stderr
    shown = run("programs", "inspect", str(path)).stdout
    assert "x\\x1b[31m int64 [1]" in shown
    assert "\x1b" not in shown
