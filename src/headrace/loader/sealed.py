"""Digests that a quantised model carries: its bytes are checked once, when it is first opened.

A GGUF has under `KEY` in its metadata the SHA-256 of its file with 64 zeros in the digest's place,
a shard of safetensors likewise, at the beginning of its header: what others write anew from it has
none. A file whose digest was right is trusted as long as its size and time of change stay.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..base.environment import cache_root
from ..base.errors import Untrusted
from .cache import Record

KEY = "headrace.sha256"
EMPTY = "0" * 64
_PIECE = 1 << 20


ENTRY = struct.pack("<Q", len(KEY)) + KEY.encode() + struct.pack("<IQ", 8, len(EMPTY))
"""Beginning of the digest's entry in a GGUF's metadata: its key, its type, its length."""
HEADER = f'{{"__metadata__": {{"{KEY}": "'.encode()
"""Beginning of a shard's header, before the digest."""
SHARD = 8 + len(HEADER)
"""Place of the digest in a shard."""


def digest_without(file: BinaryIO, at: int) -> str:
    """Return the SHA-256 of a file with 64 zeros at `at`."""
    digest, place = hashlib.sha256(), 0
    file.seek(0)
    while piece := file.read(_PIECE):
        if place < at + len(EMPTY) and at < place + len(piece):
            changed = bytearray(piece)
            first, last = max(at, place), min(at + len(EMPTY), place + len(piece))
            changed[first - place : last - place] = b"0" * (last - first)
            piece = bytes(changed)
        digest.update(piece)
        place += len(piece)
    return digest.hexdigest()


def seal(file: BinaryIO, at: int) -> None:
    """Write the digest of an open file into it, in place of the zeros at `at`."""
    found = digest_without(file, at)
    file.seek(at)
    file.write(found.encode())
    file.seek(0, 2)


def check(path: Path, digest: Any, at: int) -> None:
    """Compare a file with the digest that its model has. Raises `Untrusted`."""
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise Untrusted(f"{path.name}: {KEY} must be 64 hexadecimal digits, not {digest!r:.80}")
    folder, name = cache_root() / "checked", str(path.resolve())
    record = Record(folder)
    if record.knows(name, path.stat().st_size, digest):
        return
    with path.open("rb") as file:
        found = digest_without(file, at)
    if found != digest:
        raise Untrusted(
            f"{path.name} has other bytes than when it was quantised: SHA-256 {found[:12]}…, "
            f"{digest[:12]}… is written in it; make or fetch it again, or take {KEY} out of it if "
            f"the change is yours (gguf-new-metadata --remove-metadata {KEY} OLD NEW)"
        )
    with suppress(OSError):  # A cache that cannot be written costs hashing at every start.
        folder.mkdir(parents=True, exist_ok=True)
    files = record.data["files"]
    record.data["files"] = {old: one for old, one in files.items() if Path(old).exists()}
    record.add(name, digest)


def check_shards(paths: Iterable[Path]) -> None:
    """Compare shards with the digests that they have. Raises `Untrusted`."""
    for path in paths:
        with path.open("rb") as file:
            head = file.read(SHARD + len(EMPTY))
        if head[8:SHARD] == HEADER:
            check(path, head[SHARD:].decode(errors="replace"), SHARD)
