"""Programs over HTTP, judged by Triton's own client; and every wrong input gets a typed answer."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from processes import Running, headrace, running

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from server_fake import FakeEngine
from small_programs import double, endless, logarithm, summing, written

from headrace.base.config import EngineOptions, ServerOptions
from headrace.base.errors import InvalidRequest, OptionError
from headrace.base.several import read_models
from headrace.engine.programs.engine import ProgramEngine
from headrace.programs import ProgramLimits
from headrace.server.app import create_app
from headrace.server.attaching import attach, attach_model
from headrace.server.body import BodiesInFlight
from headrace.server.keys import Key, hash_of, new_key, write_keys
from headrace.server.residents import Residents
from headrace.server.tensors import LENGTH_HEADER

triton = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")
utils = pytest.importorskip("tritonclient.utils")


FILES = {"double": double("n", 3), "sum": summing(), "log": logarithm(), "loop": endless()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("programs"), FILES)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    first, *others = (str(folder / f"{name}.onnx") for name in FILES)
    line = headrace(
        "serve", first, "--programs", ",".join(others), "--port", "0", "--program-lanes", "2"
    )
    with running(line) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as made:
        yield made


def tensor(name: str, value: Any, kind: str = "FP32", *, binary: bool = True) -> Any:
    value = np.asarray(value)
    made = triton.InferInput(name, list(value.shape), kind)
    made.set_data_from_numpy(value, binary_data=binary)
    return made


def test_tritons_client_finds_the_programs(client: Any) -> None:
    assert client.is_server_live()
    while not client.is_server_ready():  # A busy machine holds the event loop for a moment.
        time.sleep(0.05)
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    listed = client.get_model_repository_index()
    assert {one["name"]: one["state"] for one in listed} == dict.fromkeys(FILES, "READY")
    version = next(one["version"] for one in listed if one["name"] == "double")
    while not client.is_model_ready("double", version):
        time.sleep(0.05)
    assert "double" in [one["name"] for one in listed]
    assert not client.is_model_ready("another")
    assert not client.is_model_ready("double", "7")
    told = client.get_model_metadata("double", version)
    assert told == client.get_model_metadata("double")
    assert told["versions"] == [version]
    assert told["platform"] == "onnxruntime_onnx"
    assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]
    assert told["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}]
    with pytest.raises(utils.InferenceServerException, match=r"no program 'duble'.*double"):
        client.get_model_metadata("duble")


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_tritons_client_infers(client: Any, sent: bool, wanted: bool) -> None:
    """JSON and the binary extension, each way."""
    x = np.arange(6, dtype="f").reshape(2, 3)
    asked = [triton.InferRequestedOutput("y", binary_data=wanted)]
    found = client.infer("double", [tensor("x", x, binary=sent)], outputs=asked, request_id="seven")
    assert found.as_numpy("y").tolist() == (2 * x).tolist()
    response = found.get_response()
    assert (response["id"], response["model_name"]) == ("seven", "double")
    again = client.infer("double", [tensor("x", x)], response["model_version"])
    assert again.as_numpy("y").tobytes() == (2 * x).tobytes()


def test_tritons_client_infers_at_the_same_time(client: Any) -> None:
    xs = [np.full((1, 3), at, "f") for at in range(16)]
    waiting = [client.async_infer("double", [tensor("x", x)]) for x in xs]
    for x, one in zip(xs, waiting, strict=True):
        assert one.get_result().as_numpy("y").tolist() == (2 * x).tolist()


def test_tritons_client_has_sequences(client: Any) -> None:
    x = [tensor("x", np.ones((1, 2), "f"))]

    def step(name: Any, **more: bool) -> float:
        found = client.infer("sum", x, sequence_id=name, **more)
        assert {one["name"] for one in found.get_response()["outputs"]} == {"y"}
        return float(found.as_numpy("y")[0, 0])

    assert [step(5, sequence_start=True), step(5), step("5", sequence_start=True), step(5)] == [
        1, 2, 1, 3,
    ]  # fmt: skip
    assert step(5, sequence_end=True) == 4
    with pytest.raises(utils.InferenceServerException, match="sequence 5 is not known"):
        step(5)


def test_tritons_timeout_is_the_deadline(client: Any) -> None:
    loop = [tensor("x", np.zeros(1, "f")), tensor("go", np.array(True), "BOOL")]
    with pytest.raises(utils.InferenceServerException, match="stopped at its deadline") as missed:
        client.infer("loop", loop, timeout=200_000)
    assert missed.value.status() == "504"
    go = [loop[0], tensor("go", np.array(False), "BOOL")]
    found = client.infer("loop", go, timeout=20_000_000, parameters={"class": "batch"})
    assert found.as_numpy("y").tolist() == [0]


def test_streams_over_http(server: Running, client: Any) -> None:
    with httpx.Client(base_url=server.url) as http:
        body = {"shapes": {"x": [1, 3]}, "period": 0.5}
        opened = http.post("/v2/models/double/streams", json=body)
        assert opened.status_code == 200, opened.text
        told = opened.json()
        assert (told["model_name"], told["deadline"]) == ("double", 0.5)
        x = [tensor("x", np.ones((1, 3), "f"))]
        found = client.infer("double", x, parameters={"stream": told["id"]})
        assert found.as_numpy("y").tolist() == [[2, 2, 2]]
        assert "headrace_programs_streams 1.0" in http.get("/metrics").text
        with pytest.raises(utils.InferenceServerException, match="no stream"):
            client.infer("double", x, parameters={"stream": "another"})
        refused = http.post("/v2/models/double/streams", json={**body, "period": 1e-6})
        assert (refused.status_code, refused.json()["code"]) == (503, "not_schedulable")
        for wrong, field in (
            ({"period": 0}, "period"),
            ({"period": 1, "shapes": {"x": [1, 2]}}, "inputs"),
            ({"period": 1, "shapes": {"x": [2**40, 3]}}, "shapes"),
            ({"period": 1, "shapes": {"x": [-1, 3]}}, "shapes"),
            ({"period": 1, "shapes": {"z": [1]}}, "shapes"),
            ({"period": 1, "shapes": {"x": [2**70, 3]}}, "shapes"),
            ({"period": 1, "values": {"z": 1}}, "values"),
            ({"period": 1, "values": {"x": 1e300}}, "values"),
        ):
            reply = http.post("/v2/models/double/streams", json={**body, **wrong})
            assert (reply.status_code, reply.json()["param"]) == (400, field), reply.text
        closed = http.delete(f"/v2/models/double/streams/{told['id']}")
        assert closed.json() == {"closed": True}
        assert http.delete(f"/v2/models/double/streams/{told['id']}").status_code == 404
        assert "headrace_programs_streams 0.0" in http.get("/metrics").text


def test_other_routes_say_what_it_is(server: Running) -> None:
    with httpx.Client(base_url=server.url) as http:
        chat = http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "?"}]}
        )
        assert chat.status_code == 400
        assert "use /v2/models/double/infer" in chat.json()["error"]["message"]
        listed = http.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == list(FILES)
        assert {one["task"] for one in listed} == {"program"}
        assert http.get("/openapi.json").status_code == 200


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[ProgramEngine]:
    files = {name: folder / f"{name}.onnx" for name in ("double", "log", "loop")}
    made = await ProgramEngine.start(files, ProgramLimits(1 << 28, seconds=20.0), lanes=1)
    yield made
    await made.close()


@pytest.fixture
async def http(engine: ProgramEngine) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, ServerOptions(max_body=100_000, max_concurrent=4))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as made:
        yield made


def body(**more: Any) -> dict[str, Any]:
    x = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}
    return {"inputs": [x | more]}


BAD: dict[str, tuple[bytes, str | None, int, str]] = {
    "no JSON": (b"{", None, 400, "no inference request"),
    "overflow": (
        json.dumps(body(shape=[2**31 - 1] * 3)).encode(), None, 400, "3 elements; the shape",
    ),
    "size too large": (json.dumps(body(shape=[2**62, 4])).encode(), None, 400, "shape"),
    "minus one": (json.dumps(body(shape=[-1, 3])).encode(), None, 400, "sizes from 0 to"),
    "NaN": (json.dumps(body(data=[float("nan"), 1, 2])).encode(), None, 400, "inference request"),
    "number too large": (json.dumps(body(data=[1e300, 1, 2])).encode(), None, 400, "does not fit"),
    "unknown datatype": (json.dumps(body(datatype="FP8")).encode(), None, 400, "datatype 'FP8'"),
    "another datatype": (
        json.dumps(body(datatype="INT32")).encode(), None, 400, "is int32; it takes float32",
    ),
    "texts": (
        json.dumps(body(datatype="BYTES", data=["a", "b", "c"])).encode(), None, 400,
        "datatype 'BYTES'",
    ),
    "another shape": (
        json.dumps(body(shape=[3, 1])).encode(), None, 400, "has the shape [3, 1]; it takes",
    ),
    "2 GB": (
        json.dumps(
            {"inputs": [{
                "name": "x", "shape": [1], "datatype": "FP32",
                "parameters": {"binary_data_size": 2**31},
            }]}
        ).encode(), None, 400, "binary_data_size is 2147483648; 0 bytes are left",
    ),
    "length beyond": (json.dumps(body()).encode(), "9999", 400, LENGTH_HEADER),
    "length of no number": (json.dumps(body()).encode(), "-1", 400, LENGTH_HEADER),
    "bytes behind": (
        json.dumps(body()).encode() + b"12", str(len(json.dumps(body()))), 400, "2 bytes after the",
    ),
    "another input": (
        json.dumps({"inputs": [{**body()["inputs"][0], "name": "z"}]}).encode(), None, 400,
        "input 'z' is not known; the inputs are: x",
    ),
    "no input": (json.dumps({"inputs": []}).encode(), None, 400, "input 'x' is missing"),
    "another output": (
        json.dumps(body() | {"outputs": [{"name": "q"}]}).encode(), None, 400, "no output 'q'",
    ),
    "too long": (b"[" + b"1," * 60_000 + b"1]", None, 413, "100000 bytes"),
    "many objects": (b"[" * 40_000, None, 413, "objects and lists"),
}  # fmt: skip


async def test_wrong_bodies_get_a_typed_answer(http: httpx.AsyncClient) -> None:
    """All of them to one server, which then still serves."""
    for name, (data, length, status, message) in BAD.items():
        headers = {} if length is None else {LENGTH_HEADER: length}
        reply = await http.post("/v2/models/double/infer", content=data, headers=headers)
        assert (reply.status_code, name) == (status, name), reply.text
        assert message in reply.json()["error"], name
        assert reply.json()["type"] == "invalid_request_error"
    good = await http.post("/v2/models/double/infer", json=body())
    assert good.json()["outputs"][0]["data"] == [2, 4, 6]


PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"timeout": -1}, "timeout is -1"),
    ({"timeout": 10**30}, "timeout is 1"),
    ({"timeout": True}, "timeout is True"),
    ({"timeout": "soon"}, "timeout is 'soon'"),
    ({"class": "now"}, "class is 'now'; allowed: realtime, interactive, batch"),
    ({"class": ["now"]}, "class is"),
    ({"class": "realtime"}, "realtime is for the runs of an admitted stream"),
    ({"seed": 2**64}, "seed is"),
    ({"stream": 4}, "stream is 4"),
    ({"stream": "x" * 200}, "stream is"),
    ({"sequence_id": -1.5}, "sequence_id is -1.5"),
    ({"sequence_id": "x" * 200}, "sequence_id is"),
    ({"sequence_start": True}, "sequence_id is 0"),
    ({"sequence_id": 3, "sequence_end": 1}, "sequence_end is 1"),
    ({"sequence_id": 3, "sequence_start": True}, "double keeps no state"),
    ({"sequence_id": 3}, "sequence 3 is not known"),
    ({"priority": 1}, "'priority' is not known; allowed"),
]


async def test_wrong_parameters_get_a_typed_answer(http: httpx.AsyncClient) -> None:
    for parameters, message in PARAMETERS:
        told = body() | {"parameters": parameters}
        reply = await http.post("/v2/models/double/infer", json=told)
        assert reply.status_code == 400, reply.text
        assert message in reply.json()["error"]


async def test_numbers_that_json_lacks_come_as_binary(http: httpx.AsyncClient) -> None:
    x = {"name": "x", "shape": [2], "datatype": "FP32", "data": [0.0, 1.0]}
    asked = {"inputs": [x], "outputs": [{"name": "y"}]}
    reply = await http.post("/v2/models/log/infer", json=asked)
    assert reply.status_code == 400
    assert "ask for it with binary_data" in reply.json()["error"]
    asked["outputs"] = [{"name": "y", "parameters": {"binary_data": True}}]
    reply = await http.post("/v2/models/log/infer", json=asked)
    length = int(reply.headers[LENGTH_HEADER])
    assert np.frombuffer(reply.content[length:], "f").tolist() == [-np.inf, 0]


async def test_a_compressed_body_is_refused(http: httpx.AsyncClient) -> None:
    reply = await http.post(
        "/v2/models/double/infer", content=b"x", headers={"content-encoding": "gzip"}
    )
    assert (reply.status_code, reply.json()["code"]) == (415, "unsupported_media_type")


async def test_unknown_paths_have_the_protocols_errors(http: httpx.AsyncClient) -> None:
    for path in ("/v2/models/none/infer", "/v2/models/double/versions/7/infer", "/v2/nothing"):
        reply = await http.post(path, json=body())
        assert reply.status_code == 404
        assert isinstance(reply.json()["error"], str)


async def test_the_limit_of_requests_holds(http: httpx.AsyncClient, engine: ProgramEngine) -> None:
    loop = {
        "inputs": [
            {"name": "x", "shape": [1], "datatype": "FP32", "data": [0]},
            {"name": "go", "shape": [], "datatype": "BOOL", "data": [True]},
        ],
        "parameters": {"timeout": 3_000_000},
    }
    waiting = [
        asyncio.ensure_future(http.post("/v2/models/loop/infer", json=loop)) for _ in range(4)
    ]
    while engine.executor.running + len(engine.executor.queue) < 4:
        await asyncio.sleep(0.001)
    full = await http.post("/v2/models/double/infer", json=body())
    assert (full.status_code, full.json()["code"]) == (503, "overloaded")
    for one in await asyncio.gather(*waiting):
        assert (one.status_code, one.json()["code"]) == (504, "deadline_missed")


async def test_outputs_are_held_as_bodies_are(engine: ProgramEngine) -> None:
    app, sent = create_app(engine, ServerOptions()), json.dumps(body()).encode()  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for room, status in ((11, 503), (12, 200)):
            app.state.service.bodies = BodiesInFlight(len(sent) + room)
            reply = await http.post("/v2/models/double/infer", content=sent)
            assert reply.status_code == status, reply.text
            assert app.state.service.bodies.held == 0
        assert reply.json()["outputs"][0]["data"] == [2, 4, 6]


async def test_a_program_and_a_model_do_not_share_a_name(engine: ProgramEngine) -> None:
    service = create_app(None, ServerOptions(served_name="log")).state.service
    with pytest.raises(OptionError, match="a model would both be served as log"):
        attach(service, FakeEngine(), engine)  # type: ignore[arg-type]
    service = create_app(None, ServerOptions(served_name="one")).state.service
    attach(service, FakeEngine(), engine)  # type: ignore[arg-type]
    group = SimpleNamespace(chosen=read_models(["one"], EngineOptions()))
    residents = Residents(service, group, attach_model)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="'log' is a program of this server"):
        await residents.load("two:name=log")


BESIDE = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from server_fake import FakeEngine
from headrace.base.config import ServerOptions
from headrace.engine.programs.engine import ProgramEngine
from headrace.server.run import ServerProcess

async def start():
    return FakeEngine()

async def programs():
    return await ProgramEngine.start({{"loop": Path({path!r})}}, lanes=1)

options = ServerOptions(port=0, drain_seconds=0.1)
tell = lambda line: print(line, flush=True)
sys.exit(ServerProcess(start, options, tell, start_programs=programs).run())
"""


def test_programs_beside_a_model_answer_when_the_drain_is_over(folder: Path) -> None:
    code = BESIDE.format(here=str(Path(__file__).parent), path=str(folder / "loop.onnx"))
    loop = {
        "inputs": [
            {"name": "x", "shape": [1], "datatype": "FP32", "data": [0]},
            {"name": "go", "shape": [], "datatype": "BOOL", "data": [True]},
        ]
    }
    replies: list[Any] = []

    def post() -> None:
        try:
            replies.append(httpx.post(server.url + "/v2/models/loop/infer", json=loop, timeout=60))
        except httpx.HTTPError as error:
            replies.append(error)

    with running([sys.executable, "-c", code]) as server:
        thread = Thread(target=post)
        thread.start()
        while "headrace_programs_running 1.0" not in httpx.get(server.url + "/metrics").text:
            time.sleep(0.05)
        server.signal()
        assert server.wait() == 0
        thread.join()
    assert isinstance(replies[0], httpx.Response), replies
    assert (replies[0].status_code, replies[0].json()["code"]) == (503, "engine_dead")


async def test_keys_guard_the_programs(engine: ProgramEngine, tmp_path: Path) -> None:
    keys, secret = tmp_path / "keys.toml", new_key()
    write_keys(keys, [Key("camera", hash_of(secret))])
    app = create_app(engine, ServerOptions(keys=str(keys)))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for method, path in (
            ("POST", "/v2/models/double/infer"),
            ("GET", "/v2/models/double"),
            ("POST", "/v2/repository/index"),
            ("POST", "/v2/models/double/streams"),
        ):
            reply = await http.request(method, path, json=body())
            assert reply.status_code == 401
            assert "API key" in reply.json()["error"]
        keyed = {"authorization": f"Bearer {secret}"}
        good = await http.post("/v2/models/double/infer", json=body(), headers=keyed)
        assert good.json()["outputs"][0]["data"] == [2, 4, 6]
        assert (await http.get("/v2/health/ready")).status_code == 200
