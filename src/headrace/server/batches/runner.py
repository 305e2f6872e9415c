"""Runner of batches: one task per active batch, one per request in work.

Everything that must survive a restart is on disk before it counts: the batch in the index, each
result in a file (`results`). Requests in work when the server ended are run again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ...obs.tasks import TaskWatch
from ..database import StoreFailed
from ..files.store import FileStore
from ..inside import Inside
from .courtesy import Courtesy
from .job import Job
from .record import Batch, BatchBook

if TYPE_CHECKING:
    from .record import Status

log = logging.getLogger("headrace.server.batches")

MOST_AT_ONCE = 8
"""Batches in work at once; others wait, those of busy owners longer."""
AGAIN_SECONDS = 10.0
"""Seconds of pause after the store or the server itself failed."""
LOOK_SECONDS = 30.0
"""Seconds between two checks for expired files."""


class BatchRunner:
    """All batches of one server."""

    def __init__(
        self,
        app: Inside,
        files: FileStore,
        *,
        failed: Callable[[str], None] = lambda kind: None,
        ended: Callable[[Status], None] = lambda status: None,
        line: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the runner. `failed`, `ended` and `line` count failures, batches by end, requests
        by outcome."""
        self.app = app
        self.files = files
        self.book = BatchBook(files.base, failed)
        self.courtesy = Courtesy(app.state.service)
        self.tasks: TaskWatch = app.state.service.tasks
        self.failed = failed
        self.line = line
        self.clock = clock
        self._ended = ended
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Resume unfinished batches; called from the event loop when the engine is ready.

        After `close` nothing begins any more: a batch created then is left to the next server.
        """
        if self._closed:
            return
        if self._main is None:
            self._main = self.tasks.keep("batches", self._run)
        self._news.set()

    async def close(self) -> None:
        """Stop; the next server repeats the requests in work."""
        self._closed = True
        tasks = [*self._tasks.values(), *([self._main] if self._main else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._main = None

    def live(self, batch: Batch) -> Batch:
        """Return the live state of a batch that is in work, or the batch itself."""
        job = self._jobs.get(batch.id)
        return batch if job is None else job.batch

    async def cancel(self, batch: Batch) -> Batch:
        """Begin to cancel a batch. Raises `StoreFailed`; then it goes on."""
        batch, now = self.live(batch), int(self.clock())
        batch = msgspec.structs.replace(batch, times=dict(batch.times))
        batch.enter("cancelling", now)
        await self.book.save(batch)
        self._news.set()
        # Only after saving: meanwhile the batch may have been resumed from its old row, or may have
        # progressed.
        job = self._jobs.get(batch.id)
        if job is None:
            return batch
        if job.batch.status in ("validating", "in_progress"):
            job.batch.enter("cancelling", now)
            job.stop()
            # Overwrite the row that the job wrote meanwhile; it will also write its end.
            with suppress(StoreFailed):
                await self.book.save(job.batch)
        return job.batch

    async def _run(self) -> None:
        while True:
            # Cleared first: a batch that arrives during the search triggers another one.
            self._news.clear()
            try:
                await self._begin()
                await self.files.purge()
            except StoreFailed:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            except Exception:  # the border of all batches: what fails once must not end them
                log.exception("the batches have to wait")
                self.failed("bug")
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            # Not wait_for: its cancellation is lost if the event is set at the same moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    async def _begin(self) -> None:
        """Start waiting batches, first those of owners with the fewest in work."""
        waiting = [one for one in await self.book.unfinished() if one.id not in self._tasks]
        while waiting and len(self._tasks) < MOST_AT_ONCE:
            busy = Tally(job.batch.owner for job in self._jobs.values())
            batch = min(waiting, key=lambda one: busy[one.owner])
            waiting.remove(batch)
            job = self._jobs[batch.id] = Job(self, batch)
            self._tasks[batch.id] = self.tasks.errand("batch", self._drive(job))

    async def _drive(self, job: Job) -> None:
        batch = job.batch
        try:
            while True:
                try:
                    await job.run()
                    break
                except (StoreFailed, OSError) as error:
                    # The disk is full or broken: nothing is lost, and the batch is retried.
                    if isinstance(error, OSError):
                        self.failed("batch_write")
                    log.error(
                        "a batch has to wait", extra={"batch": batch.id, "reason": str(error)}
                    )
                    await asyncio.sleep(AGAIN_SECONDS)
        except Exception:  # the border of one batch
            log.exception("a batch failed", extra={"batch": batch.id})
            self.failed("batch_failed")
            batch.errors = [
                {
                    "code": "internal_error",
                    "message": "internal error; the server's log has the details",
                    "param": None,
                    "line": None,
                }
            ]
            batch.enter("failed", int(self.clock()))
            with suppress(StoreFailed):
                await self.book.save(batch)
        finally:
            self._jobs.pop(batch.id, None)
            self._tasks.pop(batch.id, None)
            self._news.set()
        self._ended(batch.status)
