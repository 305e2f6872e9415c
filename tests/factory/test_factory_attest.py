"""Provenance: in SLSA's form, about the thing that it lies beside, and believed nowhere else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from factory_cell import DAMAGES, rewrite
from oci_registry import OciRegistry, running
from test_factory_rings import Workshop

from headrace.base.errors import Untrusted
from headrace.factory.attest import (
    ATTESTATION,
    PREDICATE,
    attest_profile,
    attestation,
    attestation_problems,
    check,
    provenance,
)
from headrace.factory.audit import named
from headrace.factory.bundle import beside, read_bundle, shipped, take_in, write_bundle
from headrace.factory.key import canonical
from headrace.factory.registry import Remote
from headrace.factory.revoke import revoke
from headrace.factory.sign import Withdrawn, opened, sign, signer
from headrace.factory.store import INDEX_TYPE, Descriptor, Store, tag_beside

Damage = Callable[[bytes], bytes]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Two profiles and an image, each with its provenance."""
    made = Workshop(tmp_path / "cache")
    for name in ("one", "two"):
        made.profile(name)
        profile = made.rings.find(name)
        made.store.attest(profile.digest, attest_profile(made.store, profile, made.key, {}))
    index = image(made.store, "headrace:9")
    told = provenance("image", [("i", index.digest)], [], made.key, asked={}, found={})
    made.store.attest(index.digest, attestation(made.store, index, [told]))
    return made


@pytest.fixture
def other(shop: Workshop, tmp_path: Path) -> Workshop:
    """Another machine that trusts the first one's key."""
    trusted = tmp_path / "other" / "factory" / "trusted"
    shutil.copytree(shop.cache / "factory" / "trusted", trusted)
    return Workshop(tmp_path / "other")


@pytest.fixture
def server() -> Iterator[OciRegistry]:
    with running() as made:
        yield made


def image(store: Store, name: str) -> Descriptor:
    text = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [],
        "annotations": {"n": name},
    }
    store.tag(name, made := store.put(canonical(text), INDEX_TYPE))
    return made


def held(shop: Workshop, name: str) -> Path:
    """The file that names what is attested about a profile."""
    digest = shop.rings.find(name).digest
    return shop.store.root / "attested" / digest.removeprefix("sha256:")


def told(shop: Workshop) -> list[str]:
    return list(attestation_problems(shop.store, shop.rings._trust))


def statements(shop: Workshop, name: str) -> list[dict[str, Any]]:
    document = shop.store.document(held(shop, name).read_text())
    data = [shop.store.read(one["digest"]) for one in document["layers"]]
    return [opened(one, shop.rings._trust) for one in data]


def things(shop: Workshop, *names: str) -> dict[str, Descriptor]:
    found: dict[str, Descriptor] = {}
    for name in names:
        found[name] = shipped(shop.store, shop.rings, name)
        attested = beside(shop.store, found[name])
        assert attested is not None
        found[f"{name}.att"] = attested
    return found


def test_provenance_is_slsas(shop: Workshop) -> None:
    """Names and nesting are those of https://slsa.dev/spec/v1.0/provenance."""
    weights, profile = statements(shop, "one")
    assert {weights["predicateType"], profile["predicateType"]} == {PREDICATE}
    body = shop.rings.find("one").body
    (file,) = body.model.files
    made = weights["predicate"]
    assert set(made) == {"buildDefinition", "runDetails"}
    assert made["buildDefinition"]["buildType"] == "urn:headrace:build:weights:v1"
    assert made["buildDefinition"]["externalParameters"] == {"model": "one"}
    resource = {"name": "weights", "digest": {"sha256": file.digest.removeprefix("sha256:")}}
    assert made["buildDefinition"]["resolvedDependencies"] == [resource]
    assert resource in weights["subject"]
    keyid = shop.key.public_key.keyid
    assert made["runDetails"]["builder"]["id"] == f"urn:headrace:builder:{keyid}"
    digests = [f"sha256:{one['digest']['sha256']}" for one in profile["subject"]]
    assert digests == [
        shop.rings.find("one").digest,
        shipped(shop.store, shop.rings, "one").digest,
    ]
    # Made of the weights whose own provenance lies beside it.
    assert profile["predicate"]["buildDefinition"]["resolvedDependencies"] == [
        weights["subject"][0]
    ]
    assert told(shop) == []


@pytest.mark.parametrize(
    "damage", [*DAMAGES, lambda _data: b"", lambda _data: b"sha256:" + b"0" * 64]
)
def test_a_pointer_that_was_changed_is_named(shop: Workshop, damage: Damage) -> None:
    path = held(shop, "one")
    rewrite(path, damage(data := path.read_bytes()))
    # A byte more is one that nobody reads, but by `damage` it makes no digest.
    assert [line[:20] for line in told(shop)] == [f"attested/{path.name}"[:20]]
    rewrite(path, data)
    assert told(shop) == []


def test_provenance_of_something_else_is_named(shop: Workshop, tmp_path: Path) -> None:
    """Another profile's, a stranger's, a profile as its layer, one without the files."""
    path, store, trust = held(shop, "one"), shop.store, shop.rings._trust
    profile, root = shop.rings.find("one"), shipped(shop.store, shop.rings, "one")
    stranger = signer(None, str(tmp_path / "stranger"))
    about = [("one", profile.digest), ("manifest", root.digest)]
    empty = provenance("profile", about, [], shop.key, asked={}, found={})
    bent = opened(empty, trust)
    bent["predicate"]["runDetails"]["metadata"] = {"finishedOn": "now"}
    plain = store.put(canonical({"layers": []}), "application/json")
    cases = {
        held(shop, "two").read_text(): "is not about",
        attest_profile(store, profile, stranger, {}).digest: "whose key is not trusted here",
        attestation(store, root, [store.read(profile.digest)]).digest: "is no provenance",
        attestation(store, root, []).digest: "is not about",
        attestation(store, root, [empty]).digest: "does not name weights",
        attestation(store, root, [sign(bent, shop.key)]).digest: "is not in shape",
        plain.digest: "is no attestation",
        root.digest: "is not as it was written",
    }
    for digest, said in cases.items():
        rewrite(path, digest.encode())
        (line,) = told(shop)
        assert line.startswith(f"attested/{path.name}: ")
        assert said in line
    (store.root / "attested" / "stranger").write_text(root.digest)
    assert any("attested/stranger: it names no attestation" in line for line in told(shop))


def test_an_attestation_has_one_spelling(shop: Workshop) -> None:
    document = shop.store.document(held(shop, "one").read_text())
    assert document["artifactType"] == ATTESTATION
    bent = shop.store.put(canonical({**document, "annotations": {}}), "application/json")
    with pytest.raises(Untrusted, match="not as it was written"):
        check(shop.store, shop.rings._trust, bent.digest, shop.rings.find("one").digest)


def test_what_was_revoked_has_no_provenance(shop: Workshop) -> None:
    profile, attested = shop.rings.find("one"), held(shop, "one").read_text()
    revoke({profile.body.model.files[0].digest: "it leaks"}, shop.key, str(shop.cache))
    with pytest.raises(Withdrawn, match="was revoked"):
        check(shop.store, shop.rings._trust, attested, profile.digest)


# It travels


def test_it_goes_to_a_registry_as_cosign_names_it(
    shop: Workshop, other: Workshop, server: OciRegistry
) -> None:
    for name in ("one", "headrace:9"):
        remote = Remote(f"{server.host}/here:tag")
        root, attested = things(shop, name).values()
        remote.push(shop.store, root, lambda *_: None)
        remote.push(shop.store, attested, lambda *_: None, tag_beside(root))
        assert server.tags[root.digest.replace(":", "-") + ".att"] == attested.digest
        assert server.tags["tag"] == root.digest
        pulled = remote.pull(other.store, lambda *_: None)
        beside_it = remote.pull(other.store, lambda *_: None, tag_beside(pulled))
        taken = take_in(other.store, {name: pulled, "x": beside_it}, other.rings._trust)
        assert taken == [name]
    assert told(other) == []
    assert things(other, "one", "headrace:9") == things(shop, "one", "headrace:9")


def test_it_goes_into_a_bundle(shop: Workshop, other: Workshop, tmp_path: Path) -> None:
    names = ("one", "headrace:9")
    write_bundle(shop.store, things(shop, *names), tmp_path / "all.tar")
    taken = take_in(other.store, read_bundle(other.store, tmp_path / "all.tar"), other.rings._trust)
    assert sorted(taken) == sorted(names)
    assert told(other) == []
    write_bundle(other.store, things(other, *names), tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == (tmp_path / "all.tar").read_bytes()


def test_an_image_without_its_provenance_is_not_taken_in(
    shop: Workshop, other: Workshop, tmp_path: Path
) -> None:
    """Another's does not help, nor one by a key that is not trusted."""
    whole, strange = things(shop, "headrace:9"), image(shop.store, "headrace:10")
    told_of = provenance(
        "image", [("i", strange.digest)], [], signer(None, str(tmp_path / "s")), asked={}, found={}
    )
    unknown = attestation(shop.store, strange, [told_of])
    for number, (named_things, said) in enumerate(
        [
            ({"headrace:9": whole["headrace:9"]}, "came without its provenance"),
            ({"headrace:10": strange, "a": whole["headrace:9.att"]}, "came without its provenance"),
            ({"headrace:10": strange, "a": unknown}, "whose key is not trusted here"),
        ]
    ):
        path = tmp_path / f"{number}.tar"
        write_bundle(shop.store, named_things, path)
        with pytest.raises(Untrusted, match=said):
            take_in(other.store, read_bundle(other.store, path), other.rings._trust)
        assert named(other.store) == {}
    assert told(shop) == ["image headrace:10 has no provenance"]


def test_sigstores_own_verifier_agrees(shop: Workshop, tmp_path: Path) -> None:
    """Profiles and provenance as bundles, held by the JavaScript that npm verifies packages with;
    `NODE_PATH` names the folder that has it."""
    node = shutil.which("node")
    program = Path(__file__).with_name("sigstore.js")
    (public,) = (shop.cache / "factory" / "trusted").glob("*.pem")
    held = shop.store.attested(shop.rings.find("one").digest)
    assert held is not None
    layers = shop.store.document(held)["layers"]
    for digest in (shop.rings.find("one").digest, *(one["digest"] for one in layers)):
        file = tmp_path / "envelope.json"
        file.write_bytes(shop.store.read(digest))
        words = [node or "node", str(program), str(file), str(public)]
        done = subprocess.run(words, capture_output=True, text=True) if node else None
        if done is None or "Cannot find module" in done.stderr:
            pytest.skip("node or @sigstore/verify is not installed")
        wrong = "signature verification failed"
        assert done.stdout.splitlines() == ["believed", wrong, wrong], done.stderr
