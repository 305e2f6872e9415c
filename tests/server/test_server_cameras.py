"""Cameras over a websocket: real sessions at real programs, and everything that a camera or its
client may do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket as sockets
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from processes import headrace, running

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import FLOAT, double, model, node, port, written

from headrace.base.config import ServerOptions
from headrace.base.shares import Shares
from headrace.engine.programs.cameras import CaptureClock, MotionFilter
from headrace.engine.programs.engine import ProgramEngine
from headrace.engine.programs.files import program_files
from headrace.engine.programs.guard import Mode
from headrace.programs import ProgramLimits
from headrace.server import session as session_module
from headrace.server.app import Application, create_app
from headrace.server.keys import Key, hash_of, new_key, write_keys
from headrace.server.listen import http_server
from headrace.server.socket_protocol import BoundedSocket

websockets = pytest.importorskip("websockets", reason="needs the extra audio")
image = pytest.importorskip("PIL.Image", reason="needs the extra pictures")
UINT8 = 2


def mean_of_picture() -> bytes:
    """y = mean of each channel of a float picture, channels first."""
    mean = node("ReduceMean", "x", "y", axes=[2, 3], keepdims=0)
    return model([mean], [port("x", [1, 3, "h", "w"])], [port("y", [1, 3])])


def mean_of_bytes() -> bytes:
    """y = mean of each channel of codes, channels last; big = all of them as floats."""
    nodes = [
        node("Cast", "x", "big", to=FLOAT),
        node("ReduceMean", "big", "y", axes=[1, 2], keepdims=0),
    ]
    outputs = [port("y", [1, 3]), port("big", [1, 64, 64, 3])]
    return model(nodes, [port("x", [1, 64, 64, 3], UINT8)], outputs)


FILES = {"mean": mean_of_picture(), "codes": mean_of_bytes(), "double": double("n", 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("programs"), FILES)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[ProgramEngine]:
    files = {name: folder / f"{name}.onnx" for name in FILES}
    made = await ProgramEngine.start(files, ProgramLimits(1 << 28, seconds=20.0), lanes=2)
    yield made
    await made.close()


@asynccontextmanager
async def served(engine: ProgramEngine, **options: Any) -> AsyncIterator[tuple[Application, str]]:
    """An application in this loop, and the address of its cameras."""
    app = create_app(engine, ServerOptions(**options))  # type: ignore[arg-type]
    listener = http_server(app, None, app.state.meter, backlog=10, last_words=1.0, websockets=True)
    with sockets.create_server(("127.0.0.1", 0)) as door:
        task = asyncio.create_task(listener.serve([door]))
        try:
            yield app, f"ws://127.0.0.1:{door.getsockname()[1]}/v1/cameras"
        finally:
            listener.should_exit = True
            await task
            app.state.service.decoders.close()


class Client:
    """One session, as a client has it."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.number = 0
        self.sequence = 0

    async def open(self, name: str = "front", **fields: Any) -> dict[str, Any]:
        asked = {"camera": name, "model": "codes", "period": 0.05, "format": "tensor", **fields}
        await self.socket.send(json.dumps({"type": "camera.open", **asked}))
        return await self.event()

    async def frame(self, data: bytes | None = None, name: str = "front", **header: Any) -> int:
        self.sequence = header.get("sequence", self.sequence + 1)
        head = {"camera": name, "sequence": self.sequence, "captured": self.sequence / 20, **header}
        data = bytes([self.sequence % 256]) * 12_288 if data is None else data
        await self.socket.send(json.dumps(head).encode() + b"\n" + data)
        return self.sequence

    async def event(self, *kinds: str) -> dict[str, Any]:
        """The next event (of these kinds), whose number and CRC are as they should be."""
        while True:
            async with asyncio.timeout(60):
                text = await self.socket.recv()
            found = json.loads(text)
            self.number += 1
            assert found["number"] == self.number
            assert zlib.crc32(text.rpartition(',"crc32":')[0].encode()) == found["crc32"]
            if not kinds or found["type"] in kinds:
                return dict(found)


@asynccontextmanager
async def cameras(engine: ProgramEngine, **options: Any) -> AsyncIterator[tuple[Any, Client]]:
    async with served(engine, **options) as (app, url), websockets.connect(url) as socket:
        yield app, Client(socket)


def picture(value: int, size: tuple[int, int] = (40, 30), spot: int | None = None) -> bytes:
    made = image.new("RGB", size, (value, 2 * value, 0))
    if spot is not None:
        made.paste((spot, spot, spot), (0, 0, 5, 5))
    data = io.BytesIO()
    made.save(data, "PNG")
    return data.getvalue()


def test_a_server_process_has_cameras(folder: Path) -> None:
    """Two programs, two cameras, one socket; the outputs are the bare program's."""

    async def talk(url: str) -> None:
        async with websockets.connect(url.replace("http", "ws") + "/v1/cameras") as socket:
            client = Client(socket)
            opened = await client.open("front", period=1.0, deadline=30)
            assert (opened["type"], opened["admitted"]) == ("camera.opened", True), opened
            assert opened["run_seconds"] < 0.8
            opened = await client.open(
                "rear", model="mean", format="picture", size=[30, 40], period=1.0
            )
            assert opened["shape"] == [1, 3, 30, 40]
            await client.frame(bytes(range(3)) * 4096, captured=5.0)
            answer = await client.event("camera.answer")
            y, big = answer["outputs"]
            assert (answer["camera"], answer["sequence"], answer["captured"]) == ("front", 1, 5.0)
            assert y == {"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [0, 1, 2]}
            assert (big["shape"], "data" in big) == ([1, 64, 64, 3], False)  # 12,288 elements
            assert 0 <= answer["age"] < 60
            assert answer["monotonic"] >= answer["received"]
            await client.frame(picture(51), "rear")
            answer = await client.event("camera.answer")
            assert answer["outputs"][0]["data"] == pytest.approx([0.2, 0.4, 0], abs=1e-6)
            await socket.send('{"type":"camera.close","camera":"rear"}')
            assert (await client.event("camera.closed"))["camera"] == "rear"

    first, *others = (str(folder / f"{name}.onnx") for name in FILES)
    with running(headrace("serve", first, "--programs", ",".join(others), "--port", "0")) as server:
        asyncio.run(talk(server.url))


async def test_the_newest_frame_is_the_next(engine: ProgramEngine) -> None:
    """A burst: one waits, the newest, and each other one is answered or counted."""
    async with cameras(engine) as (app, client):
        await client.open(outputs=["y"], deadline=30, period=60)
        for _ in range(200):
            await client.frame()
        seen = [0]
        while seen[-1] < 200:
            answer = await client.event("camera.answer")
            seen.append(answer["sequence"])
            assert answer["outputs"][0]["data"] == [answer["sequence"]] * 3
        assert seen == sorted(set(seen))
        counts = answer["counts"]
        assert counts["answered"] + counts["dropped"] == 200
        assert counts["dropped"] == 200 - len(seen) + 1
        read = engine.registry.get_sample_value
        labels = {"model_name": "codes", "outcome": "dropped"}
        assert read("headrace_camera_frames_total", labels) == counts["dropped"]
        assert read("headrace_cameras") == 1
    while app.state.service.in_work or app.state.service.bodies.held:
        await asyncio.sleep(0.01)
    assert (read("headrace_cameras"), engine.streams) == (0, {})


async def test_cameras_are_admitted_or_refused(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        refused = await client.open("fast", period=1e-5)
        assert (refused["type"], refused["camera"]) == ("error", "fast")
        assert refused["error"]["code"] == "not_schedulable"
        assert (await client.open("slow", period=1.0))["utilisation"] < 0.5
        assert len(engine.streams) == 1
        # A stream that was silent, and so has ended, is admitted again with its next frame.
        engine.close_stream(next(iter(engine.streams)), "", engine.programs["codes"])
        await client.frame(name="slow", captured=1)
        assert (await client.event())["type"] == "camera.answer"
        assert len(engine.streams) == 1


async def test_a_camera_that_stops_is_lost_and_found(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        await client.open(lost_after=0.3, period=0.1)
        await client.frame()
        assert (await client.event())["type"] == "camera.answer"
        lost = await client.event()
        assert (lost["type"], lost["camera"], lost["sequence"]) == ("camera.lost", "front", 1)
        await client.frame(sequence=5)
        found = await client.event()
        assert (found["type"], found["counts"]["lost"]) == ("camera.answer", 1)
        assert found["counts"]["missing"] == 3  # Frames 2 to 4 never came.
        read = engine.registry.get_sample_value
        assert read("headrace_camera_losses_total", {"model_name": "codes"}) == 1


async def test_what_does_not_move_is_not_run(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        more = {"model": "mean", "format": "picture", "size": [30, 40], "deadline": 30}
        await client.open(motion=0.02, refresh=5, period=2.0, **more)
        kinds = []
        for spot in (None, None, 255, 0, 0):
            await client.frame(picture(51, spot=spot))
            kinds.append((await client.event("camera.answer", "camera.still"))["type"])
        answer, still = "camera.answer", "camera.still"
        # A corner that differs from what ran last is motion.
        assert kinds == [answer, still, answer, answer, still]


async def test_a_change_that_was_not_answered_is_run_again(engine: ProgramEngine) -> None:
    """A frame that moved and failed is not what later ones are compared with."""
    async with cameras(engine) as (_, client):
        fields = {"model": "mean", "format": "picture", "size": [30, 40]}
        await client.open(**fields, deadline=30, period=1, motion=0.05, refresh=5)
        await client.frame(picture(51))
        assert (await client.event())["type"] == "camera.answer"
        guard = engine.programs["mean"].guard
        guard.mode = Mode.SAFE
        await client.frame(picture(120))
        assert (await client.event())["error"]["code"] == "program_safe"
        guard.mode = Mode.NORMAL
        for kind in ("camera.answer", "camera.still"):
            await client.frame(picture(120))
            assert (await client.event())["type"] == kind


def test_a_picture_passes_for_motion_and_after_a_while() -> None:
    motion = MotionFilter(0.02, 1.0)
    grey = np.full((480, 640, 3), 100, np.uint8)
    noise = grey + np.random.default_rng(0).integers(-3, 4, grey.shape).astype(np.uint8)
    assert motion.passes(grey, 0.0)
    assert not motion.passes(grey, 0.1)
    assert not motion.passes(noise, 0.2)
    moved = grey.copy()
    moved[-20:, -20:] = 200
    assert motion.passes(moved, 0.3)
    assert not motion.passes(moved, 1.2)
    assert motion.passes(moved, 1.4)
    assert motion.passes(moved[:100], 1.5), "another size"
    assert motion.passes(np.zeros((3, 5, 3), np.uint8), 1.6)
    assert MotionFilter(0.0, 1.0).passes(grey, 0.0)


def test_clocks_that_differ_drift_and_jump() -> None:
    """No clock has to be right: the age is what a frame lost above the least."""
    clock, ours = CaptureClock(), 1000.0
    for number in range(100):
        assert clock.delay(number / 10, ours + number / 10 + 0.05) == pytest.approx(0, abs=1e-9)
    assert clock.delay(10.0, ours + 10.0 + 0.45) == pytest.approx(0.4)
    assert clock.delay(10.1, ours + 10.1 + 0.05) == pytest.approx(0)
    assert clock.jumps == 0
    assert clock.delay(3610.2, ours + 10.25) == 0  # Forward by an hour.
    assert clock.delay(0.0, ours + 10.35) == 0  # Back to the beginning.
    assert clock.jumps == 2
    assert clock.delay(0.1, ours + 10.95) == pytest.approx(0.5)
    # A drift of a thousandth is forgotten; otherwise an hour would make 3.6 s of it.
    clock = CaptureClock()
    ages = [clock.delay(at * 0.999, ours + at) for at in np.arange(0, 3600, 0.5)]
    assert max(ages) < 0.13
    assert clock.jumps == 0


async def test_a_jump_is_told(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        await client.open(deadline=30, period=0.5)
        for captured, jumps in ((100.0, 0), (100.1, 0), (5000.0, 1), (5000.1, 1), (3.0, 2)):
            await client.frame(captured=captured)
            answer = await client.event("camera.answer")
            assert answer["counts"]["clock_jumps"] == jumps
            assert 0 <= answer["age"] < 30


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": "duble"}, "no program 'duble'"),
    ({"model": "double"}, "a camera's program takes one picture"),
    ({"model": "mean"}, "size is"),
    ({"model": "mean", "size": [0, 4]}, "size is [0, 4]"),
    ({"model": "mean", "size": [2**31, 2**31]}, "size is"),
    ({"model": "mean", "size": [-1, 4]}, "size is"),
    ({"model": "mean", "size": [2000, 2000]}, "bytes"),  # As a tensor it never fits.
    ({"size": [32, 64]}, "size is [32, 64]; codes has"),
    ({"period": 0}, "period"),
    ({"period": "soon"}, "period"),
    ({"deadline": -1}, "deadline"),
    ({"motion": 0.1}, "motion is of pictures"),
    ({"std": [1.0, 0.0, 1.0]}, "std must not be 0"),
    ({"std": [1.0, 1e-320, 1.0]}, "std must not be 0"),
    ({"mean": [0.0, 0.0, 1e300]}, "mean"),
    ({"mean": [1.0]}, "mean must have at least 3"),
    ({"outputs": ["q"]}, "no output 'q'; the outputs are: y, big"),
    ({"format": "film"}, "format"),
    ({"camera": ""}, "camera"),
    ({"camera": "x" * 65}, "camera"),
    ({"colour": 1}, "colour"),
]


async def test_wrong_events_are_answered(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        for wrong, words in WRONG:
            error = await client.open(
                **{"name": "one", **wrong} if "camera" not in wrong else wrong
            )
            assert error["type"] == "error", (wrong, error)
            assert words in error["error"]["message"], (wrong, error)
        for text in (
            "",
            "{",
            "[]",
            '{"type":"none"}',
            '{"type":"camera.close"}',
            '"x"',
            "[" * 9999,
        ):
            await client.socket.send(text)
            assert (await client.event())["type"] == "error"
        await client.open()
        assert "is open" in (await client.open())["error"]["message"]
        head = {"camera": "front", "sequence": 1, "captured": 1.0}
        for header, data, words in (
            (b"no JSON", b"", "JSON"),
            (b"x" * 2000, b"", "at most 1024 bytes"),
            ({**head, "camera": "rear"}, b"", "no camera 'rear'"),
            ({**head, "sequence": 0}, b"", "`$.sequence`"),
            ({**head, "sequence": 2**60}, b"", "`$.sequence`"),
            ({**head, "sequence": True}, b"", "`$.sequence`"),
            ({**head, "captured": None}, b"", "`$.captured`"),
            ({**head, "captured": 1e300}, b"", "`$.captured`"),
            ({**head, "crc32": 7}, bytes(12_288), "the CRC-32 of frame 1"),
        ):
            line = header if isinstance(header, bytes) else json.dumps(header).encode()
            await client.socket.send(line + b"\n" + data)
            error = await client.event()
            assert error["type"] == "error"
            assert words in error["error"]["message"], error
        await client.frame(b"short", sequence=2)
        failed = await client.event()
        assert (failed["type"], failed["error"]["param"]) == ("camera.failed", "frame")
        for number in (2, 1):  # One that is late, or is sent again, replaces nothing newer.
            await client.frame(sequence=number)
            assert (await client.event("error"))["error"]["code"] == "frame_repeated"
        await client.frame(sequence=3)
        assert (await client.event("camera.answer"))["sequence"] == 3


async def test_a_picture_that_is_none_fails_its_frame_alone(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        await client.open(model="mean", format="picture", size=[30, 40], deadline=30, period=1)
        for data in (b"no picture", picture(51)[:60]):
            await client.frame(data)
            assert (await client.event("camera.failed"))["error"]["param"] == "frame"
        await client.frame(picture(51))
        assert (await client.event("camera.answer"))["sequence"] == 3


async def test_a_frame_that_is_refused_leaves_its_camera(
    engine: ProgramEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame that waited gave way to one for which there is no memory."""
    async with cameras(engine) as (app, client):
        await client.open(model="mean", format="picture", size=[30, 40], deadline=30, period=1)
        app.state.service.bodies._shares = Shares(200_000, "as many bytes as are allowed")
        decoders, refused = app.state.service.decoders, asyncio.Event()
        decode = decoders.run

        async def later(*arguments: Any) -> Any:
            await refused.wait()
            return await decode(*arguments)

        monkeypatch.setattr(decoders, "run", later)
        for data in (picture(51), picture(52), bytes(300_000)):
            await client.frame(data)
        assert (await client.event("error"))["error"]["type"] == "overloaded_error"
        refused.set()
        assert (await client.event("camera.answer"))["sequence"] == 1
        await client.frame(picture(53))
        assert (await client.event("camera.answer"))["sequence"] == 4
    while app.state.service.bodies.held:
        await asyncio.sleep(0.01)


async def test_a_frame_that_is_late_is_told(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        # The decoding of a picture alone takes longer.
        await client.open(model="mean", format="picture", size=[30, 40], deadline=0.02, period=0.5)
        await client.frame(picture(51))
        failed = await client.event()
        assert failed["error"]["code"] == "deadline_missed"
        assert "ms old" in failed["error"]["message"]


async def test_a_recorded_drive_has_equal_outputs(engine: ProgramEngine, folder: Path) -> None:
    """Two cameras' frames, recorded as they were sent, and sent again in another order and pace to
    another engine, beside other work: the outputs of each frame are equal."""
    drive = [
        (name, model, sequence, picture(16 * sequence + shift, spot=sequence))
        for sequence in range(1, 9)
        for name, model, shift in (("front", "mean", 0), ("rear", "codes", 5))
    ]
    size = {"mean": {"size": [30, 40]}, "codes": {}}

    async def driven(engine: ProgramEngine, frames: list[Any], pause: float) -> dict[Any, str]:
        found = {}
        async with cameras(engine) as (_, client):
            for name, model in {frame[0]: frame[1] for frame in frames}.items():
                asked = {"format": "picture", "period": 60.0, "deadline": 60.0, **size[model]}
                opened = await client.open(name, model=model, **asked)
                assert opened["type"] == "camera.opened", opened
            for name, _, sequence, data in frames:
                await client.frame(data, name, sequence=sequence, captured=sequence / 10)
                answer = await client.event("camera.answer", "camera.failed")
                found[answer["camera"], answer["sequence"]] = json.dumps(answer["outputs"])
                await asyncio.sleep(pause)
        return found

    first = await driven(engine, drive, 0.0)
    assert len(first) == len(drive)
    assert len(set(first.values())) == len(drive)

    async def busy() -> None:
        while True:
            await again.run(again.find("double"), {"x": np.ones((4, 3), "f")})

    files = {name: folder / f"{name}.onnx" for name in FILES}
    again = await ProgramEngine.start(files, ProgramLimits(1 << 28), lanes=1)
    work = asyncio.ensure_future(busy())
    try:
        rear_first = sorted(drive, key=lambda frame: (frame[0] != "rear", frame[2]))
        assert await driven(again, rear_first, 0.01) == first
    finally:
        work.cancel()
        await again.close()


async def test_who_never_reads_is_left_and_holds_two_frames(
    engine: ProgramEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedSocket, "stall_seconds", 1.0)
    async with cameras(engine) as (app, client):
        await client.open(deadline=30, period=60)
        held, big = 0, app.state.service.bodies
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await asyncio.wait_for(client.frame(), 30)
                held = max(held, big.held)
        assert held < 3 * 12_288 + 5 * 12_288 * 4 + 200_000
        read = app.state.meter.registry.get_sample_value
        assert read("headrace_server_failures_total", {"kind": "reader_stalled"}) == 1
        while app.state.service.in_work or big.held or engine.streams:
            await asyncio.sleep(0.01)


async def test_keys_places_origins_and_numbers(
    engine: ProgramEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = new_key()
    write_keys(tmp_path / "keys", [Key("cars", hash_of(secret), requests_per_minute=3)])
    async with served(engine, keys=str(tmp_path / "keys")) as (app, url):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(url)
        assert refused.value.response.status_code == 401
        sent = {"authorization": f"Bearer {secret}"}
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(
                url, additional_headers={**sent, "sec-fetch-site": "cross-site"}
            )
        assert refused.value.response.status_code == 403
        async with websockets.connect(url, additional_headers=sent) as socket:
            client = Client(socket)
            await client.open(deadline=30, period=1)
            codes = []
            for _ in range(3):
                await client.frame()
                event = await client.event()
                codes.append(event.get("error", {}).get("code", event["type"]))
            # The session is one request, and each frame another.
            assert codes == ["camera.answer", "camera.answer", "rate_limit_exceeded"]
            assert app.state.accounts.totals()["cars"].requests == 3
            app.state.accounts._take([])
            async with asyncio.timeout(30):
                await socket.wait_closed()
            assert socket.close_code == 1008
    monkeypatch.setattr(session_module, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(session_module, "LOOK_SECONDS", 0.05)
    async with served(engine) as (app, url):
        app.state.service.bodies.sessions = Shares(1, "as many sessions are open as are allowed")
        async with websockets.connect(url) as socket:
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(url)
            assert refused.value.response.status_code == 503
            event = await Client(socket).event()
            assert (event["type"], event["error"]["code"]) == ("error", "session_ended")


async def test_a_session_has_so_many_cameras(engine: ProgramEngine) -> None:
    async with cameras(engine) as (_, client):
        for number in range(16):
            assert (await client.open(f"c{number}", period=10))["type"] == "camera.opened"
        refused = await client.open("more")
        assert refused["error"]["type"] == "overloaded_error"


@pytest.mark.model
async def test_a_camera_reads() -> None:
    """The pipeline of the catalog: lines as `/v1/ocr` has them, with deadlines and no promise."""
    font = pytest.importorskip("PIL.ImageFont").load_default(36)
    page, data = image.new("RGB", (480, 120), "white"), io.BytesIO()
    pytest.importorskip("PIL.ImageDraw").Draw(page).text((40, 40), "Gate 1187", "black", font=font)
    page.save(data, "PNG")
    reader = await ProgramEngine.start(program_files(["ocr-pp-v4"]), lanes=2)
    try:
        async with cameras(reader) as (app, client):
            more = {"model": "ocr-pp-v4", "format": "picture", "period": 1.0}
            refused = await client.open(**more, outputs=["y"])
            assert "leave out format and outputs" in refused["error"]["message"]
            opened = await client.open(**more, deadline=60)
            assert (opened["type"], opened["admitted"]) == ("camera.opened", False)
            await client.frame(data.getvalue())
            answer = await client.event("camera.answer", "camera.failed")
            assert [line["text"].replace(" ", "") for line in answer["lines"]] == ["Gate1187"]
        while app.state.service.bodies.held:
            await asyncio.sleep(0.01)
    finally:
        await reader.close()


async def test_a_request_that_is_no_websocket(engine: ProgramEngine) -> None:
    app = create_app(engine, ServerOptions())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.get("/v1/cameras")
    assert (reply.status_code, reply.json()["error"]["code"]) == (426, "upgrade_required")
