"""Profiles, weights and images to registries and in bundles, and what is not taken in."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factory_cell import DAMAGES, rewrite
from oci_registry import OciRegistry, running
from test_factory_rings import Workshop

from headrace.base.errors import DownloadError, NotFound, OptionError, Untrusted
from headrace.factory import registry as module
from headrace.factory.artifact import PROFILE_ARTIFACT, profile_manifest
from headrace.factory.audit import named
from headrace.factory.bundle import read_bundle, shipped, take_in, write_bundle
from headrace.factory.key import canonical, digest_of
from headrace.factory.profile import envelopes, profile_problems
from headrace.factory.registry import Remote
from headrace.factory.store import MANIFEST_TYPE, Descriptor, Store


def quiet(_one: Descriptor, _moved: bool) -> None:
    pass


@pytest.fixture
def server() -> Iterator[OciRegistry]:
    with running() as made:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path / "cache")
    made.profile("one")
    return made


@pytest.fixture
def other(shop: Workshop, tmp_path: Path) -> Workshop:
    """Another machine that trusts the first one's key."""
    trusted = tmp_path / "other" / "factory" / "trusted"
    shutil.copytree(shop.cache / "factory" / "trusted", trusted)
    return Workshop(tmp_path / "other")


def test_a_layer_that_registries_refuse_is_not_sent(
    server: OciRegistry, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest = max(one.size for one in shop.store.closure(shipped(shop.store, shop.rings, "one")))
    monkeypatch.setattr(module, "LARGEST", largest - 1)
    with pytest.raises(OptionError, match=f"has {largest:,} bytes, registries take"):
        push(shop, f"{server.host}/models:1")
    with pytest.raises(NotFound):
        pull(shop, f"{server.host}/models:1")
    monkeypatch.setattr(module, "LARGEST", largest)
    push(shop, f"{server.host}/models:1")


def push(shop: Workshop, reference: str) -> Descriptor:
    root = shipped(shop.store, shop.rings, "one")
    Remote(reference).push(shop.store, root, quiet)
    return root


def pull(shop: Workshop, reference: str) -> list[str]:
    found = Remote(reference).pull(shop.store, quiet)
    return take_in(shop.store, {"anything": found}, shop.rings._trust)


def test_a_profile_goes_to_a_registry_and_is_served_elsewhere(
    shop: Workshop, other: Workshop, server: OciRegistry
) -> None:
    reference = f"{server.host}/team/models:one"
    root = push(shop, reference)
    assert server.tags["one"] == root.digest
    assert pull(other, reference) == ["one"]
    assert envelopes(other.store) == envelopes(shop.store)
    assert list(profile_problems(other.store, other.rings._trust)) == []
    assert other.promote("one", "production").profile == shop.rings.find("one").digest
    # From there to a second registry: the same bytes.
    with running() as second:
        again = push(other, f"{second.host}/elsewhere:one")
        assert again == root
        assert second.manifests == server.manifests
        assert second.blobs == server.blobs
    assert pull(other, f"{server.host}/team/models@{root.digest}") == ["one"]


def test_the_weights_are_a_modelpack_model(shop: Workshop) -> None:
    manifest = shop.store.document(profile_manifest(shop.store, shop.rings.find("one")).digest)
    assert manifest["artifactType"] == PROFILE_ARTIFACT
    model = shop.store.document(manifest["subject"]["digest"])
    assert model["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    (layer,) = model["layers"]
    assert layer["annotations"]["org.cncf.model.filepath"] == "weights"
    assert shop.store.read(layer["digest"]) == b"one", "as the file lies, not packed"
    config = shop.store.document(model["config"]["digest"])
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"]]}


def test_what_is_there_is_not_sent_again(shop: Workshop, server: OciRegistry) -> None:
    push(shop, f"{server.host}/models:one")
    before = len(server.calls)
    push(shop, f"{server.host}/models:one")
    assert not [call for call in server.calls[before:] if "uploads" in call]


def test_large_blobs_go_in_pieces(
    shop: Workshop, other: Workshop, server: OciRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    push(shop, f"{server.host}/models:one")
    assert [call for call in server.calls if call.startswith("PATCH")]
    assert pull(other, f"{server.host}/models:one") == ["one"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_changed_comes_out_of_a_registry(
    shop: Workshop, other: Workshop, server: OciRegistry, damage: object, tmp_path: Path
) -> None:
    """Each blob and manifest in turn has other bytes than its digest says."""
    assert callable(damage)
    root, keys = push(shop, f"{server.host}/models:one"), other.rings._trust
    parts: list[dict[str, Any]] = [server.blobs, server.manifests]
    places = [(part, digest) for part in parts for digest in part]
    assert len(places) == 6, "weights, two configurations, the envelope; two manifests"
    for number, (held, digest) in enumerate(places):
        before = held[digest]
        held[digest] = damage(before) if held is server.blobs else (before[0], damage(before[1]))
        store = Store(tmp_path / f"store {number}")
        with pytest.raises(Untrusted, match="other bytes"):
            Remote(f"{server.host}/models@{root.digest}").pull(store, quiet)
        held[digest] = before
        assert named(store) == {}
    found = Remote(f"{server.host}/models:one").pull(store, quiet)
    assert take_in(store, {"one": found}, keys) == ["one"]


def test_a_strangers_profile_has_no_name_here(
    shop: Workshop, tmp_path: Path, server: OciRegistry
) -> None:
    push(shop, f"{server.host}/models:one")
    stranger = Workshop(tmp_path / "stranger")
    stranger.profile("mine")
    with pytest.raises(Untrusted, match="whose key is not trusted here"):
        pull(stranger, f"{server.host}/models:one")
    assert set(named(stranger.store)) == {"mine"}


def test_a_manifest_that_is_not_its_profiles_is_refused(shop: Workshop, other: Workshop) -> None:
    """A signature that holds, among other layers: somebody else's weights as subject."""
    shop.profile("two")
    found = [profile_manifest(shop.store, shop.rings.find(name)) for name in ("one", "two")]
    documents = [shop.store.document(one.digest) for one in found]
    mixed = canonical({**documents[0], "subject": documents[1]["subject"]})
    root = shop.store.put(mixed, MANIFEST_TYPE)
    with pytest.raises(Untrusted, match="is not that of its profile"):
        take_in(shop.store, {"one": root}, shop.rings._trust)
    with pytest.raises(Untrusted, match="neither a profile nor an image"):
        take_in(shop.store, {"x": Descriptor.read(documents[0]["subject"])}, shop.rings._trust)


def test_registries_that_are_out_of_order_are_named(shop: Workshop, server: OciRegistry) -> None:
    for reference in ("models", "models:one", f"{server.host}/models", "/x:y", "host.a/"):
        with pytest.raises(OptionError, match=r"is no host/repository:tag"):
            Remote(reference)
    with pytest.raises(NotFound, match="has no two"):
        Remote(f"{server.host}/models:two").pull(shop.store, quiet)
    gone = f"{server.host}/models:one"
    server.server_close()
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:\d+ cannot be asked"):
        push(shop, gone) if server.shutdown() is None else None


# Through the air gap


def bundle(shop: Workshop, path: Path) -> Path:
    write_bundle(shop.store, {"one": shipped(shop.store, shop.rings, "one")}, path)
    return path


def test_a_bundle_brings_everything(shop: Workshop, other: Workshop, tmp_path: Path) -> None:
    path = bundle(shop, tmp_path / "one.tar")
    things = read_bundle(other.store, path)
    assert take_in(other.store, things, other.rings._trust) == ["one"]
    assert other.promote("one", "dev").profile == shop.rings.find("one").digest
    # The same bundle, written where it was taken in.
    assert bundle(other, tmp_path / "again.tar").read_bytes() == path.read_bytes()
    with pytest.raises(OptionError, match=r"one\.tar cannot be written: File exists"):
        bundle(shop, path)


@pytest.mark.parametrize("part", ["index.json", "blobs/sha256/"])
def test_a_bundle_that_was_changed_is_refused(
    shop: Workshop, other: Workshop, tmp_path: Path, part: str
) -> None:
    """Every file of it in turn: a bit, a byte less, a byte more, or not there at all."""
    whole = bundle(shop, tmp_path / "one.tar")
    with tarfile.open(whole) as tar:
        names = [name for name in tar.getnames() if name.startswith(part)]
    for name in names:
        for damage in [*DAMAGES, None]:
            path = tmp_path / "bad.tar"
            with tarfile.open(whole) as tar, tarfile.open(path, "w") as bad:
                for one in tar:
                    file = tar.extractfile(one)
                    assert file is not None
                    data = file.read()
                    if one.name == name:
                        if damage is None:
                            continue
                        data = damage(data)
                    one.size = len(data)
                    copy = tmp_path / "copy"
                    copy.write_bytes(data)
                    with copy.open("rb") as source:
                        bad.addfile(one, source)
            fresh = Store(tmp_path / f"store-{digest_of(path.read_bytes())[7:20]}")
            if name == "index.json" and damage is None:
                assert read_bundle(fresh, path) == {}
                continue
            with pytest.raises(Untrusted):
                take_in(fresh, read_bundle(fresh, path), other.rings._trust)
            assert named(fresh) == {}


def test_what_is_no_bundle_is_refused(other: Workshop, tmp_path: Path) -> None:
    path = tmp_path / "bad.tar"
    path.write_bytes(b"no tar")
    with pytest.raises(Untrusted, match="is no bundle"):
        read_bundle(other.store, path)
    for name in ("../../x", "stages/x", "blobs/sha256/short"):
        with tarfile.open(path, "w") as tar:
            tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(Untrusted, match="is no file of a bundle"):
            read_bundle(other.store, path)
    with pytest.raises(NotFound, match="cannot be read"):
        read_bundle(other.store, tmp_path / "nowhere")


@pytest.mark.slow
def test_the_command_line_ships(shop: Workshop, other: Workshop, server: OciRegistry) -> None:
    reference = f"{server.host}/models:one"
    assert "0 were there" in shop.call("publish", "one", reference)
    assert other.call("load", reference, "--store", str(other.store.root)) == "one: taken in\n"
    file = shop.cache / "one.tar"
    assert "bytes" in shop.call("bundle", str(file), "one")
    assert other.call("load", str(file)) == "one: taken in\n"
    other.call("verify")
    rows = json.loads(other.call("profiles", "--json"))
    assert [row["profile"] for row in rows] == ["one"]
    rewrite(file, file.read_bytes().replace(b'"payload"', b'"Payload"'))
    assert "other bytes" in other.call("load", str(file), status=Untrusted.exit_code)
    assert "is no host" in shop.call("publish", "one", "models:one", status=2)
