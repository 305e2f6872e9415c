"""A profile and its weights as OCI artifacts, which registries and container runtimes know.

The weights are a ModelPack model: one layer per file, not packed. So a file is stored once for all
profiles that bind it, and mapped in place. The profile's manifest has the weights as its subject;
its layers are the envelope and the outputs of the gates.
"""

from __future__ import annotations

from .key import canonical
from .profile import ENVELOPE_TYPE, PANELS_TYPE, ProfileBody, SignedProfile
from .source import WEIGHTS
from .store import MANIFEST_TYPE, TITLE, Descriptor, Store

MODEL = "application/vnd.cncf.model"
"""Prefix of ModelPack's types (specification 1.0)."""
FILE_PATH = "org.cncf.model.filepath"
PROFILE_ARTIFACT = "application/vnd.headrace.profile.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
DOCUMENTS = (".md", ".txt", ".pdf")


def weights_manifest(store: Store, body: ProfileBody) -> Descriptor:
    """Put the ModelPack manifest of a profile's model into the store; equal files give the same
    one."""
    files, about = body.model.files, {"name": body.model.name}
    config = {
        "descriptor": about | ({"licenses": [body.model.licence]} if body.model.licence else {}),
        "config": {"format": body.model.format},
        "modelfs": {"type": "layers", "diffIds": [one.digest for one in files]},
    }
    layers = [
        Descriptor(digest=one.digest, size=one.size, media_type=_type(one.path)).document(
            **{TITLE: one.path, FILE_PATH: one.path}
        )
        for one in files
    ]
    described = store.put(canonical(config), f"{MODEL}.config.v1+json")
    return _manifest(store, f"{MODEL}.manifest.v1+json", described, layers)


def profile_manifest(store: Store, profile: SignedProfile) -> Descriptor:
    """Put the manifest that leads to everything the profile binds. Raises `Untrusted`."""
    envelope = store.read(profile.digest)
    one = Descriptor(digest=profile.digest, size=len(envelope), media_type=ENVELOPE_TYPE)
    layers = [one.document(**{TITLE: "profile.dsse.json"})]
    for gate in profile.body.gates.values():
        for title, digest in sorted(gate.outputs.items()):
            made = Descriptor(digest=digest, size=len(store.read(digest)))
            layers.append(made.document(**{TITLE: title}))
    subject = weights_manifest(store, profile.body)
    return _manifest(store, PROFILE_ARTIFACT, store.put(b"{}", EMPTY_TYPE), layers, subject)


def panels_manifest(store: Store, body: ProfileBody) -> Descriptor | None:
    """Put the manifest of the profile's panels, with its weights as subject; None without
    panels."""
    if (one := body.model.panels) is None:
        return None
    found = Descriptor(digest=one.digest, size=one.size, media_type=PANELS_TYPE)
    layers, empty = [found.document(**{TITLE: one.path})], store.put(b"{}", EMPTY_TYPE)
    return _manifest(store, PANELS_TYPE, empty, layers, weights_manifest(store, body))


def _manifest(
    store: Store,
    kind: str,
    config: Descriptor,
    layers: list[dict[str, object]],
    subject: Descriptor | None = None,
) -> Descriptor:
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": config.document(),
        "layers": layers,
        **({"subject": subject.document()} if subject else {}),
    }
    return store.put(canonical(document), MANIFEST_TYPE)


def _type(path: str) -> str:
    if path.endswith(WEIGHTS):
        return f"{MODEL}.weight.v1.raw"
    part = "doc" if path.lower().endswith(DOCUMENTS) or "LICENSE" in path else "weight.config"
    return f"{MODEL}.{part}.v1.raw"
