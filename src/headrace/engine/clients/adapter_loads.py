"""Adapters of a running engine: loaded and unloaded, and loaded again after a restart."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...base.config import EngineOptions
from ...base.errors import EngineDead, InvalidRequest
from ...base.modelfiles import ModelFiles
from ...loader.adapters import open_adapter, within
from .. import messages
from ..loop.adapters import AdapterBook

log = logging.getLogger("headrace.engine")


class AdapterLoads:
    """Questions about adapters that the engine process has not answered yet.

    Belongs to one event loop; imports no torch.
    """

    def __init__(
        self,
        book: AdapterBook,
        options: EngineOptions,
        files: ModelFiles,
        model_name: str,
        send: Callable[[Any], None],
    ) -> None:
        self._book = book
        self._options = options
        self._files = files
        self._model_name = model_name
        self._send = send
        self._asked: dict[str, asyncio.Future[None]] = {}
        self._coming: set[str] = set()
        """Names whose adapters are being loaded: a second one of such a name is refused at once."""

    async def load(self, name: str, path: str | Path) -> None:
        """See `AsyncEngine.load_adapter`, which has checked that adapters are served."""
        roots = [root for root in (self._options.adapter_roots or "").split(os.pathsep) if root]
        folder = within(path, roots)
        if name in self._coming:
            raise InvalidRequest(f"the name {name!r:.140} is being loaded", param="lora_name")
        adapter = self._book.new(name, str(folder), self._model_name)
        self._coming.add(name)
        try:
            rank = self._options.adapter_rank
            await asyncio.to_thread(open_adapter, folder, self._files.arch, max_rank=rank)
            await self._ask(messages.LoadAdapter(adapter.id, adapter.path))
        finally:
            self._coming.remove(name)
        self._book.add(adapter)

    async def unload(self, name: str) -> None:
        adapter = self._book.remove(name)
        await self._ask(messages.UnloadAdapter(adapter.id))

    async def _ask(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send(message)
        self._asked[message.name] = waiting
        await waiting

    def done(self, done: messages.AdapterDone) -> None:
        """Take an answer of the engine process."""
        waiting = self._asked.pop(done.name, None)
        error = None if done.error is None else done.error.error()
        if waiting is not None and not waiting.done():
            if error is None:
                waiting.set_result(None)
            else:
                waiting.set_exception(error)
        elif waiting is not None and error is None:
            # The caller has left, so the adapter is in no book.
            self._send(messages.UnloadAdapter(done.name))
        elif error is not None:
            # After a restart: the files have changed.
            log.error("an adapter could not be loaded again: %s", error)
            for adapter in self._book:
                if adapter.id == done.name:
                    self._book.remove(adapter.name)

    def again(self) -> None:
        """Send all adapters to a new engine process, before any request."""
        for adapter in self._book:
            self._send(messages.LoadAdapter(adapter.id, adapter.path))

    def fail(self, error: EngineDead) -> None:
        """End all open questions: the engine process is gone and answers no more."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._asked.clear()
