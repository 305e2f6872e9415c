"""Commands of a store: verify, profiles, promote, rollback, revoke, publish, bundle, load."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..base.errors import NotFound, Untrusted
from ..factory.attest import attestation_problems, check_image, measured_of
from ..factory.audit import problems
from ..factory.bundle import beside, panels, read_bundle, shipped, take_in, write_bundle
from ..factory.key import hardware_class, is_digest
from ..factory.profile import (
    Compatibility,
    compatibility,
    envelopes,
    find_profile,
    profile_problems,
    read_profile,
)
from ..factory.release import Ring, Rings
from ..factory.revoke import revoke, take_list, trusted
from ..factory.sign import public_keys, signer, until
from ..factory.store import Descriptor, Store, store_folder, tag_beside
from .factory_parts import AsJson, At, Signing, Trusted, existing, show
from .flags import argument, flag

if TYPE_CHECKING:
    from ..factory.registry import Remote

command = typer.Typer()
Until = Annotated[str | None, flag("Day of UTC, as in 2027-01-31, from which on it is refused.")]
InRing = Annotated[Ring, argument("Which pointer.")]


@command.command()
def verify(
    profile: Annotated[
        str | None,
        argument("Ring, file, name or digest of a profile, or an image; none: the whole store."),
    ] = None,
    store: At = None,
    key: Trusted = None,
) -> None:
    """Check every digest and signature of the store, one profile or image; name each mismatch."""
    keys = trusted(key)
    place = existing(store)
    if profile is not None and (image := check_image(place, keys, profile)) is not None:
        if wrong := [*problems(place)]:
            raise Untrusted(f"{place.root}: {wrong[0]}")
        print(f"{profile}: the provenance's signature holds")
        for part, digest in image.items():
            print(f"{part} {digest}")
        return
    if profile is not None:
        found = Rings(place, keys).find(profile)
        print(f"{found.body.name} {found.digest}: the signature holds")
        measured = measured_of(place, keys, found)
        if place.attested(found.digest) is not None:
            print("provenance: of the files that the profile binds")
        for name, gate in found.body.gates.items():
            print(f"{name}: {gate.outcome}" + (f": {gate.reason}" if gate.reason else ""))
        for name, figures in (measured.gates if measured else {}).items():
            values = ", ".join(f"{figure} {value}" for figure, value in figures.items())
            print(f"measured for {name}: {values}")
        return
    wrong = [*problems(place), *profile_problems(place, keys), *Rings(place, keys).problems()]
    if not wrong:  # Everything printed above, including names and envelopes, relies on this.
        wrong = [*attestation_problems(place, keys)]
    for line in wrong:
        print(line)
    if wrong:
        raise Untrusted(f"{len(wrong)} things in {place.root} are not what they should be")
    held = envelopes(place)
    if lacking := [name for name, digest in held.items() if not place.attested(digest)]:
        print(f"without provenance: {', '.join(lacking)}")
    blobs = sum(1 for _ in (place.root / "blobs" / "sha256").iterdir())
    print(f"{blobs} blobs, {len(held)} profiles: all are what they should be")


@command.command()
def profiles(store: At = None, key: Trusted = None, as_json: AsJson = False) -> None:
    """List the rings and profiles of the store: which of them this machine can serve, and why."""
    keys, place, here = trusted(key), existing(store), hardware_class()
    rows = []
    for name, digest in [*dict.fromkeys(Ring, "").items(), *envelopes(place).items()]:
        try:
            if name in list(Ring):
                if (now := Rings(place, keys).read(name)) is None:
                    continue
                digest = now.profile
            fits, why = compatibility(read_profile(place.read(digest), keys).body, here)
        except Untrusted as error:
            fits, why = Compatibility.INCOMPATIBLE, error.message
        shown = digest if as_json else digest[:19]
        rows.append({"profile": name, "digest": shown, "fit": str(fits), "why": why})
    show(rows, as_json)


@command.command()
def promote(
    profile: Annotated[str, argument("Name or digest of a profile, or another ring.")],
    ring: InRing,
    unevaluated: Annotated[
        str | None, flag("Gates that may be open, as in accuracy,performance.")
    ] = None,
    valid_until: Until = None,
    store: At = None,
    key: Signing = None,
) -> None:
    """Let RING point to PROFILE, if its gates have passed and a rollback would succeed."""
    place, own, end = existing(store), signer(key), until(valid_until)
    accepted = (unevaluated or "").split(",")
    now = Rings(place, trusted(None)).promote(profile, ring, own, accepted, end)
    print(f"{ring} {now.counter}: {now.profile}")


@command.command()
def rollback(
    ring: InRing, valid_until: Until = None, store: At = None, key: Signing = None
) -> None:
    """Let RING point to its previous profile; a second rollback returns to the present one."""
    place, own = existing(store), signer(key)
    now = Rings(place, trusted(None)).rollback(ring, own, until(valid_until))
    print(f"{ring} {now.counter}: {now.profile}")


@command.command("revoke")
def revoke_command(
    what: Annotated[
        list[str] | None,
        argument("Profiles, digests of what they bind, public keys (PEM); none: list."),
    ] = None,
    reason: Annotated[str, flag("What is said to whoever is refused.")] = "revoked",
    take: Annotated[Path | None, flag("A newer list, instead of the one here.", "--take")] = None,
    valid_until: Until = None,
    store: At = None,
    key: Signing = None,
) -> None:
    """Sign that these are believed no more; the list is factory/trusted/revoked.json."""
    if take is not None:
        take_list(take)
    elif what or valid_until:
        own, found = signer(key), [_revocable(one, store) for one in what or ()]
        revoke(dict.fromkeys(found, reason), own, valid_until=until(valid_until))
    for one, why in trusted(None).revoked.items():
        print(f"{one} {why}")


def _revocable(what: str, store: str | None) -> str:
    """Return a key's id, a digest, or the digest of the profile of this name."""
    if what.endswith(".pem"):
        return str(public_keys([Path(what)])[0].keyid)
    return what if is_digest(what) else find_profile(what, existing(store), trusted(None)).digest


@command.command()
def publish(
    name: Annotated[str, argument("Ring, profile or image of the store.")],
    reference: Annotated[str, argument("host/repository:tag of a registry.")],
    store: At = None,
) -> None:
    """Push a profile with its weights, or the image, to a registry; existing blobs are not sent."""
    place, moved = existing(store), Moved()
    root = shipped(place, rings := Rings(place, trusted(None)), name)
    remote = opened(reference)
    remote.push(place, root, moved)
    if (attested := beside(place, root)) is not None:
        remote.push(place, attested, moved, tag_beside(root))
    if (kept := panels(place, rings, name)) is not None:
        remote.push(place, kept, moved, tag_beside(root, "panels"))
    print(f"{reference} {root.digest}: {moved}")


@command.command()
def bundle(
    file: Annotated[Path, argument("The file to be written.")],
    names: Annotated[list[str], argument("Rings, profiles or images of the store.")],
    store: At = None,
) -> None:
    """Write profiles, weights and images into one file, for a place without a network."""
    place = existing(store)
    rings = Rings(place, trusted(None))
    things = {}
    for name in names:
        things[name] = root = shipped(place, rings, name)
        if (attested := beside(place, root)) is not None:
            things[f"{name}.att"] = attested
        if (kept := panels(place, rings, name)) is not None:
            things[f"{name}.panels"] = kept
    size = write_bundle(place, things, file)
    print(f"{file}: {size:,} bytes")


@command.command()
def load(
    source: Annotated[str, argument("A bundle, or host/repository:tag of a registry.")],
    with_panels: Annotated[
        bool, flag("Of a registry, also its weights as kernels need them.", "--panels")
    ] = False,
    store: At = None,
    key: Trusted = None,
) -> None:
    """Take the contents of a bundle or a registry into the store, after checking the signature."""
    place, moved = Store(store_folder(store)), Moved()
    if Path(source).is_file():
        things = read_bundle(place, Path(source))
    else:
        remote = opened(source)
        things = {source.rpartition("/")[2]: (root := remote.pull(place, moved))}
        with suppress(NotFound):
            things["attestation"] = remote.pull(place, moved, tag_beside(root))
        if with_panels:
            things["panels"] = remote.pull(place, moved, tag_beside(root, "panels"))
    print(f"{', '.join(take_in(place, things, trusted(key)))}: taken in")


def opened(reference: str) -> Remote:
    """Open a repository of a registry. Raises `PackageAbsent`."""
    from ..factory.registry import Remote  # Local: other commands do not need its packages.

    return Remote(reference)


class Moved:
    """Counter of the blobs sent over a network."""

    def __init__(self) -> None:
        self._count = self._bytes = self._there = 0

    def __call__(self, one: Descriptor, moved: bool) -> None:
        self._count, self._there = self._count + moved, self._there + (not moved)
        self._bytes += one.size if moved else 0

    def __str__(self) -> str:
        return f"{self._count} blobs, {self._bytes:,} bytes sent; {self._there} were there"
