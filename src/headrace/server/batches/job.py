"""One batch in work: validate it, run each line, make its result files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ...base.errors import NotFound, TooLarge
from ...base.foreign import Undecodable, any_json
from ..files.store import FileStore, StoredFile
from ..inside import Answer, Inside, post
from .lines import MOST_LINES, Line, last_in_line, read_lines, sequences_of
from .record import Batch
from .results import Results, line_id, opened

if TYPE_CHECKING:
    from ...obs.tasks import TaskWatch
    from ..accounts import Account
    from ..generation import Usage
    from .courtesy import Courtesy
    from .record import BatchBook, Status

MOST_DEATHS = 3
"""Engine deaths after which the request in work is taken to be the cause. At the first death other
requests were in work too; at the later ones no other suspect was."""
EXPIRED = ("batch_expired", "the batch expired before this request was done")
EXPIRED_AT_A_TIME = 256
"""Lines written between two turns of the event loop."""
MOST_QUOTAS = 2
"""Quotas that a begun batch may fill: it may exceed its owner's quota by one more at most."""
LONGEST_PAUSE = 30.0
"""Maximum seconds before retrying a request that the engine could not take."""


class Ended(Exception):
    """Failure of the whole batch; `error` is one entry of its `errors`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "param": None, "line": None}


class Runner(Protocol):
    """Parts of the batch runner that a job uses; see `BatchRunner`."""

    app: Inside
    files: FileStore
    book: BatchBook
    courtesy: Courtesy
    tasks: TaskWatch
    line: Callable[[str], None]
    clock: Callable[[], float]


class Job:
    """A batch with its files open. `run` may be called again after it raised."""

    def __init__(self, runner: Runner, batch: Batch) -> None:
        self.batch = batch
        self._runner = runner
        self._stopped = batch.status == "cancelling"
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = self._stopped
        """Whether requests stopped now will not be repeated; their tokens are then charged."""
        self._opened = False
        self._held = 0
        """Bytes of its results until they are registered files."""
        self._fault: BaseException | None = None
        self._deaths: dict[int, int] = {}
        self._suspects = asyncio.Lock()
        """Lock for lines that were in work when the engine died: they run one at a time."""

    def stop(self) -> None:
        """Cancel the batch, including its requests in the engine."""
        self._stopped = self._over = True
        for task in self._tasks:
            task.cancel()

    @property
    def _late(self) -> bool:
        return self._runner.clock() >= self.batch.expires

    async def run(self) -> None:
        """Run the batch to its end.

        Raises `StoreFailed` and `OSError` if the disk is full or broken; results already on disk
        stay valid.
        """
        batch, runner = self.batch, self._runner
        if batch.status == "validating":
            try:
                await self._validate()
            except Ended as end:
                batch.errors = [end.error]
                batch.enter("failed", int(runner.clock()))
                await runner.book.save(batch)
                return
        self._fault = None
        output, errors = await opened(
            runner.files.path(batch.output_file), runner.files.path(batch.error_file)
        )
        try:
            self._hold(output.size + errors.size)
            output.check_room()
            if not self._opened:
                self._opened = True
                self._recount(output, errors)
            if batch.status != "finalizing":
                try:
                    batch.end = await self._lines(output, errors)
                except Ended as end:
                    batch.errors, batch.end = [end.error], "failed"
                    self._over = True
            await self._end_tasks()
            await self._finish(output, errors)
        finally:
            await self._end_tasks()
            self._hold(-self._held)
            output.close()
            errors.close()

    def _hold(self, more: int) -> None:
        """Charge result bytes to their owner as soon as they are written."""
        growing, owner = self._runner.files.growing, self.batch.owner
        self._held += more
        growing[owner] += more
        if not growing[owner]:
            del growing[owner]

    async def _full(self) -> str | None:
        """Return why no further line may begin for this owner, or None. Raises `StoreFailed`."""
        try:
            await self._runner.files.check_quota(
                self.batch.owner, param="input_file_id", times=MOST_QUOTAS
            )
        except TooLarge as error:
            return error.message
        return None

    def _recount(self, output: Results, errors: Results) -> None:
        """Take the counts from the result files; later lines are counted as they finish."""
        batch = self.batch
        batch.completed, batch.failed = len(output.done), len(errors.done)
        batch.prompt_tokens, batch.completion_tokens = output.prompt_tokens, output.completion
        batch.cached_tokens = output.cached_tokens

    async def _validate(self) -> None:
        """Count the lines of the input file. Raises `Ended`."""
        batch, runner = self.batch, self._runner
        try:
            await runner.files.get(batch.input_file, batch.owner)
            batch.total = await asyncio.to_thread(_count, self._read())
        except (NotFound, FileNotFoundError):
            raise Ended("input_file_gone", "the input file was deleted") from None
        if batch.status == "validating":  # It may have been cancelled in the meantime.
            batch.enter("in_progress", int(runner.clock()))
            await runner.book.save(batch)

    def _read(self) -> Iterator[Line]:
        path = self._runner.files.path(self.batch.input_file)
        max_line = self._runner.app.state.service.options.max_body
        return read_lines(path, self.batch.endpoint, max_line)

    async def _lines(self, output: Results, errors: Results) -> Status:
        """Run every unfinished line or write its error; return the final status.

        Raises `Ended` and `OSError`.
        """
        done = output.done | errors.done
        lines = self._read()
        full: str | None = None
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if self._stopped:
                    return "cancelled"
                if line.number in done:
                    continue
                if (full := await self._full()) is not None:
                    break
                if line.body is None:
                    self._write(errors, line, None, line.problem)
                elif await self._place(rows := sequences_of(line.body, self.batch.endpoint)):
                    task = self._runner.tasks.errand("batch line", self._one(line, output, errors))
                    self._tasks.add(task)
                    task.add_done_callback(partial(self._left, rows))
                elif not self._stopped:
                    self._write(errors, line, None, EXPIRED)
        except FileNotFoundError:
            raise Ended("input_file_gone", "the input file was deleted") from None
        while self._tasks and not (self._stopped or self._late):
            await asyncio.wait(self._tasks, timeout=0.5)
        self._over = self._over or self._late
        await self._end_tasks()
        if self._fault is not None:
            raise self._fault
        if self._stopped:
            return "cancelled"
        if full is not None:
            raise Ended("quota_exceeded", full)
        if len(output.done) + len(errors.done) < self.batch.total:
            await self._expire(output, errors)
        expired = self._late and self.batch.completed < self.batch.total
        return "expired" if expired else "completed"

    async def _expire(self, output: Results, errors: Results) -> None:
        """Write an error for each line without a result, including those in work when time ran
        out."""
        left = _unanswered(self._read(), output.done | errors.done)
        while lines := await asyncio.to_thread(_some, left):
            for line in lines:
                self._write(errors, line, None, line.problem)

    async def _place(self, rows: int) -> bool:
        """Wait for engine rows; return False if they are no longer wanted or time has run out."""
        courtesy = self._runner.courtesy
        try:
            while not (self._stopped or self._late):
                if self._fault is not None:
                    raise self._fault
                if await courtesy.enter(self, rows):
                    return True
            return False
        finally:
            courtesy.give_up(self)

    def _left(self, rows: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._runner.courtesy.leave(rows)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = self._fault or fault

    async def _one(self, line: Line, output: Results, errors: Results) -> None:
        """Run one request until it has an answer of its own. Raises `OSError`, `Ended`."""
        answer = await self._answer(line)
        self._write(output if answer.status == 200 else errors, line, answer, None)
        self._charge(answer.usage)

    async def _answer(self, line: Line) -> Answer:
        batch, app = self.batch, self._runner.app
        assert line.body is not None
        body = last_in_line(line.body, batch.endpoint)
        for attempt in itertools.count():
            await self._runner.courtesy.ready()
            suspect = self._suspects if self._deaths.get(line.number) else nullcontext()
            async with suspect:
                answer = await post(
                    app,
                    app.inside,
                    batch.endpoint,
                    body,
                    request_id=f"{line_id(batch.id, line.number)}-{attempt}",
                    account=self._account(),
                    owner=batch.owner,
                    left=self._unfinished,
                )
                if answer.status not in (429, 503):
                    break
                # The engine is full, loading, asleep or gone. The request is not at fault, unless
                # it kills the engine each time.
                if _code(answer.body) == "engine_dead":
                    self._deaths[line.number] = self._deaths.get(line.number, 0) + 1
                    if self._deaths[line.number] >= MOST_DEATHS:
                        break
                pause = answer.headers.get("retry-after", "1")
                await asyncio.sleep(min(LONGEST_PAUSE, max(1.0, float(pause))))
        return answer

    def _account(self) -> Account | None:
        """Return the account of the key that made the batch. Raises `Ended` if that key was
        removed."""
        account = self._payer()
        if account is None and self._runner.app.state.accounts is not None:
            raise Ended("key_removed", "the key that made this batch is not known any more")
        return account

    def _payer(self) -> Account | None:
        accounts = self._runner.app.state.accounts
        account: Account | None = None if accounts is None else accounts.named(self.batch.owner)
        return account

    def _unfinished(self, usage: Usage) -> None:
        """Charge a request that was stopped in mid-answer, if it will not be repeated."""
        if self._over:
            self._charge(usage)

    def _charge(self, usage: Usage | None) -> None:
        """Charge the key's ledger and the batch's usage."""
        account = self._payer()
        if account is not None:
            account.totals.requests += 1
        if usage is not None:
            if account is not None:
                account.totals.add(usage)
            self.batch.prompt_tokens += usage.prompt
            self.batch.cached_tokens += usage.cached
            self.batch.completion_tokens += usage.completion

    def _write(
        self, into: Results, line: Line, answer: Answer | None, problem: tuple[str, str] | None
    ) -> None:
        """Write a line's result. Raises `OSError`; then the line is not done."""
        response: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        if problem is not None:
            error = {"code": problem[0], "message": problem[1], "line": line.number}
        if answer is not None:
            response = {
                "status_code": answer.status,
                "request_id": line_id(self.batch.id, line.number),
                "body": msgspec.Raw(answer.body),
            }
        before = into.size
        into.append(
            line.number,
            {
                "id": line_id(self.batch.id, line.number),
                "custom_id": line.custom_id,
                "response": response,
                "error": error,
            },
        )
        self._hold(into.size - before)
        good = answer is not None and answer.status == 200
        if good:
            self.batch.completed += 1
        else:
            self.batch.failed += 1
        self._runner.line("completed" if good else "failed")

    async def _finish(self, output: Results, errors: Results) -> None:
        """Register the results as files and end the batch."""
        batch, runner = self.batch, self._runner
        now = int(runner.clock())
        if batch.end in ("completed", "expired"):
            batch.enter("finalizing", now)
            await runner.book.save(batch)
        expires = None if batch.output_expires is None else now + batch.output_expires
        for results, file_id, kind in (
            (output, batch.output_file, "output"),
            (errors, batch.error_file, "error"),
        ):
            if not results.size:
                results.path.unlink(missing_ok=True)
                continue
            await asyncio.to_thread(results.close, sync=True)
            name = f"{batch.id}_{kind}.jsonl"
            await runner.files.add(
                StoredFile(file_id, batch.owner, name, "batch_output", results.size, now, expires)
            )
        batch.has_output, batch.has_errors = bool(output.size), bool(errors.size)
        batch.enter(batch.end, int(runner.clock()))
        await runner.book.save(batch)

    async def _end_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _count(lines: Iterator[Line]) -> int:
    """Count the lines. Raises `Ended` if there are none or too many."""
    total = 0
    for _ in lines:
        total += 1
        if total > MOST_LINES:
            raise Ended("too_many_requests", f"a batch may have {MOST_LINES} requests")
    if not total:
        raise Ended("empty_file", "the input file has no requests")
    return total


def _unanswered(lines: Iterator[Line], done: set[int]) -> Iterator[Line]:
    """Yield the lines without a result, without their bodies, each with the reason."""
    for line in lines:
        if line.number not in done:
            yield Line(line.number, line.custom_id, problem=line.problem or EXPIRED)


def _some(lines: Iterator[Line]) -> list[Line]:
    return list(itertools.islice(lines, EXPIRED_AT_A_TIME))


def _code(body: bytes) -> str | None:
    try:
        code = any_json(body)["error"]["code"]
    except (Undecodable, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
