"""Rings: dev, staging and production as signed pointers to profiles; promotion and rollback.

A pointer is an in-toto statement in a DSSE envelope, `rings/<ring>.json` of the store; earlier ones
are blobs. A copy of the last pointer that this machine trusted is next to the keys, outside the
store, so that an older one is refused. A ring changes by one renaming.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..base.errors import Forbidden, NotFound, Untrusted
from .attest import measured_of
from .key import DIGEST, digest_of
from .profile import ENVELOPE_TYPE, SignedProfile, find_profile, read_profile
from .sign import (
    MOST_BYTES,
    STATEMENT,
    Trust,
    Withdrawn,
    appear,
    key_folder,
    opened,
    sign,
    subjects,
)
from .stage import Outcome
from .store import Descriptor, Store, held

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

PREDICATE = "urn:headrace:ring:v1"
Ring = StrEnum("Ring", ["dev", "staging", "production"])
NEEDED = {"dev": (), "staging": ("performance",), "production": ("accuracy", "performance")}
"""Gates that each ring needs."""
Digest = Annotated[str, msgspec.Meta(pattern=rf"\A{DIGEST.pattern}\Z")]


class RingPointer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signed content of a pointer."""

    ring: str
    counter: Annotated[int, msgspec.Meta(ge=1)]
    """The previous pointer's counter plus one."""
    profile: Digest
    replaces: Digest | None
    """The previous pointer, to whose profile a rollback returns."""
    unevaluated: list[str]
    """Gates that the ring needs and the profile lacks, waived by the promoter."""
    valid_until: str | None = None


class Rings:
    """The rings of a store, verified with these keys and this machine's memory of pointers."""

    def __init__(self, store: Store, trust: Trust, cache_dir: str | None = None):
        place = digest_of(str(store.root.resolve()).encode()).removeprefix("sha256:")[:16]
        self._store, self._trust = store, trust
        self._seen = key_folder(cache_dir) / "seen" / place

    def read(self, ring: str) -> RingPointer | None:
        """Read the ring's pointer; None if it never had one. Raises `Untrusted`."""
        return self._read(ring, self._trust)

    def _read(self, ring: str, trust: Trust) -> RingPointer | None:
        # The memory first: it is written after the ring, so it is never the newer of the two.
        last, _ = self._load(self._seen, ring)
        now, data = self._load(self._store.root / "rings", ring, trust)
        if last and (now is None or now.counter < last.counter + (now != last)):
            raise Untrusted(f"rings/{ring}.json is not pointer {last.counter}, which was seen")
        if now is not None and now != last:
            self._remember(now, data)
        return now

    def find(self, wanted: str) -> SignedProfile:
        """Find the profile of a ring, in a file, or under a name or digest in the store."""
        if wanted not in NEEDED:
            return find_profile(wanted, self._store, self._trust)
        if (now := self.read(wanted)) is None:
            raise NotFound(f"nothing was promoted to {wanted}", param="profile")
        return read_profile(self._store.read(now.profile), self._trust)

    def promote(
        self,
        wanted: str,
        ring: str,
        key: CryptoSigner,
        unevaluated: Collection[str] = (),
        valid_until: str | None = None,
    ) -> RingPointer:
        """Point the ring to a profile, if it and the target of a rollback are servable.

        Raises `Untrusted`, `NotFound`; `Forbidden` if a gate failed, or was not evaluated and is
        not in `unevaluated`.
        """
        found = self._servable(self.find(wanted).digest)
        measured_of(self._store, self._trust, found)  # Changed evidence is refused.
        gates = {name: gate.outcome for name, gate in found.body.gates.items()}
        ended = {name: gates.get(name, Outcome.NOT_EVALUATED) for name in NEEDED[ring]}
        missing = [name for name, outcome in ended.items() if outcome != Outcome.PASSED]
        fine = [one for one in unevaluated if ended.get(one) == Outcome.NOT_EVALUATED]
        if wrong := [f"{name}: {ended[name]}" for name in missing if name not in fine]:
            raise Forbidden(f"{ring} needs {', '.join(wrong)} (see --unevaluated)")
        with self._store.lock(f"ring-{ring}"):
            # A promotion replaces a withdrawn pointer, which no rollback should restore.
            with suppress(Withdrawn):
                now = self.read(ring)
                same = now and self._servable(now.profile).digest == found.digest
                if now and same and now.valid_until == valid_until:
                    return now
            self._read(ring, self._trust.signatures)
            return self._write(ring, key, found.digest, missing, valid_until)

    def rollback(self, ring: str, key: CryptoSigner, valid_until: str | None = None) -> RingPointer:
        """Point to the ring's previous profile, by a new pointer. Raises `NotFound`,
        `Untrusted`."""
        with self._store.lock(f"ring-{ring}"):
            if (old := self._before(self._read(ring, self._trust.signatures))) is None:
                raise NotFound(f"{ring} has nothing to go back to", param="ring")
            digest = self._servable(old.profile).digest
            return self._write(ring, key, digest, old.unevaluated, valid_until)

    def problems(self) -> Iterator[str]:
        """Yield one line for each ring that is not trusted, cannot be served, or cannot roll
        back."""
        for ring in NEEDED:
            try:
                if (now := self.read(ring)) is not None:
                    self._servable(now.profile)
                with suppress(Withdrawn):  # Perhaps the reason for its replacement.
                    if (old := self._before(now)) is not None:
                        self._servable(old.profile)
            except Untrusted as error:
                yield f"ring {ring}: {error.message}"

    def _load(
        self, folder: Path, ring: str, trust: Trust | None = None
    ) -> tuple[RingPointer | None, bytes]:
        """Load the pointer in a folder; revocation and expiry are checked only with `trust`."""
        path = folder / f"{ring}.json"
        try:
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            return self._opened(data, ring, trust or self._trust.signatures), data
        except FileNotFoundError:
            return None, b""
        except Untrusted as error:
            raise type(error)(f"{path}: {error}") from None
        except OSError as error:
            raise Untrusted(f"{path}: {error}") from None

    def _opened(self, data: bytes, ring: str, trust: Trust) -> RingPointer:
        statement = opened(data, trust)
        try:
            found = msgspec.convert(statement.get("predicate"), RingPointer)
        except msgspec.ValidationError as error:
            raise Untrusted(f"what is signed is no pointer: {error}") from None
        if statement != _statement(found) or found.ring != ring:
            raise Untrusted(f"what is signed is no pointer of {ring}, but of {found.ring:.80}")
        return found

    def _before(self, now: RingPointer | None) -> RingPointer | None:
        if now is None or now.replaces is None:
            return None
        return self._opened(self._store.read(now.replaces), now.ring, self._trust.signatures)

    def _servable(self, digest: str) -> SignedProfile:
        """Read a profile; check its signature and every file of its model."""
        try:
            found = read_profile(self._store.read(digest), self._trust)
            bound = found.body.model.files
            files = {one.path: Descriptor(digest=one.digest, size=one.size) for one in bound}
            self._store.checkout(files)
        except Untrusted as error:
            raise type(error)(f"profile {digest} cannot be served: {error.message}") from None
        return found

    def _write(
        self, ring: str, key: CryptoSigner, profile: str, gates: list[str], end: str | None
    ) -> RingPointer:
        """Replace the ring's pointer, then the memory of it: after a crash in between the memory is
        the older one."""
        with self._store.lock("rings"):
            last, before = self._load(self._store.root / "rings", ring)
            replaces = self._store.put(before, ENVELOPE_TYPE).digest if last else None
            counter = last.counter + 1 if last else 1
            made = RingPointer(ring, counter, profile, replaces, gates, end)
            data = sign(_statement(made), key)
            self._opened(data, ring, self._trust)  # Refuses a revoked key and a past end.
            with self._store.writing():
                appear(self._store.root / "rings" / f"{ring}.json", data, 0o644, replace=True)
            self._remember(made, data)
        return made

    def _remember(self, now: RingPointer, data: bytes) -> None:
        """Keep a copy, unless a newer one is kept or the cache folder is read-only."""
        with suppress(OSError):
            self._seen.mkdir(parents=True, exist_ok=True)
            with held(os.open(self._seen / "lock", os.O_RDWR | os.O_CREAT, 0o644)):
                last, _ = self._load(self._seen, now.ring)
                if last is None or last.counter < now.counter:
                    appear(self._seen / f"{now.ring}.json", data, 0o644, replace=True)


def _statement(pointer: RingPointer) -> dict[str, object]:
    about = {"subject": subjects([(pointer.ring, pointer.profile)]), "predicateType": PREDICATE}
    return {"_type": STATEMENT, **about, "predicate": msgspec.to_builtins(pointer)}
