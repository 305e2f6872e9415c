"""The catalog's programs of wheels behind KServe v2: Triton's client gets the bits of bare ONNX
Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
import pytest
from processes import Running, headrace, running

from headrace.loader.open import fetched

triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
utils = pytest.importorskip("tritonclient.utils")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra programs: onnxruntime")
pytestmark = pytest.mark.model
Array = np.ndarray[Any, Any]
OCR = {"det": (1, 3, 160, 320), "cls": (1, 3, 48, 192), "rec": (1, 3, 48, 320)}
"""Shapes of one input of each program of ocr-pp-v4."""
RATE = 16_000


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    line = headrace("serve", "vad-silero", "--programs", "ocr-pp-v4", "--port", "0")
    with running(line) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as made:
        yield made


@cache
def bare(name: str, file: str) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = fetched(name) / file
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def tensor(name: str, value: Array, kind: str = "FP32") -> Any:
    made = triton.InferInput(name, list(value.shape), kind)
    made.set_data_from_numpy(value)
    return made


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1.0, 1.0, shape).astype(np.float32)


def output_of(client: Any, name: str) -> str:
    (found,) = client.get_model_metadata(name)["outputs"]
    return str(found["name"])


def test_every_file_is_a_program(client: Any) -> None:
    listed = {one["name"]: one["state"] for one in client.get_model_repository_index()}
    assert listed == dict.fromkeys(("vad-silero", *(f"ocr-pp-v4-{one}" for one in OCR)), "READY")


@pytest.mark.parametrize("file", OCR)
def test_the_bits_are_those_of_bare_onnx_runtime(client: Any, file: str) -> None:
    name, x = f"ocr-pp-v4-{file}", drawn(*OCR[file])
    output = output_of(client, name)
    found = client.infer(name, [tensor("x", x)], timeout=60_000_000).as_numpy(output)
    (expected,) = bare("ocr-pp-v4", f"{file}.onnx").run(None, {"x": x})
    assert found.tobytes() == expected.tobytes()


def test_a_line_of_any_width_is_taken(client: Any) -> None:
    """Twelve shapes at a time, in whichever order they end."""
    lines = [drawn(1, 3, 48, 32 * width, seed=width) for width in range(3, 15)]
    output = output_of(client, "ocr-pp-v4-rec")
    waiting = [client.async_infer("ocr-pp-v4-rec", [tensor("x", line)]) for line in lines]
    for line, one in zip(lines, waiting, strict=True):
        (expected,) = bare("ocr-pp-v4", "rec.onnx").run(None, {"x": line})
        assert one.get_result().as_numpy(output).tobytes() == expected.tobytes()


def test_two_recordings_have_their_own_states(client: Any) -> None:
    """Frames of two recordings alternate; each has the odds that bare ONNX Runtime gives it."""
    reference = bare("vad-silero", "silero_vad.onnx")
    states = {name: np.zeros((2, 1, 128), np.float32) for name in (1, 2)}
    rate = np.array(RATE, np.int64)
    for at in range(12):
        for name in (1, 2):
            frame = drawn(1, 576, seed=100 * name + at)
            given = [tensor("input", frame), tensor("sr", rate, "INT64")]
            place = {"sequence_id": name, "sequence_start": at == 0, "sequence_end": at == 11}
            found = client.infer("vad-silero", given, **place).as_numpy("output")
            fed = {"input": frame, "state": states[name], "sr": rate}
            expected, states[name] = reference.run(["output", "stateN"], fed)
            assert found.tobytes() == expected.tobytes(), (name, at)


def test_without_a_sequence_the_state_is_an_input(client: Any) -> None:
    frame, state, rate = drawn(1, 576), drawn(2, 1, 128), np.array(RATE, np.int64)
    given = [tensor("input", frame), tensor("state", state), tensor("sr", rate, "INT64")]
    found = client.infer("vad-silero", given)
    fed = {"input": frame, "state": state, "sr": rate}
    for name, expected in zip(
        ("output", "stateN"),
        bare("vad-silero", "silero_vad.onnx").run(["output", "stateN"], fed),
        strict=True,
    ):
        assert found.as_numpy(name).tobytes() == expected.tobytes()


def test_a_shape_that_the_graph_cannot_take_is_the_clients_error(client: Any) -> None:
    why = r"cannot run on these inputs: .*dimension other than 1"
    with pytest.raises(utils.InferenceServerException, match=why) as wrong:
        client.infer("ocr-pp-v4-det", [tensor("x", drawn(1, 3, 33, 47))])
    assert wrong.value.status() == "400"
    assert "onnxruntime" not in str(wrong.value), "its source files are no client's business"
    x = drawn(*OCR["det"])
    output = output_of(client, "ocr-pp-v4-det")
    assert client.infer("ocr-pp-v4-det", [tensor("x", x)]).as_numpy(output).shape == x[:, :1].shape


def test_a_real_stream_is_admitted_and_kept(server: Running, client: Any) -> None:
    """The rate, a branch of the graph, has its value as runs are measured."""
    with httpx.Client(base_url=server.url) as http:
        body = {"shapes": {"input": [1, 576]}, "values": {"sr": RATE}, "period": 5.0}
        opened = http.post("/v2/models/vad-silero/streams", json=body)
        assert opened.status_code == 200, opened.text
        told = opened.json()
        assert 0.0 < told["utilisation"] < 0.8
        state, rate = np.zeros((2, 1, 128), np.float32), np.array(RATE, np.int64)
        for at in range(5):
            frame = drawn(1, 576, seed=at)
            given = [tensor("input", frame), tensor("state", state), tensor("sr", rate, "INT64")]
            found = client.infer("vad-silero", given, parameters={"stream": told["id"]})
            state = found.as_numpy("stateN")
        assert http.delete(f"/v2/models/vad-silero/streams/{told['id']}").status_code == 200
