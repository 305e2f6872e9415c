"""Does the batches: one task for each that is being worked on, one for each of its requests.

Everything that must survive a restart is on disk before it counts: the batch in the index, each
result in a file (`results`). What was in the engine when the server ended is done again.
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
"""Batches that are worked on at the same time; others wait, those of busy owners longer."""
AGAIN_SECONDS = 10.0
"""Pause after the store failed, or the server itself did."""
LOOK_SECONDS = 30.0
"""Time between two looks for files that have expired."""


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
        """`failed`, `ended` and `line` count: failures, batches by end, requests by outcome."""
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
        """Go on with what is unfinished; from the event loop, once the engine is there.

        After `close` nothing begins any more: a batch that comes then is the next server's.
        """
        if self._closed:
            return
        if self._main is None:
            self._main = self.tasks.keep("batches", self._run)
        self._news.set()

    async def close(self) -> None:
        """Stop; what is in work will be done again by the next server."""
        self._closed = True
        tasks = [*self._tasks.values(), *([self._main] if self._main else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._main = None

    def live(self, batch: Batch) -> Batch:
        """The batch as it is at this moment, where it is being worked on."""
        job = self._jobs.get(batch.id)
        return batch if job is None else job.batch

    async def cancel(self, batch: Batch) -> Batch:
        """Begin to stop it. Raises `StoreFailed`; then it goes on."""
        batch, now = self.live(batch), int(self.clock())
        batch = msgspec.structs.replace(batch, times=dict(batch.times))
        batch.enter("cancelling", now)
        await self.book.save(batch)
        self._news.set()
        # Not before: while that was written, the batch may have been taken up from its older row,
        # or may have got further.
        job = self._jobs.get(batch.id)
        if job is None:
            return batch
        if job.batch.status in ("validating", "in_progress"):
            job.batch.enter("cancelling", now)
            job.stop()
            # Over what it wrote meanwhile; it will write its end too.
            with suppress(StoreFailed):
                await self.book.save(job.batch)
        return job.batch

    async def _run(self) -> None:
        while True:
            # Before the look: what comes while it lasts is looked for again.
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
            # Not wait_for, whose cancellation is lost where the event comes at the same moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()

    async def _begin(self) -> None:
        """Take up waiting batches, from the owners who have the fewest in work."""
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
                    # The disk is full or broken: nothing is lost, it is tried again.
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
