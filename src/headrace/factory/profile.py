"""The signed profile: its parts, read and compared with this machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from ..base.config import EngineOptions
from ..base.errors import NotFound, OptionError, Untrusted
from ..base.identity import Identity
from ..kernels.cpu.library import LEVELS_OF
from ..loader.partial import file_sha256
from .audit import named
from .key import digest_of, is_digest
from .sign import MOST_BYTES, Trust, opened, subjects
from .store import INDEX_TYPE, Descriptor, Store, is_file_name

SCHEMA = "headrace.profile/1"
PREDICATE = "urn:headrace:profile:v1"
ENVELOPE_TYPE = "application/vnd.dsse.envelope.v1+json"
PANELS_TYPE = "application/vnd.headrace.panels.v1"
UNBOUND = (
    "model", "cache_dir", "context_cache", "context_cache_keys", "context_cache_quota", "offline",
    "keep_packed",
)  # fmt: skip
"""Options about paths and the disk of one machine, which do not affect answers."""


class ProfileFile(msgspec.Struct):
    path: str
    digest: str
    size: int


class QuantisedModel(msgspec.Struct):
    to: str
    of: list[ProfileFile]
    """Files of the model before quantisation; serving does not need them."""


class ProfileModel(msgspec.Struct):
    name: str
    licence: str | None
    files: list[ProfileFile]
    format: str
    task: str
    quantised: QuantisedModel | None = None
    panels: ProfileFile | None = None
    """The weights in the CPU kernels' layout, by digest; serving does not need them."""


class GateRecord(msgspec.Struct):
    """The outcome of a gate."""

    outcome: str
    reason: str
    figures: dict[str, Any]
    outputs: dict[str, str]


class ProfileBody(msgspec.Struct):
    """The signed content of a profile."""

    schema: str
    name: str
    headrace: str
    model: ProfileModel
    options: dict[str, Any]
    limits: dict[str, int]
    identity: dict[str, Any]
    hardware: dict[str, Any]
    gates: dict[str, GateRecord]
    valid_until: str | None = None


@dataclass(frozen=True, slots=True)
class SignedProfile:
    """A body whose signature was checked."""

    body: ProfileBody
    digest: str
    """Digest of the envelope's file."""


def read_profile(data: bytes, trust: Trust) -> SignedProfile:
    """Check the signature, type and shape of an envelope. Raises `Untrusted`."""
    statement = opened(data, trust)
    if statement.get("predicateType") != PREDICATE:
        raise Untrusted(f"what is signed is {statement.get('predicateType')!r:.80}, no profile")
    try:
        body = msgspec.convert(statement.get("predicate"), ProfileBody)
    except msgspec.ValidationError as error:
        raise Untrusted(f"the profile is not in shape: {error}") from None
    if body.schema != SCHEMA:
        raise Untrusted(f"the profile's schema is {body.schema!r:.80}, not {SCHEMA}")
    files, panels = body.model.files, body.model.panels
    for one in (*files, *([panels] if panels else [])):
        if not is_digest(one.digest) or not is_file_name(one.path):
            raise Untrusted(f"the profile names the file {one.path!r:.80}, which cannot be one")
    if statement.get("subject") != subjects((one.path, one.digest) for one in files):
        raise Untrusted("the statement's subjects are not the files of its profile")
    return SignedProfile(body, digest_of(data))


def find_profile(wanted: str, store: Store | None, trust: Trust) -> SignedProfile:
    """Find the profile in a file, or under a name or digest in the store. Raises `NotFound`."""
    path = Path(wanted)
    if path.is_file():
        if path.stat().st_size > MOST_BYTES:
            raise Untrusted(f"{wanted}: larger than {MOST_BYTES:,} bytes")
        return read_profile(path.read_bytes(), trust)
    digest = f"sha256:{wanted.removeprefix('sha256:')}"
    for name, found in envelopes(store).items() if store is not None else ():
        if store is not None and (wanted == name or digest == found):
            return read_profile(store.read(found), trust)
    raise NotFound(
        f"no profile {wanted!r:.100}: neither a file nor a name or digest of the store",
        param="profile",
    )


def envelopes(store: Store) -> dict[str, str]:
    """Return the digests of the store's signed profiles by name. Raises `Untrusted`."""
    return {
        name: output.digest
        for name, one in named(store).items()
        for output in map(Descriptor.read, store.document(one.digest).get("layers") or [])
        if output.media_type == ENVELOPE_TYPE
    }


def profile_problems(store: Store, trust: Trust) -> Iterator[str]:
    """Yield one line for each profile of the store that is not trusted, or lacks a part."""
    try:
        found = envelopes(store)
    except Untrusted as error:
        yield f"profiles: {error.message}"
        return
    for name, entry in named(store).items():
        if name not in found and entry.media_type != INDEX_TYPE:
            yield f"index.json: {name} names neither a profile nor an image"
    for name, digest in found.items():
        try:
            body = read_profile(store.read(digest), trust).body
        except Untrusted as error:
            yield f"profile {name} {digest}: {error.message}"
            continue
        if body.name != name:
            yield f"index.json: {name} names the profile {body.name}"
        for one in body.model.files:
            if not store.has(Descriptor(digest=one.digest, size=one.size)):
                yield f"profile {name}: {one.path} is not in the store"
        for gate, record in body.gates.items():
            for title, output in record.outputs.items():
                if not is_digest(output) or not store.blob(output).is_file():
                    yield f"profile {name}: {title} of the gate {gate} is not in the store"


class Compatibility(StrEnum):
    """The fit of a profile to a machine."""

    COMPATIBLE = "compatible"
    WITH_LOSS = "runnable with loss"
    INCOMPATIBLE = "not compatible"


def compatibility(profile: ProfileBody, here: Mapping[str, Any]) -> tuple[Compatibility, str]:
    """Return (the fit of this machine to the profile, the reason)."""
    there = profile.hardware
    if there.get("machine") != here["machine"]:
        why = f"it is of {there.get('machine')}, this is {here['machine']}"
        return Compatibility.INCOMPATIBLE, why
    if lacking := [one for one in there.get("gpus") or [] if one not in here["gpus"]]:
        return Compatibility.INCOMPATIBLE, f"it was measured on {lacking[0]}, which is not here"
    order = ("none", *LEVELS_OF.get(platform.machine(), ()))
    levels = [
        order.index(one) if one in order else 0 for one in (there.get("level"), here["level"])
    ]
    if levels[1] < levels[0]:
        why = f"the CPU has {here['level']}, it was measured with {there['level']}"
    elif here["cores"] < int(there.get("cores") or 0):
        why = f"{here['cores']} cores, it was measured on {there['cores']}"
    elif here["cpu"] != there.get("cpu"):
        why = f"its speed was measured on {there.get('cpu')}, this is {here['cpu']}"
    else:
        return Compatibility.COMPATIBLE, "the hardware is of the class that it was measured on"
    return Compatibility.WITH_LOSS, why


def bound_options(options: EngineOptions) -> dict[str, Any]:
    """Return the options that a profile binds: those that were set, without paths."""
    return {
        spec.name: getattr(options, spec.name)
        for spec in fields(options)
        if spec.name not in UNBOUND and getattr(options, spec.name) != spec.default
    }


def with_profile(options: EngineOptions, profile: ProfileBody, path: Path) -> EngineOptions:
    """Apply the profile's options, for the model at `path`. Raises `OptionError` if one was set to
    another value."""
    for name, value in bound_options(options).items():
        if profile.options.get(name) != value:
            bound = profile.options.get(name, "the default")
            raise OptionError(f"{name} is {value!r}, the profile binds {bound!r}", param="profile")
    known = {spec.name for spec in fields(EngineOptions)} - set(UNBOUND)
    if strange := sorted(set(profile.options) - known):
        raise Untrusted(f"the profile binds {strange[0]}, which is no option here")
    made = EngineOptions(**(asdict(options) | profile.options | {"model": str(path)}))
    made.verify()
    return made


def check_files(profile: ProfileBody, folder: Path) -> None:
    """Hash the model's files. Raises `Untrusted` with the name of one that does not match."""
    for one in profile.model.files:
        check_file(folder / one.path, one)


def check_file(path: Path, one: ProfileFile) -> None:
    """Hash a file. Raises `Untrusted` if it is not the one that the profile binds."""
    if not path.is_file():
        raise Untrusted(f"{path} is absent, the profile binds it")
    if path.stat().st_size != one.size or f"sha256:{file_sha256(path)}" != one.digest:
        raise Untrusted(f"{path} has other bytes than the profile binds")


def check_identity(profile: ProfileBody, found: Identity | None) -> None:
    """Raise `Untrusted` if the identity of answers here differs from that of the gates."""
    if found is None:
        raise Untrusted("the engine does not say what its answers depend on")
    try:
        differences = Identity(**profile.identity).differences(found)
    except (TypeError, AttributeError):
        raise Untrusted("the profile's identity is not in shape") from None
    if differences:
        raise Untrusted(f"this engine is not that of the profile: {differences[0]}")
