"""One model on two hosts: `headrace serve --launcher env` as real processes, in network namespaces.

Each fault ends the group as one, and the error names who was the cause.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import Running, headrace, running

from headrace.base.layout import Layout
from ports import two_ports
from tiny import bytewise
from tiny.kept import Kept

pytestmark = pytest.mark.slow

BRIDGE, NET = f"hrb{os.getpid()}", "10.213.77"


@pytest.fixture(scope="module")
def model(kept: Kept) -> Path:
    return kept(bytewise.make)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    number: int

    @property
    def name(self) -> str:
        return f"{BRIDGE}-{self.number}"

    @property
    def address(self) -> str:
        return f"{NET}.{self.number}"

    def cut(self) -> None:
        """Cut the host off: its packets are lost from now on, both ways; no connection is
        closed."""
        ip("link", "set", f"{BRIDGE}p{self.number}", "down")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two, on a bridge on which this process is, too."""
    made = [Host(1), Host(2)]
    if shutil.which("ip") is None:
        pytest.skip("no ip command: hosts are network namespaces")
    try:
        ip("netns", "add", made[0].name)
    except subprocess.CalledProcessError:
        pytest.skip("network namespaces are not permitted here")
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for host in made:
            if host.number > 1:
                ip("netns", "add", host.name)
            port = f"{BRIDGE}p{host.number}"
            ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", port, "master", BRIDGE, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", host.name, "link", "set", link, "up")
        yield made
    finally:
        for link in (BRIDGE, *(f"{BRIDGE}p{host.number}" for host in made)):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], check=False, capture_output=True)


def serve(model: Path, cache: Path, *more: str) -> list[str]:
    return headrace(
        *("serve", str(model), "--cache-dir", str(cache), "--threads", "1", "--offline"),
        *("--kv-memory", "16MiB", "--max-context", "512", *more),
    )


@contextmanager
def group(
    hosts: list[Host], model: Path, tmp: Path, *, layout: str = "TP2", other: Path | None = None
) -> Iterator[list[Running]]:
    """All ranks, half of them on each host, not yet ready; `other`: the model of the second."""
    key = tmp / "key"
    key.write_bytes(b"a key that two hosts share, and no other")
    with ExitStack() as stack:
        made = []
        ranks = Layout.parse(layout).devices
        for rank in range(ranks):
            host = hosts[2 * rank // ranks]
            said = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": hosts[0].address}
            set_ = [f"{name}={value}" for name, value in said.items()]
            command = serve(
                model if rank == 0 else other or model,
                tmp / f"cache {rank}",
                *("--layout", layout, "--launcher", "env", "--rank-key", str(key)),
                *("--host", "0.0.0.0", "--port", "8000"),
            )
            inside = ["ip", "netns", "exec", host.name, "env", *set_, *command]
            made.append(stack.enter_context(running(inside, ready=False)))
        yield made


def url(hosts: list[Host]) -> str:
    return f"http://{hosts[0].address}:8000"


def answers(where: str) -> list[Any]:
    found = []
    for more in (
        {"temperature": 0, "max_tokens": 24, "logprobs": 2},
        {"temperature": 1, "seed": 5, "max_tokens": 24, "n": 3},
    ):
        body = {"model": "tiny", "prompt": ["one", "The quick brown fox", "x" * 90], **more}
        reply = httpx.post(f"{where}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        found.append([(one["text"], one["logprobs"]) for one in reply.json()["choices"]])
    return found


@pytest.mark.parametrize("layout", ["TP2", "PP2", "TP2.PP2"])
def test_two_hosts_answer_as_one_process(
    hosts: list[Host], model: Path, tmp_path: Path, layout: str
) -> None:
    with running(serve(model, tmp_path / "alone", "--port", "0")) as alone:
        expected = answers(alone.url)
    with group(hosts, model, tmp_path, layout=layout) as (first, *others):
        first.await_line("ready: ")
        assert answers(url(hosts)) == expected
        first.signal()
        assert first.wait() == 0
        assert all(other.wait() == 0 for other in others), [other.lines for other in others]


def streaming(where: str) -> Iterator[str]:
    """The lines of a stream that has begun."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 450, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{where}/v1/completions", json=body, timeout=60) as reply:
        yield from reply.iter_lines()


@pytest.mark.parametrize("fault", ["killed", "stopped", "cut off"])
def test_a_group_ends_as_one_and_names_the_cause(
    hosts: list[Host], model: Path, tmp_path: Path, fault: str
) -> None:
    with group(hosts, model, tmp_path) as (first, second):
        first.await_line("ready: ")
        lines = streaming(url(hosts))
        next(lines)
        begin = time.monotonic()
        match fault:
            case "killed":
                second.signal(signal.SIGKILL)
            case "stopped":
                second.signal(signal.SIGSTOP)
            case "cut off":
                hosts[1].cut()
        told = "\n".join(lines)
        passed = time.monotonic() - begin
        assert "rank 1 of 2 (10.213.77.2)" in told, told
        how = "closed its connection" if fault == "killed" else "has been silent for 3 s"
        assert how in told or fault == "killed", told
        assert passed < (5 if fault == "killed" else 15)
        if fault == "cut off":
            # The other side of the cut knows, too.
            assert second.wait(30) == 1
            assert "rank 0 of 2 (10.213.77.1) has been silent for 3 s" in "\n".join(second.lines)
        second.signal(signal.SIGKILL)


def test_a_leader_that_is_killed_is_named(hosts: list[Host], model: Path, tmp_path: Path) -> None:
    with group(hosts, model, tmp_path) as (first, second):
        first.await_line("ready: ")
        for one in psutil.Process(first.process.pid).children(recursive=True):
            one.kill()
        assert second.wait(30) == 1
        assert "rank 0 of 2 (10.213.77.1)" in "\n".join(second.lines)


def test_other_weights_are_refused_on_both_hosts(
    hosts: list[Host], model: Path, tmp_path: Path, kept: Kept
) -> None:
    other = kept(bytewise.make, layers=3)
    with group(hosts, model, tmp_path, other=other) as (first, second):
        assert first.wait(60) != 0
        assert second.wait(60) != 0
        for server in (first, second):
            text = "\n".join(server.lines)
            assert "rank 1 of 2 (10.213.77.2) has weights of digest" in text


def test_torchrun_starts_a_group(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    port = two_ports()
    command = serve(model, tmp_path, "--layout", "TP2", "--launcher", "env", "--port", str(port))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with running([*torchrun, "--nproc-per-node", "2", *command[1:]], ready=False) as both:
        both.await_line("ready: ", 120)
        reply = httpx.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "tiny", "prompt": "one", "max_tokens": 4},
            timeout=60,
        )
        assert reply.status_code == 200, json.dumps(reply.json())
