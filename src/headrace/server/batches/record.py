"""Records of batches and their storage."""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args

import msgspec

from ...base.errors import HeadraceError, NotFound
from ...base.foreign import Undecodable, json_reader
from ..database import Database

log = logging.getLogger("headrace.server.batches")

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
MOST_KEPT = 10_000
"""Number of batches remembered; the oldest finished ones are dropped first."""


class BatchUnreadable(HeadraceError):
    """Failure: the record of a batch is damaged, or of another version."""

    code = "batch_unreadable"


class Batch(msgspec.Struct):
    """One batch; times are whole seconds since the epoch."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    window: str
    created: int
    expires: int
    metadata: dict[str, str] | None
    output_file: str
    """File id that the results will get; `has_output` says whether the file exists."""
    error_file: str
    output_expires: int | None = None
    """Seconds after which the result files expire."""
    status: Status = "validating"
    end: Status = "completed"
    """Status that it gets once its results are files."""
    has_output: bool = False
    has_errors: bool = False
    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    times: dict[str, int] = {}
    """Time at which it entered each status."""
    errors: list[dict[str, Any]] | None = None
    """Reasons why the whole batch failed."""

    def enter(self, status: Status, now: int) -> None:
        self.status = status
        self.times[status] = now

    def reply(self, model: str | None) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        _, *later = get_args(Status)
        stamps = {f"{name}_at": self.times.get(name) for name in later}
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": model,
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "input_file_id": self.input_file,
            "completion_window": self.window,
            "status": self.status,
            "output_file_id": self.output_file if self.has_output else None,
            "error_file_id": self.error_file if self.has_errors else None,
            "created_at": self.created,
            "expires_at": self.expires,
            **stamps,
            "request_counts": {
                name: getattr(self, name) for name in ("total", "completed", "failed")
            },
            "usage": usage,
            "metadata": self.metadata,
        }


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


_batch = json_reader(Batch)


class BatchBook:
    """Batches in the index of a folder of files."""

    def __init__(self, base: Database, failed: Callable[[str], None] = lambda kind: None) -> None:
        """Use the index in `base`. `failed` counts unreadable rows."""
        self._base = base
        self._failed = failed
        self._unreadable: set[str] = set()

    async def save(self, batch: Batch) -> None:
        """Save a batch, and forget the oldest finished ones. Raises `StoreFailed`."""
        row = (batch.id, batch.owner, batch.status, batch.created, msgspec.json.encode(batch))

        def write(base: sqlite3.Connection) -> None:
            base.execute(
                "insert into batches values (?, ?, ?, ?, ?) on conflict (id) do update set "
                "status = excluded.status, record = excluded.record",
                row,
            )
            base.execute(
                "delete from batches where id in (select id from batches where status in "
                "('failed', 'completed', 'expired', 'cancelled') order by created desc "
                "limit -1 offset ?)",
                (MOST_KEPT,),
            )

        await self._base.run(write, "batch_write")

    async def get(self, batch_id: str, owner: str) -> Batch:
        """Return a batch. Raises `NotFound`, `StoreFailed` and `BatchUnreadable`."""

        def read(base: sqlite3.Connection) -> bytes | None:
            row = base.execute(
                "select record from batches where id = ? and owner = ?", (batch_id, owner)
            ).fetchone()
            return None if row is None else row[0]

        found = await self._base.run(read, "file_read")
        if found is None:
            raise NotFound(f"there is no batch {batch_id[:128]!r}", param="batch_id")
        for batch in self._readable([(batch_id, found)]):
            return batch
        raise BatchUnreadable(
            f"what is kept of {batch_id} cannot be read; the server's log has the reason, and "
            "other batches go on",
            param="batch_id",
        )

    async def listed(
        self, owner: str, *, after: str | None, limit: int
    ) -> tuple[list[Batch], bool]:
        """List (batches after the id `after`, newest first; whether more follow)."""

        def read(base: sqlite3.Connection) -> list[tuple[str, bytes]]:
            return base.execute(
                "select id, record from batches where owner = ? order by created desc, rowid desc",
                (owner,),
            ).fetchall()

        rows = await self._base.run(read, "file_read")
        if after is not None:
            place = next((i for i, (name, _) in enumerate(rows) if name == after), None)
            if place is None:
                raise NotFound(f"there is no batch {after[:128]!r}", param="after")
            rows = rows[place + 1 :]
        return list(self._readable(rows[:limit])), len(rows) > limit

    async def unfinished(self) -> list[Batch]:
        """List the unfinished batches, oldest first. Raises `StoreFailed`."""
        marks = ", ".join("?" for _ in UNFINISHED)

        def read(base: sqlite3.Connection) -> list[tuple[str, bytes]]:
            return base.execute(
                f"select id, record from batches where status in ({marks}) order by created, rowid",
                UNFINISHED,
            ).fetchall()

        return list(self._readable(await self._base.run(read, "file_read")))

    def _readable(self, rows: Iterable[tuple[str, bytes]]) -> Iterator[Batch]:
        """Yield the readable batches; records damaged by a disk or from another version are
        skipped."""
        for name, record in rows:
            try:
                yield _batch(record)
            except Undecodable as error:
                if name not in self._unreadable:
                    self._unreadable.add(name)
                    self._failed("file_read")
                    log.error("a batch cannot be read", extra={"batch": name, "reason": str(error)})
