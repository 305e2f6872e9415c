"""`headrace factory`: build a model's signed profile, explain, verify, list, promote, go back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..base.config import EngineOptions
from ..base.errors import Untrusted
from ..factory.attest import attestation_problems, check
from ..factory.audit import problems
from ..factory.build import Build, BuildOptions
from ..factory.graph import Step
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
from .brief import BriefHelp
from .configured import configured
from .factory_fleet import ingest, page, watch
from .factory_parts import AsJson, At, Signing, Trusted, existing, show, tell
from .factory_ship import bundle, chart, fleet, image, load, publish, workflow
from .progress import DownloadBars

command = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
for one in (image, publish, bundle, load, chart, fleet, workflow, ingest, page, watch):
    command.command()(one)

FAILED = 1
"""Exit status where a gate failed; `Untrusted` has one of its own."""
Until = Annotated[
    str | None, typer.Option(help="Day of UTC, as in 2027-01-31, from which on it is refused.")
]
InRing = Annotated[Ring, typer.Argument(help="Which pointer.")]


@command.command(cls=BriefHelp)
@configured
def build(engine: EngineOptions, wanted: BuildOptions, as_json: AsJson = False) -> None:
    """Fetch MODEL, hold it to its gates, sign a profile of it. What is unchanged does not run."""
    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    with DownloadBars(sys.stderr, enabled=not as_json) as bars:
        planned = Build(engine, wanted, bars)
        built = planned.run(lambda what, step: tell(console, what, step))
    if as_json:
        told = {
            "cell": planned.cell,
            "profile": built.profile and built.profile.digest,
            "evidence": str(built.page),
            "ran": built.ran,
            "stages": {step.stage.name: _plain(step) for step in built.steps},
        }
        print(json.dumps(told))
    ran = f"{len(built.ran)} of {len(built.steps)} stages ran"
    console.print(f"{ran if built.ran else 'nothing was to run'}; evidence: {built.page}")
    if built.profile is not None:
        path = f"{planned.store.root}/profiles/{planned.cell}.json"
        name = planned.cell if wanted.store is None else path
        console.print(f"serve it: headrace serve --profile {name}")
    if built.failed:
        console.print(f"failed: {', '.join(built.failed)}; no profile was signed", style="bold red")
        raise typer.Exit(FAILED)
    if wanted.ring is not None and built.profile is not None:
        own = signer(Path(wanted.key) if wanted.key else None, engine.cache_dir)
        rings = Rings(planned.store, trusted(None, engine.cache_dir), engine.cache_dir)
        now = rings.promote(built.profile.digest, wanted.ring, own)
        console.print(f"{wanted.ring} {now.counter}: {now.profile}")


@command.command(cls=BriefHelp)
@configured
def explain(engine: EngineOptions, wanted: BuildOptions, as_json: AsJson = False) -> None:
    """Show what `build` with the same options would run, and why; no stage runs."""
    with DownloadBars(sys.stderr, enabled=not as_json) as bars:
        steps = Build(engine, wanted, bars).plan()
    rows = []
    for step in steps:
        kept, why = ("runs", step.why)
        if step.result is not None:
            kept, why = str(step.result.outcome), step.result.reason
        rows.append({"stage": step.stage.name, "kept": kept, "why": why})
    show(rows, as_json)


@command.command()
def verify(
    profile: Annotated[
        str | None,
        typer.Argument(help="Ring, file, name or digest of a profile; none: the whole store."),
    ] = None,
    store: At = None,
    key: Trusted = None,
) -> None:
    """Check every digest and signature of the store, or one profile; name what does not match."""
    keys = trusted(key)
    place = existing(store)
    if profile is not None:
        found = Rings(place, keys).find(profile)
        print(f"{found.body.name} {found.digest}: the signature holds")
        if (attested := place.attested(found.digest)) is not None:
            bound = [(one.path, one.digest) for one in found.body.model.files]
            check(place, keys, attested, found.digest, bound)
            print("provenance: of the files that the profile binds")
        for name, gate in found.body.gates.items():
            print(f"{name}: {gate.outcome}" + (f": {gate.reason}" if gate.reason else ""))
        return
    wrong = [*problems(place), *profile_problems(place, keys), *Rings(place, keys).problems()]
    if not wrong:  # Whatever is told above, names and envelopes among it, this relies on.
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
    profile: Annotated[str, typer.Argument(help="Name or digest of a profile, or another ring.")],
    ring: InRing,
    unevaluated: Annotated[
        str | None, typer.Option(help="Gates that may be open, as in accuracy,performance.")
    ] = None,
    valid_until: Until = None,
    store: At = None,
    key: Signing = None,
) -> None:
    """Let RING point to PROFILE, where its gates have passed and a rollback would succeed."""
    place, own, end = existing(store), signer(key), until(valid_until)
    accepted = (unevaluated or "").split(",")
    now = Rings(place, trusted(None)).promote(profile, ring, own, accepted, end)
    print(f"{ring} {now.counter}: {now.profile}")


@command.command()
def rollback(
    ring: InRing, valid_until: Until = None, store: At = None, key: Signing = None
) -> None:
    """Let RING point to what it had before; again: back to what it has now."""
    place, own = existing(store), signer(key)
    now = Rings(place, trusted(None)).rollback(ring, own, until(valid_until))
    print(f"{ring} {now.counter}: {now.profile}")


@command.command("revoke")
def revoke_command(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="Profiles, digests of what they bind, public keys (PEM); none: list."),
    ] = None,
    reason: Annotated[str, typer.Option(help="What is said to whoever is refused.")] = "revoked",
    take: Annotated[
        Path | None, typer.Option("--take", help="A newer list, instead of the one here.")
    ] = None,
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
    """A key's id, a digest, or that of the profile of this name."""
    if what.endswith(".pem"):
        return str(public_keys([Path(what)])[0].keyid)
    return what if is_digest(what) else find_profile(what, existing(store), trusted(None)).digest


def _plain(step: Step) -> dict[str, object]:
    result = step.result
    return {
        "outcome": None if result is None else str(result.outcome),
        "reason": step.why if result is None else result.reason,
        "ran": step.ran,
        "why": step.why,
        "manifest": step.manifest and step.manifest.digest,
    }
