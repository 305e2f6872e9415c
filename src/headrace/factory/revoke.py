"""Revocations: one signed list next to the trusted keys, which only grows.

It travels with the keys, in the folder `trusted`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..base.errors import NotFound, OptionError, Untrusted, file_errors
from .key import DIGEST
from .sign import (
    MOST_BYTES,
    STATEMENT,
    Trust,
    appear,
    key_folder,
    opened,
    public_keys,
    sign,
    subjects,
    until,
)
from .store import held

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

PREDICATE = "urn:headrace:revocations:v1"
FILE = "revoked.json"
Revocable = Annotated[str, msgspec.Meta(pattern=rf"\A({DIGEST.pattern}|[0-9a-f]{{64}})\Z")]
"""Digest of an envelope or of one of its subjects, or a key's id."""


class Revocations(msgspec.Struct, frozen=True, omit_defaults=True):
    """The signed content of the list."""

    counter: Annotated[int, msgspec.Meta(ge=1)]
    issued: str
    revoked: dict[Revocable, str]
    """Reasons by digest or key id."""
    valid_until: str | None = None
    """Time from which nothing is trusted without a newer list."""


def trusted(path: Path | None, cache_dir: str | None = None) -> Trust:
    """Read the public key in a file (PEM, of either half), or all in the folder `trusted` if None.

    The folder's list of revocations applies to both. Raises `OptionError`; `Untrusted` for an
    invalid list.
    """
    folder = key_folder(cache_dir) / "trusted"
    keys = tuple(public_keys([path] if path else sorted(folder.glob("*.pem"))))
    found = believed(folder / FILE, cache_dir)
    if found is None:
        return Trust(keys)
    return Trust(keys, found.revoked, datetime.fromisoformat(found.issued))


def believed(path: Path, cache_dir: str | None = None, dated: bool = True) -> Revocations | None:
    """Read the list in a file, or None without a file. A key of the folder that it does not revoke
    must have signed it.

    `dated`: whether the list can expire. Raises `Untrusted`.
    """
    folder = key_folder(cache_dir) / "trusted"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        keys = tuple(public_keys(sorted(folder.glob("*.pem"))))
        statement = opened(data, Trust(keys, dated=dated))
        found = msgspec.convert(statement.get("predicate"), Revocations)
        if statement != _statement(found) or found.issued != until(found.issued):
            raise Untrusted("what is signed is no list of revocations")
        opened(
            data, Trust(tuple(one for one in keys if one.keyid not in found.revoked), dated=False)
        )
    except FileNotFoundError:
        return None
    except (OSError, OptionError, msgspec.ValidationError, Untrusted) as error:
        raise Untrusted(f"{path}: {error}") from None
    return found


def revoke(
    what: Mapping[str, str],
    key: CryptoSigner,
    cache_dir: str | None = None,
    valid_until: str | None = None,
) -> Revocations:
    """Add these entries, with a reason each, to the list. Raises `Untrusted`, `OptionError`."""
    with _changing(cache_dir) as path:
        old = believed(path, cache_dir, dated=False)
        revoked = {**(old.revoked if old else {}), **what}
        if key.public_key.keyid in revoked:
            raise OptionError("a list cannot revoke the key that signs it", param="key")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        made = Revocations(old.counter + 1 if old else 1, now, revoked, valid_until)
        appear(path, sign(_statement(made), key), 0o644, replace=True)
    return made


def take_list(fresh: Path, cache_dir: str | None = None) -> Revocations:
    """Replace the list with a newer one that contains all of it. Raises `Untrusted`, `NotFound`."""
    if (found := believed(fresh, cache_dir)) is None:
        raise NotFound(f"{fresh} is not there", param="take")
    with _changing(cache_dir) as path:
        old = believed(path, cache_dir, dated=False)
        if old and (found.counter < old.counter or not old.revoked.keys() <= found.revoked.keys()):
            raise Untrusted(f"{fresh} is older than list {old.counter}, or lacks some of it")
        appear(path, fresh.read_bytes(), 0o644, replace=True)
    return found


@contextmanager
def _changing(cache_dir: str | None) -> Iterator[Path]:
    """Lock the list against other writers; yield its path."""
    folder = key_folder(cache_dir) / "trusted"
    with file_errors(OptionError, f"{folder} cannot be written", "key"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        with held(lock):
            yield folder / FILE


def _statement(found: Revocations) -> dict[str, object]:
    named = [(one, one) for one in sorted(found.revoked)]
    about = {"subject": subjects(named), "predicateType": PREDICATE}
    return {"_type": STATEMENT, **about, "predicate": msgspec.to_builtins(found)}
