"""Signatures: in-toto statements in DSSE envelopes, made and checked by securesystemslib.

An envelope is accepted in its canonical form only, so that no byte of its file can change
unnoticed. `Trust` decides which keys count, until when, and whether they are revoked.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..base.environment import cache_root
from ..base.errors import OptionError, Untrusted
from ..base.extras import needing
from ..base.foreign import any_json
from .key import canonical, digest_of

with needing("the factory needs", "factory"):
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
        load_pem_public_key,
    )
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import Error
    from securesystemslib.signer import CryptoSigner, SSlibKey

STATEMENT = "https://in-toto.io/Statement/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MOST_BYTES = 4 << 20
"""Most bytes of an envelope's file."""
_UNREADABLE = OSError, ValueError, TypeError, UnsupportedAlgorithm, Error
"""Exceptions raised by reading a file that holds no key."""


def key_folder(cache_dir: str | None = None) -> Path:
    """Return the folder of our own key; its subfolder `trusted` has the trusted public keys."""
    return (Path(cache_dir) if cache_dir else cache_root()) / "factory"


def signer(path: Path | None, cache_dir: str | None = None) -> CryptoSigner:
    """Read the Ed25519 key in a file (PEM, PKCS 8); None: our own, made at its first use.

    This machine trusts its public half from now on. Raises `OptionError`.
    """
    place = path or key_folder(cache_dir) / "key.pem"
    try:
        if path is None and not place.exists():
            appear(place, CryptoSigner.generate_ed25519().private_bytes, 0o600)
        private = load_pem_private_key(place.read_bytes(), None)
        found = CryptoSigner(private)
    except _UNREADABLE as error:
        raise OptionError(f"{place} holds no private key: {_why(error)}", param="key") from None
    if found.public_key.keytype != "ed25519":
        raise OptionError(f"{place} holds no Ed25519 key", param="key")
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    trusted = key_folder(cache_dir) / "trusted" / f"{found.public_key.keyid[:16]}.pem"
    try:
        if not trusted.exists():
            appear(trusted, public, 0o644)
    except OSError as error:
        raise OptionError(f"{trusted} cannot be written: {_why(error)}", param="key") from None
    return found


class Withdrawn(Untrusted):
    """The signature is valid, but it has expired or was revoked."""


@dataclass(frozen=True, slots=True)
class Trust:
    """The keys that this machine trusts, and its revocations."""

    keys: tuple[SSlibKey, ...] = ()
    revoked: Mapping[str, str] = field(default_factory=dict)
    """Reasons by the digest of an envelope or of one of its subjects, or by a key's id."""
    since: datetime | None = None
    """Time at which the revocations were signed: an earlier clock is not trusted."""
    dated: bool = True
    """Whether `valid_until` counts."""

    @property
    def signatures(self) -> Trust:
        """The same keys without revocations and expiry, for signatures that were once valid."""
        return Trust(self.keys, dated=False)

    def hold(self, data: bytes, signers: Iterable[str], statement: Mapping[str, Any]) -> None:
        """Raise `Withdrawn` if this verified envelope is revoked or has expired."""
        about = [one["digest"]["sha256"] for one in statement["subject"]]
        for one in (digest_of(data), *(f"sha256:{digest}" for digest in about), *signers):
            if (why := self.revoked.get(one)) is not None:
                raise Withdrawn(f"{one} was revoked: {why:.200}")
        end = (statement.get("predicate") or {}).get("valid_until")
        if not self.dated or end is None:
            return
        now = max(datetime.now(UTC), self.since or datetime.min.replace(tzinfo=UTC))
        if now >= datetime.fromisoformat(end):
            raise Withdrawn(f"it was valid until {end}")


def until(text: str | None) -> str | None:
    """Normalise a day (its first second) or a time in UTC. Raises `OptionError`."""
    try:
        found = text and datetime.fromisoformat(text)
    except ValueError:
        raise OptionError(
            f"{text!r:.40} is no date as in 2027-01-31", param="valid_until"
        ) from None
    if not found:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC).astimezone(UTC).isoformat(timespec="seconds")


def public_keys(places: Iterable[Path]) -> list[SSlibKey]:
    """Read the public key in each file (PEM, of either half). Raises `OptionError`."""
    found = []
    for place in places:
        try:
            data = place.read_bytes()
            public = (
                load_pem_private_key(data, None).public_key()
                if b"PRIVATE" in data
                else load_pem_public_key(data)
            )
            found.append(SSlibKey.from_crypto(public))
        except _UNREADABLE as error:
            raise OptionError(f"{place} holds no key: {_why(error)}", param="key") from None
    return found


def subjects(files: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """List the subjects of an in-toto statement: (path, digest) of each file."""
    return [
        {"name": path, "digest": {"sha256": digest.removeprefix("sha256:")}}
        for path, digest in files
    ]


def sign(statement: Mapping[str, Any], key: CryptoSigner) -> bytes:
    """Sign a statement; return the envelope."""
    envelope = Envelope(canonical(dict(statement)), PAYLOAD_TYPE, {})
    envelope.sign(key)
    return canonical(envelope.to_dict())


def opened(data: bytes, trust: Trust) -> dict[str, Any]:
    """Verify and open an envelope signed by a trusted key. Raises `Untrusted`, `Withdrawn`."""
    if len(data) > MOST_BYTES:
        raise Untrusted(f"the envelope is larger than {MOST_BYTES:,} bytes")
    try:
        document = any_json(data)
        if data != canonical(document):
            raise ValueError
        payload = base64.b64decode(document["payload"], validate=True)
        envelope = Envelope.from_dict(document)
        if data != canonical(envelope.to_dict()):
            raise ValueError
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, Error):
        raise Untrusted("the envelope is not as it was written") from None
    if envelope.payload_type != PAYLOAD_TYPE:
        raise Untrusted(f"the envelope holds {envelope.payload_type!r:.80}, not {PAYLOAD_TYPE}")
    known = {key.keyid: key for key in trust.keys if key.keyid in envelope.signatures}
    # A revoked key is ignored if another one signed too; alone it is reported.
    signers = {one: key for one, key in known.items() if one not in trust.revoked} or known
    if not signers:
        named = ", ".join(one[:16] for one in envelope.signatures) or "nobody"
        raise Untrusted(
            f"the signature is by {named}, whose key is not trusted here; its public half belongs "
            "into the folder factory/trusted of the cache"
        )
    try:
        envelope.verify(list(signers.values()), 1)
        statement = any_json(payload)
    except (Error, ValueError):
        raise Untrusted("the signature does not match what is signed") from None
    if not isinstance(statement, dict) or statement.get("_type") != STATEMENT:
        raise Untrusted("what is signed is no in-toto statement")
    try:
        trust.hold(data, signers, statement)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise Untrusted("what is signed has no subjects, or an end that is no time") from None
    return statement


def appear(path: Path, data: bytes, mode: int, replace: bool = False) -> None:
    """Write a file atomically; an existing one is kept, or replaced (`replace`)."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        with suppress(FileExistsError):
            (os.replace if replace else os.link)(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _why(error: Exception) -> object:
    return getattr(error, "strerror", None) or error
