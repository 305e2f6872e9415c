"""The rows of the fault table for foreign programs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fault_client import ANSWERED, HUNG, LIMIT, LOST, REFUSED, Row, http
from processes import Running, headrace, running

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from bit_flips import flip_in_process
from small_programs import model, node, port, stored

WEIGHTS = np.random.default_rng(7).standard_normal((64, 64)).astype(np.float32)
X = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [1.0] + [0.0] * 63}


@contextmanager
def program(folder: Path, wrap: tuple[str, ...] = ()) -> Iterator[Running]:
    """A server of y = x W, and of a picture's mean."""
    product = node("MatMul", "x w", "y")
    ports = [port("x", [1, 64])], [port("y", [1, 64])]
    path, seen = folder / "weighted.onnx", folder / "mean.onnx"
    path.write_bytes(model([product], *ports, [stored("w", WEIGHTS)]))
    mean = node("ReduceMean", "x", "y", axes=[2, 3], keepdims=0)
    seen.write_bytes(model([mean], [port("x", [1, 3, 8, 8])], [port("y", [1, 3])]))
    flags = ("--port", "0", "--program-lanes", "2", "--program-seconds", "2")
    command = headrace("serve", str(path), "--programs", str(seen), *flags)
    with running([*wrap, *command]) as server:
        yield server


def child(server: Running) -> int:
    """The process of the program."""
    for one in psutil.Process(server.process.pid).children(recursive=True):
        if "headrace.programs.child" in one.cmdline():
            return one.pid
    raise AssertionError("the program has no process")


async def ask(server: Running, count: int = 1, **parameters: Any) -> list[str]:
    """Outcomes of requests; an answer with another number counts as lost."""
    body = {"inputs": [X], "parameters": parameters}

    async def one() -> str:
        try:
            async with http() as client:
                reply = await client.post(f"{server.url}/v2/models/weighted/infer", json=body)
        except TimeoutError:
            return HUNG
        except OSError:
            return LOST
        if reply.status_code != 200:
            return REFUSED if "code" in reply.json() else LOST
        right = np.float32(reply.json()["outputs"][0]["data"]) == WEIGHTS[0]
        return ANSWERED if right.all() else LOST

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def until_answered(server: Running, row: Row) -> Row:
    begin = time.monotonic()
    while (outcome := (await ask(server))[0]) != ANSWERED and time.monotonic() - begin < LIMIT:
        await asyncio.sleep(0.05)
    row.facts["ready_again_seconds"] = round(time.monotonic() - begin, 2)
    row.facts["after"] = outcome
    return row


async def killed_program(folder: Path) -> Row:
    row = Row("kill", "the process of a foreign program under 64 requests")
    with program(folder) as server:
        asking = asyncio.ensure_future(ask(server, 64))
        await asyncio.sleep(0.02)
        os.kill(child(server), signal.SIGKILL)
        row.count(await asking)
        return await until_answered(server, row)


async def stopped_program(folder: Path) -> Row:
    row = Row("stop", "the process of a foreign program: killed after its time, and replaced")
    row.limits["ready_again_seconds"] = 10.0
    with program(folder) as server:
        await ask(server)
        os.kill(child(server), signal.SIGSTOP)
        row.count(await ask(server, 4))
        return await until_answered(server, row)


async def flipped_weights(folder: Path) -> Row | None:
    """Bits of the running weights: a self-test sees them, then nothing is answered until another
    process has passed three. None where no process may write another's memory."""
    row = Row("flip", "bits of a foreign program's weights; a self-test on demand")
    row.limits |= {"wrong_after_the_test": 0, "ready_again_seconds": 30.0}
    with program(folder) as server:
        row.count(await ask(server, 4))
        lines = [WEIGHTS[0, at : at + 4].tobytes() for at in range(0, 64, 4)]
        try:
            assert flip_in_process(child(server), lines)
        except PermissionError:
            return None
        passed = None  # A busy machine may leave a test no time.
        while passed is None:
            async with http() as client:
                told = (await client.post(f"{server.url}/v2/models/weighted/test")).json()
            passed = told["passed"]
        assert passed is False, told
        outcomes = await ask(server, 4)
        row.facts["wrong_after_the_test"] = outcomes.count(LOST)
        row.count(outcomes)
        return await until_answered(server, row)


async def full_disk(folder: Path) -> Row | None:
    """The folder for temporary files has no room while the process is killed, which is started
    again from memory. None where none can be had."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return None
    room = folder / "room"
    room.mkdir(exist_ok=True)
    row = Row("fill", "temporary folder full, the process of a foreign program killed")
    row.limits["ready_again_seconds"] = 10.0
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {room} && "
        f'(head -c 900k /dev/zero > {room}/filler; true) && export TMPDIR={room} && exec "$@"'
    )
    with program(folder, ("unshare", "--mount", "sh", "-c", script, "sh")) as server:
        row.count(await ask(server, 4))
        os.kill(child(server), signal.SIGKILL)
        row.count(await ask(server, 4))
        return await until_answered(server, row)


async def slower_clock(folder: Path) -> Row:
    """A process that runs a tenth of the time: late frames of its stream are answered as such."""
    row = Row("stop", "a foreign program runs a tenth of the time: 40 frames of its stream")
    row.limits |= {"unnamed": 0, "ready_again_seconds": 30.0}
    with program(folder) as server:
        asked = {"shapes": {"x": [1, 64]}, "period": 0.1, "deadline": 0.1}
        async with http() as client:
            reply = await client.post(f"{server.url}/v2/models/weighted/streams", json=asked)
        stream, pid = reply.json()["id"], child(server)

        async def slow() -> None:
            while True:
                for number, seconds in ((signal.SIGSTOP, 0.27), (signal.SIGCONT, 0.03)):
                    os.kill(pid, number)
                    await asyncio.sleep(seconds)

        slowing = asyncio.ensure_future(slow())
        outcomes = []
        for _ in range(40):
            outcomes += await ask(server, stream=stream)
            await asyncio.sleep(0.12)  # An early frame is batch, which a degraded program refuses.
        slowing.cancel()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        row.count(outcomes)
        async with http() as client:
            text = (await client.get(f"{server.url}/metrics")).text
        ends = Counter[str]()
        for line in text.splitlines():
            if line.startswith('headrace_program_runs_total{model_name="weighted"'):
                ends[line.split('outcome="')[1].partition('"')[0]] += int(float(line.split()[-1]))
        missed = ends["missed_waiting"] + ends["missed_running"]
        row.facts["unnamed"] = abs(row.refused - missed)
        return await until_answered(server, row)


class Camera:
    """One camera of one session."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.sequence, self.texts = socket, 0, list[str]()

    async def frame(self, captured: float) -> None:
        self.sequence += 1
        head = {"camera": "front", "sequence": self.sequence, "captured": captured}
        await self.socket.send(json.dumps(head).encode() + b"\n" + bytes(768))

    async def event(self, *kinds: str) -> dict[str, Any]:
        """The next event of these kinds."""
        while True:
            async with asyncio.timeout(LIMIT):
                self.texts.append(await self.socket.recv())
            found: dict[str, Any] = json.loads(self.texts[-1])
            if found["type"] in kinds:
                return found

    async def answered(self, captured: float) -> float:
        """The age of a frame's answer."""
        await self.frame(captured)
        return float((await self.event("camera.answer"))["age"])


@asynccontextmanager
async def camera(server: Running) -> AsyncIterator[Camera]:
    import websockets

    url = server.url.replace("http", "ws") + "/v1/cameras"
    asked = {"camera": "front", "model": "mean", "period": 1.0, "format": "tensor"}
    async with websockets.connect(url) as socket:
        await socket.send(json.dumps({"type": "camera.open", **asked, "lost_after": 0.3}))
        own = Camera(socket)
        await own.event("camera.opened")
        yield own


async def lost_camera(folder: Path) -> Row:
    row = Row("stop", "a camera; then its clock jumps by an hour, forth and back")
    row.limits |= {"seen_seconds": 1.0, "jumps_unseen": 0, "age_seconds": 1.0}
    with program(folder) as server:
        async with camera(server) as own:
            ages = [await own.answered(number / 10) for number in range(5)]
            begin = time.monotonic()
            await own.event("camera.lost")
            row.facts["seen_seconds"] = round(time.monotonic() - begin, 2)
            for start in (3600.0, 1.0):
                ages += [await own.answered(start + number / 10) for number in range(5)]
            row.count([ANSWERED] * len(ages))
            counts = json.loads(own.texts[-1])["counts"]
        row.facts["jumps_unseen"] = abs(2 - counts["clock_jumps"]) + (counts["lost"] < 1)
        row.facts["age_seconds"] = round(max(ages), 3)
        return await until_answered(server, row)


async def flipped_answers(folder: Path) -> Row:
    """Every bit of answers on their way to a camera's client: the checksum shows each."""
    row = Row("flip", "each bit of five answers to a camera; their checksums")
    row.limits["unseen"] = 0
    with program(folder) as server:
        async with camera(server) as own:
            row.count([ANSWERED] * len([await own.answered(number / 10) for number in range(5)]))
            texts = [one.encode() for one in own.texts if '"camera.answer"' in one]
        unseen = sum(
            whole(text[:at] + bytes([text[at] ^ 1 << bit]) + text[at + 1 :])
            for text in texts
            for at in range(len(text))
            for bit in range(8)
        )
        assert all(map(whole, texts))
        row.facts["unseen"] = unseen
        return await until_answered(server, row)


def whole(text: bytes) -> bool:
    """Whether an event has the checksum that it tells."""
    told, _, number = text.rpartition(b',"crc32":')
    return number == b"%d}" % zlib.crc32(told)


QUICK: dict[str, Callable[[Path], Awaitable[Row | None]]] = {
    "killed_program": killed_program,
    "stopped_program": stopped_program,
    "flipped_weights": flipped_weights,
    "flipped_answers": flipped_answers,
    "full_disk": full_disk,
    "slower_clock": slower_clock,
    "lost_camera": lost_camera,
}
"""Faults that CI tries too."""
