"""The user's input: an editor with history on a terminal, plain lines from a pipe."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .conversation import COMMANDS


class Typed:
    """Reader of messages; `read` returns one, and raises `EOFError` at the end."""

    def __init__(self, history: Path) -> None:
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._session: PromptSession[str] | None = None
        if self.interactive:
            self._session = PromptSession(
                "› ",
                history=_history(history),
                multiline=True,
                key_bindings=_keys(),
                completer=WordCompleter([usage.split()[0] for usage in COMMANDS], sentence=True),
                complete_while_typing=False,
                prompt_continuation="  ",
            )

    async def read(self) -> str:
        if self._session is not None:
            typed: str = await self._session.prompt_async()
            return typed
        line: str = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise EOFError
        return line.rstrip("\n")


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history(path: Path) -> History:
    """Return the file, readable by its owner only; memory if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()
