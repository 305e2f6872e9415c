"""States between the runs of a sequence: an output of one run is an input of the next.

A sequence belongs to an owner and a program. It is kept until its sender ends it, leaves during a
run, or is silent for a minute. Number and bytes are bounded, half of each for one key.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from ...base.errors import InvalidRequest
from ...base.shares import Shares
from ...programs.inspection import StateTensor
from ...programs.rows import Array

MOST_SEQUENCES = 4096
MOST_BYTES = 256 << 20
SILENT_SECONDS = 60.0

Key = tuple[str, str, str]
"""Owner, program, id of the client."""


@dataclass(eq=False, slots=True)
class ProgramSequence:
    """One sequence. `turn` serialises its runs."""

    states: dict[str, Array]
    last: float
    taken: int = 0
    """Bytes counted for its states."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    dropped: bool = False


def unknown(key: Key) -> InvalidRequest:
    """Return the error of a step without its sequence."""
    return InvalidRequest(
        f"sequence {key[2]:.80} is not known: it has ended, was silent for "
        f"{SILENT_SECONDS:.0f} s, or its first request lacked sequence_start",
        param="parameters",
        code="sequence_unknown",
    )


def zeros(states: tuple[StateTensor, ...]) -> dict[str, Array]:
    """Return the states of a new sequence of one row."""
    return {
        one.input: np.zeros([dim if isinstance(dim, int) else 1 for dim in one.dims], one.type)
        for one in states
    }


class Sequences:
    """All sequences of a server, those used longest ago first."""

    def __init__(self) -> None:
        full = "as many sequences are kept as are allowed"
        self._places = Shares(MOST_SEQUENCES, full)
        self._bytes = Shares(MOST_BYTES, "the sequences' states have as many bytes as are allowed")
        self._kept: OrderedDict[Key, ProgramSequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, key: Key, states: tuple[StateTensor, ...], now: float) -> ProgramSequence:
        """Start a sequence; replace one of the same name. Raises `Overloaded`, `InvalidRequest`."""
        if not states:
            raise InvalidRequest(
                f"{key[1]} keeps no state, so it takes no sequence_id", param="parameters"
            )
        self.expire(now)
        self.drop(key)
        made = ProgramSequence(zeros(states), now)
        self._places.take(key[0], 1)
        try:
            self._account(key, made, made.states)
        except BaseException:
            self._places.give(key[0], 1)
            raise
        self._kept[key] = made
        return made

    def find(self, key: Key, now: float) -> ProgramSequence:
        """Return a sequence to continue. Raises `InvalidRequest`."""
        self.expire(now)
        found = self._kept.get(key)
        if found is None:
            raise unknown(key)
        found.last = now
        self._kept.move_to_end(key)
        return found

    def keep(self, key: Key, sequence: ProgramSequence, states: dict[str, Array]) -> None:
        """Replace a sequence's states, unless it was dropped. Raises `Overloaded` and keeps the old
        ones."""
        if not sequence.dropped:
            self._account(key, sequence, states)
            sequence.states = states

    def _account(self, key: Key, sequence: ProgramSequence, states: dict[str, Array]) -> None:
        due = sum(one.nbytes for one in states.values())
        self._bytes.take(key[0], due - sequence.taken)
        sequence.taken = due

    def drop(self, key: Key, sequence: ProgramSequence | None = None) -> None:
        """Forget the sequence of this key, if any; `sequence`: only if it is this one."""
        found = self._kept.get(key)
        if found is not None and sequence in (None, found):
            del self._kept[key]
            found.dropped = True
            self._places.give(key[0], 1)
            self._bytes.give(key[0], found.taken)

    def expire(self, now: float) -> None:
        """Forget sequences that were silent for too long; one with a running run is not silent."""
        while self._kept:
            key, first = next(iter(self._kept.items()))
            if now - first.last <= SILENT_SECONDS:
                return
            if first.turn.locked():
                first.last = now
                self._kept.move_to_end(key)
            else:
                self.drop(key)
