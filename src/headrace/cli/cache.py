"""`headrace cache`: the folder of the context cache, with or without a server that uses it."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, BinaryIO

import httpx
import typer
from rich.console import Console
from rich.table import Table

from ..base.config import parse_size
from ..base.errors import InvalidRequest, Unreachable, file_errors
from ..loader.cache import root
from ..worker.disk import BLOCK_NAME, FOLDER, StoredBlock, is_block, put, stored_blocks
from ..worker.seal import forget_keys
from .flags import argument, flag
from .remote import API_KEY, Url, named

command = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="The context cache on the disk: what was computed, and comes back after a restart.",
)

CacheDir = Annotated[str | None, flag("As of headrace serve.")]
Engine = Annotated[str, flag("Of this engine only: its first digits.")]
Tenant = Annotated[str, flag("Of this caller only: its first digits.")]
UnusedDays = Annotated[float, flag("Only what was not used for so long.", min=0)]
Keys = Annotated[Path | None, flag("Folder of the keys: those of the callers go first.")]
PIN_COLUMNS = ("name", "key", "tokens", "cached_tokens", "problem")
FIRST_LINE = b"headrace blocks 1\n"
MOST_NAME = 128
"""Most bytes of the line before a block."""
MOST_BLOCK = 256 << 20
"""Most bytes of a block read from a file."""
MEBI = 1 << 20


@command.command()
def show(cache_dir: CacheDir = None) -> None:
    """List engines and callers with what they hold."""
    held: defaultdict[tuple[str, str], list[StoredBlock]] = defaultdict(list)
    for block in stored_blocks(_folder(cache_dir)):
        held[block.path.parent.parent.name, block.tenant].append(block)
    table = Table("engine", "tenant", "blocks", "MiB", "last used", box=None, pad_edge=False)
    for (engine, tenant), blocks in sorted(held.items()):
        size = sum(block.nbytes for block in blocks) / MEBI
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(b.used for b in blocks)))
        table.add_row(engine[:12], tenant[:12], str(len(blocks)), f"{size:.1f}", used)
    Console(markup=False).print(table)


@command.command()
def pins(
    server: Annotated[
        str | None, argument("The operator's port of a server.", show_default=False)
    ] = None,
    url: Url = None,
    key: Annotated[
        str | None, flag("API key of an operator.", *API_KEY, envvar="HEADRACE_API_KEY")
    ] = None,
) -> None:
    """List the prompts that a server keeps, with the cached part of each at its last use."""
    url = named(server, url)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/operate/pins", headers=headers)
        answer.raise_for_status()
        found = answer.json()["pins"]
    except httpx.HTTPStatusError as refused:
        raise InvalidRequest(f"{url} answers {refused.response.status_code}", param="url") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as wrong:
        raise Unreachable(f"{url} is no operator's port of a server: {wrong}") from None
    table = Table(*(name.replace("_", " ") for name in PIN_COLUMNS), box=None, pad_edge=False)
    for pin in found:
        table.add_row(*(str(pin[name]) for name in PIN_COLUMNS))
    Console(markup=False).print(table)


@command.command()
def measure(cache_dir: CacheDir = None, most: str = "1GiB") -> None:
    """Read and verify blocks, up to `--most` bytes; remove the damaged."""
    left, read, damaged, spent = parse_size(most, "most"), 0, 0, 0.0
    for block in stored_blocks(_folder(cache_dir)):
        if block.nbytes > left:
            break
        begin = time.perf_counter()
        data = _content(block)
        if data is None:
            continue
        whole = is_block(_name(block), memoryview(data))
        spent += time.perf_counter() - begin
        left -= len(data)
        read += len(data)
        if not whole:
            damaged += 1
            block.path.unlink(missing_ok=True)
    rate = read / spent / MEBI if spent else 0.0
    print(f"{read / MEBI:.1f} MiB at {rate:.0f} MiB/s with their digests; {damaged} damaged")


@command.command("export")
def export_blocks(
    file: str, cache_dir: CacheDir = None, engine: Engine = "", tenant: Tenant = ""
) -> None:
    """Write whole blocks to FILE; `-` is standard output."""
    chosen = _chosen(cache_dir, engine, tenant)
    with (
        file_errors(InvalidRequest, f"{file} cannot be written", "file"),
        Path(file).open("wb") if file != "-" else sys.stdout.buffer as out,
    ):
        out.write(FIRST_LINE)
        count = sum(_export_one(out, block) for block in chosen)
    print(f"{count} blocks exported", file=sys.stderr)


@command.command("import")
def import_blocks(file: str, cache_dir: CacheDir = None, size: str = "8GiB") -> None:
    """Take the whole blocks of FILE, up to `--size` bytes; `-` is standard input."""
    left, folder, taken, refused = parse_size(size, "size"), _folder(cache_dir), 0, 0
    with (
        file_errors(InvalidRequest, f"{file} cannot be taken", "file"),
        Path(file).open("rb") if file != "-" else sys.stdin.buffer as source,
    ):
        if source.readline(MOST_NAME) != FIRST_LINE:
            raise InvalidRequest(f"{file} is not what headrace cache export writes", param="file")
        while line := source.readline(MOST_NAME):
            name, nbytes = _announced(line, file)
            if nbytes > left:
                print("what follows is more than --size allows", file=sys.stderr)
                break
            data = source.read(nbytes)
            if not is_block(name, memoryview(data)):
                refused += 1
                continue
            put(folder, name, data)
            left -= nbytes
            taken += 1
    print(f"{taken} blocks imported, {refused} refused", file=sys.stderr)


@command.command()
def forget(
    cache_dir: CacheDir = None,
    engine: Engine = "",
    tenant: Tenant = "",
    unused_days: UnusedDays = 0.0,
    keys: Keys = None,
) -> None:
    """Remove blocks: all, or those that the options select."""
    before, count = time.time() - unused_days * 86400, 0
    if keys is not None:
        if engine or unused_days:
            raise InvalidRequest(
                "a key seals what all engines keep of a caller: not with --engine or --unused-days",
                param="keys",
            )
        print(f"{forget_keys(keys, tenant)} keys forgotten", file=sys.stderr)
    for block in _chosen(cache_dir, engine, tenant):
        if block.used <= before:
            block.path.unlink(missing_ok=True)
            count += 1
    print(f"{count} blocks forgotten", file=sys.stderr)


def _folder(cache_dir: str | None) -> Path:
    return root(cache_dir) / FOLDER


def _name(block: StoredBlock) -> str:
    return "/".join(block.path.parts[-3:])


def _chosen(cache_dir: str | None, engine: str, tenant: str) -> list[StoredBlock]:
    """Select the blocks whose engine and caller start with these texts."""
    return [
        block
        for block in stored_blocks(_folder(cache_dir))
        if BLOCK_NAME.fullmatch(name := _name(block))
        and name.startswith(engine)
        and block.tenant.startswith(tenant)
    ]


def _content(block: StoredBlock) -> bytes | None:
    """Read a block; None if a server has removed it since."""
    try:
        return block.path.read_bytes()
    except OSError:
        return None


def _export_one(out: BinaryIO, block: StoredBlock) -> bool:
    data = _content(block)
    if data is None or not is_block(_name(block), memoryview(data)):
        return False
    out.write(f"{_name(block)} {len(data)}\n".encode())
    out.write(data)
    return True


def _announced(line: bytes, file: str) -> tuple[str, int]:
    """Parse name and size of the next block."""
    name, _, nbytes = line.decode("ascii", "replace").rstrip("\n").partition(" ")
    fine = nbytes.isascii() and nbytes.isdecimal() and len(nbytes) < 12
    if not fine or int(nbytes) > MOST_BLOCK or not BLOCK_NAME.fullmatch(name):
        raise InvalidRequest(f"{file} is damaged: no block follows where one should", param="file")
    return name, int(nbytes)
