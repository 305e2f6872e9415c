"""How a download says where it is; the command line draws the bar."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told of one file after the other: start, advance …, done."""

    def start(self, total: int, label: str) -> None:
        """`total` bytes in all; `label` is what the user reads (the file's name, or a wait)."""
        ...

    def advance(self, n: int) -> None:
        """n more bytes; negative where some had to be thrown away."""
        ...

    def done(self) -> None:
        """The file is complete, or was given up (an error follows)."""
        ...


class Silent:
    """A `Progress` that nobody watches."""

    def start(self, total: int, label: str) -> None: ...

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...
