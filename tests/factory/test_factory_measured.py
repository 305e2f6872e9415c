"""A profile's figures that a clock measured: in no digest, in evidence that is signed
separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from factory_cell import DAMAGES, rewrite
from test_factory_rings import Workshop

from headrace.base.errors import Untrusted
from headrace.factory.attest import (
    Measured,
    attest_profile,
    attestation_problems,
    evidence,
    measured_of,
)
from headrace.factory.bundle import beside, read_bundle, shipped, take_in, write_bundle
from headrace.factory.graph import Graph
from headrace.factory.key import canonical
from headrace.factory.profile import SignedProfile
from headrace.factory.sign import sign, signer
from headrace.factory.stage import Recipe, Result, Stage
from headrace.factory.store import Store

FAST, SLOW = {"seconds_per_token": 0.01}, {"seconds_per_token": 0.02}


def test_a_clock_is_in_no_key_but_that_of_what_attests_it(tmp_path: Path) -> None:
    """Two builders with other figures: what follows has one key, the evidence its own."""
    stages = [
        Stage("speed", "speed"),
        Stage("profile", "copy", ("speed",)),
        Stage("evidence", "attest", ("speed",)),
    ]
    made = []
    for number, measured in enumerate((FAST, SLOW, FAST)):
        recipes = {
            "speed": Recipe(lambda _work, told=measured: Result(figures={"n": 1}, measured=told)),
            "copy": Recipe(lambda work: Result({"out": work.store.put(b"profile", "text/plain")})),
            "attest": Recipe(
                lambda work: Result(
                    {
                        "out": work.store.put(
                            canonical(dict(work.inputs["speed"].measured)), "text/plain"
                        )
                    }
                ),
                attests=True,
            ),
        }
        store = Store(tmp_path / str(number))
        graph = Graph(stages, recipes)
        made.append({step.stage.name: step for step in graph.run(store)})
        again = {step.stage.name: step for step in graph.run(store)}
        assert not any(step.ran for step in again.values())
        assert dict(again["speed"].result.measured) == measured
    fast, slow, third = made
    assert fast["profile"].document == slow["profile"].document
    assert fast["profile"].manifest == slow["profile"].manifest
    assert fast["evidence"].document != slow["evidence"].document
    assert fast["evidence"].manifest == third["evidence"].manifest


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path / "cache")
    made.profile("one")
    attest(made, {"performance": FAST})
    return made


def attest(shop: Workshop, measured: Any) -> SignedProfile:
    profile = shop.rings.find("one")
    made = attest_profile(shop.store, profile, shop.key, {}, measured)
    shop.store.attest(profile.digest, made)
    return profile


def found(shop: Workshop) -> Measured | None:
    return measured_of(shop.store, shop.rings._trust, shop.rings.find("one"))


def test_evidence_is_read_beside_its_profile(shop: Workshop) -> None:
    digest = shop.rings.find("one").digest
    measured = found(shop)
    assert measured is not None
    assert measured.seconds_per_token == 0.01
    attest(shop, {"performance": SLOW})
    measured = found(shop)
    assert measured is not None
    assert measured.seconds_per_token == 0.02
    assert shop.rings.find("one").digest == digest
    assert list(attestation_problems(shop.store, shop.rings._trust)) == []
    attest(shop, None)
    assert found(shop) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_evidence_that_was_changed_is_refused(shop: Workshop, damage: Any) -> None:
    attested = shop.store.attested(shop.rings.find("one").digest)
    assert attested is not None
    last = shop.store.document(attested)["layers"][-1]["digest"]
    rewrite(shop.store.blob(last), damage(shop.store.read(last)))
    assert len(list(attestation_problems(shop.store, shop.rings._trust))) == 1
    with pytest.raises(Untrusted):
        found(shop)
    with pytest.raises(Untrusted):
        shop.promote("one", "staging")


def test_evidence_of_another_profile_or_key_is_refused(shop: Workshop, tmp_path: Path) -> None:
    shop.profile("two")
    profile, trust = shop.rings.find("one"), shop.rings._trust
    stranger = signer(None, str(tmp_path / "stranger"))
    attested = shop.store.attested(profile.digest)
    assert attested is not None
    sound = shop.store.document(attested)
    for envelope in (
        evidence(shop.rings.find("two"), {"performance": FAST}, shop.key),
        evidence(profile, {"performance": FAST}, stranger),
        sign(
            {
                "_type": "https://in-toto.io/Statement/v1",
                "subject": [{"name": "one", "digest": {"sha256": profile.digest[7:]}}],
                "predicateType": "urn:headrace:measured:v1",
                "predicate": {"hardware": {}, "gates": "fast"},
            },
            shop.key,
        ),
    ):
        one = shop.store.put(envelope, sound["layers"][-1]["mediaType"])
        layer = {**sound["layers"][-1], "digest": one.digest, "size": one.size}
        told = {**sound, "layers": [*sound["layers"][:-1], layer]}
        shop.store.attest(profile.digest, shop.store.put(canonical(told), sound["mediaType"]))
        with pytest.raises(Untrusted):
            measured_of(shop.store, trust, profile)


def test_evidence_goes_where_its_profile_goes(shop: Workshop, tmp_path: Path) -> None:
    root = shipped(shop.store, shop.rings, "one")
    attested = beside(shop.store, root)
    assert attested is not None
    write_bundle(shop.store, {"one": root, "one.att": attested}, tmp_path / "bundle.tar")
    other = Store(tmp_path / "other")
    take_in(other, read_bundle(other, tmp_path / "bundle.tar"), shop.rings._trust)
    measured = measured_of(other, shop.rings._trust, shop.rings.find("one"))
    assert measured is not None
    assert measured.seconds_per_token == 0.01
