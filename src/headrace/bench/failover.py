"""Death of a server under streams: a check that answers equal those of an undisturbed run.

The same requests go through a gateway twice: first undisturbed, then with a server killed while all
streams are in work. Both times they are greedy and of a fixed length, so a lost, repeated or wrong
token shows as a difference of the texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import HeadraceError, InvalidRequest
from .client import Client
from .http import ConnectionLost, fetch, parse_url
from .job import Job, Target
from .record import RequestRecord
from .workload import Session, Turn

READY = re.compile(r"^ready: .* on (https?://\S+)", re.MULTILINE)
START_SECONDS = 900.0
"""Most seconds until a server started here is ready: its first start downloads the model."""
COMMAND_SECONDS = 120.0
"""Most seconds for the command that kills a server."""
MOVED = re.compile(r"^headrace_route_migrations_total(?:\{.*\})? (\S+)$", re.MULTILINE)
"""Streams moved to another server, by server, in the metrics of `headrace route`."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """One stream of a run."""

    text: str
    record: RequestRecord


@dataclass(frozen=True, slots=True)
class Failover:
    """Comparison of the two runs; seconds."""

    streams: int
    in_work: int
    """Streams that were in work when the server was killed."""
    equal: int
    """Complete answers that equal those of the undisturbed run."""
    failed: tuple[str, ...]
    """Distinct errors of incomplete streams."""
    unlike: int
    """Complete answers with a different text."""
    moved: float | None
    """Streams that the gateway moved to another server, if its metrics report that."""
    pause: float
    """Longest time without a token in an unfinished stream, after the kill."""
    usual: float
    """Longest time without a token in the undisturbed run, at any time."""

    @property
    def kept(self) -> bool:
        """Whether a server died under streams and nothing was lost or repeated."""
        return self.in_work > 0 and self.equal == self.streams


def sessions_of(streams: int, tokens: int) -> list[Session]:
    """Return single requests with different prompts."""
    return [
        Session([Turn(f"{number + 1}. A story about a river and {number + 2} bridges.", tokens)])
        for number in range(streams)
    ]


def failover(
    target: Target,
    sessions: Sequence[Session],
    kill: Callable[[], None],
    say: Callable[[str], None],
) -> Failover:
    """Run the sessions twice against a gateway, the second time with a `kill`; compare the answers.

    Raises `HeadraceError` if the undisturbed run has an error: then a death would prove nothing.
    """
    say("undisturbed")
    expected, _ = asyncio.run(_run(target, sessions, None))
    broken = [one.record.error for one in expected if not one.record.ok]
    if broken:
        raise HeadraceError(
            f"{len(broken)} of {len(sessions)} streams failed without any death: {broken[0]}"
        )
    before = moved(target.url)
    say("with a death")
    found, killed_ns = asyncio.run(_run(target, sessions, kill))
    after = moved(target.url)
    pairs = list(zip(expected, found, strict=True))
    whole = [(one, other) for one, other in pairs if other.record.ok]
    equal = sum(_same(one, other) for one, other in whole)
    return Failover(
        len(sessions),
        sum(_in_work(one.record, killed_ns) for one in found),
        equal,
        tuple(dict.fromkeys(one.record.error or "cut" for one in found if not one.record.ok)),
        len(whole) - equal,
        None if before is None or after is None else after - before,
        max((_pause(one.record, killed_ns) for one in found), default=0.0),
        max((_pause(one.record, 0) for one in expected), default=0.0),
    )


async def _run(
    target: Target, sessions: Sequence[Session], kill: Callable[[], None] | None
) -> tuple[list[Streamed], int]:
    """Return (answers by session, monotonic time of the kill)."""
    numbers = list(range(len(sessions)))
    job = Job(0, target, list(sessions), numbers, concurrency=len(sessions))
    found: dict[int, Streamed] = {}

    def keep(record: RequestRecord, text: str) -> None:
        found[record.session] = Streamed(text, record)

    client = Client(job, lambda _record: None, heard=keep)
    run = asyncio.ensure_future(client.run(time.monotonic_ns()))
    killed_ns = 0
    try:
        if kill is not None:
            while client.begun < len(sessions) and not found and not run.done():
                await asyncio.sleep(0.005)
            killed_ns = time.monotonic_ns()
            await asyncio.to_thread(kill)
        await run
    finally:
        run.cancel()
    return [found[number] for number in numbers], killed_ns


def _same(one: Streamed, other: Streamed) -> bool:
    ends = [(each.text, each.record.finish_reason, each.record.tokens) for each in (one, other)]
    return ends[0] == ends[1]


def _in_work(record: RequestRecord, at: int) -> bool:
    return bool(record.chunk_ns) and record.chunk_ns[0] <= at < record.end_ns


def _pause(record: RequestRecord, since: int) -> float:
    times = record.chunk_ns
    return max((b - a for a, b in itertools.pairwise(times) if b > since), default=0) / 1e9


def moved(url: str) -> float | None:
    """Return the number of streams that a gateway has moved; None if its metrics lack it."""
    try:
        status, body = asyncio.run(fetch(parse_url(url), "GET", "/metrics", timeout=10))
    except ConnectionLost:
        return None
    found = MOVED.findall(body.decode(errors="replace")) if status == 200 else []
    return sum(map(float, found)) if found else None


def by_command(line: str) -> Callable[[], None]:
    """Return a kill that runs a command; raise `InvalidRequest` if it is not a command line."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidRequest(f"kill is no command: {error}", param="kill") from None
    if not words:
        raise InvalidRequest("kill is empty", param="kill")

    def kill() -> None:
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidRequest(f"kill: {error}", param="kill") from None
        if done.returncode:
            text = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise InvalidRequest(f"kill ended with {done.returncode}: {text[:300]}", param="kill")

    return kill


class Own:
    """A server process on this machine, as a context manager, with its output in a file."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headrace", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Own:
        return self

    def __exit__(self, *what: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self.kill()

    def ready(self) -> str:
        """Wait until it is ready; return its address. Raises `HeadraceError` with its last line."""
        end = time.monotonic() + START_SECONDS
        while True:
            ended = self._process.poll() is not None
            text = self._log.read_text(errors="replace")
            if (found := READY.search(text)) is not None:
                return found[1]
            if ended or time.monotonic() > end:
                last = text.strip().rpartition("\n")[2]
                raise HeadraceError(f"a server of this machine did not start: {last[:500]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it as `kill -9` does; its engine's processes end with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextlib.contextmanager
def own_servers(
    model: Sequence[str], threads: int, folder: Path, say: Callable[[str], None]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield (address of a gateway to two servers of this machine, a function that kills one)."""
    serve = ["serve", *model, "--port", "0", "--threads", str(threads)]
    say("starting two servers")
    with Own(serve, folder / "a.log") as a:
        first = a.ready()  # Alone: the second one finds the model downloaded and packed.
        with Own(serve, folder / "b.log") as b:
            second = b.ready()
            route = ["route", first, second, "--port", "0", "--policy", "least-loaded"]
            with Own(route, folder / "gateway.log") as gateway:
                yield gateway.ready(), a.kill
