"""Real servers behind a real gateway: one of two is killed under 64 streams, or a rank of one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tiny import talker
from tiny.kept import Kept

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
from kill_streams import Told, body, group_of, tell, until
from processes import Running, api_pid, headrace, kill, running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]
STREAMS, TOKENS = 64, 400


def a_rank(number: int) -> Callable[[Running], None]:
    return lambda server: os.kill(group_of(server)[number], signal.SIGKILL)


@pytest.mark.parametrize(
    ("layout", "ends"),
    [("1", lambda server: kill(api_pid(server))), ("TP2", a_rank(1)), ("TP2", a_rank(0))],
    ids=["server", "rank 1", "rank 0"],
)
async def test_a_killed_server_loses_and_repeats_nothing(
    kept: Kept, tmp_path: Path, layout: str, ends: Callable[[Running], None]
) -> None:
    """The answers are those of one server that was left alone, token by token."""
    model = kept(talker.make, hidden=512)
    flags = ("--port", "0", "--threads", "2", "--cache-dir", str(tmp_path))
    limits = httpx.Limits(max_connections=None)
    with (
        running(headrace("serve", str(model), *flags, "--layout", layout)) as one,
        running(headrace("serve", str(model), *flags)) as two,
        running(
            headrace("route", one.url, two.url, "--port", "0", "--policy", "least-loaded")
        ) as gate,
    ):
        async with httpx.AsyncClient(limits=limits, timeout=300) as client:
            asked = [body(model.name, number, TOKENS) for number in range(STREAMS)]
            found = [Told() for _ in asked]
            streams = [
                asyncio.ensure_future(tell(client, gate.url, each, told))
                for each, told in zip(asked, found, strict=True)
            ]
            await until(lambda: all(told.parts for told in found))
            assert sum(not stream.done() for stream in streams) > STREAMS // 2
            await asyncio.to_thread(ends, one)
            await asyncio.gather(*streams)
            metrics = (await client.get(gate.url + "/metrics")).text
            wanted = await asyncio.gather(*(tell(client, two.url, each, Told()) for each in asked))
    assert [told.error for told in found] == [""] * STREAMS
    assert [told.answer for told in found] == [told.answer for told in wanted]
    assert all(told.ended and len(told.tokens) == TOKENS for told in found)
    moved = [line for line in metrics.splitlines() if line.startswith("headrace_route_migrations_")]
    assert f'{{replica="{two.url}"}} 0.0' not in "".join(moved), "streams went on at the other"
