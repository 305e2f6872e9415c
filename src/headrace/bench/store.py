"""The folder of a run: records as they come, then the result; a full disk loses nothing more."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec

from ..base.errors import HeadraceError, InvalidRequest, file_errors
from ..base.foreign import Undecodable, json_reader
from .metrics import SAMPLES
from .record import RequestRecord

_encode = msgspec.json.Encoder().encode


class Store:
    """Writer into `folder`; after the first failure it only keeps the reason.

    Raises `InvalidRequest` if the folder cannot be written to at all.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.problem: str | None = None
        self._records: io.BufferedWriter | None = None
        if folder is not None:
            with file_errors(InvalidRequest, f"cannot write to {folder}", "out"):
                folder.mkdir(parents=True, exist_ok=True)
                self._records = (folder / "requests.jsonl").open("wb")

    def record(self, record: RequestRecord) -> None:
        if self._records is None or self.problem is not None:
            return
        try:
            self._records.write(_encode(record) + b"\n")
            self._records.flush()
        except OSError as error:
            self._broken(error)

    def text(self, name: str, content: str) -> Path | None:
        """Write a file, completely or not at all."""
        if self.folder is None:
            return None
        try:
            return write_text(self.folder / name, content)
        except HeadraceError as error:
            self.problem = self.problem or error.message
            return None

    def json(self, name: str, value: dict[str, Any]) -> Path | None:
        return self.text(name, json.dumps(value, indent=1))

    def close(self) -> None:
        if self._records is not None:
            try:
                self._records.close()
            except OSError as error:
                self._broken(error)

    def _broken(self, error: OSError) -> None:
        self.problem = self.problem or f"{self.folder}: {error.strerror or error}"


def write_text(path: Path, text: str) -> Path:
    """Write a file, completely or not at all; `HeadraceError` gives the reason (full disk, no
    folder)."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise HeadraceError(f"{path} was not written: {error.strerror or error}") from None
    return path


_record = json_reader(RequestRecord)


def read_records(path: Path) -> list[RequestRecord]:
    """Read a run's records, even of an interrupted run: an incomplete last line is left out."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except Undecodable:
            break
    return records


PLAIN = ["number", "session", "turn", "group", "status", "error", "cached_tokens", "finish_reason"]
TIMES = ("planned", "sent", "end")
"""Columns that are times of a record: raw, and in seconds from the start."""


def records_csv(records: list[RequestRecord], start_ns: int) -> str:
    """Format one line per request, times in seconds from the start of the run."""
    per_request = [metric for metric in SAMPLES if metric.name != "itl"]
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*PLAIN, *TIMES, "cancelled", "itl_mean", *(one.name for one in per_request)])
    for record in records:
        gaps = len(record.chunk_ns) - 1
        mean = (record.chunk_ns[-1] - record.chunk_ns[0]) / 1e9 / gaps if gaps > 0 else ""
        plain = [getattr(record, name) for name in PLAIN]
        times = [(getattr(record, f"{name}_ns") - start_ns) / 1e9 for name in TIMES]
        values = [next(iter(metric.values(record)), "") for metric in per_request]
        writer.writerow([*plain, *times, int(record.cancelled), mean, *values])
    return out.getvalue()
