"""One answer on its way to its reader, which may be slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from ...base.errors import HeadraceError
from ...base.outputs import Samples
from ...base.request import OutputDelta


class Stream:
    """An asynchronous iterator of the deltas of one request (see `face.OutputStream`).

    Deltas that the reader has not taken are merged per choice. At most n deltas wait, and together
    they are never larger than the answer. Belongs to one event loop and one reader.
    """

    __slots__ = (
        "_cancel", "_choices", "_error", "_open", "_pending", "_straight", "_taken", "_void",
        "_waiter", "_whole", "begun", "prompt_ids", "request_id",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        choices: int,
        cancel: Callable[[str], None],
        *,
        whole: bool = False,
    ) -> None:
        """`whole`: the reader shows nothing before the answer is complete, and can take it again
        from the start (`OutputDelta.void`)."""
        self.begun = False
        """Whether the reader got any delta."""
        self._choices = choices
        self._whole = whole
        self._taken: dict[int, int] = {}
        """Per choice, the tokens that the reader has; only if it wants the whole."""
        self._void: dict[int, int] = {}
        """Per choice, the reader's tokens that are void, until a delta reports that."""
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self._open = choices
        self._pending: dict[int, OutputDelta] = {}
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._straight: Callable[[OutputDelta], bool] | None = None
        self._cancel = cancel

    def push(self, delta: OutputDelta) -> None:
        """Add a delta of one choice (engine's side)."""
        if (
            self._straight is not None
            and delta.finish_reason is None
            and self._waiter is not None  # All earlier deltas have been read.
            and not self._waiter.done()
            and self._straight(delta)
        ):
            self.begun = True
            return
        waiting = self._pending.get(delta.index)
        if self._void:
            delta.void = self._void.pop(delta.index, None)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            merge(waiting, delta)
        if delta.finish_reason is not None:
            self._open -= 1
        self._wake()

    def divert(self, straight: Callable[[OutputDelta], bool]) -> None:
        """Pass each delta except a choice's last to `straight` from now on, in the call that brings
        it, while the reader waits. If it returns False, the reader gets the delta. It must not
        raise."""
        assert not self._whole
        self._straight = straight

    def fail(self, error: HeadraceError) -> None:
        """End the request with an error, once the pending deltas have been read."""
        if self._open:
            self._error = error
            self._open = 0
            self._wake()

    @property
    def repeatable(self) -> bool:
        """Whether the whole answer can come again unnoticed by outside observers."""
        return self._whole or not self.begun

    def again(self) -> None:
        """Prepare for the whole answer to come again."""
        assert self.repeatable
        self._pending.clear()
        self._void = dict(self._taken)
        self._open = self._choices

    def show(self) -> bool:
        """Note that the reader's tokens will be shown, after which they cannot come again. False:
        the engine has died and they are void, so there is nothing to show yet."""
        restarts = self._void or any(delta.void is not None for delta in self._pending.values())
        if restarts and self._error is None:
            return False
        self._whole = False
        return True

    @property
    def ended(self) -> bool:
        """Whether nothing more will be pushed."""
        return self._open == 0

    def cancel(self) -> None:
        if self._open:
            self._open = 0
            self._cancel(self.request_id)
        self._pending.clear()
        self._wake()

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self.begun = True
        delta = self._pending.pop(next(iter(self._pending)))
        if self._whole:
            before = 0 if delta.void is not None else self._taken.get(delta.index, 0)
            self._taken[delta.index] = before + len(delta.token_ids)
        return delta

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: OutputDelta, second: OutputDelta) -> None:
    """Append the later delta of the same choice to the earlier one."""
    first.text += second.text
    first.token_ids += second.token_ids
    if first.logprobs is None:
        first.logprobs = second.logprobs
    elif second.logprobs is not None:
        first.logprobs += second.logprobs
    first.finish_reason = second.finish_reason
    first.stop_reason = second.stop_reason
    first.cached_tokens = max(first.cached_tokens, second.cached_tokens)
    first.prompt_logprobs = first.prompt_logprobs or second.prompt_logprobs
    if isinstance(first.output, Samples) and isinstance(second.output, Samples):
        first.output = first.output.then(second.output)
    else:  # Of two pictures, keep the later one.
        first.output = second.output or first.output
    first.drafted = second.drafted
    first.queue_seconds = first.queue_seconds or second.queue_seconds
    first.preemptions = second.preemptions
