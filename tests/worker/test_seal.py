"""Sealed blocks: who has no key reads nothing and makes nothing, and a key that is gone is gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_disk import PARTS, SIZE, TENANT, content, key

from headrace.base.errors import OptionError
from headrace.worker.disk import DiskTier, is_block
from headrace.worker.remote import ObjectStore, RemoteTier
from headrace.worker.seal import HEAD_BYTES, Sealed, TenantKeys, forget_keys

OTHER = "1" * 16


def sealed(root: Path, keys: str = "keys") -> DiskTier:
    tier = DiskTier(root / "disk", Sealed("engine", TenantKeys(root / keys)), 2, 1 << 30)
    tier.look(again=True)
    return tier


def path_of(tier: DiskTier, number: int, tenant: str = TENANT) -> Path:
    return tier.folder / tenant / f"{key(number).hex()}-0"


def read(tier: DiskTier, number: int, tenant: str = TENANT) -> bytes | None:
    found = tier.read(key(number), 0, tenant, PARTS * SIZE, 0)
    return None if found is None else bytes(found)


def whole(number: int) -> bytes:
    return b"".join(content(number))


def test_a_sealed_block_comes_back_and_says_nothing(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    for number in range(3):
        assert tier.write(key(number), 0, TENANT, content(number), 0)
    kept = path_of(tier, 1).read_bytes()
    assert len(kept) == HEAD_BYTES + PARTS * SIZE
    assert not any(part.tobytes()[:32] in kept for part in content(1))
    again = sealed(tmp_path)  # a restart
    assert key(1) in again.exists(0)
    assert read(again, 1) == whole(1)
    assert (tmp_path / "keys" / f"{TENANT}.key").stat().st_mode & 0o77 == 0
    assert tier.write(key(1), 0, TENANT, content(1), 0)
    assert path_of(tier, 1).read_bytes() != kept, "a nonce is used once"


@pytest.mark.parametrize("at", [3, 9, 40, 50, HEAD_BYTES, -1])
def test_what_was_changed_is_not_opened(tmp_path: Path, at: int) -> None:
    tier = sealed(tmp_path)
    tier.write(key(1), 0, TENANT, content(1), 0)
    data = bytearray(path_of(tier, 1).read_bytes())
    data[at] ^= 4
    path_of(tier, 1).write_bytes(data)
    assert read(tier, 1) is None
    assert not path_of(tier, 1).exists()


def test_a_block_belongs_to_one_name_and_one_tenant(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    for tenant in (TENANT, OTHER):
        for number in (1, 2):
            tier.write(key(number), 0, tenant, content(number), 0)
    path_of(tier, 1).replace(path_of(tier, 2))
    assert read(tier, 2) is None
    tier.write(key(1), 0, TENANT, content(1), 0)
    path_of(tier, 1).replace(path_of(tier, 1, OTHER))
    assert read(tier, 1, OTHER) is None
    assert read(tier, 2, OTHER) == whole(2)


def test_a_tenant_is_forgotten_with_its_key(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    for tenant in (TENANT, OTHER):
        tier.write(key(1), 0, tenant, content(1), 0)
    copied = path_of(tier, 1).read_bytes()
    assert read(tier, 1) == whole(1)
    assert forget_keys(tmp_path / "keys", TENANT) == 1
    assert read(tier, 1) is None, "by the process that has used the key, too"
    assert read(tier, 1, OTHER) == whole(1)
    # What is computed again is sealed with another key, which does not open what was copied.
    assert tier.write(key(2), 0, TENANT, content(2), 0)
    path_of(tier, 1).write_bytes(copied)
    assert read(tier, 1) is None
    assert read(tier, 2) == whole(2)


def test_plain_and_sealed_files_lie_apart(tmp_path: Path) -> None:
    tier, plain = sealed(tmp_path), DiskTier(tmp_path / "disk", "engine", 2, 1 << 30)
    tier.write(key(1), 0, TENANT, content(1), 0)
    plain.write(key(1), 0, TENANT, content(1), 0)
    assert path_of(tier, 1) != path_of(plain, 1)
    path_of(plain, 1).replace(path_of(tier, 1))  # a file that anybody could have made
    assert read(tier, 1) is None


def test_a_key_that_another_process_made_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = TenantKeys(tmp_path), TenantKeys(tmp_path)
    kept, made = mine.kept, iter([True])

    def late(tenant: str) -> Any:
        if next(made, False):
            theirs.made(tenant)
            return None
        return kept(tenant)

    monkeypatch.setattr(mine, "kept", late)
    secret = mine.made(TENANT).encrypt(bytes(12), b"bytes", None)
    assert theirs.made(TENANT).decrypt(bytes(12), secret, None) == b"bytes"
    assert [path.name for path in tmp_path.iterdir()] == [f"{TENANT}.key"]


def test_two_processes_make_one_key(tmp_path: Path) -> None:
    one, two = sealed(tmp_path), sealed(tmp_path)
    assert one.write(key(1), 0, TENANT, content(1), 0)
    assert two.write(key(2), 0, TENANT, content(2), 0)
    one.look(again=True)
    assert read(one, 2) == whole(2)
    assert [path.name for path in (tmp_path / "keys").iterdir()] == [f"{TENANT}.key"]


def test_the_store_gets_sealed_blocks(tmp_path: Path) -> None:
    store = ObjectStore(f"file://{tmp_path}/bucket")
    tiers = [
        RemoteTier(store, Sealed("engine", TenantKeys(tmp_path / keys)), 2)
        for keys in ("keys", "keys", "others")
    ]
    tiers[0].write(key(1), 0, TENANT, content(1), 0)
    tiers[2].write(key(2), 0, TENANT, content(2), 0)
    assert tiers[1].seek([(key(1), 0, TENANT)]) == [True]
    assert tiers[1].read(key(1), 0, TENANT, PARTS * SIZE, 0) == whole(1)
    assert tiers[2].read(key(1), 0, TENANT, PARTS * SIZE, 0) is None


def test_a_folder_that_holds_no_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a file")
    with pytest.raises(OptionError, match="cannot hold keys"):
        TenantKeys(tmp_path / "keys")


def test_a_key_of_another_length_seals_nothing(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    (tmp_path / "keys" / f"{TENANT}.key").write_bytes(os.urandom(7))
    assert not tier.write(key(1), 0, TENANT, content(1), 0)
    assert not list((tmp_path / "disk").rglob("*.tmp"))


def test_who_has_no_key_sees_the_form(tmp_path: Path) -> None:
    tier = sealed(tmp_path)
    tier.write(key(1), 0, TENANT, content(1), 0)
    path = path_of(tier, 1)
    name, data = f"{tier.folder.name}/{TENANT}/{path.name}", path.read_bytes()
    assert is_block(name, memoryview(data))
    assert not is_block(name, memoryview(data[:-1]))
