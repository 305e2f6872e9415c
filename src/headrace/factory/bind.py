"""The last two stages: one document with all findings, and a signature over it."""

from __future__ import annotations

from ..base.version import VERSION
from .checks import Place, need
from .key import canonical, hardware_class
from .profile import ENVELOPE_TYPE, PREDICATE, SCHEMA
from .sbom import listed, model_document
from .sign import STATEMENT, sign, subjects
from .stage import Recipe, Result, Work

PROFILE_TYPE = "application/vnd.headrace.profile.v1+json"


def bind(work: Work) -> Result:
    """Make the profile: one document without timestamps."""
    limits = dict(need(work, "limits").figures)
    gates = {
        name.rpartition("/")[2]: {
            "outcome": str(one.outcome),
            "reason": one.reason,
            "figures": dict(one.figures),
            "outputs": {title: output.digest for title, output in one.outputs.items()},
        }
        for name, one in work.inputs.items()
        if not name.endswith(("fetch", "quantise", "limits", "panels"))
    }
    body = {
        "schema": SCHEMA,
        "name": work.stage.parameters["name"],
        "headrace": VERSION,
        "model": {**model_document(work), "format": limits["format"], "task": limits["task"]},
        "options": work.stage.parameters["options"],
        "limits": {name: limits[name] for name in ("max_context", "max_sequences", "memory")},
        "identity": limits["identity"],
        "hardware": hardware_class(),
        "gates": gates,
    }
    for name, one in work.inputs.items():
        if name.endswith("panels") and one.outputs:
            (body["model"]["panels"],) = listed(one.outputs)
    if end := work.stage.parameters.get("valid_until"):
        body["valid_until"] = end
    return Result({"profile.json": work.store.put(canonical(body), PROFILE_TYPE)})


def sign_profile(work: Work) -> Result:
    """Sign the profile: an in-toto statement about the weights in a DSSE envelope."""
    place: Place = work.place
    assert place.key is not None
    body = work.store.document(need(work, "profile").outputs["profile.json"].digest)
    files = [(one["path"], one["digest"]) for one in body["model"]["files"]]
    statement = {
        "_type": STATEMENT,
        "subject": subjects(files),
        "predicateType": PREDICATE,
        "predicate": body,
    }
    one = work.store.put(sign(statement, place.key), ENVELOPE_TYPE)
    return Result({"profile.dsse.json": one}, figures={"key": place.key.public_key.keyid})


_CODE = ("factory/bind.py", "factory/profile.py")
BINDING = {
    "profile": Recipe(bind, code=(*_CODE, "factory/sbom.py"), measured=True),
    "sign": Recipe(
        sign_profile, code=(*_CODE, "factory/sign.py"), tools=("securesystemslib", "cryptography")
    ),
}
