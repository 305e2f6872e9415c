"""Flight recorder: the last steps of an engine, kept where they survive a crash.

A ring of records of one length in a memory-mapped file. Written records are in the page cache and
can be read after the process was killed, hung or crashed inside a kernel. A step is written when it
is submitted and again when its result is in, so a step that never returned can be seen.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from ..base.foreign import Undecodable, any_json
from ..base.request import StepStats
from ..base.step import StepPlan, StepResult

log = logging.getLogger("headrace.flight")
RECORDS = 256
RECORD_BYTES = 2048
_SHOWN = 24
"""Entries of a plan that are written in full; the rest is counted."""
_HEADER = struct.Struct("<I")
_encode = msgspec.json.Encoder().encode


class _Step(msgspec.Struct, omit_defaults=True):
    """Common fields of every record. Structs, not dictionaries: two are written in every step."""

    step: int
    at: float
    state: str
    entries: int
    tokens: int
    drafts: int


class _Submitted(_Step):
    rows: list[int]
    starts: list[int]
    counts: list[int]
    admitted: list[list[int]]
    """(row, sequence, tokens) each."""
    released: list[int]
    block_writes: int
    copies: int
    running: int
    waiting: int
    model: int = 0


class _Finished(_Step):
    error: str | None
    sampled: int
    verified: list[list[int | str]]
    """(row, drafter, drafts verified, accepted) each."""
    seconds: float
    schedule_seconds: float
    idle_seconds: float
    kv_usage: float
    running: int
    waiting: int
    preemptions: int
    model: int = 0


class _Short(_Step):
    """Replacement of a record that was too long."""

    error: str
    model: int = 0


class FlightRecorder:
    """Writer of the ring.

    With path None (an engine in this process) or a full disk it is in anonymous memory. Then it
    does not outlive the process.
    """

    def __init__(self, path: Path | None = None, records: int = RECORDS) -> None:
        self._size = records
        length = records * RECORD_BYTES
        ring = None if path is None else _mapped(path, length)
        self._ring = mmap.mmap(-1, length) if ring is None else ring
        self._several = False
        """Whether steps of other models than the first were written."""
        self._steps = 0
        self._places: dict[tuple[int, int], int] = {}
        """Places in the ring of steps in flight, by model and number."""

    def submitted(self, plan: StepPlan, running: int, waiting: int, model: int = 0) -> None:
        """Record the start of a step. `model`: its number, in a server of several."""
        admitted = [
            [entry.row, entry.sequence_id, len(entry.tokens)] for entry in plan.admitted[:_SHOWN]
        ]
        self._write(
            _Submitted(
                plan.number,
                time.time(),
                "submitted",
                len(plan.rows),
                plan.tokens,
                plan.drafts,
                plan.rows[:_SHOWN],
                plan.starts[:_SHOWN],
                plan.counts[:_SHOWN],
                admitted,
                plan.released[:_SHOWN],
                len(plan.blocks),
                len(plan.copies),
                running,
                waiting,
            ),
            model,
        )

    def finished(
        self, plan: StepPlan, result: StepResult, stats: StepStats, model: int = 0
    ) -> None:
        error = result.error
        verified: list[list[int | str]] = [
            [plan.rows[entry], one.drafter, one.tried, one.accepted]
            for entry, one in list((result.verified or {}).items())[:_SHOWN]
        ]
        self._write(
            _Finished(
                plan.number,
                time.time(),
                "failed" if error else "done",
                len(plan.rows),
                plan.tokens,
                plan.drafts,
                error[:500] if error else None,
                sum(map(len, result.tokens)),
                verified,
                result.seconds,
                stats.schedule_seconds,
                stats.idle_seconds,
                stats.kv_usage,
                stats.running,
                stats.waiting,
                stats.preemptions,
            ),
            model,
        )

    def _write(self, record: _Submitted | _Finished, model: int) -> None:
        place = record.step
        if model or self._several:
            place = self._place(record, model)
        data = _encode(record)
        if len(data) > RECORD_BYTES - _HEADER.size:
            # One character may take six bytes in JSON.
            error = (record.error or "")[:200] if isinstance(record, _Finished) else ""
            of_step = record.step, record.at, record.state, record.entries
            data = _encode(_Short(*of_step, record.tokens, record.drafts, error, model))
        at = place % self._size * RECORD_BYTES
        self._ring[at : at + _HEADER.size] = _HEADER.pack(0)  # A torn record reads as empty.
        self._ring[at + _HEADER.size : at + _HEADER.size + len(data)] = data
        self._ring[at : at + _HEADER.size] = _HEADER.pack(len(data))

    def _place(self, record: _Submitted | _Finished, model: int) -> int:
        """Return a step's place in the ring. Each model numbers its own steps."""
        if not self._several:
            self._several, self._steps = True, record.step
        record.model, key = model, (model, record.step)
        if not isinstance(record, _Submitted):
            return self._places.pop(key, self._steps if model else record.step)
        self._steps += 1
        self._places[key] = self._steps
        return self._steps

    def read(self) -> list[dict[str, Any]]:
        """Return the steps in the ring, oldest first."""
        return _parse(self._ring[:])

    def close(self) -> None:
        self._ring.close()


def _mapped(path: Path, length: int) -> mmap.mmap | None:
    """Map the file, with all its blocks allocated; None if the disk refuses.

    On a full disk, a write to a hole of a mapped file would be a SIGBUS.
    """
    try:
        with path.open("wb+") as file:
            os.posix_fallocate(file.fileno(), 0, length)
            return mmap.mmap(file.fileno(), length)
    except OSError as refused:
        log.warning("the flight recorder has no file, it is kept in memory: %s", refused)
        path.unlink(missing_ok=True)
        return None


def read_flight(path: Path) -> list[dict[str, Any]]:
    """Read the last steps of the process that wrote `path`, oldest first; [] without a file."""
    try:
        return _parse(path.read_bytes())
    except OSError:
        return []


def _parse(data: bytes) -> list[dict[str, Any]]:
    records = []
    for at in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        (length,) = _HEADER.unpack_from(data, at)
        if 0 < length <= RECORD_BYTES - _HEADER.size:
            start = at + _HEADER.size
            try:
                records.append(any_json(data[start : start + length]))
            except Undecodable:
                continue
    # Each model numbers its own steps.
    order = "at" if any("model" in record for record in records) else "step"
    return sorted(records, key=lambda record: record[order])


_KEPT_DUMPS = 20


def write_dump(
    folder: Path,
    *,
    kind: str,
    reason: str,
    stacks: str,
    steps: list[dict[str, Any]],
    details: dict[str, Any],
) -> Path | None:
    """Write the facts of a failure to one JSON file; None if the disk refuses.

    The newest `_KEPT_DUMPS` are kept. They contain no text and no token of any request.
    """
    path = folder / f"flight-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.json"
    record = {
        "kind": kind,
        "reason": reason,
        "at": time.time(),
        **details,
        "stacks": stacks.splitlines(),
        "steps": steps,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")  # So that readers only find complete files.
        part.write_bytes(msgspec.json.format(_encode(record), indent=1))
        part.replace(path)
        for old in sorted(folder.glob("flight-*.json"))[:-_KEPT_DUMPS]:
            old.unlink(missing_ok=True)
    except OSError:
        return None
    return path
