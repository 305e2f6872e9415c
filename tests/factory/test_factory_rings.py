"""Rings: who may be promoted, what a rollback returns to, what tampering and killing do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factory_cell import DAMAGES, flip, headrace, rewrite, statement

from headrace.base.errors import Forbidden, NotFound, OptionError, Untrusted
from headrace.factory.key import canonical, hardware_class
from headrace.factory.profile import ENVELOPE_TYPE
from headrace.factory.release import NEEDED, RingPointer, Rings
from headrace.factory.revoke import trusted
from headrace.factory.sign import opened, sign, signer
from headrace.factory.stage import KEY_TYPE, Result
from headrace.factory.store import MANIFEST_TYPE, Store

PASSED = {"accuracy": "passed", "performance": "passed"}
OPEN = {"accuracy": "not evaluated", "performance": "passed"}


@dataclass
class Workshop:
    """A cache folder with a key, and its store with profiles of models of a few bytes."""

    cache: Path

    @property
    def store(self) -> Store:
        return Store(self.cache / "factory" / "store")

    @property
    def key(self) -> Any:
        return signer(None, str(self.cache))

    @property
    def rings(self) -> Rings:
        return Rings(self.store, trusted(None, str(self.cache)), str(self.cache))

    def ring_file(self, ring: str) -> Path:
        return self.store.root / "rings" / f"{ring}.json"

    def profile(
        self,
        name: str,
        outcomes: dict[str, str] | None = None,
        named: bool = True,
        **more: Any,
    ) -> str:
        """Digest of a signed profile of a model of its own."""
        weights = self.store.put(name.encode(), "application/octet-stream")
        file = {"path": "weights", "digest": weights.digest, "size": weights.size}
        ended = {"reason": "", "figures": {}, "outputs": {}}
        gates = PASSED if outcomes is None else outcomes
        body = {
            "schema": "headrace.profile/1",
            "name": name,
            "headrace": "0",
            "model": {"name": name, "licence": None, "files": [file], "format": "", "task": ""},
            "options": {},
            "limits": {},
            "identity": {},
            "hardware": hardware_class(),
            "gates": {gate: {"outcome": outcome, **ended} for gate, outcome in gates.items()},
            **more,
        }
        envelope = self.store.put(sign(statement(body), self.key), ENVELOPE_TYPE)
        if named:
            key = self.store.put(canonical({"name": name}), KEY_TYPE)
            manifest = Result({"profile.dsse.json": envelope}).manifest("sign", key)
            self.store.tag(name, self.store.put(manifest, MANIFEST_TYPE))
        return envelope.digest

    def weights(self, name: str) -> Path:
        return self.store.blob(self.store.put(name.encode(), "").digest)

    def promote(self, name: str, ring: str, unevaluated: tuple[str, ...] = ()) -> RingPointer:
        key = self.key  # Believed from its first use on, so before the rings are opened.
        return self.rings.promote(name, ring, key, unevaluated)

    def rollback(self, ring: str) -> RingPointer:
        return self.rings.rollback(ring, self.key)

    def pointer(self, ring: str) -> RingPointer:
        found = self.rings.read(ring)
        assert found is not None
        return found

    def call(self, *words: str, status: int = 0) -> str:
        environment = {**os.environ, "HEADRACE_CACHE": str(self.cache)}
        command = headrace("factory", *words)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path / "cache")


# Promotion and rollback


def test_a_ring_points_to_what_was_promoted(shop: Workshop) -> None:
    digest = shop.profile("one")
    assert shop.rings.read("production") is None
    with pytest.raises(NotFound, match="nothing was promoted to production"):
        shop.rings.find("production")
    made = shop.promote("one", "production")
    assert made == shop.pointer("production") == RingPointer("production", 1, digest, None, [])
    assert shop.rings.find("production").body.name == "one"
    assert shop.rings.read("staging") is None


def test_a_ring_is_promoted_from_another(shop: Workshop) -> None:
    digest = shop.profile("one")
    shop.promote("one", "dev")
    shop.profile("one", OPEN)  # The name is another profile's now; the ring keeps to its own.
    assert shop.promote("dev", "staging").profile == digest
    assert shop.promote("staging", "production").profile == digest
    with pytest.raises(Forbidden):
        shop.promote("one", "production")


def test_a_rollback_is_a_new_pointer_to_what_was_before(shop: Workshop) -> None:
    one, two = shop.profile("one"), shop.profile("two")
    for name in ("one", "two"):
        shop.promote(name, "production")
    back = shop.rollback("production")
    assert (back.profile, back.counter) == (one, 3)
    assert shop.rollback("production").profile == two
    with pytest.raises(NotFound, match="staging has nothing to go back to"):
        shop.rollback("staging")
    shop.promote("one", "staging")
    with pytest.raises(NotFound, match="staging has nothing to go back to"):
        shop.rollback("staging")


def test_the_same_profile_again_changes_nothing(shop: Workshop) -> None:
    shop.profile("one")
    first = shop.promote("one", "dev")
    data = shop.ring_file("dev").read_bytes()
    assert shop.promote("one", "dev") == first
    assert shop.ring_file("dev").read_bytes() == data


# Gates


@pytest.mark.parametrize("gate", ["accuracy", "performance"])
@pytest.mark.parametrize("outcome", ["not evaluated", None])
def test_production_needs_its_gates_or_somebodys_word(
    shop: Workshop, gate: str, outcome: str | None
) -> None:
    outcomes = {**PASSED, gate: outcome}
    digest = shop.profile("one", {name: one for name, one in outcomes.items() if one})
    other = "performance" if gate == "accuracy" else "accuracy"
    for accepted in ((), (other,)):
        with pytest.raises(Forbidden, match=f"production needs {gate}: not evaluated"):
            shop.promote("one", "production", accepted)
    assert shop.rings.read("production") is None
    made = shop.promote("one", "production", (gate, other))
    assert (made.profile, made.unevaluated) == (digest, [gate])
    assert shop.pointer("production").unevaluated == [gate]


@pytest.mark.parametrize("outcome", ["failed", "PASSED", ""])
def test_nobodys_word_promotes_what_failed(shop: Workshop, outcome: str) -> None:
    shop.profile("one", {**PASSED, "accuracy": outcome})
    with pytest.raises(Forbidden, match="production needs accuracy"):
        shop.promote("one", "production", ("accuracy", "performance"))
    assert not shop.ring_file("production").exists()


def test_a_rollback_says_again_what_was_not_evaluated(shop: Workshop) -> None:
    shop.profile("one", OPEN)
    shop.profile("two")
    shop.promote("one", "production", ("accuracy",))
    assert shop.promote("two", "production").unevaluated == []
    assert shop.rollback("production").unevaluated == ["accuracy"]


def test_each_ring_asks_for_what_the_one_before_does() -> None:
    assert set(NEEDED["dev"]) < set(NEEDED["staging"]) < set(NEEDED["production"])


# The rollback is exercised


def test_without_a_way_back_nothing_is_written(shop: Workshop) -> None:
    one = shop.profile("one")
    shop.profile("two")
    shop.promote("one", "production")
    data, path = shop.ring_file("production").read_bytes(), shop.weights("one")
    path.chmod(0o644)
    weights = path.read_bytes()
    path.write_bytes(flip(weights))  # In the model's folder too: it is the same file.
    with pytest.raises(Untrusted, match=f"profile {one} cannot be served: weights: its blob"):
        shop.promote("two", "production")
    assert shop.ring_file("production").read_bytes() == data
    assert any("production" in line and "weights" in line for line in shop.rings.problems())
    path.write_bytes(weights)
    assert shop.promote("two", "production").counter == 2
    assert list(shop.rings.problems()) == []


def test_what_cannot_be_served_is_not_promoted(shop: Workshop) -> None:
    shop.profile("one")
    shop.weights("one").unlink()
    with pytest.raises(Untrusted, match="weights"):
        shop.promote("one", "dev")
    assert shop.rings.read("dev") is None


def test_a_rollback_leaves_what_is_broken(shop: Workshop) -> None:
    one = shop.profile("one")
    for name in ("one", "two"):
        shop.profile(name)
        shop.promote(name, "production")
    shop.weights("two").unlink()
    assert shop.rollback("production").profile == one
    before = shop.ring_file("production").read_bytes()
    with pytest.raises(Untrusted, match="cannot be served"):
        shop.rollback("production")
    assert shop.ring_file("production").read_bytes() == before


# Tampering


@pytest.fixture
def promoted(shop: Workshop) -> Workshop:
    """Production has had two profiles, staging one."""
    for name in ("one", "two"):
        shop.profile(name)
        shop.promote(name, "production")
    shop.promote("one", "staging")
    return shop


def refused(shop: Workshop, said: str) -> None:
    """Nobody reads, serves, promotes to or rolls back the ring, and `problems` names it."""
    for call in (
        lambda: shop.rings.read("production"),
        lambda: shop.rings.find("production"),
        lambda: shop.promote("one", "production"),
        lambda: shop.rollback("production"),
    ):
        with pytest.raises(Untrusted, match=said):
            call()
    (line,) = shop.rings.problems()
    assert line.startswith("ring production: ")


def test_no_byte_of_a_pointer_can_change(promoted: Workshop) -> None:
    path, rings = promoted.ring_file("production"), promoted.rings
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(Untrusted, match=r"rings/production\.json: "):
            rings.read("production")
    for damage in DAMAGES:
        path.write_bytes(damage(data))
        refused(promoted, r"rings/production\.json: ")
    path.write_bytes(data)
    assert list(rings.problems()) == []


def test_a_pointer_of_another_ring_is_refused(promoted: Workshop) -> None:
    shutil.copy(promoted.ring_file("staging"), promoted.ring_file("production"))
    refused(promoted, "no pointer of production, but of staging")


def test_an_older_pointer_is_refused(promoted: Workshop) -> None:
    """The first one lies in the store still, with a signature that holds."""
    first = promoted.pointer("production").replaces
    assert first is not None
    promoted.ring_file("production").write_bytes(promoted.store.read(first))
    refused(promoted, r"production\.json is not pointer 2, which was seen")


def test_a_pointer_that_is_gone_is_missed(promoted: Workshop) -> None:
    promoted.ring_file("production").unlink()
    refused(promoted, r"production\.json is not pointer 2, which was seen")


def test_another_pointer_with_the_same_counter_is_refused(promoted: Workshop) -> None:
    body = opened(promoted.ring_file("production").read_bytes(), promoted.rings._trust)
    body["predicate"]["unevaluated"] = ["accuracy"]
    promoted.ring_file("production").write_bytes(sign(body, promoted.key))
    refused(promoted, "is not pointer 2, which was seen")


def test_a_strangers_pointer_is_refused(promoted: Workshop, tmp_path: Path) -> None:
    path = promoted.ring_file("production")
    statement = opened(path.read_bytes(), promoted.rings._trust)
    path.write_bytes(sign(statement, signer(None, str(tmp_path / "stranger"))))
    refused(promoted, "whose key is not trusted here")


@pytest.mark.parametrize(
    "changes",
    [
        {"predicateType": "urn:headrace:profile:v1"},
        {"subject": []},
        {"more": 1},
        {"predicate": {}},
        {"predicate": {"ring": "production", "counter": 3, "profile": "../x"}},
    ],
    ids=["type", "subject", "more", "empty", "digest"],
)
def test_a_signature_over_something_else_is_no_pointer(
    promoted: Workshop, changes: dict[str, Any]
) -> None:
    path = promoted.ring_file("production")
    statement = opened(path.read_bytes(), promoted.rings._trust)
    path.write_bytes(sign({**statement, **changes}, promoted.key))
    refused(promoted, "what is signed is no pointer")


def test_a_profile_is_no_pointer(promoted: Workshop) -> None:
    pointer = promoted.pointer("production")
    promoted.ring_file("production").write_bytes(promoted.store.read(pointer.profile))
    refused(promoted, "what is signed is no pointer")


def test_a_pointer_that_is_a_folder_is_refused(promoted: Workshop) -> None:
    promoted.ring_file("production").unlink()
    promoted.ring_file("production").mkdir()
    refused(promoted, r"rings/production\.json: ")


def test_a_way_back_that_was_changed_is_refused(promoted: Workshop) -> None:
    first = promoted.pointer("production").replaces
    assert first is not None
    rewrite(promoted.store.blob(first), flip(promoted.store.read(first)))
    with pytest.raises(Untrusted, match=f"blob {first} has other bytes"):
        promoted.rollback("production")
    assert list(promoted.rings.problems()) == [
        f"ring production: blob {first} has other bytes than its name says"
    ]


def test_another_machine_believes_what_it_sees_first(promoted: Workshop, tmp_path: Path) -> None:
    """It has the public key and no memory; from then on it takes nothing older either."""
    other = tmp_path / "other"
    keys = promoted.cache / "factory" / "trusted"
    shutil.copytree(keys, other / "factory" / "trusted")
    rings = Rings(promoted.store, trusted(None, str(other)), str(other))
    assert rings.read("production") == promoted.pointer("production")
    data = promoted.ring_file("production").read_bytes()
    promoted.promote("one", "production")
    assert rings.find("production").body.name == "one"
    promoted.ring_file("production").write_bytes(data)
    with pytest.raises(Untrusted, match="is not pointer 3, which was seen"):
        rings.read("production")


def test_promotions_at_once_follow_each_other(shop: Workshop) -> None:
    """Each takes the lock by a file of its own, as processes do; no pointer is lost."""
    names = [f"model {number}" for number in range(6)]
    digests = {shop.profile(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        made = list(pool.map(lambda name: shop.promote(name, "production"), names))
    assert sorted(one.counter for one in made) == [1, 2, 3, 4, 5, 6]
    found, now = set(), shop.pointer("production")
    while now.replaces is not None:
        found.add(now.profile)
        statement = opened(shop.store.read(now.replaces), shop.rings._trust)
        now = msgspec.convert(statement["predicate"], RingPointer)
    assert found | {now.profile} == digests


# Folders that can only be read


@pytest.fixture
def readable() -> Iterator[Workshop]:
    """A shop like `promoted` for a user who is not root, since root may write everywhere."""
    root = Path(tempfile.mkdtemp())
    root.chmod(0o777)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        shop = Workshop(root / "cache")
        for name in ("one", "two"):
            shop.profile(name)
            shop.promote(name, "production")
        yield shop
    finally:
        os.seteuid(user)
        shutil.rmtree(root, ignore_errors=True)


def closed(root: Path) -> None:
    """Take the right to write from all folders below one."""
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        folder.chmod(0o555)


def test_a_store_that_can_only_be_read_is_read(readable: Workshop) -> None:
    closed(readable.store.root)
    two = readable.pointer("production").profile
    assert readable.rings.find("production").digest == two
    assert list(readable.rings.problems()) == []
    for write in (
        lambda: readable.promote("one", "dev"),
        lambda: readable.rollback("production"),
        lambda: readable.store.put(b"new", "text/plain"),
    ):
        with pytest.raises(OptionError, match=f"{readable.store.root} cannot be used as a store"):
            write()
    assert readable.pointer("production").profile == two


def test_a_cache_that_can_only_be_read_keeps_what_it_remembers(readable: Workshop) -> None:
    """It takes nothing older than its memory, and does not learn what is newer."""
    first = readable.pointer("production").replaces
    assert first is not None
    old, path = readable.store.read(first), readable.ring_file("production")
    newest = path.read_bytes()
    closed(readable.cache / "factory" / "seen")
    assert readable.promote("one", "production").counter == 3
    assert readable.pointer("production").counter == 3
    path.write_bytes(newest)
    assert readable.pointer("production").counter == 2
    path.write_bytes(old)
    with pytest.raises(Untrusted, match="is not pointer 2, which was seen"):
        readable.rings.read("production")


def test_a_key_that_cannot_be_written_is_refused_by_name(readable: Workshop) -> None:
    folder = readable.cache / "factory"
    (folder / "key.pem").unlink()
    closed(folder)
    with pytest.raises(OptionError, match=r"key\.pem holds no private key: Permission denied"):
        signer(None, str(readable.cache))


# Killing

PROMOTE = """
import os, signal, sys
from pathlib import Path
from headrace.factory.release import Rings
from headrace.factory.revoke import trusted
from headrace.factory.sign import signer
from headrace.factory.store import Store

cache, wanted, moment, left = *sys.argv[1:4], int(sys.argv[4])
def replace(source, target, replace=os.replace):
    global left
    left -= 1
    if left == 0 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
rings = Rings(Store(Path(cache) / "factory" / "store"), trusted(None, cache), cache)
key = signer(None, cache)
os.replace = replace
rings.promote(wanted, "production", key)
"""
"""A promotion that kills itself beside one of the renamings by which all its writes appear."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_between_any_two_writes_the_ring_is_the_old_or_the_new(
    shop: Workshop, moment: str
) -> None:
    shop.profile("zero")
    now, killed = shop.promote("zero", "production"), set()
    for write in range(1, 9):
        wanted = shop.profile(f"model {write}")
        words = (str(shop.cache), f"model {write}", moment, str(write))
        done = subprocess.run([sys.executable, "-c", PROMOTE, *words], check=False)
        old, now = now, shop.pointer("production")
        assert now == old or (now.profile, now.counter) == (wanted, old.counter + 1)
        assert list(shop.rings.problems()) == []
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        killed.add(now == old)
        now = shop.promote(f"model {write}", "production")
        assert (now.profile, now.counter) == (wanted, old.counter + 1)
    assert done.returncode == 0, "it was killed at every write, and there is no more"
    assert killed == {True, False}, "some died before the ring had changed, some after"


# The command line


@pytest.mark.slow
def test_the_command_line_promotes_and_goes_back(shop: Workshop) -> None:
    one, two = shop.profile("one"), shop.profile("two", OPEN)
    assert shop.call("promote", "one", "production") == f"production 1: {one}\n"
    said = shop.call("promote", "two", "production", status=Forbidden.exit_code)
    assert said.startswith("error: production needs accuracy: not evaluated (see --unevaluated)")
    shop.profile("three", {})
    said = shop.call("promote", "three", "production", status=Forbidden.exit_code)
    assert "accuracy: not evaluated, performance: not evaluated (see" in said
    said = shop.call("promote", "two", "production", "--unevaluated", "accuracy,performance")
    assert said == f"production 2: {two}\n"
    rows = {row["profile"]: row for row in json.loads(shop.call("profiles", "--json"))}
    assert rows["production"]["digest"] == rows["two"]["digest"] == two
    assert rows["production"]["fit"] == rows["two"]["fit"] != "not compatible"
    assert set(rows) == {"production", "one", "two", "three"}
    assert shop.call("rollback", "production") == f"production 3: {one}\n"
    assert shop.call("verify", "production").startswith(f"one {one}: the signature holds")
    shop.call("verify")
    assert "nothing to go back to" in shop.call("rollback", "dev", status=NotFound.exit_code)
    assert "'prod' is not one of" in shop.call("promote", "one", "prod", status=2)
    path = shop.ring_file("production")
    path.write_bytes(flip(path.read_bytes()))
    assert "rings/production.json: " in shop.call("verify", status=Untrusted.exit_code)
    rows = {row["profile"]: row for row in json.loads(shop.call("profiles", "--json"))}
    assert rows["production"]["fit"] == "not compatible"
    assert "production.json" in rows["production"]["why"]
