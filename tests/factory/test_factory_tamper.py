"""Whatever changes in a store or in a profile is named, and nothing of it is believed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factory_cell import DAMAGES, Made, flip, make, rewrite, statement

from headrace.base.errors import Untrusted
from headrace.factory.attest import attestation_problems
from headrace.factory.audit import problems
from headrace.factory.profile import (
    Compatibility,
    compatibility,
    envelopes,
    profile_problems,
    read_profile,
)
from headrace.factory.sign import opened, sign, signer
from headrace.factory.store import Descriptor, Store

pytestmark = pytest.mark.slow

TAMPERED = (
    "blobs",
    "stages",
    "models",
    "profiles",
    "evidence",
    "attested",
    "oci-layout",
    "index.json",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("factory"), without="performance,accuracy")


def told(made: Made) -> list[str]:
    lines = [*problems(made.store), *profile_problems(made.store, made.keys)]
    return lines or list(attestation_problems(made.store, made.keys))


def in_store(root: Path, name: str) -> list[Path]:
    place = root / name
    return [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", TAMPERED)
def test_every_file_of_the_store_is_held_to_its_bytes(made: Made, name: str) -> None:
    paths = in_store(made.store.root, name)
    assert paths
    for path in paths:
        data = path.read_bytes()
        for damage in DAMAGES:
            rewrite(path, damage(data))
            assert any(path.name in line for line in told(made)), (path, told(made))
        rewrite(path, data)
    assert told(made) == []


def test_a_blob_that_is_gone_is_named(made: Made) -> None:
    weights = next(one for one in made.body.model.files if one.path == "model.safetensors")
    path = made.store.blob(weights.digest)
    data = path.read_bytes()
    path.unlink()
    assert any("model.safetensors is not in the store" in line for line in told(made))
    path.write_bytes(data)
    assert told(made) == []


def test_another_file_in_the_store_is_named(made: Made) -> None:
    for name in ("blobs/sha256/stranger", "stages/stranger", "profiles/stranger"):
        path = made.store.root / name
        path.write_text("stranger")
        assert any("stranger" in line for line in told(made))
        path.unlink()
    assert told(made) == []


def test_a_name_of_another_profile_is_named(made: Made) -> None:
    store = made.store
    (entry,) = store.index()
    store.tag("promoted", Descriptor.read(entry))
    assert any(f"promoted names the profile {made.cell}" in line for line in told(made))
    store._write_index([entry])
    assert told(made) == []


def test_no_byte_of_a_profile_can_change(made: Made) -> None:
    keys, data = made.keys, made.envelope
    read_profile(data, keys)
    for place in range(len(data)):
        with pytest.raises(Untrusted):
            read_profile(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], keys)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"predicateType": "https://slsa.dev/provenance/v1"}, "no profile"),
        ({"subject": []}, "subjects are not the files"),
        ({"predicate": {}}, "not in shape"),
    ],
)
def test_a_signature_over_something_else_is_no_profile(
    made: Made, changes: dict[str, Any], said: str
) -> None:
    body = opened(made.envelope, made.keys)["predicate"]
    data = sign(statement(body, **changes), signer(None, str(made.cache)))
    with pytest.raises(Untrusted, match=said):
        read_profile(data, made.keys)


def test_a_signed_path_out_of_the_folder_is_refused(made: Made) -> None:
    body = opened(made.envelope, made.keys)["predicate"]
    for path in ("../weights", "/weights"):
        first = {**body["model"]["files"][0], "path": path}
        wrong = {**body, "model": {**body["model"], "files": [first]}}
        data = sign(statement(wrong), signer(None, str(made.cache)))
        with pytest.raises(Untrusted, match="cannot be one"):
            read_profile(data, made.keys)


def test_a_strangers_profile_is_listed_and_not_believed(made: Made, tmp_path: Path) -> None:
    stranger = signer(None, str(tmp_path / "stranger"))
    body = opened(made.envelope, made.keys)["predicate"]
    path = tmp_path / "profile.json"
    path.write_bytes(sign(statement(body), stranger))
    assert "not trusted here" in made.call("verify", str(path), status=6)
    (public,) = (tmp_path / "stranger" / "factory" / "trusted").iterdir()
    assert "the signature holds" in made.call("verify", str(path), "--key", str(public))
    assert "not trusted here" in made.call("profiles", "--json", "--key", str(public))


def test_verify_fails_with_a_status_of_its_own(made: Made) -> None:
    path = made.store.blob(next(iter(envelopes(made.store).values())))
    data = path.read_bytes()
    rewrite(path, flip(data))
    said = made.call("verify", status=6)
    assert path.name in said
    assert "not what they should be" in said
    rewrite(path, data)
    made.call("verify")


def test_another_machine_is_told_apart(made: Made) -> None:
    body = made.body
    here = {**body.hardware, "machine": "x86_64", "level": "vnni", "cores": 4, "cpu": "a"}
    body.hardware = here
    assert compatibility(body, here)[0] is Compatibility.COMPATIBLE
    assert compatibility(body, {**here, "cpu": "b"})[0] is Compatibility.WITH_LOSS
    assert compatibility(body, {**here, "cores": 2})[0] is Compatibility.WITH_LOSS
    assert compatibility(body, {**here, "machine": "arm"})[0] is Compatibility.INCOMPATIBLE
    body.hardware = {**here, "gpus": ["NVIDIA H200 139 GiB"]}
    found, why = compatibility(body, {**here, "gpus": []})
    assert found is Compatibility.INCOMPATIBLE
    assert "H200" in why


def test_an_index_that_is_none_is_named(made: Made) -> None:
    store = Store(made.store.root)
    path = store.root / "index.json"
    data = path.read_bytes()
    for wrong in (b"", b"[]", b"{}", b'{"manifests":[1]}', b'{"manifests":[{"annotations":1}]}'):
        path.write_bytes(wrong)
        assert any(line.startswith("index.json: ") for line in told(made)), wrong
    path.write_bytes(data)
    assert told(made) == []
