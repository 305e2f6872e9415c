"""Connections between hosts: who has the key comes in, and who falls silent is noticed."""

from __future__ import annotations

import errno
import fcntl
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from headrace.base.errors import EngineDead
from headrace.dist import pulse as pulses
from headrace.dist.hosts import _AT_ONCE, _SHARE, PROOF_SECONDS, Door, HostPort, NoRank, Use, dial
from headrace.dist.pulse import Pulse

KEY = b"k" * 32
HERE = "127.0.0.1"


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door.open(HERE, 0, KEY)
    yield made
    made.close()


def let_in(door: Door) -> None:
    """Wait for an arrival, and hang up."""
    arrival = door.next(60)
    assert arrival is not None
    arrival.connection.close()


def test_who_has_the_key_comes_in(door: Door) -> None:
    mine = dial(HostPort(HERE, door.port), KEY, Use.EXCHANGE, 3, seconds=5)
    arrival = door.next(5)
    assert arrival is not None
    assert (arrival.use, arrival.rank, arrival.host) == (Use.EXCHANGE, 3, HERE)
    mine.sendall(b"hello")
    assert arrival.connection.recv(5) == b"hello"
    mine.close()
    arrival.connection.close()


def test_another_key_is_refused_by_both_ends(door: Door) -> None:
    with pytest.raises(NoRank, match=f"{HERE}:{door.port}: .*key"):
        dial(HostPort(HERE, door.port), b"x" * 32, Use.CONTROL, 1, seconds=5)
    assert door.next(0.2) is None


def test_a_listener_without_the_key_is_refused() -> None:
    """One that lets everybody in does not know what to answer."""
    with socket.create_server((HERE, 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HRRANK01" + b"n" * 24)
                connection.recv(4096)
                connection.recv(4096)
                connection.sendall(b"p" * 32)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoRank, match="another key"):
            dial(HostPort(*listener.getsockname()), KEY, Use.CONTROL, 1, seconds=5)
        thread.join()


def test_a_proof_that_is_sent_back_proves_nothing(door: Door) -> None:
    """A stranger relays what a door says to a second connection of the same door."""
    where = HERE, door.port
    with socket.create_connection(where) as first, socket.create_connection(where) as second:
        first.sendall(second.recv(32))
        second.sendall(first.recv(32))
        first.sendall(b"\0\0\0\1" + b"\0" * 32)
        first.settimeout(5)
        assert first.recv(64) == bytes(32), "no proof"
        assert first.recv(1) == b""
    assert door.next(0.2) is None


def test_one_that_says_nothing_keeps_nobody_waiting(door: Door) -> None:
    with socket.create_connection((HERE, door.port)) as silent:
        begin = time.monotonic()
        dial(HostPort(HERE, door.port), KEY, Use.PULSE, 1, seconds=5).close()
        let_in(door)
        assert time.monotonic() - begin < PROOF_SECONDS
        silent.settimeout(2 * PROOF_SECONDS)
        assert len(silent.recv(64)) == 32
        assert silent.recv(1) == b""  # It is not waited for for ever.


def test_other_protocols_are_closed(door: Door) -> None:
    with socket.create_connection((HERE, door.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nhost: somewhere\r\n\r\n")
        stranger.settimeout(60)
        with suppress(ConnectionResetError):  # Bytes that nobody read end a line out of order.
            while stranger.recv(64):
                pass
    assert door.next(0.2) is None


def test_nobody_there_is_said_with_the_reason() -> None:
    with socket.create_server((HERE, 0)) as listener:
        where = HostPort(*listener.getsockname())
    with pytest.raises(EngineDead, match=r"was not reached in 0\.5 s: Connection refused"):
        dial(where, KEY, Use.CONTROL, 1, seconds=0.5)


def test_a_port_that_is_taken_is_named(door: Door) -> None:
    with pytest.raises(EngineDead, match=f"{HERE}:{door.port}: Address already in use"):
        Door.open(HERE, door.port, KEY)


def lost_by(end: socket.socket, silent: float = 0.6) -> tuple[Pulse, list[str], threading.Event]:
    said: list[str] = []
    over = threading.Event()

    def lost(name: str, why: str) -> None:
        said.append(f"{name} {why}")
        over.set()

    return Pulse({"rank 1": end}, lost, silent=silent), said, over


def test_a_pulse_notices_an_end_and_a_silence() -> None:
    for acts, expected in ((socket.socket.close, "closed"), (lambda _: None, "silent for 0.6 s")):
        mine, other = socket.socketpair()
        pulse, said, over = lost_by(mine)
        other.settimeout(0.1)
        assert other.recv(1), "the first sign of life is given at once"
        acts(other)
        assert over.wait(10)
        pulse.close()
        other.close()
        assert len(said) == 1
        assert expected in said[0]


def test_a_word_is_told_beside_the_beats() -> None:
    mine, other = socket.socketpair()
    said: list[tuple[str, str]] = []
    over = threading.Event()
    hears = Pulse(
        {"rank 1": mine}, lambda *lost: over.set(), on_word=lambda *word: said.append(word)
    )
    says = Pulse({"": other}, lambda *_: None)
    says.say("the disk is full, e.g. of words")
    says.close()
    assert over.wait(10), "its end is heard behind its word"
    assert said == [("rank 1", "the disk is full, e.g. of words")]
    hears.close()


def test_a_pulse_is_closed_while_it_tells_of_a_loss() -> None:
    """The one that closes may be the one on which the other waits."""
    mine, other = socket.socketpair()
    within, go_on = threading.Event(), threading.Event()

    def lost(name: str, why: str) -> None:
        within.set()
        go_on.wait(60)

    pulse = Pulse({"rank 1": mine}, lost)
    other.close()
    assert within.wait(10)
    closing = threading.Thread(target=pulse.close)
    closing.start()
    closing.join(1.0)
    alive = closing.is_alive()
    go_on.set()
    assert not alive


def test_signs_of_life_end_the_silence_and_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on when the pulse has answered, so that no thread is late by it."""
    clock = [0.0]
    monkeypatch.setattr(pulses, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    mine, other = socket.socketpair()
    pulse, said, over = lost_by(mine)
    other.settimeout(60)
    assert other.recv(1) == b"."
    for _ in range(20):
        other.sendall(b".")
        clock[0] += pulses.BEAT
        assert other.recv(1) == b"."
    assert said == []
    for _ in range(4):  # Nobody speaks, and this process did not sleep meanwhile.
        clock[0] += pulses.BEAT
        if over.wait(0.0) or not other.recv(1):
            break
    assert over.wait(60)
    assert said == ["rank 1 has been silent for 0.6 s"]
    pulse.close()
    other.close()


def test_silent_strangers_keep_no_rank_out(door: Door) -> None:
    """The ones that have waited longest make room: of one address, and of many."""
    with ExitStack() as held:
        for number in range(2 * _AT_ONCE):
            one = held.enter_context(socket.socket())
            one.bind((f"127.0.0.{2 + number % 2}" if number < _AT_ONCE else "127.0.0.9", 0))
            one.connect((HERE, door.port))
        dial(HostPort(HERE, door.port), KEY, Use.CONTROL, 1, seconds=60).close()
        let_in(door)
        assert len(door._proving) <= _AT_ONCE
        assert max(Counter(door._proving.values()).values()) <= _SHARE


def test_an_end_before_any_byte_is_tried_again() -> None:
    with socket.create_server((HERE, 0)) as listener:
        port = listener.getsockname()[1]

        def full() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            made.append(Door(listener, KEY))
            made[0]._listen()

        made: list[Door] = []
        thread = threading.Thread(target=full)
        thread.start()
        dial(HostPort(HERE, port), KEY, Use.CONTROL, 1, seconds=60).close()
        let_in(made[0])
        made[0].close()
        thread.join()


def test_no_room_is_told_from_another_key(door: Door) -> None:
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(60)
        over = threading.Event()

        def full() -> None:
            listener.settimeout(0.05)
            while not over.is_set():
                with suppress(TimeoutError):
                    listener.accept()[0].close()

        thread = threading.Thread(target=full)
        thread.start()
        with pytest.raises(EngineDead, match="no room") as said:
            dial(HostPort(*listener.getsockname()), KEY, Use.CONTROL, 1, seconds=1.0)
        over.set()
        thread.join()
    assert not isinstance(said.value, NoRank)
    with pytest.raises(NoRank, match="another key"):
        dial(HostPort(HERE, door.port), b"x" * 32, Use.CONTROL, 1, seconds=60)


def test_a_door_outlives_an_accept_that_fails(door: Door) -> None:
    class Full:
        """A listener whose process has no descriptor left, twice."""

        def __init__(self, listener: socket.socket) -> None:
            self.listener, self.failed = listener, 0

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if self.failed < 2:
                self.failed += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(self.listener, name)

    full = Full(door.listener)
    door.listener = full  # type: ignore[assignment]
    for _ in range(2):  # The first was awaited by the listener itself.
        dial(HostPort(HERE, door.port), KEY, Use.PULSE, 1, seconds=60).close()
        let_in(door)
    assert full.failed == 2


def test_a_pulse_beats_above_descriptor_1023() -> None:
    mine, other = socket.socketpair()
    try:
        high = fcntl.fcntl(mine.fileno(), fcntl.F_DUPFD_CLOEXEC, 1100)
    except OSError:
        pytest.skip("this process may not have so many descriptors")
    pulse, said, over = lost_by(socket.socket(fileno=high))
    other.close()
    mine.close()
    assert over.wait(60), "its thread has ended"
    assert len(said) == 1
    assert said[0].startswith("rank 1 ")
    pulse.close()
