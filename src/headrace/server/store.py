"""Stored responses, in sqlite: one file, or memory; bounded; each visible to its owner only."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..base.errors import OptionError, Overloaded
from .accounts import Totals

log = logging.getLogger("headrace.server.store")

MOST = 100_000
"""Responses that are kept; the oldest go first."""
_SCHEMA = """
create table if not exists responses (
    id text primary key, owner text not null, previous text, created real not null,
    input blob not null, response blob not null
);
create table if not exists ledger (
    key text primary key, requests integer, refused integer, prompt_tokens integer,
    cached_tokens integer, completion_tokens integer
);
create index if not exists responses_by_age on responses (created);
"""

Result = TypeVar("Result")


class StoreFailed(Overloaded):
    """The store could not be read or written: a full or broken disk."""

    code = "store_failed"


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with what was asked."""

    id: str
    previous: str | None
    input: list[dict[str, Any]]
    """The input items of this turn alone."""
    response: dict[str, Any]


class ResponseStore:
    """All calls run in one thread of their own: sqlite never holds up the event loop."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        most: int = MOST,
        failed: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """`failed` is told the kind of each failure (`meter.FAILURES`).

        Raises `OptionError` where the file cannot be used.
        """
        self._most = most
        self._failed = failed
        self._writes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
            self._base = sqlite3.connect(
                ":memory:" if path is None else path, check_same_thread=False
            )
            self._base.executescript(_SCHEMA)
            self._base.execute("pragma journal_mode=wal")
        except (sqlite3.Error, OSError) as error:
            raise OptionError(f"the store {path} cannot be used: {error}", param="store") from None

    async def put(self, stored: Stored, owner: str, created: float) -> bool:
        """Insert or replace; False where it could not be written (a full disk), which is logged."""

        def write() -> bool:
            try:
                with self._base:
                    self._base.execute(
                        "insert or replace into responses values (?, ?, ?, ?, ?, ?)",
                        (
                            stored.id, owner, stored.previous, created,
                            msgspec.json.encode(stored.input),
                            msgspec.json.encode(stored.response),
                        ),
                    )  # fmt: skip
                    self._writes += 1
                    if self._writes % 100 == 1:
                        self._base.execute(
                            "delete from responses where id in (select id from responses "
                            "order by created desc limit -1 offset ?)",
                            (self._most,),
                        )
            except sqlite3.Error as error:
                log.error("a response could not be stored", extra={"reason": str(error)})
                return False
            return True

        done = await self._run(write)
        if not done:
            self._failed("store_write")
        return done

    async def get(self, response_id: str, owner: str) -> Stored | None:
        """Raises `StoreFailed`, as `delete` does."""

        def read() -> Stored | None:
            row = self._base.execute(
                "select id, previous, input, response from responses where id = ? and owner = ?",
                (response_id, owner),
            ).fetchone()
            if row is None:
                return None
            decode = msgspec.json.decode
            return Stored(row[0], row[1], decode(row[2]), decode(row[3]))

        return await self._run(read)

    async def delete(self, response_id: str, owner: str) -> bool:
        def drop() -> bool:
            with self._base:
                found = self._base.execute(
                    "delete from responses where id = ? and owner = ?", (response_id, owner)
                )
            return found.rowcount > 0

        return await self._run(drop)

    def ledger(self) -> dict[str, Totals]:
        """What each key used, by its name."""
        return {row[0]: Totals(*row[1:]) for row in self._base.execute("select * from ledger")}

    async def save_ledger(self, totals: dict[str, Totals]) -> bool:
        """False where it could not be written, which is logged."""
        rows = [(name, *astuple(total)) for name, total in totals.items()]

        def write() -> bool:
            try:
                with self._base:
                    self._base.executemany(
                        "insert or replace into ledger values (?, ?, ?, ?, ?, ?)", rows
                    )
            except sqlite3.Error as error:
                log.error("the ledger could not be written", extra={"reason": str(error)})
                return False
            return True

        done = await self._run(write)
        if not done:
            self._failed("ledger_write")
        return done

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            log.error("the store failed", extra={"reason": str(error)})
            self._failed("store_read")
            raise StoreFailed("the store cannot be used now", retry_after=10.0) from None

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._base.close()
