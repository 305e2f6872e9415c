"""One sqlite database, in a file or in memory, used in its own thread: it never blocks the event
loop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ..base.errors import OptionError, Overloaded

log = logging.getLogger("headrace.server.store")

Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]


class StoreFailed(Overloaded):
    """Failure to read or write the store: a full or broken disk."""

    code = "store_failed"


class Database:
    """A connection and its thread."""

    def __init__(
        self,
        path: Path | None,
        schema: str,
        *,
        option: str,
        failed: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """Open the database. `failed` gets the kind of each failure (`meter.FAILURES`).

        Raises `OptionError` naming `option` if the file cannot be used.
        """
        self._failed = failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                ":memory:" if path is None else path, check_same_thread=False
            )
            self._connection.executescript(schema)
            self._connection.execute("pragma journal_mode=wal")
        except (sqlite3.Error, OSError) as error:
            raise OptionError(f"the store {path} cannot be used: {error}", param=option) from None

    def now(self, work: Work[Result]) -> Result:
        """Run `work` in the calling thread: only before the first `run`."""
        return work(self._connection)

    async def run(self, work: Work[Result], kind: str) -> Result:
        """Return the result of `work` in one transaction. Raises `StoreFailed`, counted as
        `kind`."""

        def transaction() -> Result:
            with self._connection:
                return work(self._connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except sqlite3.Error as error:
            log.error("the store failed", extra={"kind": kind, "reason": str(error)})
            self._failed(kind)
            raise StoreFailed("the store cannot be used now", retry_after=10.0) from None

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._connection.close()
