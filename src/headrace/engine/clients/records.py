"""Records of requests and their answers, which `headrace replay` uses to reproduce an answer.

Off unless the environment variable HEADRACE_RECORD names a folder: a record holds all tokens of
prompt and answer, which is the user's text. Every request that ends, or that an engine's death cuts
off, is then one line of JSON in a file of this process. A record has the engine's identity, the
resolved spec with its seed, and the answer. An answer's bits depend on nothing else (DESIGN promise
1), so the batch around it need not be recorded.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from ...base.config import EngineOptions
from ...base.errors import InvalidRequest
from ...base.foreign import Undecodable, any_json, json_reader
from ...base.identity import OPTIONS, Identity
from ...base.request import OutputDelta, Request
from ...base.spec import RequestSpec
from ...base.step import TokenLogprobs

log = logging.getLogger("headrace.engine")

MOST_BYTES = 1 << 30
"""Most bytes of a file; later requests are not recorded, and the log says so once."""
MOST_LINE = 64 << 20
CARRIED = (*OPTIONS, "kernels", "max_context", "max_adapters", "adapter_rank")
"""Options of `EngineOptions` with which a replay starts its engine."""


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    """One of the answers of a request."""

    tokens: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None
    """None: the engine died before its end."""


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """One request and its answers."""

    model: str
    options: dict[str, str | int | bool | None]
    """The options of `CARRIED` that the user set."""
    identity: Identity
    at: float
    """Unix time of the end."""
    prompt: list[int]
    spec: RequestSpec
    choices: list[Choice]
    adapter: str | None = None
    """Folder of the adapter that `spec.adapter` names."""
    cut: str | None = None
    """The failure of the engine that ended it: death, hang or step."""

    def request(self, name: str) -> Request:
        """Make the same request under another name."""
        return Request(name, self.prompt, self.spec, arrival=time.monotonic())


@dataclass
class _Open:
    request: Request
    adapter: str | None
    choices: list[Choice] = field(default_factory=list)


class Recorder:
    """Writer of the records of one engine into a folder."""

    def __init__(self, folder: Path, options: EngineOptions) -> None:
        """Raises `OSError` if the folder cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"records-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        self.identity: Identity | None = None
        """Identity of the engine that answers; nothing is recorded before it is known."""
        self._model = options.model
        self._options = {
            spec.name: getattr(options, spec.name)
            for spec in fields(options)
            if spec.name in CARRIED and getattr(options, spec.name) != spec.default
        }
        self._open: dict[str, _Open] = {}
        self._encode = msgspec.json.Encoder().encode
        self._written = 0
        log.warning("requests and answers are recorded, text and all, in %s", self.path)

    def begin(self, request: Request, adapter: str | None = None) -> None:
        """Note a request that is in work. `adapter`: the folder of its adapter. A request with
        inputs that are not text is not recorded: it holds handles, which cannot be opened later."""
        if request.spec.inputs:
            return
        choices = [Choice() for _ in range(request.spec.sampling.n)]
        if request.spec.generates:
            self._open[request.id] = _Open(request, adapter, choices)

    def take(self, delta: OutputDelta) -> None:
        """Add a delta as its reader gets it; the end of the last choice writes the record."""
        found = self._open.get(delta.request_id)
        if found is None:
            return
        choice = found.choices[delta.index]
        choice.tokens += delta.token_ids
        if delta.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            choice.finish = delta.finish_reason
            if all(each.finish is not None for each in found.choices):
                self._write(self._open.pop(delta.request_id), None)

    def forget(self, request_id: str) -> None:
        """Drop a request that its reader left: its length depended on the reader."""
        self._open.pop(request_id, None)

    def cut(self, failure: str, request_id: str | None = None) -> None:
        """Record that the engine failed with a request, or with all in work (`request_id` None).
        Requests that are sent again start empty."""
        for name, found in self._open.items():
            if request_id in (None, name):
                self._write(found, failure)
                found.choices = [Choice() for _ in found.choices]

    def _write(self, found: _Open, cut: str | None) -> None:
        if self.identity is None or self._written > MOST_BYTES:
            return
        record = Record(
            self._model,
            self._options,
            self.identity,
            time.time(),
            found.request.prompt,
            found.request.spec,
            found.choices,
            found.adapter,
            cut,
        )
        line = self._encode(record) + b"\n"
        try:
            with self.path.open("ab") as file:
                file.write(line)
        except OSError as refused:
            log.warning("a request could not be recorded: %s", refused)
        self._written += len(line)
        if self._written > MOST_BYTES:
            log.warning("%s is full: no more requests are recorded", self.path)


_record = json_reader(Record)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, one at a time. Raises `InvalidRequest` naming the line that is
    not a record, or the file that cannot be read."""
    try:
        with path.open("rb") as file:
            for number in range(1, 1 << 62):
                line = file.readline(MOST_LINE)
                if not line:
                    return
                try:
                    yield _record(line)
                except Undecodable as wrong:
                    raise InvalidRequest(
                        f"line {number} of {path} is no record: {wrong}", param="file"
                    ) from None
    except OSError as refused:
        raise InvalidRequest(f"{path} cannot be read: {refused.strerror}", param="file") from None


def records_of_dump(path: Path) -> Path | None:
    """Return the file of records that a dump of the flight recorder names, or None if this is not a
    dump.

    Raises `InvalidRequest` for a dump without one.
    """
    try:
        dump: Any = any_json(path.read_bytes()[: 16 << 20])
    except (OSError, Undecodable):
        return None
    if not isinstance(dump, Mapping) or "steps" not in dump:
        return None
    named = dump.get("records")
    if not isinstance(named, str):
        raise InvalidRequest(
            f"{path} names no recorded requests: the engine ran without HEADRACE_RECORD=FOLDER",
            param="file",
        )
    return Path(named)
