"""The fleet's store: logs, metrics, runs and builds as Parquet files that DuckDB reads and writes.

Each table is a folder. A file of `logs` is called `<source>-<from>-<to>.parquet`: a byte range of a
source, which is identified by its first line. One renaming publishes rows and range together. So a
killed process has ingested all of a batch or none of it, and a source is ingested once under any
name. Files of the other tables are named by the digest of their rows.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..base.environment import cache_root
from ..base.errors import InvalidRequest, OptionError, Untrusted, file_errors
from ..base.sections import read_sections
from ..bench import history
from .rows import MOST_LINE, REASONS, SCHEMA, log_row
from .store import held

BATCH = 200_000
"""Most lines of one file."""
MERGED = 5_000_000
"""Rows of a merged file, exceeded by at most the rows of its last part."""
NAME = re.compile(r"([0-9a-f]{16})-(\d{15})-(\d{15})\.parquet")
SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(slots=True)
class Taken:
    """The result of ingesting one source."""

    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refused lines by reason."""
    known: bool = False
    """Whether there was nothing new."""


class Lake:
    """The folder; several processes may use it at once, but only one writes at a time."""

    def __init__(self, root: Path) -> None:
        """Create the folder if it is absent. Raises `OptionError`."""
        if re.search(r"[*?\[\]{}'\"]", str(root)):
            raise OptionError(f"{root}: its name may hold no *, ?, bracket or quote", param="into")
        self.root = root
        with file_errors(OptionError, f"{root} cannot be used", "into"):
            for name in (*SCHEMA, "tmp"):
                (root / name).mkdir(parents=True, exist_ok=True)

    def take_logs(
        self, path: Path, service: str, watch: Callable[[int], None] = lambda _bytes: None
    ) -> Taken:
        """Ingest the new part of a file of JSON lines; `watch` gets its offset after each batch.

        A last line without a newline waits for the next time. Raises `InvalidRequest`,
        `OptionError`.
        """
        named(service)
        taken = Taken(known=True)
        with (
            file_errors(InvalidRequest, f"{path} was not taken in", "source"),
            self._lock(),
            path.open("rb") as source,
        ):
            if (name := _source(source, service)) is None:
                return taken
            start = max((end for _, end in self._spans(name)), default=0)
            source.seek(start)
            while batch := self._batch(source, service):
                rows, refused, end = batch
                notes = {"refused": json.dumps(refused), "service": service}
                self._write("logs", f"{name}-{start:015d}-{end:015d}", rows, notes)
                taken.rows, taken.known, start = taken.rows + len(rows), False, end
                taken.refused += refused
                watch(end)
        return taken

    def take(self, table: str, rows: Iterable[Mapping[str, Any]]) -> Taken:
        """Ingest rows of any other table; the same rows again add nothing."""
        lines = [msgspec.json.encode(row) for row in rows]
        digest = hashlib.sha256(b"\n".join(lines)).hexdigest()[:32]
        with self._lock():
            if not lines or (self.root / table / f"{digest}.parquet").exists():
                return Taken(known=True)
            self._write(table, digest, lines, {})
        return Taken(len(lines))

    def refused(self) -> Counter[str]:
        """Return the number of refused lines since the store was made, by reason."""
        found: Counter[str] = Counter()
        with self.open() as database:
            for path in self.files("logs"):
                found += _told(database, path)
        return found

    def files(self, table: str) -> list[Path]:
        """List the current files in order, without those that a merged file contains."""
        if table != "logs":
            return sorted((self.root / table).glob("*.parquet"))
        sources = {found[1] for one in self._names() if (found := NAME.fullmatch(one))}
        return [
            self.root / "logs" / f"{name}-{start:015d}-{end:015d}.parquet"
            for name in sorted(sources)
            for start, end in self._spans(name)
        ]

    @contextmanager
    def open(self) -> Iterator[Any]:
        """Open a DuckDB connection with one view per table. Raises `OptionError`, `Untrusted`."""
        duckdb = library()
        database = duckdb.connect(
            ":memory:", config={"temp_directory": str(self.root / "tmp/spill")}
        )
        try:
            for table, columns in SCHEMA.items():
                if found := [str(path) for path in self.files(table)]:
                    listed = ", ".join(f"'{path}'" for path in found)
                    once = "" if table == "logs" else "DISTINCT "
                    view = f"SELECT {once}{', '.join(columns)} FROM read_parquet([{listed}])"
                else:
                    nulls = (f"CAST(NULL AS {kind}) AS {name}" for name, kind in columns.items())
                    view = f"SELECT {', '.join(nulls)} WHERE false"
                database.execute(f"CREATE VIEW {table} AS {view}")
            yield database
        except duckdb.Error as error:
            reason = str(error).partition("\n")[0]
            raise Untrusted(f"{self.root} cannot be read: {reason}") from None
        finally:
            database.close()

    def merge(self, before: int | None = None) -> int:
        """Merge consecutive files; return the number of files removed.

        Rows older than `before` (microseconds since 1970) are left out; the position in their
        source is kept.
        """
        gone = 0
        with self._lock(), self.open() as database:
            for name in sorted({path.name[:16] for path in self.files("logs")}):
                for run in self._runs(database, name):
                    gone += self._merge(database, name, run, before)
        return gone

    def _runs(self, database: Any, name: str) -> Iterator[list[Path]]:
        """Yield consecutive files of one source, up to `MERGED` rows together."""
        run: list[Path] = []
        size = 0
        for start, end in self._spans(name):
            path = self.root / "logs" / f"{name}-{start:015d}-{end:015d}.parquet"
            run.append(path)
            query = f"SELECT count(*) FROM read_parquet('{path}')"
            size += database.execute(query).fetchone()[0]
            if size >= MERGED:
                yield run
                run, size = [], 0
        if run:
            yield run

    def _merge(self, database: Any, name: str, run: list[Path], before: int | None) -> int:
        listed = ", ".join(f"'{path}'" for path in run)
        old = (
            before is not None
            and database.execute(
                f"SELECT bool_or(ts < make_timestamp(?)) FROM read_parquet([{listed}])", [before]
            ).fetchone()[0]
        )
        if len(run) == 1 and not old:
            return 0
        refused: Counter[str] = sum((_told(database, path) for path in run), Counter())
        start, end = run[0].name.split("-")[1], run[-1].name.split("-")[2]
        kept = f" WHERE ts >= make_timestamp({int(before)})" if before is not None else ""
        query = f"SELECT * FROM read_parquet([{listed}]){kept} ORDER BY ts"
        target = self.root / "logs" / f"{name}-{start}-{end}"
        self._copy(database, query, target, {"refused": json.dumps(refused)})
        gone = [path for path in run if path != target]
        for path in gone:
            path.unlink()
        return len(gone)

    def _batch(
        self, source: BinaryIO, service: str
    ) -> tuple[list[bytes], Counter[str], int] | None:
        """Return (rows, refused lines by reason, offset after them); None without a complete
        line."""
        rows: list[bytes] = []
        refused: Counter[str] = Counter()
        place = source.tell()
        for _ in range(BATCH):
            line = source.readline(MOST_LINE + 1)
            size = len(line)
            if long := size > MOST_LINE:
                while line and not line.endswith(b"\n"):
                    line = source.readline(MOST_LINE)
                    size += len(line)
            if not line.endswith(b"\n"):
                break
            place += size
            if long:
                refused[REASONS[0]] += 1
            elif line.strip():
                row = log_row(line, service)
                if isinstance(row, str):
                    refused[row] += 1
                else:
                    rows.append(row)
        return (rows, refused, place) if rows or refused else None

    def _write(self, table: str, name: str, rows: list[bytes], metadata: Mapping[str, str]) -> None:
        columns = SCHEMA[table]
        kinds = {name: "BIGINT" if kind == "TIMESTAMP" else kind for name, kind in columns.items()}
        listed = ", ".join(f"{name}: '{kind}'" for name, kind in kinds.items())
        shown = ", ".join(
            f"make_timestamp({name}) AS {name}" if kind == "TIMESTAMP" else name
            for name, kind in columns.items()
        )
        duckdb = library()
        with tempfile.NamedTemporaryFile(dir=self.root / "tmp", suffix=".json") as lines:
            lines.write(b"\n".join(rows) or b"\n")
            lines.flush()
            with duckdb.connect(":memory:") as database:
                query = (
                    f"SELECT {shown} FROM read_json('{lines.name}', format = 'newline_delimited', "
                    f"columns = {{{listed}}}, maximum_object_size = {8 * MOST_LINE})"
                )
                try:
                    self._copy(database, query, self.root / table / f"{name}.parquet", metadata)
                except duckdb.Error as error:
                    reason = str(error).partition("\n")[0]
                    raise OptionError(f"{self.root}: {reason}", param="into") from None

    def _copy(self, database: Any, query: str, target: Path, metadata: Mapping[str, str]) -> None:
        """Write a file; it gets its name once it is on the disk."""
        quoted = ", ".join(f"{name}: '{_quoted(text)}'" for name, text in metadata.items())
        notes = f", KV_METADATA {{{quoted}}}" if metadata else ""
        handle, partial = tempfile.mkstemp(dir=self.root / "tmp", suffix=".parquet")
        os.close(handle)
        try:
            database.execute(
                f"COPY ({query}) TO '{partial}' (FORMAT parquet, COMPRESSION zstd{notes})"
            )
            with open(partial, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(partial, 0o644)
            os.replace(partial, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(partial)
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _names(self) -> list[str]:
        return os.listdir(self.root / "logs")

    def _spans(self, name: str) -> list[tuple[int, int]]:
        """Return (from, to) of the files of a source, without those contained in another."""
        spans = sorted(
            (
                (int(found[2]), int(found[3]))
                for one in self._names()
                if (found := NAME.fullmatch(one)) and found[1] == name
            ),
            key=lambda span: (span[0], -span[1]),
        )
        kept: list[tuple[int, int]] = []
        for span in spans:
            if not kept or span[1] > kept[-1][1]:
                kept.append(span)
        return kept

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Allow one writer at a time; remove files that a dead one left in `tmp`."""
        with file_errors(OptionError, f"{self.root} cannot be written", "into"):
            handle = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        with held(handle):
            for left in (self.root / "tmp").iterdir():
                if left.is_file():
                    left.unlink(missing_ok=True)
            yield


QUERIES = {name: query for name, _, query in read_sections(Path(__file__).with_name("queries.sql"))}


def library() -> Any:
    """Import DuckDB. Raises `OptionError` if it is not installed."""
    return history.library("fleet's store", "into", "fleet")


def lake_folder(given: Path | None) -> Path:
    """Return the folder of the store; by default in the cache folder."""
    return (given or cache_root() / "factory" / "fleet").expanduser().resolve()


def named(service: str) -> str:
    """Check the name of a service. Raises `OptionError`."""
    if SERVICE.fullmatch(service) is None:
        raise OptionError(
            f"service is {service!r:.80}, which is no name of letters, digits, points and dashes, "
            "63 at most",
            param="service",
        )
    return service


def _source(source: BinaryIO, service: str) -> str | None:
    """Return a source's id, made of its service and first line; None until there is such a line."""
    first = source.readline(MOST_LINE)
    if not first.endswith(b"\n") and len(first) < MOST_LINE:
        return None
    return hashlib.sha256(service.encode() + b"\0" + first).hexdigest()[:16]


def _told(database: Any, path: Path) -> Counter[str]:
    rows = database.execute(
        "SELECT value FROM parquet_kv_metadata(?) WHERE key = 'refused'::BLOB", [str(path)]
    ).fetchall()
    try:
        return Counter({k: int(v) for (text,) in rows for k, v in json.loads(text).items()})
    except (ValueError, TypeError, AttributeError):
        raise Untrusted(f"{path.name} does not say what was refused") from None


def _quoted(text: str) -> str:
    return text.replace("'", "''")
