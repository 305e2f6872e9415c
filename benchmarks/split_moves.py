"""How fast the blocks of a lent prompt come, beside what the same machine can move at all.

    python benchmarks/split_moves.py [--rounds 7] [--prompt 2048] [--key] [--json FILE]

A prefill server in a process of its own computes prompts that the engine here hands over, and their
blocks come in turns by a socket and out of its memory, as if the servers were two hosts or one:
first into *fresh* pools, of which each prompt gets blocks that none had before, then into *used*
ones, which were filled before and are so small that each prompt gets another's. Timed is from its
word that they are lent until the last block is where it is wanted and known to be the one of its
name. The limits, measured right after it: a raw socket between two processes, and a copy by one
thread, both of as many bytes, from one piece of memory to another, each of that size, used before
and in no cache, as blocks of a prompt are: seven of them take turns. With `--key` what goes through
the socket is encrypted. The engine is told that each prompt pays, and nothing decodes beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from split import headrace, running, two_ports

from headrace import LLM, SamplingParams
from headrace.base.hardware import cpu
from headrace.kv.split import SplitChoice
from headrace.server.run import take_port
from headrace.worker import borrowing
from headrace.worker.borrowing import Borrowed

WAYS = "socket", "memory"
POOLS = "fresh", "used"
REPEATS = 7
"""Measurements of each limit, whose median counts."""


class Moves:
    """Says by which way blocks come, and looks at when they do."""

    def __init__(self) -> None:
        self.way = ""
        self.lent = self.began = self.last = 0.0
        self.nbytes = self.blocks = 0
        self._kept: dict[str, tuple[list[Any], Any]] = {}
        lend, bring, open_line = Borrowed._lend, Borrowed.bring, borrowing.open_line

        def lending(tier: Borrowed, *given: Any) -> None:
            self.lent, self.began, self.nbytes, self.blocks = time.perf_counter(), 0.0, 0, 0
            lend(tier, *given)

        def bringing(tier: Borrowed, pieces: Any, places: Any, ready: Any) -> list[bool]:
            self.began = self.began or time.perf_counter()
            found = bring(tier, pieces, places, ready)
            self.last = time.perf_counter()
            for piece, good in zip(pieces, found, strict=True):
                self.nbytes += good * places[piece.group].nbytes
                self.blocks += good
            return found

        def opening(address: str, welcome: Any, *given: Any) -> Any:
            near = welcome.near if self.way == "memory" else ""
            line = open_line(address, msgspec.structs.replace(welcome, near=near), *given)
            assert (line.pool is not None) == (self.way == "memory")
            return line

        Borrowed._lend, Borrowed.bring = lending, bringing  # type: ignore[method-assign]
        borrowing.open_line = opening

    def forget(self) -> None:
        """Another server comes."""
        self.blocks = 0
        self._kept.clear()

    def go(self, llm: LLM, way: str) -> None:
        """From now on by this way, on the lines that it had before if blocks came on them."""
        borrowed: Any = llm._built.context.tiers.handovers._servers  # type: ignore[union-attr]
        with borrowed._lock:
            (server,) = borrowed._servers
            if self.blocks:
                self._kept[self.way] = server.lines, server.pool
            server.lines, server.pool = self._kept.pop(way, ([], None))
        self.way, self.blocks = way, 0


def copies(nbytes: int) -> float:
    """Bytes a second of a copy of as many."""
    source, target = np.ones((REPEATS, nbytes), np.uint8), np.ones((REPEATS, nbytes), np.uint8)
    found = []
    for one, other in zip(source, target, strict=True):
        begin = time.perf_counter()
        other[:] = one
        found.append(nbytes / (time.perf_counter() - begin))
    return statistics.median(found)


def _send(port: int) -> None:
    """Send as many bytes as are asked for, until none are."""
    with socket.create_connection(("127.0.0.1", port)) as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data, number = np.ones((0, 0), np.uint8), 0
        while nbytes := int.from_bytes(to.recv(8)):
            if data.shape[1] != nbytes:
                data = np.ones((REPEATS, nbytes), np.uint8)
            to.sendall(data[number % REPEATS].data)
            number += 1


class RawSocket:
    """A connection over the loopback with another process, which sends."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def rate(self, nbytes: int) -> float:
        """Bytes a second, from the question to the last byte."""
        targets, found = np.ones((REPEATS, nbytes), np.uint8), []
        for number in range(REPEATS + 1):
            target = targets[number % REPEATS].data
            begin, got = time.perf_counter(), 0
            self._socket.sendall(nbytes.to_bytes(8))
            while got < nbytes:
                got += self._socket.recv_into(target[got:])
            found.append(nbytes / (time.perf_counter() - begin))
        return statistics.median(found[1:])


@contextmanager
def raw_socket() -> Iterator[RawSocket]:
    with take_port("127.0.0.1", 0) as listener:
        listener.setblocking(True)
        listener.listen()
        context = multiprocessing.get_context("fork")
        other = context.Process(target=_send, args=(listener.getsockname()[1],), daemon=True)
        other.start()
        with listener.accept()[0] as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield RawSocket(connected)
            connected.sendall(bytes(8))
        other.join()


def measured(
    asked: argparse.Namespace, pool: str, moves: Moves, raw: RawSocket
) -> dict[str, list[dict[str, float]]]:
    """By way, of each round."""
    draws, found = random.Random(1), {way: list[dict[str, float]]() for way in WAYS}
    memory = f"{28 * asked.prompt}KiB" if pool == "used" else "auto"
    before = 6 if pool == "used" else 2
    moves.forget()
    where = f"tcp://127.0.0.1:{two_ports()}"
    context = str(2 * asked.prompt)
    flags = ("--threads", "1", "--port", "0", "--max-context", context, "--kv-memory", memory)
    with tempfile.TemporaryDirectory() as folder:
        if asked.key:
            key = Path(folder) / "key"
            key.write_bytes(draws.randbytes(32).hex().encode())
            where += f"?key={key}"
        serve = headrace("serve", asked.model, *flags, "--role", f"prefill@{where}")
        with (
            running(serve),
            LLM(
                asked.model,
                role=f"decode@{where}",
                threads=1,
                offline=True,
                max_context=2 * asked.prompt,
                kv_memory=memory,
            ) as llm,
        ):
            time.sleep(2)
            for number in range(before + 2 * asked.rounds):
                way = WAYS[number % 2]
                moves.go(llm, way)
                prompt = [draws.randrange(1000, 30_000) for _ in range(asked.prompt)]
                llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
                if not moves.blocks or number < before:
                    continue  # A server that others held up for seconds counts as gone.
                limit = (raw.rate if way == "socket" else copies)(moves.nbytes)
                one_round = {
                    "blocks": moves.blocks,
                    "bytes_per_s": moves.nbytes / (moves.last - moves.lent),
                    "moving_bytes_per_s": moves.nbytes / (moves.last - moves.began),
                    "limit_bytes_per_s": limit,
                }
                found[way].append(one_round)
                print(pool, way, json.dumps(one_round), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--pool", choices=POOLS, action="append")
    parser.add_argument("--key", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    SplitChoice.pays = True  # type: ignore[assignment,method-assign]
    report: dict[str, Any] = {
        "machine": cpu().name,
        "model": asked.model,
        "prompt": asked.prompt,
        "encrypted": asked.key,
    }
    rounds, moves = {}, Moves()
    with raw_socket() as raw:
        for pool in asked.pool or POOLS:
            rounds[pool] = measured(asked, pool, moves, raw)
            for way, some in rounds[pool].items():
                for name in ("bytes_per_s", "moving_bytes_per_s"):
                    shares = [one[name] / one["limit_bytes_per_s"] for one in some]
                    moving = "_moving" * (name != "bytes_per_s")
                    report[f"{pool}_{way}_share{moving}"] = round(statistics.median(shares), 3)
                    report[f"{pool}_{way}{moving}_GB_per_s"] = round(
                        statistics.median(one[name] for one in some) / 1e9, 2
                    )
    print(json.dumps(report))
    if asked.json:
        asked.json.write_text(json.dumps(report | {"rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
