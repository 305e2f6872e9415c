"""The parent of the API process: what it forks, and when it prepares."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from processes import Running, running

CODE = """
import os, signal, sys, time
from headrace.server import kept
from headrace.server.run import import_routes

kept.SETTLE = kept.BACK_OFF = 0.0

def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1

def prepare():
    {prepare}
    import_routes()
    print("prepared, threads:", threads(), flush=True)

def serve(life):
    prepared = "headrace.server.app" in sys.modules and "uvicorn" in sys.modules
    print("child", life.restarts, os.getpid(), "prepared" if prepared else "cold", flush=True)
    {serve}
    life.serves()
    time.sleep(600)
    return 0

sys.exit(kept.keep(serve, prepare))
"""


def parent(*, serve: str = "pass", prepare: str = "pass") -> list[str]:
    return [sys.executable, "-c", CODE.format(serve=serve, prepare=prepare)]


def child(server: Running, number: int) -> tuple[int, str]:
    """(process id, prepared or cold) of the child after so many deaths."""
    found = server.await_line(rf"child {number} (\d+) (\w+)")
    return int(found.group(1)), found.group(2)


def test_the_next_child_finds_everything_imported() -> None:
    with running(parent(), ready=False) as server:
        pid, state = child(server, 0)
        assert state == "cold"
        # A fork is safe where there is one thread: nothing that is imported starts another.
        assert server.await_line(r"prepared, threads: (\d+)").group(1) == "1"
        for death in (1, 2):
            os.kill(pid, signal.SIGKILL)
            pid, state = child(server, death)
            assert state == "prepared"
        server.signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


def test_a_child_that_never_serves_is_followed_by_a_cold_one() -> None:
    serve = "os.kill(os.getpid(), signal.SIGKILL)"
    with running(parent(serve=serve), ready=False) as server:
        assert server.wait() == 128 + signal.SIGKILL
    states = [line for line in server.lines if line.startswith("child")]
    assert [line.split()[1] for line in states] == ["0", "1", "2", "3", "4"]
    assert all(line.endswith("cold") for line in states)
    assert not any("prepared, threads" in line for line in server.lines)


def test_a_parent_that_cannot_prepare_goes_on() -> None:
    with running(parent(prepare="raise ImportError('gone')"), ready=False) as server:
        pid, _ = child(server, 0)
        server.await_line("ImportError: gone")
        os.kill(pid, signal.SIGKILL)
        assert child(server, 1)[1] == "cold"
        server.signal(signal.SIGTERM)
        server.wait()


def test_an_exit_is_passed_on() -> None:
    done = subprocess.run(parent(serve="return 7"), capture_output=True, timeout=300)
    assert done.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_child_serves(number: signal.Signals) -> None:
    """Handed on to the child, whose end by it is no death to be mended."""
    with running(parent(serve="time.sleep(600)"), ready=False) as server:
        child(server, 0)
        server.signal(number)
        assert server.wait() != 0
    assert not any(line.startswith("child 1") for line in server.lines)
