"""The server as a process: port, signals, drain, disconnects, bodies that never end."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, fake_server, headrace, running

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **more}


def ask(server: Running, replies: list[Any], tokens: int, **more: Any) -> threading.Thread:
    def post() -> None:
        try:
            replies.append(httpx.post(server.url + CHAT, json=body(tokens, **more)))
        except httpx.HTTPError as error:
            replies.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def begin(server: Running, texts: list[str]) -> threading.Thread:
    """Ask for a stream, and wait until it has begun; its whole text comes to `texts`."""
    begun = threading.Event()

    def post() -> None:
        text = ""
        with httpx.stream("POST", server.url + CHAT, json=body(400, stream=True)) as reply:
            for part in reply.iter_text():
                text += part
                begun.set()
        texts.append(text)

    thread = threading.Thread(target=post)
    thread.start()
    assert begun.wait(120)
    return thread


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def in_work(server: Running) -> int:
    text = httpx.get(server.url + "/metrics").text
    line = next(x for x in text.splitlines() if x.startswith("headrace_http_requests_in_work "))
    return int(float(line.split()[1]))


def test_an_occupied_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = headrace("serve", "/no/such/model", "--port", str(port))
        with running(command, ready=False) as server:
            assert server.wait() == 2
    assert len(server.lines) == 1
    assert server.lines[0].startswith("error:")
    assert f"port {port}" in server.lines[0]
    assert "in use" in server.lines[0]


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_finishes_what_runs(stream: bool, tmp_path: Path) -> None:
    replies: list[Any] = []
    gate = tmp_path / "gate"
    with running(fake_server(gate=gate, options="port=0, drain_seconds=600")) as server:
        thread = ask(server, replies, 30, stream=stream)
        until(lambda: in_work(server) == 1)
        server.signal()
        server.await_line("finishing 1 requests")
        for path in ("/health", "/v1/health/ready"):
            assert httpx.get(server.url + path).status_code == 503
        assert httpx.get(server.url + "/v1/health/live").status_code == 200
        refused = httpx.post(server.url + CHAT, json=body(1))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        gate.touch()
        assert server.wait() == 0
        thread.join()
    assert replies[0].status_code == 200
    if stream:
        assert replies[0].text.endswith("data: [DONE]\n\n")
    else:
        assert replies[0].json()["usage"]["completion_tokens"] == 30


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    replies: list[Any] = []
    gate = tmp_path / "gate"  # Never there: the answer has no end.
    with running(fake_server(gate=gate, options="port=0, drain_seconds=600")) as server:
        whole = ask(server, replies, 400)
        until(lambda: in_work(server) == 1)
        server.signal()
        server.await_line("finishing")
        server.signal()
        assert server.wait() == 0
        whole.join()
    # Exactly one answer, and a typed one.
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "aborted"


def test_the_drain_ends_after_its_seconds(tmp_path: Path) -> None:
    texts: list[str] = []
    gate = tmp_path / "gate"
    with running(fake_server(gate=gate, options="port=0, drain_seconds=0.5")) as server:
        thread = begin(server, texts)
        server.signal()
        assert server.wait() == 0
        thread.join()
    assert '"code":"aborted"' in texts[0]
    assert texts[0].endswith("data: [DONE]\n\n")


def test_ctrl_c_exits_130() -> None:
    with running(fake_server()) as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 130


async def test_thirty_two_streams_with_disconnects(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running(fake_server(gate=gate)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:

            async def stream(leaves: bool) -> str:
                text = ""
                request = client.stream("POST", CHAT, json=body(60, stream=True))
                async with request as reply:
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line[6:])["choices"][0]
                            text += choice["delta"].get("content", "")
                        if leaves and text:
                            break
                return text

            tasks = [asyncio.create_task(stream(number % 2 == 0)) for number in range(32)]
            await asyncio.gather(*tasks[::2])
            # Those that stay wait in the middle, and have begun; those that left are seen to.
            wanted = (
                f'route="{CHAT}",status="499"}} 16.0',
                "headrace_http_requests_in_work 16.0",
            )
            async with asyncio.timeout(120):
                metrics = ""
                while not all(words in metrics for words in wanted):
                    await asyncio.sleep(0.02)
                    metrics = (await client.get("/metrics")).text
            gate.touch()
            texts = await asyncio.gather(*tasks[1::2])
        assert all(len(text) == 60 for text in texts)
        until(lambda: in_work(server) == 0)
        metrics = httpx.get(server.url + "/metrics").text
    assert f'route="{CHAT}",status="499"}} 16.0' in metrics
    assert f'route="{CHAT}",status="200"}} 16.0' in metrics


def test_a_client_that_leaves_an_answer_without_stream(tmp_path: Path) -> None:
    with running(fake_server(gate=tmp_path / "gate")) as server:
        host, port = server.url.removeprefix("http://").split(":")
        data = json.dumps(body(400)).encode()
        with socket.create_connection((host, int(port))) as leaves:
            leaves.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(data), data))
            until(lambda: in_work(server) == 1)
        until(lambda: in_work(server) == 0)


def test_more_than_max_concurrent_get_503(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running(fake_server(gate=gate, options="port=0, max_concurrent=2")) as server:
        replies: list[Any] = []
        threads = [ask(server, replies, 40) for _ in range(6)]
        until(lambda: len(replies) == 4)
        gate.touch()
        for thread in threads:
            thread.join()
        assert sorted(reply.status_code for reply in replies) == [200] * 2 + [503] * 4
        assert all("retry-after" in r.headers for r in replies if r.status_code == 503)
        assert httpx.post(server.url + CHAT, json=body(1)).status_code == 200


@pytest.mark.parametrize("announced", [True, False])
def test_a_hundred_megabytes_are_refused_without_being_read(announced: bool) -> None:
    size = 100 * 2**20

    def parts() -> Any:
        for _ in range(100):
            yield b" " * 2**20

    headers = {"content-type": "application/json"}
    if announced:
        headers["content-length"] = str(size)
    with running(fake_server()) as server:
        before = memory(server)
        try:
            reply = httpx.post(server.url + CHAT, content=parts(), headers=headers)
            assert reply.status_code == 413
        except (httpx.WriteError, httpx.ReadError):
            pass  # Refused and closed while the client still wrote: a reset may cost the answer.
        assert httpx.post(server.url + CHAT, json=body(1)).status_code == 200
        assert memory(server) - before < 64 * 2**20


def memory(server: Running) -> int:
    with open(f"/proc/{server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_a_slow_reader_does_not_stop_the_others() -> None:
    with running(fake_server()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            data = json.dumps(body(500, stream=True, n=8)).encode()
            slow.sendall(POST + b"content-length: %d\r\n\r\n%b" % (len(data), data))
            time.sleep(0.3)
            assert httpx.post(server.url + CHAT, json=body(50)).status_code == 200
        until(lambda: in_work(server) == 0)


def test_while_the_model_loads_probes_are_answered(tmp_path: Path) -> None:
    code, loaded = fake_server(), tmp_path / "loaded"
    code[-1] = code[-1].replace(
        "async def start():",
        "import asyncio\nfrom pathlib import Path\nasync def start():\n"
        f"    while not Path({str(loaded)!r}).exists():\n        await asyncio.sleep(0.02)",
    )
    with running(code, ready=False) as server:
        # The ready line, which tells the port, has not come.
        until(lambda: _listening(server))
        server.url = f"http://127.0.0.1:{_listening(server)[0]}"
        assert httpx.get(server.url + "/v1/health/live").status_code == 200
        assert httpx.get(server.url + "/v1/health/ready").status_code == 503
        reply = httpx.post(server.url + CHAT, json=body(1))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "2"
        assert httpx.get(server.url + "/v1/models").status_code == 503
        loaded.touch()
        server.await_line("ready:")
        assert httpx.post(server.url + CHAT, json=body(1)).status_code == 200


def _listening(server: Running) -> list[int]:
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return [one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN]
