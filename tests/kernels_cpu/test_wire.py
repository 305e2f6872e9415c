"""Messages between ranks without shared memory: exactly the rows that there are."""

from __future__ import annotations

import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.base.errors import HeadraceError
from headrace.dist.commons import Commons, make_commons
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.records import HrStep
from headrace.kernels.cpu.wire import Wire

MOST, WIDTH, LANE = 1000, 128, 64
HEAD = struct.Struct("=IIQ")


class Rank:
    """One of two, which has half of the columns of a value in codes."""

    def __init__(self, rank: int, end: socket.socket) -> None:
        self.descriptor = make_commons()
        self.commons = commons = Commons(self.descriptor, 2, rank)
        self.wire = Wire(commons, [end.fileno() if at != rank else -1 for at in range(2)])
        self.codes = emit.QuantisedRows(MOST, WIDTH)
        piece = emit.piece(self.codes, [0, WIDTH // 2, WIDTH], 0)
        self.program = emit.program([emit.exchange(commons, 0, [piece])])
        self.team = Team(1)

    def meet(self, rows: int) -> None:
        self.team.run(self.program, 1, HrStep(n=rows))

    def close(self) -> None:
        self.wire.close()
        os.close(self.descriptor)


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 12, 16, 510, 511, 997, 1000])
def test_rows_of_codes_arrive_and_no_others_are_sent(rows: int) -> None:
    mine, its = socket.socketpair()
    ranks = [Rank(0, mine), Rank(1, its)]
    draws = np.random.default_rng(rows)
    for one in ranks:
        one.codes.data[:] = draws.integers(0, 256, one.codes.data.shape, np.uint8)
    wanted = [one.codes.data.reshape(-1, WIDTH // 32, 6, LANE).copy() for one in ranks]
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(ranks[1].meet, rows)
        ranks[0].meet(rows)
        other.result()
    blocks, lanes = np.divmod(np.arange(rows), 6)
    for of in range(2):
        columns = slice(of * WIDTH // 64, (of + 1) * WIDTH // 64)
        wanted[1 - of][blocks, columns, lanes] = wanted[of][blocks, columns, lanes]
    for one, whole in zip(ranks, wanted, strict=True):
        assert np.array_equal(one.codes.data.reshape(whole.shape), whole)
        one.close()
    mine.close()
    its.close()


@pytest.mark.parametrize("rows", [1, 6, 8])
def test_a_message_is_as_long_as_its_rows(rows: int) -> None:
    mine, its = socket.socketpair()
    rank = Rank(0, mine)
    with ThreadPoolExecutor(1) as thread:
        meeting = thread.submit(rank.meet, rows)
        _, _, size = HEAD.unpack(its.recv(HEAD.size, socket.MSG_WAITALL))
        its.close()
        with pytest.raises(HeadraceError):
            meeting.result()
    assert size == rows * (WIDTH // 2 // 32) * LANE
    rank.close()
    mine.close()


@pytest.mark.parametrize("rows", [(1, 2), (997, 1000), (16, 1000)])
def test_ranks_that_differ_in_their_rows_both_end(rows: tuple[int, int]) -> None:
    ends = socket.socketpair()
    ranks = [Rank(rank, end) for rank, end in enumerate(ends)]
    with ThreadPoolExecutor(2) as threads:
        meetings = [threads.submit(one.meet, count) for one, count in zip(ranks, rows, strict=True)]
        for meeting in meetings:
            with pytest.raises(HeadraceError):
                meeting.result()
    for one, end in zip(ranks, ends, strict=True):
        one.close()
        end.close()
