"""The rows of the fault table for foreign programs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
def program(folder: Path) -> Iterator[Running]:
    """A server of y = x W."""
    product = node("MatMul", "x w", "y")
    ports = [port("x", [1, 64])], [port("y", [1, 64])]
    path = folder / "weighted.onnx"
    path.write_bytes(model([product], *ports, [stored("w", WEIGHTS)]))
    flags = ("--port", "0", "--program-lanes", "2", "--program-seconds", "2")
    with running(headrace("serve", str(path), *flags)) as server:
        yield server


def child(server: Running) -> int:
    """The process of the program."""
    for one in psutil.Process(server.process.pid).children(recursive=True):
        if "headrace.programs.child" in one.cmdline():
            return one.pid
    raise AssertionError("the program has no process")


async def ask(server: Running, count: int = 1, path: str = "infer") -> list[str]:
    """Outcomes of requests; an answer with another number counts as lost."""

    async def one() -> str:
        try:
            async with http() as client:
                url = f"{server.url}/v2/models/weighted/{path}"
                reply = await client.post(url, json={"inputs": [X]})
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


QUICK: dict[str, Callable[[Path], Awaitable[Row | None]]] = {
    "killed_program": killed_program,
    "stopped_program": stopped_program,
    "flipped_weights": flipped_weights,
}
"""Faults that CI tries too."""
