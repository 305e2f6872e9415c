"""From one machine to another and back, without a network: promoted, broken, refused, rolled back.

All of it runs in a network namespace of its own, where whatever is sent anywhere but to loopback
goes out of one interface that leads nowhere and counts.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Event, Lock, Thread

import pytest
from factory_cell import AT_LEAST, Made, flip, headrace, make
from oci_registry import running as registry
from processes import Running, running

from headrace.factory.build import Build, BuildOptions

pytestmark = pytest.mark.slow

CLONE_NEWNET = 0x40000000
LINKS = (
    "link set lo up",
    "link add out type veth peer name nowhere",
    "link set out arp off",
    "addr add 192.0.2.1/24 dev out",
    "link set nowhere up",
    "link set out up",
    "route add default dev out",
)
"""Arguments of `ip`; the addresses are those that RFC 5737 reserves for examples."""
WORDS = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "river"}],
    "max_tokens": 8,
    "temperature": 0,
}


@contextmanager
def without_a_network() -> Iterator[Callable[[], int]]:
    """This thread and what it starts in a namespace of their own; gives the packets that left."""
    libc, ip = (
        ctypes.CDLL(None, use_errno=True),
        shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin"),
    )
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    if ip is None or libc.unshare(CLONE_NEWNET):
        os.close(before)
        pytest.skip("ip is not installed, or a network namespace needs root")
    try:
        for words in LINKS:
            if words == "link set out up":  # The kernel announces itself to other IPv6 hosts.
                for name in ("out", "nowhere"):
                    Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
            done = subprocess.run([ip, *words.split()], capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"ip {words}: {done.stderr.strip()}, so no packet is counted")
        yield left
    finally:
        libc.setns(before, CLONE_NEWNET)
        os.close(before)


def left() -> int:
    """Packets that went out of the interface."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (fields,) = [line.split() for line in lines if line.split()[0] == "out:"]
    return int(fields[10])


class Service:
    """Servers behind one name, as a cluster has them: a new one is ready before an old one goes."""

    def __init__(self, cache: Path, stack: ExitStack) -> None:
        self._cache, self._stack, self._lock = cache, stack, Lock()
        self._servers: list[Running] = []
        self.words = dict(WORDS)
        self.answers: list[str] = []
        self.errors: list[str] = []

    def start(self) -> Running:
        """One more server of the ring, in front of which nobody is yet."""
        command = headrace("serve", "--profile", "production", "--offline", "--port", "0")
        server = running([*command, "--cache-dir", str(self._cache)])
        return self._stack.enter_context(server)

    def roll(self, count: int = 2) -> float:
        """Replace all servers by such of what the ring has now; → seconds."""
        begin, old = time.monotonic(), list(self._servers)
        for place in range(max(count, len(old))):
            fresh = self.start()
            with self._lock:
                self._servers.append(fresh)
                gone = self._servers.pop(0) if place < len(old) else None
            if gone is not None:
                gone.signal()
                assert gone.wait() == 0
        return time.monotonic() - begin

    def ask(self, number: int) -> str:
        """The answer of one of the servers, which has the request before it is told to end."""
        with self._lock:
            url = self._servers[number % len(self._servers)].url
            connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
            kind = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(self.words), kind)
        reply = connection.getresponse()
        text = reply.read()
        connection.close()
        if reply.status != 200:
            raise ValueError(f"{reply.status}: {text!r:.200}")
        return str(json.loads(text)["choices"][0]["message"]["content"])

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Two clients that ask without a pause, from now on until this ends."""
        ended = Event()

        def client(number: int) -> None:
            while not ended.is_set():
                try:
                    self.answers.append(self.ask(number))
                except (OSError, HTTPException, ValueError, LookupError) as error:
                    self.errors.append(repr(error))
                number += 1

        clients = [Thread(target=client, args=(number,)) for number in range(2)]
        for one in clients:
            one.start()
        try:
            yield
        finally:
            ended.set()
            for one in clients:
                one.join()


def two_profiles(root: Path) -> tuple[Made, str, str]:
    """A machine with profiles of two models, and their names; the second has a file more."""
    made = make(root, without="accuracy")
    model = shutil.copytree(made.model, root / "next" / made.model.name)
    (model / "NOTES.txt").write_text("what is new")
    engine = replace(made.engine(model), max_sequences=4)
    build = Build(engine, BuildOptions(at_least=AT_LEAST, without="accuracy"))
    assert build.run().profile is not None
    return made, made.cell, build.cell


def test_nothing_fails_and_nothing_leaves(tmp_path: Path) -> None:
    with without_a_network() as packets, ExitStack() as stack:
        factory, one, two = two_profiles(tmp_path / "factory")
        host = stack.enter_context(registry()).host
        site = Made(factory.model, tmp_path / "site", factory.result, one)
        keys = Path("factory") / "trusted"
        shutil.copytree(factory.cache / keys, site.cache / keys)
        for tag, name in (("one", one), ("two", two)):
            factory.call("publish", name, f"{host}/models:{tag}")
            assert site.call("load", f"{host}/models:{tag}") == f"{name}: taken in\n"
        site.call("verify")
        gates = ("--unevaluated", "accuracy")
        site.call("promote", one, "production", *gates)
        service = Service(site.cache, stack)
        service.roll()
        with service.asked():
            first = service.ask(0)
            site.call("promote", two, "production", *gates)
            service.roll()
            # One byte of a file that the new profile binds: the servers that run go on.
            notes = next(site.store.root.glob("models/*/NOTES.txt"))
            notes.chmod(0o644)
            notes.write_bytes(flip(notes.read_bytes()))
            assert notes.name in site.call("verify", status=6)
            refused = headrace("serve", "--profile", "production", "--offline", "--port", "0")
            with running([*refused, "--cache-dir", str(site.cache)], ready=False) as server:
                assert server.wait() == 6
                assert any("NOTES.txt" in line for line in server.lines)
            assert "NOTES.txt" in site.call("promote", two, "staging", *gates, status=6)
            begin = time.monotonic()
            assert site.call("rollback", "production").startswith("production 3: ")
            service.roll()
            print(f"rolled back in {time.monotonic() - begin:.2f} s")
            last = service.ask(0)
        print(f"{len(service.answers)} answers")
        assert service.errors == []
        assert first == last
        assert set(service.answers) == {first}
        assert packets() == 0
        # That there is something to count.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stray:
            stray.sendto(b"stray", ("198.51.100.1", 9))
        assert packets() == 1
