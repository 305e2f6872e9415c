"""Withdrawn signatures: their time is over, or they were revoked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factory_cell import DAMAGES, rewrite
from test_factory_rings import Workshop

from headrace.base.config import EngineOptions
from headrace.base.errors import NotFound, OptionError, Untrusted
from headrace.factory.admit import admit
from headrace.factory.bundle import read_bundle, shipped, take_in, write_bundle
from headrace.factory.profile import profile_problems
from headrace.factory.revoke import FILE, believed, revoke, take_list, trusted
from headrace.factory.sign import Withdrawn, opened, sign, signer, until

PAST, FUTURE = "2001-02-03", "2999-01-01"


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Production has had two profiles."""
    made = Workshop(tmp_path / "cache")
    for name in ("one", "two"):
        made.profile(name)
        made.promote(name, "production")
    return made


def the_list(shop: Workshop) -> Path:
    return shop.cache / "factory" / "trusted" / FILE


def withdraw(shop: Workshop, *what: str, **more: Any) -> None:
    revoke(dict.fromkeys(what, "it leaks"), shop.key, str(shop.cache), **more)


def serve(shop: Workshop, wanted: str) -> object:
    return admit(wanted, EngineOptions(cache_dir=str(shop.cache)))


def bundled(shop: Workshop, path: Path) -> Path:
    write_bundle(shop.store, {"two": shipped(shop.store, shop.rings, "two")}, path)
    return path


def load(shop: Workshop, path: Path) -> list[str]:
    return take_in(shop.store, read_bundle(shop.store, path), shop.rings._trust)


def uses(shop: Workshop, path: Path) -> list[Callable[[], object]]:
    """Everything that the profile `two` is good for, by ring, name and bundle."""
    return [
        lambda: shop.rings.find("production"),
        lambda: shop.rings.find("two"),
        lambda: serve(shop, "production"),
        lambda: serve(shop, "two"),
        lambda: shop.promote("two", "dev"),
        lambda: shipped(shop.store, shop.rings, "two"),
        lambda: load(shop, path),
    ]


def refused(uses: list[Callable[[], object]], said: str) -> None:
    for use in uses:
        with pytest.raises(Untrusted, match=said):
            use()


# Revocation


@pytest.mark.parametrize("what", ["profile", "weights"])
def test_nobody_uses_what_was_revoked(shop: Workshop, tmp_path: Path, what: str) -> None:
    path = bundled(shop, tmp_path / "two.tar")
    profile = shop.rings.find("two")
    files = profile.body.model.files
    withdraw(shop, profile.digest if what == "profile" else files[0].digest)
    refused(uses(shop, path), "was revoked: it leaks")
    lines = [*profile_problems(shop.store, shop.rings._trust), *shop.rings.problems()]
    assert [line[:11] for line in lines] == ["profile two", "ring produc"]
    # The way back is open, and leads forward again to a profile that is none of these.
    assert shop.rollback("production").counter == 3
    assert shop.rings.find("production").body.name == "one"
    assert list(shop.rings.problems()) == []
    with pytest.raises(Withdrawn):
        shop.rollback("production")


def test_what_was_revoked_can_be_replaced(shop: Workshop) -> None:
    shop.profile("three")
    withdraw(shop, shop.rings.find("two").digest)
    assert shop.promote("three", "production").counter == 3
    assert list(shop.rings.problems()) == []


def test_a_revoked_key_is_nobodys(shop: Workshop, tmp_path: Path) -> None:
    path = bundled(shop, tmp_path / "two.tar")
    old = shop.key
    (shop.cache / "factory" / "key.pem").unlink()
    assert shop.key.public_key.keyid != old.public_key.keyid
    withdraw(shop, old.public_key.keyid)
    refused(uses(shop, path), "was revoked: it leaks")
    with pytest.raises(Untrusted, match="was revoked"):
        shop.rollback("production")
    shop.profile("three")
    assert shop.promote("three", "production").counter == 3
    with pytest.raises(Untrusted, match="was revoked"):
        shop.rings.promote("three", "staging", old)
    assert shop.rings.read("staging") is None


def test_only_another_key_revokes_one(shop: Workshop) -> None:
    with pytest.raises(OptionError, match="cannot revoke the key that signs it"):
        withdraw(shop, shop.key.public_key.keyid)
    assert not the_list(shop).exists()


def test_the_list_grows(shop: Workshop) -> None:
    one, two = (shop.rings.find(name).digest for name in ("one", "two"))
    withdraw(shop, one)
    withdraw(shop, two)
    found = believed(the_list(shop), str(shop.cache))
    assert found is not None
    assert (found.counter, found.revoked) == (2, {one: "it leaks", two: "it leaks"})


# The list itself


@pytest.mark.parametrize("damage", [*DAMAGES, lambda _data: b""])
def test_a_list_that_was_changed_lets_nothing_pass(
    shop: Workshop, damage: Callable[[bytes], bytes]
) -> None:
    withdraw(shop, shop.rings.find("one").digest)
    rewrite(the_list(shop), damage(the_list(shop).read_bytes()))
    with pytest.raises(Untrusted, match=r"revoked\.json: "):
        trusted(None, str(shop.cache))
    with pytest.raises(Untrusted, match=r"revoked\.json: "):
        serve(shop, "two")


def test_a_strangers_list_and_a_profile_in_its_place_are_refused(
    shop: Workshop, tmp_path: Path
) -> None:
    withdraw(shop, shop.rings.find("one").digest)
    statement = opened(the_list(shop).read_bytes(), shop.rings._trust.signatures)
    stranger = sign(statement, signer(None, str(tmp_path / "stranger")))
    profile = shop.store.read(shop.rings.find("two").digest)
    emptied = sign({**statement, "subject": []}, shop.key)
    for data in (stranger, profile, emptied):
        rewrite(the_list(shop), data)
        with pytest.raises(Untrusted, match=r"revoked\.json: "):
            serve(shop, "two")


def test_a_list_by_a_key_that_it_revokes_is_refused(shop: Workshop) -> None:
    """A thief of a key may not sign that the others are revoked with it."""
    key = shop.key
    withdraw(shop, shop.rings.find("one").digest)
    statement = opened(the_list(shop).read_bytes(), shop.rings._trust.signatures)
    revoked = {key.public_key.keyid: "stolen"}
    subject = [{"name": one, "digest": {"sha256": one}} for one in revoked]
    predicate = {**statement["predicate"], "revoked": revoked}
    rewrite(the_list(shop), sign({**statement, "subject": subject, "predicate": predicate}, key))
    with pytest.raises(Untrusted, match="not trusted here"):
        serve(shop, "two")


def test_lists_travel_and_only_forward(shop: Workshop, tmp_path: Path) -> None:
    other = Workshop(tmp_path / "other")
    shutil.copytree(shop.cache / "factory" / "trusted", other.cache / "factory" / "trusted")
    path, cache = tmp_path / "list.json", str(other.cache)
    withdraw(shop, shop.rings.find("one").digest)
    shutil.copy(the_list(shop), path)
    assert take_list(path, cache).counter == 1
    withdraw(shop, shop.rings.find("two").digest)
    assert take_list(the_list(shop), cache).counter == 2
    with pytest.raises(Untrusted, match="older than list 2, or lacks some of it"):
        take_list(path, cache)
    with pytest.raises(NotFound, match="is not there"):
        take_list(tmp_path / "none", cache)
    revoke({shop.store.put(b"x", "").digest: "more"}, other.key, cache)
    with pytest.raises(Untrusted, match=r"list.json|older than list 3"):
        take_list(the_list(shop), cache)
    assert believed(the_list(other), cache) == believed(the_list(other), cache)


def test_a_list_whose_time_is_over_lets_nothing_pass_until_a_newer_one(shop: Workshop) -> None:
    withdraw(shop, valid_until=until(PAST))
    with pytest.raises(Untrusted, match=r"revoked\.json: it was valid until 2001-02-03"):
        serve(shop, "two")
    withdraw(shop, valid_until=until(FUTURE))
    assert shop.rings.find("two").body.name == "two"


# Time


def test_a_profile_ends(shop: Workshop) -> None:
    shop.profile("over", valid_until=until(PAST))
    shop.profile("lasts", valid_until=until(FUTURE))
    with pytest.raises(Withdrawn, match=r"it was valid until 2001-02-03T00:00:00\+00:00"):
        shop.promote("over", "dev")
    with pytest.raises(Withdrawn):
        serve(shop, "over")
    assert any("over" in line for line in profile_problems(shop.store, shop.rings._trust))
    shop.promote("lasts", "dev")


def test_a_clock_that_was_set_back_does_not_help(shop: Workshop, tmp_path: Path) -> None:
    """The list was signed in a year in which the profile had ended."""
    shop.profile("ends", valid_until=until(FUTURE))
    assert shop.rings.find("ends").body.name == "ends"
    withdraw(shop, shop.rings.find("one").digest)
    statement = opened(the_list(shop).read_bytes(), shop.rings._trust.signatures)
    statement["predicate"]["issued"] = until("2999-06-01")
    rewrite(the_list(shop), sign(statement, shop.key))
    with pytest.raises(Withdrawn, match="valid until 2999-01-01"):
        shop.rings.find("ends")


def test_a_pointer_ends_and_is_written_anew(shop: Workshop) -> None:
    path = shop.ring_file("production")
    assert shop.rings.promote("two", "production", shop.key, (), until(FUTURE)).counter == 3
    with pytest.raises(Withdrawn, match="valid until"):
        shop.rings.promote("two", "production", shop.key, (), until(PAST))
    assert shop.pointer("production").counter == 3
    statement = opened(path.read_bytes(), shop.rings._trust)
    statement["predicate"] |= {"valid_until": until(PAST), "counter": 4}
    path.write_bytes(sign(statement, shop.key))
    with pytest.raises(Withdrawn, match=r"production\.json: it was valid until"):
        shop.rings.find("production")
    assert any("it was valid until" in line for line in shop.rings.problems())
    assert shop.promote("two", "production").counter == 5
    assert shop.rings.find("production").body.name == "two"


@pytest.mark.parametrize("end", ["soon", 7, {}, "", "2027-01-31"])
def test_an_end_that_is_no_time_is_refused(shop: Workshop, end: object) -> None:
    """The last has no time zone: nobody knows when it is."""
    shop.profile("odd", valid_until=end)
    with pytest.raises(Untrusted):
        shop.rings.find("odd")


def test_days_and_times_are_read_in_one_spelling() -> None:
    assert until(None) is None
    assert until("2027-01-31") == "2027-01-31T00:00:00+00:00"
    assert until("2027-01-31T02:00:00+02:00") == "2027-01-31T00:00:00+00:00"
    with pytest.raises(OptionError, match="'soon' is no date"):
        until("soon")


@pytest.mark.slow
def test_the_command_line_revokes(shop: Workshop, tmp_path: Path) -> None:
    one, two = (shop.rings.find(name).digest for name in ("one", "two"))
    said = shop.call("revoke", "two", one, "--reason", "it leaks", "--valid-until", FUTURE)
    assert one in said
    assert two in said
    assert said == shop.call("revoke")
    assert "was revoked: it leaks" in shop.call("verify", "production", status=6)
    assert "was revoked" in shop.call("verify", status=6)
    assert "was revoked" in shop.call("profiles", "--json")
    assert "is no date" in shop.call("revoke", one, "--valid-until", "soon", status=2)
    other = Workshop(tmp_path / "other")
    shutil.copytree(shop.cache / "factory" / "trusted", other.cache / "factory" / "trusted")
    the_list(other).unlink()
    assert two in other.call("revoke", "--take", str(the_list(shop)))
    shop.profile("three")
    shop.call("promote", "three", "production", "--valid-until", FUTURE)
    assert shop.pointer("production").valid_until == until(FUTURE)
