"""A check of everything in a store against its digests, which lists each mismatch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..base.errors import Untrusted
from ..loader.partial import file_sha256
from .graph import kept
from .key import is_digest
from .store import INDEX_TYPE, LAYOUT, MANIFEST_TYPE, Descriptor, Store, index_document, name_of

COPIES = ("models", "profiles", "evidence")
"""Folders for people and for the loader: each file in them is also a blob."""


def problems(store: Store) -> Iterator[str]:
    """Yield one line for each entry of the store that does not match its name or digest."""
    blobs, layout = store.root / "blobs" / "sha256", store.root / "oci-layout"
    if not layout.is_file() or layout.read_bytes() != LAYOUT:
        yield "oci-layout does not say version 1.0.0"
    sound: set[str] = set()
    linked: dict[tuple[int, int], str] = {}
    for path in _files(blobs):
        linked[_node(path)] = found = file_sha256(path)
        if path == blobs / found:
            sound.add(found)
        else:
            yield f"blobs/sha256/{path.name} has other bytes than its name says"
    for path in (path for folder in COPIES for path in _files(store.root / folder)):
        if (linked.get(_node(path)) or file_sha256(path)) not in sound:
            yield f"{path.relative_to(store.root)} has bytes of no blob"
    for path in _files(store.root / "stages"):
        key = f"sha256:{path.name}"
        result = kept(store, key) if is_digest(key) else "its name is no key"
        if isinstance(result, str):
            yield f"stages/{path.name}: {result}"
    try:
        named(store)
    except Untrusted as error:
        yield f"index.json: {error.message}"


def named(store: Store) -> dict[str, Descriptor]:
    """Return the manifests of the index by name. Raises `Untrusted` if the index is not as it was
    written."""
    entries = store.index()
    try:
        found = {name_of(entry): Descriptor.read(entry) for entry in entries}
    except (AttributeError, TypeError):
        raise Untrusted("it is not an index") from None
    if (store.root / "index.json").read_bytes() != index_document(found):
        raise Untrusted("it is not as it was written")
    for name, one in found.items():
        if one.media_type not in (MANIFEST_TYPE, INDEX_TYPE) or not store.has(one):
            raise Untrusted(f"{name} names no manifest of the store, or one of another size")
    store.closure(*found.values())
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _node(path: Path) -> tuple[int, int]:
    """Return an identity shared by all hard links of a file."""
    return (found := path.stat()).st_dev, found.st_ino
