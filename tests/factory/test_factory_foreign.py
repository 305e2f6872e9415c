"""Graphs that others made, and the names in them: bounded, and refused by a typed error."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from oci_registry import OciRegistry, running
from test_factory_rings import Workshop

from headrace.base.errors import Untrusted
from headrace.factory.audit import named
from headrace.factory.bundle import read_bundle, take_in, write_bundle
from headrace.factory.key import canonical
from headrace.factory.registry import Remote
from headrace.factory.store import (
    DEEPEST,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Store,
    index_document,
)

BYTES = "application/octet-stream"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def doubling(store: Store, levels: int) -> Descriptor:
    """An index of so many levels, each of which names the next twice."""
    leaf = store.put(b"leaf", BYTES)
    told = {"mediaType": MANIFEST_TYPE, "config": leaf.document(), "layers": [leaf.document()]}
    one = store.put(canonical(told), MANIFEST_TYPE)
    for _ in range(levels - 1):
        parts = [one.document()] * 2
        one = store.put(canonical({"mediaType": INDEX_TYPE, "manifests": parts}), INDEX_TYPE)
    return one


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The documents that are read."""
    found: list[str] = []
    read = Store.document

    def counted(self: Store, digest: str) -> dict[str, object]:
        found.append(digest)
        return read(self, digest)

    monkeypatch.setattr(Store, "document", counted)
    return found


def test_what_is_named_twice_is_read_once(store: Store, reads: list[str]) -> None:
    root = doubling(store, 20)
    assert len(store.closure(root)) == 21
    assert len(reads) == len(set(reads)) == 20
    store.tag("one", root)
    store.tag("two", doubling(store, 21))
    reads.clear()
    assert set(named(store)) == {"one", "two"}
    assert len(reads) == len(set(reads)) == 21


@pytest.mark.parametrize("levels", [DEEPEST + 1, 2_000])
def test_a_graph_that_is_too_deep_is_refused(store: Store, levels: int) -> None:
    with pytest.raises(Untrusted, match=f"{DEEPEST} levels"):
        store.closure(doubling(store, levels))


def test_a_graph_that_is_too_large_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = doubling(store, 10)
    monkeypatch.setattr("headrace.factory.store.MOST_PARTS", 11)
    assert len(store.closure(root)) == 11
    monkeypatch.setattr("headrace.factory.store.MOST_PARTS", 10)
    with pytest.raises(Untrusted, match="10 blobs"):
        store.closure(root)


def test_what_is_needed_comes_before_what_needs_it(store: Store) -> None:
    """A manifest may be named before another that needs it."""
    leaf = store.put(b"leaf", BYTES)
    inner = store.put(canonical({"layers": [leaf.document()]}), MANIFEST_TYPE)
    outer = store.put(canonical({"manifests": [inner.document()]}), INDEX_TYPE)
    told = {"manifests": [outer.document(), inner.document(), outer.document()]}
    root = store.put(canonical(told), INDEX_TYPE)
    assert store.closure(root) == [leaf, inner, outer, root]


def test_a_hostile_bundle_is_refused_in_no_time(tmp_path: Path, reads: list[str]) -> None:
    shop, made = Workshop(tmp_path / "cache"), Store(tmp_path / "made")
    path = tmp_path / "bundle.tar"
    root = doubling(made, 30)
    assert write_bundle(made, {"evil": root}, path) > 0
    for levels in (30, 40):
        root = doubling(made, levels)
        with tarfile.open(path, "w") as tar:
            index = index_document({"evil": root})
            files = [("index.json", index)]
            files += [
                (f"blobs/sha256/{one.name}", one.read_bytes())
                for one in (made.root / "blobs" / "sha256").iterdir()
            ]
            for name, data in files:
                head = tarfile.TarInfo(name)
                head.size = len(data)
                tar.addfile(head, io.BytesIO(data))
        reads.clear()
        with pytest.raises(Untrusted):
            take_in(shop.store, read_bundle(shop.store, path), shop.rings._trust)
        assert len(reads) < 2 * levels
        assert shop.store.index() == []


@pytest.fixture
def server() -> Iterator[OciRegistry]:
    with running() as made:
        yield made


def test_a_hostile_registry_is_asked_once_for_each(store: Store, server: OciRegistry) -> None:
    made = Store(store.root.parent / "made")
    root = doubling(made, 20)
    for one in made.closure(root):
        data = made.blob(one.digest).read_bytes()
        if one.media_type == BYTES:
            server.blobs[one.digest] = data
        else:
            server.manifests[one.digest] = one.media_type, data
    server.tags["evil"] = root.digest
    moved: list[str] = []
    remote = Remote(f"{server.host}/models:evil")
    assert remote.pull(store, lambda one, _fresh: moved.append(one.digest)) == root
    assert len(moved) == len(set(moved)) == 21
    deep = doubling(made, 500)
    for path in (made.root / "blobs" / "sha256").iterdir():
        data = path.read_bytes()
        if data.startswith(b"{"):
            kind = json.loads(data)["mediaType"]
            server.manifests[f"sha256:{path.name}"] = kind, data
    server.tags["deep"] = deep.digest
    with pytest.raises(Untrusted, match="levels"):
        Remote(f"{server.host}/models:deep").pull(store, lambda _one, _fresh: None)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/etc/evil",
        "../evil",
        "a/../../evil",
        "a/..",
        "a/./b",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        "\u202egnp.exe",
        "\ud800",
        "x" * 256,
    ],
)
def test_a_name_that_leaves_its_folder_is_refused(store: Store, name: str) -> None:
    one = store.put(b"evil", BYTES)
    before = sorted(store.root.parent.rglob("*"))
    with pytest.raises(Untrusted, match="is no name of a file in a folder"):
        store.checkout({name: one})
    assert sorted(store.root.parent.rglob("*")) == before


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a")])
def test_a_file_that_is_a_folder_too_is_refused(store: Store, names: tuple[str, str]) -> None:
    one = store.put(b"evil", BYTES)
    with pytest.raises(Untrusted, match="cannot be a file and a folder"):
        store.checkout(dict.fromkeys(names, one))


def test_a_link_in_a_checkout_is_not_followed(store: Store, tmp_path: Path) -> None:
    one = store.put(b"weights", BYTES)
    folder = store.checkout({"inside/weights": one})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_bytes(b"weights")
    (folder / "inside" / "weights").unlink()
    (folder / "inside").rmdir()
    (folder / "inside").symlink_to(elsewhere)
    assert store.checkout({"inside/weights": one}) == folder
    assert not (folder / "inside").is_symlink()
    assert (elsewhere / "weights").read_bytes() == b"weights"
    for path in sorted(folder.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder.rmdir()
    (elsewhere / "inside").mkdir()
    (elsewhere / "inside" / "weights").write_bytes(b"weights")
    folder.symlink_to(elsewhere)
    assert store.checkout({"inside/weights": one}) == folder
    assert not folder.is_symlink()
