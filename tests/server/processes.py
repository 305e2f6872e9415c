"""Servers as real processes, for tests: started, awaited by their ready line, always ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import anthropic
    import ollama
    import openai

HERE = Path(__file__).parent
FAKE = """
import sys
sys.path.insert(0, {here!r})
from server_fake import FakeEngine
from headrace.base.config import ServerOptions
from headrace.base.errors import HeadraceError
from headrace.obs import loopwatch
from headrace.server.run import ServerProcess

# A busy machine holds the loop: no test of a fake server is about that.
loopwatch.UNREADY = 1e9

async def start():
    return FakeEngine({engine})

options = ServerOptions({options})
try:
    sys.exit(ServerProcess(start, options, lambda line: print(line, flush=True)).run())
except HeadraceError as error:
    print("error:", error.message, flush=True)
    sys.exit(error.exit_code)
"""


@dataclass
class Running:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""
    reader: Thread | None = None
    clients: ExitStack = field(default_factory=ExitStack)
    """Clients that its tests have made; `running` closes them."""

    def openai(self, **options: Any) -> openai.OpenAI:
        """A client that fails where it might try again."""
        import openai

        keyed = {"api_key": "none", "max_retries": 0, **options}
        return self.clients.enter_context(openai.OpenAI(base_url=self.url + "/v1", **keyed))

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        """One that fails where it might try again, too."""
        import anthropic

        keyed = {"api_key": "none", "max_retries": 0, **options}
        return self.clients.enter_context(anthropic.Anthropic(base_url=self.url, **keyed))

    def ollama(self) -> ollama.Client:
        import ollama

        return self.clients.enter_context(ollama.Client(host=self.url))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 120) -> int:
        """The exit status; `lines` has its last words by then."""
        status = self.process.wait(seconds)
        self._hear_out()
        return status

    def _hear_out(self) -> None:
        """Until its output ends, or for a while where a child that stays holds it open."""
        if self.reader is not None:
            self.reader.join(5)

    def await_line(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = self.process.poll() is not None
            if ended:
                self._hear_out()
            for line in list(self.lines):
                found = re.search(pattern, line)
                if found:
                    return found
            if ended:
                raise AssertionError("the server ended:\n" + "\n".join(self.lines))
            time.sleep(0.02)
        raise AssertionError(f"no line {pattern!r} in\n" + "\n".join(self.lines))


@contextmanager
def running(
    command: list[str], *, ready: bool = True, log: IO[bytes] | None = None
) -> Iterator[Running]:
    """`log`: where its standard error goes, instead of to `lines`."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log or subprocess.STDOUT, text=True, bufsize=1
    )
    server = Running(process)
    assert process.stdout is not None
    stream = process.stdout
    server.reader = Thread(target=_read, args=(stream, server.lines), daemon=True)
    server.reader.start()
    try:
        if ready:
            server.url = server.await_line(r"ready: .* on (https?://\S+)").group(1)
        with server.clients:
            yield server
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        stream.close()


def _read(stream: object, lines: list[str]) -> None:
    try:
        for line in stream:  # type: ignore[attr-defined]
            lines.append(line.rstrip())
    except ValueError:
        pass  # closed by the test


def fake_server(
    *, delay: float = 0.0, options: str = "port=0", gate: Path | None = None
) -> list[str]:
    """`gate`: the file that every answer waits for, once it has begun (`FakeEngine`)."""
    engine = f"delay={delay}" if gate is None else f"delay={delay}, gate={str(gate)!r}"
    code = FAKE.format(here=str(HERE), engine=engine, options=options)
    return [sys.executable, "-c", code]


def headrace(*arguments: str) -> list[str]:
    """A command line. A server finds nothing that an earlier test computed, unless it asks."""
    if arguments[:1] == ("serve",) and "--context-cache" not in arguments:
        arguments = (*arguments, "--context-cache", "0")
    return [sys.executable, "-m", "headrace", *arguments]


@contextmanager
def serving(model: object, flags: str = "", *more: str) -> Iterator[Running]:
    """A server of this model on one thread; `flags` as they are typed."""
    wanted = f"--port 0 --threads 1 {flags}".split()
    with running(headrace("serve", str(model), *wanted, *more)) as server:
        yield server


def api_pid(server: Running) -> int:
    """The process that answers: the only child of the one that was started (`headrace serve`)."""
    pid = server.process.pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def ended(pid: int) -> bool:
    """Is this process gone? One that nobody has waited for yet is."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill(pid: int) -> None:
    """End a process at once, unless it has ended with another one that was killed."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while not ended(pid):
        time.sleep(0.005)


def memory(server: Running) -> int:
    """Bytes of the server's process that are in memory (Linux)."""
    with open(f"/proc/{server.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
