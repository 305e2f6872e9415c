"""KServe v2 over gRPC, judged by Triton's own client, against a server process; the bad inputs and
the bounds against the same port in this process."""

from __future__ import annotations

import asyncio
import queue
import re
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from processes import Running, headrace, running

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import double, endless, logarithm, summing, written

from headrace.base.config import ServerOptions
from headrace.base.errors import OptionError
from headrace.base.shares import Shares
from headrace.engine.programs.engine import ProgramEngine
from headrace.programs import ProgramLimits
from headrace.server import grpc_port
from headrace.server.app import create_app
from headrace.server.grpc_port import GrpcPort
from headrace.server.inference_messages import SERVICE, TYPES
from headrace.server.keys import Key, hash_of, new_key, write_keys

grpc = pytest.importorskip("grpc", reason="needs the extra picker: grpcio")
triton = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
utils = pytest.importorskip("tritonclient.utils")
pb = pytest.importorskip("tritonclient.grpc.service_pb2")

FILES = {"double": double("n", 3), "sum": summing(), "log": logarithm(), "loop": endless()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("programs"), FILES)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    first, *others = (str(folder / f"{name}.onnx") for name in FILES)
    ports = ["--port", "0", "--grpc-port", "0", "--program-lanes", "2"]
    with running(headrace("serve", first, "--programs", ",".join(others), *ports)) as one:
        yield one


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with triton.InferenceServerClient(server.await_line(r"grpc: (\S+)")[1]) as made:
        yield made


def tensor(name: str, value: Any, kind: str = "FP32") -> Any:
    value = np.asarray(value)
    made = triton.InferInput(name, list(value.shape), kind)
    made.set_data_from_numpy(value)
    return made


def loop(go: bool) -> list[Any]:
    return [tensor("x", np.zeros(1, "f")), tensor("go", np.array(go), "BOOL")]


def test_tritons_client_finds_the_programs(client: Any) -> None:
    assert client.is_server_live()
    while not client.is_server_ready():  # A busy machine holds the event loop for a moment.
        time.sleep(0.05)
    assert "sequence" in client.get_server_metadata().extensions
    listed = client.get_model_repository_index().models
    assert {one.name: one.state for one in listed} == dict.fromkeys(FILES, "READY")
    version = next(one.version for one in listed if one.name == "double")
    assert client.is_model_ready("double", version)
    assert not client.is_model_ready("another")
    assert not client.is_model_ready("double", "7")
    told = client.get_model_metadata("double", version)
    assert (told.name, list(told.versions)) == ("double", [version])
    assert [(one.name, one.datatype, list(one.shape)) for one in told.inputs] == [
        ("x", "FP32", [-1, 3])
    ]
    with pytest.raises(utils.InferenceServerException, match=r"no program 'duble'.*double") as no:
        client.get_model_metadata("duble")
    assert no.value.status() == "StatusCode.NOT_FOUND"


def test_tritons_client_infers(client: Any) -> None:
    x = np.arange(6, dtype="f").reshape(2, 3)
    asked = [triton.InferRequestedOutput("y")]
    found = client.infer("double", [tensor("x", x)], outputs=asked, request_id="seven")
    assert found.as_numpy("y").tobytes() == (2 * x).tobytes()
    response = found.get_response()
    assert (response.id, response.model_name) == ("seven", "double")
    again = client.infer("double", [tensor("x", x)], response.model_version)
    assert again.as_numpy("y").tobytes() == (2 * x).tobytes()
    both = client.infer("log", [tensor("x", np.array([0, 1, 3], "f"))])
    assert both.as_numpy("n").tolist()[1:] == [0, 1]
    assert both.as_numpy("y")[0] == -np.inf


def test_numbers_in_the_message_are_tensors_too(client: Any) -> None:
    """Clients of KServe's own protocol send `contents` instead of raw bytes."""
    with grpc.insecure_channel(client._channel._channel.target().decode()) as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        asked = pb.ModelInferRequest(model_name="double")
        x = asked.inputs.add(name="x", datatype="FP32", shape=[1, 3])
        x.contents.fp32_contents.extend([1, float("nan"), -3])
        found = np.frombuffer(infer(asked).raw_output_contents[0], "f")
        assert np.array_equal(found, [2, np.nan, -6], equal_nan=True)
        asked = pb.ModelInferRequest(model_name="loop")
        asked.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(7)
        asked.inputs.add(name="go", datatype="BOOL", shape=[]).contents.bool_contents.append(False)
        assert np.frombuffer(infer(asked).raw_output_contents[0], "f").tolist() == [7]


def test_calls_at_the_same_time(client: Any) -> None:
    done: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for at in range(32):
        x = [tensor("x", np.full((1, 3), at, "f"))]
        client.async_infer("double", x, lambda result, error, at=at: done.put((at, result, error)))
    for _ in range(32):
        at, result, error = done.get(timeout=60)
        assert error is None
        assert result.as_numpy("y").tolist() == [[2 * at] * 3]


def test_a_stream_answers_in_order_and_goes_on_after_an_error(client: Any) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: done.put((result, error)))
    x = [tensor("x", np.ones((1, 2), "f"))]
    for number in range(5):
        client.async_stream_infer(
            "sum", x, sequence_id=9, sequence_start=number == 0, sequence_end=number == 4
        )
    client.async_stream_infer("sum", x, sequence_id=9, request_id="late")
    client.async_stream_infer("double", [tensor("x", np.ones((1, 3), "f"))], request_id="after")
    found = [done.get(timeout=60) for _ in range(7)]
    client.stop_stream()
    assert [float(result.as_numpy("y")[0, 0]) for result, _ in found[:5]] == [1, 2, 3, 4, 5]
    assert "sequence 9 is not known" in str(found[5][1])
    assert found[6][0].get_response().id == "after"


def runs(server: Running) -> dict[str, int]:
    text = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'runs_total\{model_name="loop",outcome="(\w+)"\} (\d+)', text)
    return {outcome: int(count) for outcome, count in found}


def test_the_deadline_of_a_call_is_that_of_its_run(server: Running, client: Any) -> None:
    with pytest.raises(utils.InferenceServerException, match="stopped at its deadline") as missed:
        client.infer("loop", loop(True), timeout=200_000)
    assert missed.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    before = runs(server)
    with pytest.raises(utils.InferenceServerException) as missed:
        client.infer("loop", loop(True), client_timeout=0.3)
    assert missed.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    end = time.monotonic() + 10
    while sum(runs(server).values()) == sum(before.values()):
        assert time.monotonic() < end, "the run goes on"
        time.sleep(0.05)
    found = client.infer("loop", loop(False), client_timeout=30, parameters={"class": "batch"})
    assert found.as_numpy("y").tolist() == [0]


def test_a_cancelled_call_is_dropped_before_its_next_run(server: Running, client: Any) -> None:
    """Four calls for two lanes: all are taken back, the two that wait without a run."""
    before = runs(server).get("left", 0)
    done: queue.Queue[Any] = queue.Queue()
    calls = [
        client.async_infer("loop", loop(True), lambda result, error: done.put(error))
        for _ in range(4)
    ]
    end = time.monotonic() + 30
    while "headrace_programs_waiting 2.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.02)
    for call in calls:
        call.cancel()
    assert all("CANCELLED" in str(done.get(timeout=30).status()) for _ in calls)
    while runs(server).get("left", 0) < before + 4:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert client.infer("loop", loop(False)).as_numpy("y").tolist() == [0]


def test_the_log_has_a_line_for_each_call(server: Running, client: Any) -> None:
    client.infer("double", [tensor("x", np.ones((1, 3), "f"))], headers={"x-request-id": "seen-it"})
    server.await_line(
        r"exchange request_id=seen-it method=POST path=/v2/models/double/infer st", 10
    )


def test_messages_have_the_numbers_of_tritons() -> None:
    """Numbers, names and kinds of fields of each message that we describe."""
    bytes_kind = 12
    theirs: dict[str, Any] = {}

    def take(found: Any) -> None:
        theirs[found.name] = found
        for one in found.nested_types:
            take(one)

    for one in pb.DESCRIPTOR.message_types_by_name.values():
        take(one)
    names = {
        "Named": "ModelReadyRequest", "Parameter": "ParametersEntry",
        "ParameterValue": "InferParameter", "TensorContents": "InferTensorContents",
        "Truth": None,
    }  # fmt: skip
    for name, made in TYPES._classes().items():
        if (other := names.get(name, name)) is None:
            continue
        for field in made.DESCRIPTOR.fields:
            like = theirs[other].fields_by_number[field.number]
            assert like.name == field.name
            assert field.type in (like.type, bytes_kind), (name, field.name)
            assert field.type == like.type or like.type in (bytes_kind, 11)
            assert getattr(like, "is_repeated", None) == getattr(field, "is_repeated", None)
    for answer in ("ServerLiveResponse", "ServerReadyResponse", "ModelReadyResponse"):
        (flag,) = theirs[answer].fields
        assert (flag.number, flag.type) == (1, 8)


# The same port, in this process.


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[ProgramEngine]:
    files = {name: folder / f"{name}.onnx" for name in ("double", "loop")}
    made = await ProgramEngine.start(files, ProgramLimits(1 << 28, seconds=20.0), lanes=1)
    yield made
    await made.close()


@asynccontextmanager
async def served(engine: ProgramEngine, **options: Any) -> AsyncIterator[GrpcPort]:
    given = {"max_body": 100_000, "grpc_port": 0, **options}
    app = create_app(engine, ServerOptions(**given))  # type: ignore[arg-type]
    port = GrpcPort(app)
    await port.start()
    try:
        yield port
    finally:
        await port.stop(0)
        app.state.store.close()


def call(channel: Any, method: str = "ModelInfer") -> Any:
    """A call of bytes, as they are."""
    return channel.unary_unary(f"/{SERVICE}/{method}")


def message(**more: Any) -> Any:
    made = pb.ModelInferRequest(model_name="double")
    made.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 3], **more})
    return made


def raw(data: bytes = struct.pack("3f", 1, 2, 3), **more: Any) -> Any:
    made = message(**more)
    made.raw_input_contents.append(data)
    return made


def typed(field: str, values: list[Any], **more: Any) -> Any:
    made = message(**more)
    getattr(made.inputs[0].contents, field).extend(values)
    return made


def with_parameter(name: str, **value: Any) -> Any:
    made = raw()
    made.parameters[name].MergeFrom(pb.InferParameter(**value))
    return made


def both() -> Any:
    made = raw()
    made.inputs[0].contents.fp32_contents.append(1)
    return made


def twice() -> Any:
    made = raw()
    made.raw_input_contents.append(b"")
    return made


def shared() -> Any:
    made = raw()
    made.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    return made


def unpaired() -> Any:
    made = raw()
    made.outputs.add(name="q")
    return made


INVALID, MISSING = "INVALID_ARGUMENT", "NOT_FOUND"
BAD: dict[str, tuple[Any, str, str]] = {
    "no message": (b"\xff\xff\xff", INVALID, "no ModelInferRequest"),
    "no UTF-8": (b"\x0a\x02\xff\xfe" + raw().SerializeToString()[8:], INVALID, "not UTF-8"),
    "no tensor": (b"\x0a\x06double" + b"\x2a\x02\xff\xff", INVALID, "no InferInputTensor"),
    "no name": (pb.ModelInferRequest(), INVALID, "model_name is ''"),
    "a path": (pb.ModelInferRequest(model_name="../double"), INVALID, "without a slash"),
    "another program": (pb.ModelInferRequest(model_name="duble"), MISSING, "no program 'duble'"),
    "another version": (
        pb.ModelInferRequest(model_name="double", model_version="7"), MISSING, "no version '7'",
    ),
    "overflow": (raw(shape=[2**31 - 1] * 3), INVALID, "binary_data_size is 12"),
    "overflow to nothing": (raw(b"", shape=[0, 2**31 - 1, 2**31 - 1]), INVALID, "multiply to less"),
    "size too large": (raw(shape=[2**62, 4]), INVALID, "sizes from 0 to 2^31 - 1"),
    "many sizes": (raw(shape=[1] * 20_000), INVALID, "sizes from 0 to 2^31 - 1"),
    "minus one": (raw(shape=[-1, 3]), INVALID, "sizes from 0 to 2^31 - 1"),
    "minus one, typed": (
        typed("fp32_contents", [1, 2, 3], shape=[-1, 3]), INVALID, "sizes from 0 to 2^31 - 1",
    ),
    "2 GB": (raw(b"", shape=[2**29, 1]), INVALID, "has 2,147,483,648 bytes"),
    "BYTES of 2 GB": (
        raw(struct.pack("<I", 2**31 - 1) + b"ab", datatype="BYTES", shape=[1]), INVALID,
        "datatype 'BYTES'",
    ),
    "unknown datatype": (raw(datatype="FP8"), INVALID, "datatype 'FP8'"),
    "another datatype": (raw(datatype="INT32"), INVALID, "is int32; it takes float32"),
    "another shape": (raw(shape=[3, 1]), INVALID, "has the shape [3, 1]; it takes"),
    "another input": (raw(name="z"), INVALID, "input 'z' is not known; the inputs are: x"),
    "no input": (pb.ModelInferRequest(model_name="double"), INVALID, "input 'x' is missing"),
    "no contents": (message(), INVALID, "fp32_contents has 0 elements; the shape [1, 3] has 3"),
    "other contents": (typed("int_contents", [1, 2, 3]), INVALID, "fp32_contents has 0 elements"),
    "too little": (typed("fp32_contents", [1]), INVALID, "fp32_contents has 1 elements"),
    "half a number": (message(datatype="FP16"), INVALID, "FP16 come only in raw"),
    "a number too large": (
        typed("int_contents", [300, 1, 2], datatype="INT8"), INVALID, "does not fit in INT8",
    ),
    "both": (both(), INVALID, "both contents and raw_input_contents"),
    "raw twice": (twice(), INVALID, "2 raw contents of 1 inputs"),
    "shared memory": (shared(), INVALID, "shared memory is not read"),
    "another output": (unpaired(), INVALID, "no output 'q'"),
    "unknown parameter": (with_parameter("priority", uint64_param=1), INVALID, "'priority'"),
    "no value": (with_parameter("timeout"), INVALID, "'timeout' has no value"),
    "a text": (with_parameter("timeout", string_param="soon"), INVALID, "timeout is 'soon'"),
    "no number": (with_parameter("timeout", double_param=float("nan")), INVALID, "timeout is"),
    "too late": (with_parameter("timeout", int64_param=-1), INVALID, "timeout is -1"),
    "many inputs": (b"\x0a\x06double" + b"\x2a\x00" * 20_000, INVALID, "20000 tensors"),
    "many parameters": (b"\x0a\x06double" + b"\x22\x00" * 20_000, INVALID, "20000 parameters"),
}  # fmt: skip


async def test_wrong_messages_get_a_typed_answer(engine: ProgramEngine) -> None:
    """All of them to one port, which then still serves."""
    async with served(engine) as port, grpc.aio.insecure_channel(port.address) as channel:
        for name, (given, code, words) in BAD.items():
            data = given if isinstance(given, bytes) else given.SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)(data, timeout=30)
            assert refused.value.code().name == code, (name, refused.value)
            assert words in refused.value.details(), (name, refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel)(raw(b"x" * 200_000).SerializeToString(), timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        empty = channel.stream_stream(f"/{SERVICE}/ModelInfer")()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await empty.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        good = await call(channel)(raw().SerializeToString(), timeout=30)
        found = pb.ModelInferResponse.FromString(good)
        assert np.frombuffer(found.raw_output_contents[0], "f").tolist() == [2, 4, 6]
        assert port.app.state.service.bodies.held == 0
        assert port._places.held == 0


async def test_keys_and_quotas_are_those_of_the_server(
    engine: ProgramEngine, tmp_path: Path
) -> None:
    secrets = {name: new_key() for name in ("fast", "slow")}
    write_keys(
        tmp_path / "keys",
        [
            Key("fast", hash_of(secrets["fast"])),
            Key("slow", hash_of(secrets["slow"]), requests_per_minute=1),
        ],
    )
    data = raw().SerializeToString()
    async with (
        served(engine, keys=str(tmp_path / "keys")) as port,
        grpc.aio.insecure_channel(port.address) as channel,
    ):

        async def code(secret: str | None, method: str = "ModelInfer") -> str:
            sent = () if secret is None else (("authorization", f"Bearer {secret}"),)
            try:
                await call(channel, method)(data, metadata=sent, timeout=30)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return "OK"

        assert await code(None) == await code("hr-wrong") == "UNAUTHENTICATED"
        assert await code(None, "ServerMetadata") == "UNAUTHENTICATED"
        assert await code(None, "ServerLive") == "OK"
        assert [await code(secrets["slow"]) for _ in range(2)] == ["OK", "RESOURCE_EXHAUSTED"]
        assert [await code(secrets["fast"]) for _ in range(3)] == ["OK"] * 3
        totals = port.app.state.accounts.totals()
        assert (totals["fast"].requests, totals["slow"].requests) == (3, 1)
        # A stream ends when its key goes.
        sent = (("authorization", f"Bearer {secrets['fast']}"),)
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(metadata=sent)
        await stream.write(data)
        assert pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.outputs
        port.app.state.accounts._take([])
        await stream.write(data)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
        assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_who_sends_nothing_holds_only_so_many_places(
    engine: ProgramEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_port, "BODY_SECONDS", 0.5)
    async with served(engine, max_body=1024) as port:
        monkeypatch.setattr(port, "_most", 0)
        monkeypatch.setattr(port, "_places", Shares(4, "as many are being read as are allowed"))
        async with grpc.aio.insecure_channel(port.address) as channel:
            method = channel.stream_stream(f"/{SERVICE}/ModelInfer")
            silent = [method() for _ in range(2)]
            while port._places.held < len(silent):
                await asyncio.sleep(0.01)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)(raw().SerializeToString(), timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert ("retry-after", "1") in tuple(refused.value.trailing_metadata())
            assert await call(channel, "ServerLive")(b"", timeout=30)
            for one in silent:
                with pytest.raises(grpc.aio.AioRpcError) as late:
                    await one.read()
                assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await call(channel)(raw().SerializeToString(), timeout=30)


async def test_who_reads_nothing_holds_only_so_many_bytes(
    engine: ProgramEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that are not read are bounded, and are gone with their client; others are served."""
    async with served(engine, max_body=300_000) as port:
        monkeypatch.setattr(port, "_unread", Shares(2_000_000, "clients have not read so much"))
        # The client's window has 64 KB, and an answer 240.
        data = raw(bytes(240_000), shape=[20_000, 3]).SerializeToString()
        held = port.app.state.service.bodies
        # Otherwise a client's window grows until an answer fits.
        still = [("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(port.address, still) as channel:
            method = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
            streams = [method() for _ in range(12)]
            writing = [asyncio.ensure_future(_write(one, data, 5)) for one in streams]
            while port._unread.held < 900_000:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert 900_000 < port._unread.held <= 1_000_000  # Half of half, to one address.
            # Small answers have room left; a large one is refused, not kept.
            assert await call(channel)(raw().SerializeToString(), timeout=30)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel)(data, timeout=30)
            assert "clients have not read" in refused.value.details()
            for one in writing:
                one.cancel()
        while port._unread.held or held.held or port.app.state.service.in_work:
            await asyncio.sleep(0.01)
        async with grpc.aio.insecure_channel(port.address) as channel:
            assert await call(channel)(data, timeout=30)


async def test_one_address_holds_half_of_the_calls(engine: ProgramEngine) -> None:
    """A client whose window is 0 reads nothing, and needs no key for a probe."""

    def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
        return struct.pack(">IBI", len(data) << 8 | kind, flags, stream) + data

    def header(name: bytes, value: bytes) -> bytes:
        return bytes([0, len(name), *name, len(value), *value])

    async with served(engine, max_concurrent=8) as port:
        host, _, number = port.address.rpartition(":")
        doors = []
        path = f"/{SERVICE}/ServerLive".encode()
        fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
        fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
        head = b"".join(header(*one) for one in fields.items())
        for _ in range(2):  # Each connection has eight calls; the port has sixteen.
            _, door = await asyncio.open_connection(host, int(number))
            doors.append(door)
            door.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            door.write(frame(4, 0, 0, struct.pack(">HI", 4, 0)))
            for stream in range(1, 17, 2):
                door.write(frame(1, 4, stream, head) + frame(0, 1, stream, bytes(5)))
        async with asyncio.timeout(30):
            while port._calls.held < 8:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert port._calls.held == 8
        async with grpc.aio.insecure_channel(port.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:  # From the same address.
                await call(channel)(raw().SerializeToString(), timeout=30)
            assert "as many calls are open" in refused.value.details()
            for door in doors:
                door.close()
            async with asyncio.timeout(30):
                while port._calls.held:
                    await asyncio.sleep(0.01)
            assert await call(channel)(raw().SerializeToString(), timeout=30)


async def _write(stream: Any, data: bytes, times: int) -> None:
    for _ in range(times):
        await stream.write(data)


async def test_tls_and_a_port_in_use(engine: ProgramEngine, tmp_path: Path) -> None:
    line = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem"
    )
    subprocess.run(line.split(), cwd=tmp_path, check=True, capture_output=True)
    files = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    async with served(engine, host="localhost", **files) as port:
        number = int(port.address.rpartition(":")[2])
        paper = (tmp_path / "cert.pem").read_bytes()
        secured = grpc.ssl_channel_credentials(paper)
        async with grpc.aio.secure_channel(port.address, secured) as channel:
            assert await call(channel)(raw().SerializeToString(), timeout=30)
        with pytest.raises(OptionError, match="cannot listen") as used:
            async with served(engine, host="localhost", grpc_port=number):
                pass
        assert used.value.param == "grpc_port"
    revoked = tmp_path / "clients.pem"
    revoked.write_bytes(paper + b"-----BEGIN X509 CRL-----\n")
    with pytest.raises(OptionError, match="revoked"):
        async with served(engine, host="localhost", tls_clients=str(revoked), **files):
            pass
