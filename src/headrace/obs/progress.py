"""A progress bar for many prompts: requests done, tokens per second. Silent if not enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class TokenProgress:
    """A progress bar as a context manager; its methods cost next to nothing while disabled."""

    def __init__(self, requests: int, *, enabled: bool) -> None:
        self._requests = requests
        self._enabled = enabled
        self._bar: Progress | None = None
        self._tokens = 0
        self._done = 0

    def __enter__(self) -> TokenProgress:
        if self._enabled:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.completed:.0f} of {task.total:.0f} requests"),
                BarColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("", total=self._requests, tokens=0)
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()

    def tokens(self, count: int) -> None:
        self._tokens += count
        if self._bar is not None:
            self._show()

    def done(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None
        self._bar.update(self._task, completed=self._done, tokens=self._tokens)
