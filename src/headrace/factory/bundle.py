"""Bundles: artefacts with all their dependencies, exported to one file and imported again.

Nothing imported gets a name here before its digests, and a profile's signature, are checked.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from ..base.errors import NotFound, OptionError, Untrusted, file_errors
from ..base.foreign import any_json
from .artifact import panels_manifest, profile_manifest
from .attest import ATTESTATION, about, check
from .audit import named
from .key import is_digest
from .profile import ENVELOPE_TYPE, PANELS_TYPE, read_profile
from .release import Rings
from .sign import Trust
from .store import (
    INDEX_TYPE,
    LAYOUT,
    MANIFEST_TYPE,
    SMALL,
    Descriptor,
    Store,
    index_document,
    name_of,
)


def shipped(store: Store, rings: Rings, name: str) -> Descriptor:
    """Return the profile or image that a name means, or the profile of a ring. Raises `NotFound`,
    `Untrusted`."""
    found = named(store).get(name)
    if found is not None and found.media_type == INDEX_TYPE:
        return found
    return profile_manifest(store, rings.find(name))


def write_bundle(store: Store, things: Mapping[str, Descriptor], path: Path) -> int:
    """Write an OCI layout of these artefacts and all that they need into a tar; return its bytes.

    The same artefacts give the same bytes.
    """
    blobs = {one.digest: one for one in store.closure(*things.values())}
    with file_errors(OptionError, f"{path} cannot be written", "file"):
        with path.open("xb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name, data in (("oci-layout", LAYOUT), ("index.json", index_document(things))):
                tar.addfile(_head(name, len(data)), io.BytesIO(data))
            for digest, one in sorted(blobs.items()):
                with store.blob(digest).open("rb") as blob:
                    tar.addfile(_head(f"blobs/sha256/{digest[7:]}", one.size), blob)
        return path.stat().st_size


def read_bundle(store: Store, path: Path) -> dict[str, Descriptor]:
    """Read every blob of a bundle into the store by its digest; return the named artefacts."""
    found: dict[str, Descriptor] = {}
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            for one in tar:
                data = tar.extractfile(one)
                digest = f"sha256:{one.name.removeprefix('blobs/sha256/')}"
                if data is None or (one.name in ("index.json", "oci-layout") and one.size > SMALL):
                    raise Untrusted(f"{path} holds {one.name!r:.80}, which is no file of a bundle")
                if one.name == "index.json":
                    entries = any_json(data.read())["manifests"]
                    found = {name_of(entry): Descriptor.read(entry) for entry in entries}
                elif is_digest(digest):
                    wanted = Descriptor(digest=digest, size=one.size)
                    store.put_stream(data, wanted.media_type, wanted)
                elif one.name != "oci-layout":
                    raise Untrusted(f"{path} holds {one.name!r:.80}, which is no file of a bundle")
    except (tarfile.TarError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Untrusted(f"{path} is no bundle: {error}") from None
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}", param="source") from None
    return found


def panels(store: Store, rings: Rings, name: str) -> Descriptor | None:
    """Return the manifest of the profile's panels, if the store has them."""
    if (found := named(store).get(name)) is not None and found.media_type == INDEX_TYPE:
        return None
    body = rings.find(name).body
    one = body.model.panels
    here = one is not None and store.has(Descriptor(digest=one.digest, size=one.size))
    return panels_manifest(store, body) if here else None


def beside(store: Store, root: Descriptor) -> Descriptor | None:
    """Return the attestation of a shipped artefact, if there is one. Raises `Untrusted`."""
    if (digest := store.attested(about(store, root))) is None:
        return None
    return Descriptor(digest=digest, size=len(store.read(digest)), media_type=MANIFEST_TYPE)


def take_in(store: Store, things: Mapping[str, Descriptor], trust: Trust) -> list[str]:
    """Name the imported artefacts, once all are there and every signature was checked.

    A profile gets its signed name; an image needs its provenance. Raises `Untrusted` before
    anything gets a name.
    """
    names: dict[str, Descriptor] = {}
    attested: dict[str, str] = {}
    given, bound = [], set()
    store.closure(*things.values())
    for name, root in things.items():
        document = store.document(root.digest)
        layers = map(Descriptor.read, document.get("layers") or [])
        if document.get("artifactType") == PANELS_TYPE:
            given.append(root)
            continue
        signed = [one for one in layers if one.media_type == ENVELOPE_TYPE]
        if document.get("artifactType") == ATTESTATION:
            subject = Descriptor.read(document.get("subject"))
            wanted = about(store, subject)
            check(store, trust, root.digest, wanted)
            attested[wanted] = root.digest
            continue
        if signed:
            profile = read_profile(store.read(signed[0].digest), trust)
            if profile_manifest(store, profile) != root:
                raise Untrusted(f"the manifest of {profile.body.name} is not that of its profile")
            bound.add(panels_manifest(store, profile.body))
            name = profile.body.name
        elif root.media_type != INDEX_TYPE:
            raise Untrusted(f"{name:.80} is neither a profile nor an image")
        names[name] = root
    if strange := [one.digest for one in given if one not in bound]:
        raise Untrusted(f"no profile that came with them binds the panels {strange[0]}")
    for name, root in names.items():
        if root.media_type == INDEX_TYPE and root.digest not in attested:
            raise Untrusted(f"the image {name:.80} came without its provenance")
    for name, root in names.items():
        store.tag(name, root)
        if (found := attested.get(about(store, root))) is not None:
            store.attest(about(store, root), Descriptor(digest=found, size=0))
    return list(names)


def _head(name: str, size: int) -> tarfile.TarInfo:
    one = tarfile.TarInfo(name)
    one.size, one.mode = size, 0o644
    return one
