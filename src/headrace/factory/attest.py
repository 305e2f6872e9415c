"""Provenance in SLSA's form: inputs and builder of an artefact, signed like a profile.

It is next to its subject, whose digest it does not change. It is a manifest in cosign's form: its
subject is the artefact, its layers are the envelopes. Another envelope holds the timings measured
for a profile. They are not in the profile, so two builders sign the same profile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ..base.errors import Untrusted
from ..base.version import VERSION
from .artifact import profile_manifest, weights_manifest
from .audit import named
from .checks import need
from .key import canonical
from .profile import ENVELOPE_TYPE, SignedProfile, envelopes, read_profile
from .sign import STATEMENT, Trust, Withdrawn, opened, sign, subjects
from .stage import Recipe, Result, Work
from .store import INDEX_TYPE, MANIFEST_TYPE, Descriptor, Store

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

PREDICATE = "https://slsa.dev/provenance/v1"
MEASURED = "urn:headrace:measured:v1"
ATTESTATION = "application/vnd.in-toto+json"
"""Artifact type of the manifest."""
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
BUILD = "urn:headrace:build:{}:v1"
BUILDER = "urn:headrace:builder:{}"
Digests = Iterable[tuple[str, str]]
"""(name, digest) of each of several things."""


class Resource(msgspec.Struct):
    name: str
    digest: dict[str, str]


class Definition(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    build_type: str
    external_parameters: dict[str, Any]
    """Parameters given by the user."""
    internal_parameters: dict[str, Any]
    """Parameters found by the builder."""
    resolved_dependencies: list[Resource]


class Builder(msgspec.Struct):
    id: str
    version: dict[str, str]


class RunDetails(msgspec.Struct, forbid_unknown_fields=True):
    builder: Builder


class Provenance(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """SLSA's predicate 1, with the fields that we write."""

    build_definition: Definition
    run_details: RunDetails


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """Timings: the evidence of a profile's gates."""

    hardware: dict[str, Any]
    gates: dict[str, dict[str, Any]]

    @property
    def seconds_per_token(self) -> float | None:
        """The certified seconds, if the performance gate measured them."""
        found = self.gates.get("performance", {}).get("seconds_per_token")
        return float(found) if isinstance(found, int | float) and found > 0 else None


def provenance(
    kind: str,
    about: Digests,
    used: Digests,
    key: CryptoSigner,
    *,
    asked: dict[str, Any],
    found: dict[str, Any],
) -> bytes:
    """Sign an envelope that lists the inputs of the built artefacts. `kind`: of the build."""
    made_of = [Resource(**one) for one in subjects(used)]
    predicate = Provenance(
        Definition(BUILD.format(kind), asked, found, made_of),
        RunDetails(Builder(BUILDER.format(key.public_key.keyid), {"headrace": VERSION})),
    )
    head = {"subject": subjects(about), "predicateType": PREDICATE}
    return sign({"_type": STATEMENT, **head, "predicate": msgspec.to_builtins(predicate)}, key)


def evidence(
    profile: SignedProfile, gates: Mapping[str, Mapping[str, Any]], key: CryptoSigner
) -> bytes:
    """Sign the envelope of the timings measured for a profile's gates."""
    predicate = Measured(profile.body.hardware, {name: dict(one) for name, one in gates.items()})
    head = {"subject": subjects([(profile.body.name, profile.digest)]), "predicateType": MEASURED}
    return sign({"_type": STATEMENT, **head, "predicate": msgspec.to_builtins(predicate)}, key)


def attest_profile(
    store: Store,
    profile: SignedProfile,
    key: CryptoSigner,
    found: dict[str, Any],
    measured: Mapping[str, Mapping[str, Any]] | None = None,
) -> Descriptor:
    """Put the attestation of a profile, its weights and its gates' figures into the store."""
    body, root = profile.body, profile_manifest(store, profile)
    weights = weights_manifest(store, body)
    files = [(one.path, one.digest) for one in body.model.files]
    model = (body.model.name, weights.digest)
    asked, made_of = {"model": body.model.name}, body.model.quantised
    used = files + [(f"before/{one.path}", one.digest) for one in made_of.of] if made_of else files
    how = {"quantise_to": made_of.to} if made_of else {}
    signed = [(body.name, profile.digest), ("manifest", root.digest)]
    envelopes = [
        provenance("weights", [model, *files], used, key, asked={**asked, **how}, found={}),
        provenance(
            "profile", signed, [model], key, asked={**asked, "options": body.options}, found=found
        ),
    ]
    last = None if measured is None else evidence(profile, measured, key)
    return attestation(store, root, envelopes, last)


def attestation(
    store: Store, subject: Descriptor, envelopes: Iterable[bytes], measured: bytes | None = None
) -> Descriptor:
    """Put the envelopes of an artefact's provenance into the store under one manifest, the evidence
    last; return its descriptor."""
    given = [(one, PREDICATE) for one in envelopes] + ([(measured, MEASURED)] if measured else [])
    layers = [(store.put(one, ENVELOPE_TYPE), kind) for one, kind in given]
    rootfs = {"type": "layers", "diff_ids": [one.digest for one, _ in layers]}
    config = canonical({"architecture": "", "os": "", "config": {}, "rootfs": rootfs})
    document = _document(subject, store.put(config, CONFIG_TYPE), layers)
    return store.put(canonical(document), MANIFEST_TYPE)


def about(store: Store, root: Descriptor) -> str:
    """Return the digest that attestations name: a profile's envelope or an image's index."""
    layers = map(Descriptor.read, store.document(root.digest).get("layers") or [])
    return next((one.digest for one in layers if one.media_type == ENVELOPE_TYPE), root.digest)


def check(
    store: Store, trust: Trust, manifest: str, wanted: str, bound: Collection[tuple[str, str]] = ()
) -> Measured | None:
    """Check that an attestation is about the wanted digest and names all of its inputs, `bound`:
    (name, digest). Returns the evidence in it. Raises `Untrusted`, `Withdrawn`."""
    document, about_digests, used = store.document(manifest), set(), set()
    measured: Measured | None = None
    try:
        parts = [Descriptor.read(document[name]) for name in ("subject", "config")]
        layers = [Descriptor.read(one) for one in document["layers"]]
    except (LookupError, TypeError):
        raise Untrusted("it is no attestation") from None
    statements = [opened(store.read(one.digest), trust) for one in layers]
    kinds = [one.get("predicateType") for one in statements]
    written = [MEASURED if kind == MEASURED else PREDICATE for kind in kinds]
    if document != _document(parts[0], parts[1], [*zip(layers, written, strict=True)]):
        raise Untrusted("the attestation is not as it was written")
    for kind, statement in zip(kinds, statements, strict=True):
        try:
            if kind == MEASURED and measured is None and told_of(statement) == {wanted}:
                measured = msgspec.convert(statement.get("predicate"), Measured)
                continue
            if kind != PREDICATE:
                raise Untrusted(f"what is signed is no provenance, nor evidence of {wanted}")
            made = msgspec.convert(statement.get("predicate"), Provenance)
        except msgspec.ValidationError as error:
            raise Untrusted(f"the provenance is not in shape: {error}") from None
        about_digests |= told_of(statement)
        inputs = made.build_definition.resolved_dependencies
        used |= {(part.name, f"sha256:{part.digest.get('sha256')}") for part in inputs}
    if not {wanted, parts[0].digest} <= about_digests:
        raise Untrusted(f"the provenance is not about {wanted}")
    if lacking := sorted(set(bound) - used):
        raise Untrusted(f"the provenance does not name {lacking[0][0]:.80}")
    return measured


def told_of(statement: Mapping[str, Any]) -> set[str]:
    """Return the digests of a statement's subjects."""
    return {f"sha256:{part['digest']['sha256']}" for part in statement["subject"]}


def measured_of(store: Store, trust: Trust, profile: SignedProfile) -> Measured | None:
    """Read the evidence of a profile; None if the store has none. Raises `Untrusted`."""
    if (attested := store.attested(profile.digest)) is None:
        return None
    bound = [(one.path, one.digest) for one in profile.body.model.files]
    return check(store, trust, attested, profile.digest, bound)


def check_image(store: Store, trust: Trust, wanted: str) -> dict[str, str] | None:
    """Check the provenance of an image of the store, given by name or digest.

    Returns the digest of its index under "index" and that of each architecture's manifest; None
    without such an image. Raises `Untrusted`, `Withdrawn`.
    """
    images = {name: one for name, one in named(store).items() if one.media_type == INDEX_TYPE}
    image = next((one for name, one in images.items() if wanted in (name, one.digest)), None)
    if image is None:
        return None
    if (attested := store.attested(image.digest)) is None:
        raise Untrusted(f"image {wanted:.80} has no provenance")
    check(store, trust, attested, image.digest)
    parts = store.document(image.digest)["manifests"]
    return {"index": image.digest} | {
        part["platform"]["architecture"]: part["digest"] for part in parts
    }


def attestation_problems(store: Store, trust: Trust) -> Iterator[str]:
    """Yield one line for each attestation that is not trusted, and each image without one."""
    bound: dict[str, list[tuple[str, str]]] = {}
    for digest in envelopes(store).values():
        with suppress(Untrusted):  # Reported with the profiles.
            files = read_profile(store.read(digest), trust).body.model.files
            bound[digest] = [(one.path, one.digest) for one in files]
    images = {
        one.digest: name for name, one in named(store).items() if one.media_type == INDEX_TYPE
    }
    held = sorted(path.name for path in (store.root / "attested").glob("*"))
    for name in (
        one for digest, one in images.items() if digest.removeprefix("sha256:") not in held
    ):
        yield f"image {name} has no provenance"
    for one in held:
        try:
            found = store.attested(wanted := f"sha256:{one}") if len(one) == 64 else None
            if found is None:
                raise Untrusted("it names no attestation")
            check(store, trust, found, wanted, bound.get(wanted, ()))
        except Withdrawn as error:  # Valid for a subject that no longer has a name.
            if wanted in {*images, *bound}:
                yield f"attested/{one}: {error.message}"
        except Untrusted as error:
            yield f"attested/{one}: {error.message}"


def attest_cell(work: Work) -> Result:
    """Attest a cell's profile: the result of every stage, and the machine."""
    signed, place = need(work, "sign").outputs["profile.dsse.json"], work.place
    own = Trust((place.key.public_key,), dated=False)
    profile = read_profile(work.store.read(signed.digest), own)
    results = {name.rpartition("/")[2]: one.content for name, one in work.inputs.items()}
    found = {"results": results, "hardware": profile.body.hardware}
    measured = {
        name.rpartition("/")[2]: one.measured for name, one in work.inputs.items() if one.measured
    }
    made = attest_profile(work.store, profile, place.key, found, measured or None)
    return Result({"attestation": made})


def _document(
    subject: Descriptor, config: Descriptor, layers: Sequence[tuple[Descriptor, str]]
) -> dict[str, Any]:
    """Build the manifest; each layer comes with its predicate's type."""
    signature = {"dev.cosignproject.cosign/signature": ""}
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ATTESTATION,
        "config": config.document(),
        "layers": [one.document(predicateType=kind, **signature) for one, kind in layers],
        "subject": subject.document(),
    }


_CODE = ("factory/attest.py", "factory/artifact.py", "factory/profile.py", "factory/sign.py")
ATTESTING = {
    "provenance": Recipe(
        attest_cell, code=_CODE, tools=("securesystemslib", "cryptography"), attests=True
    )
}
