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
import pytest
from processes import Running, fake_server, headrace, running

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


def body(tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **more}


def ask(server: Running, replies: list[Any], tokens: int, **more: Any) -> threading.Thread:
    def post() -> None:
        try:
            replies.append(httpx.post(server.url + CHAT, json=body(tokens, **more), timeout=60))
        except httpx.HTTPError as error:
            replies.append(error)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def until(condition: Any, seconds: float = 20) -> None:
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
            assert server.wait(60) == 2
            until(lambda: server.lines)
    assert len(server.lines) == 1
    assert server.lines[0].startswith("error:")
    assert f"port {port}" in server.lines[0]
    assert "in use" in server.lines[0]


@pytest.mark.parametrize("stream", [False, True])
def test_sigterm_finishes_what_runs(stream: bool) -> None:
    replies: list[Any] = []
    with running(fake_server(delay=0.05, options="port=0, drain_seconds=20")) as server:
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
        assert server.wait() == 0
        thread.join()
    assert replies[0].status_code == 200
    if stream:
        assert replies[0].text.endswith("data: [DONE]\n\n")
    else:
        assert replies[0].json()["usage"]["completion_tokens"] == 30


def test_a_second_signal_ends_at_once() -> None:
    replies: list[Any] = []
    with running(fake_server(delay=0.2, options="port=0, drain_seconds=600")) as server:
        whole = ask(server, replies, 400)
        until(lambda: in_work(server) == 1)
        server.signal()
        server.await_line("finishing")
        server.signal()
        assert server.wait(40) == 0, "it waited for the answer"
        whole.join()
    # Exactly one answer, and a typed one.
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "aborted"


def test_the_drain_ends_after_its_seconds() -> None:
    replies: list[Any] = []
    with running(fake_server(delay=0.2, options="port=0, drain_seconds=0.5")) as server:
        thread = ask(server, replies, 400, stream=True)
        until(lambda: in_work(server) == 1)
        time.sleep(0.5)
        server.signal()
        assert server.wait(10) == 0
        thread.join()
    assert '"code":"aborted"' in replies[0].text
    assert replies[0].text.endswith("data: [DONE]\n\n")


def test_ctrl_c_exits_130() -> None:
    with running(fake_server()) as server:
        server.signal(signal.SIGINT)
        assert server.wait() == 130


async def test_thirty_two_streams_with_disconnects() -> None:
    with running(fake_server(delay=0.01)) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def stream(leaves: bool) -> str:
                text = ""
                request = client.stream("POST", CHAT, json=body(60, stream=True))
                async with request as reply:
                    async for line in reply.aiter_lines():
                        if line.startswith("data: {"):
                            choice = json.loads(line[6:])["choices"][0]
                            text += choice["delta"].get("content", "")
                        if leaves and len(text) > 10:
                            break
                return text

            texts = await asyncio.gather(*(stream(number % 2 == 0) for number in range(32)))
        assert all(len(text) == 60 for text in texts[1::2])
        until(lambda: in_work(server) == 0, 5)
        metrics = httpx.get(server.url + "/metrics").text
    assert f'route="{CHAT}",status="499"}} 16.0' in metrics
    assert f'route="{CHAT}",status="200"}} 16.0' in metrics


def test_a_client_that_leaves_an_answer_without_stream() -> None:
    with running(fake_server(delay=0.05)) as server:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + CHAT, json=body(400), timeout=0.5)
        until(lambda: in_work(server) == 0, 3)


def test_more_than_max_concurrent_get_503() -> None:
    with running(fake_server(delay=0.05, options="port=0, max_concurrent=2")) as server:
        replies: list[Any] = []
        threads = [ask(server, replies, 40) for _ in range(6)]
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
            reply = httpx.post(server.url + CHAT, content=parts(), headers=headers, timeout=60)
            assert reply.status_code == 413
        except httpx.WriteError:
            pass  # refused and closed while the client still wrote
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
            slow.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
                b"\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
            )
            time.sleep(0.3)
            assert httpx.post(server.url + CHAT, json=body(50)).status_code == 200
        until(lambda: in_work(server) == 0, 5)


def test_while_the_model_loads_probes_are_answered(tmp_path: Path) -> None:
    code, loaded = fake_server(), tmp_path / "loaded"
    code[-1] = (
        code[-1]
        .replace(
            "async def start():",
            "import asyncio\nfrom pathlib import Path\nasync def start():\n"
            f"    while not Path({str(loaded)!r}).exists():\n        await asyncio.sleep(0.02)",
        )
        .replace("port=0", "port=8377")
    )
    with running(code, ready=False) as server:
        server.url = "http://127.0.0.1:8377"
        until(lambda: _answers(server.url))
        assert httpx.get(server.url + "/v1/health/live").status_code == 200
        assert httpx.get(server.url + "/v1/health/ready").status_code == 503
        reply = httpx.post(server.url + CHAT, json=body(1))
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "2"
        assert httpx.get(server.url + "/v1/models").status_code == 503
        loaded.touch()
        server.await_line("ready:")
        assert httpx.post(server.url + CHAT, json=body(1)).status_code == 200


def _answers(url: str) -> bool:
    try:
        httpx.get(url + "/v1/health/live")
    except httpx.ConnectError:
        return False
    return True
