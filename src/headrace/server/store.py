"""Stored responses, in sqlite (a file, or memory); bounded; each visible to its owner only."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..base.foreign import any_json
from .accounts import Totals
from .database import Database, StoreFailed

MOST = 100_000
"""Maximum stored responses; the oldest are dropped first."""
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


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and its input."""

    id: str
    previous: str | None
    input: list[dict[str, Any]]
    """Input items of this turn only."""
    response: dict[str, Any]


class ResponseStore:
    """Responses by id and owner, and the ledger of usage."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        most: int = MOST,
        failed: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """Open the store. `failed` gets the kind of each failure (`meter.FAILURES`).

        Raises `OptionError` if the file cannot be used.
        """
        self._most = most
        self._writes = 0
        self._base = Database(path, _SCHEMA, option="store", failed=failed)

    async def put(self, stored: Stored, owner: str, created: float) -> bool:
        """Insert or replace a response; return False if it could not be written (a full disk)."""
        row = (
            stored.id,
            owner,
            stored.previous,
            created,
            msgspec.json.encode(stored.input),
            msgspec.json.encode(stored.response),
        )

        def write(base: sqlite3.Connection) -> None:
            base.execute("insert or replace into responses values (?, ?, ?, ?, ?, ?)", row)
            self._writes += 1
            if self._writes % 100 == 1:
                base.execute(
                    "delete from responses where id in (select id from responses "
                    "order by created desc limit -1 offset ?)",
                    (self._most,),
                )

        with suppress(StoreFailed):
            await self._base.run(write, "store_write")
            return True
        return False

    async def get(self, response_id: str, owner: str) -> Stored | None:
        """Return a stored response, or None. Raises `StoreFailed`, as `delete` does."""

        def read(base: sqlite3.Connection) -> Stored | None:
            row = base.execute(
                "select id, previous, input, response from responses where id = ? and owner = ?",
                (response_id, owner),
            ).fetchone()
            if row is None:
                return None
            return Stored(row[0], row[1], any_json(row[2]), any_json(row[3]))

        return await self._base.run(read, "store_read")

    async def delete(self, response_id: str, owner: str) -> bool:
        def drop(base: sqlite3.Connection) -> bool:
            found = base.execute(
                "delete from responses where id = ? and owner = ?", (response_id, owner)
            )
            return found.rowcount > 0

        return await self._base.run(drop, "store_write")

    def ledger(self) -> dict[str, Totals]:
        """Return each key's usage, by its name. Only before the first other call."""
        rows = self._base.now(lambda base: base.execute("select * from ledger").fetchall())
        return {row[0]: Totals(*row[1:]) for row in rows}

    async def save_ledger(self, totals: dict[str, Totals]) -> bool:
        """Save the ledger; return False if it could not be written. The next save is soon."""
        rows = [(name, *astuple(total)) for name, total in totals.items()]

        def write(base: sqlite3.Connection) -> None:
            base.executemany("insert or replace into ledger values (?, ?, ?, ?, ?, ?)", rows)

        with suppress(StoreFailed):
            await self._base.run(write, "ledger_write")
            return True
        return False

    def close(self) -> None:
        self._base.close()
