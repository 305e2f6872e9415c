"""Start of a server under a profile: checks before it is ready, then a measurement of its speed."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path

from ..base.config import DEFAULT_MODEL, EngineOptions
from ..base.errors import OptionError
from ..engine.clients.face import ServingEngine
from ..loader.panelfile import TEMPORARY
from ..loader.panels import panel_folder
from ..server.served_profile import ServedProfile
from .attest import measured_of
from .key import hardware_class
from .profile import (
    Compatibility,
    ProfileFile,
    SignedProfile,
    check_file,
    check_files,
    check_identity,
    compatibility,
    find_profile,
    with_profile,
)
from .release import Rings
from .revoke import trusted
from .sign import key_folder
from .source import model_folder, model_path
from .speed import seconds_per_token
from .store import Descriptor, Store, store_folder


@dataclass(frozen=True, slots=True)
class Admitted:
    """A profile that this machine, these files and these options match."""

    profile: SignedProfile
    options: EngineOptions
    served: ServedProfile


def admit(wanted: str, options: EngineOptions) -> Admitted:
    """Check a profile before anything is loaded: a file, a ring, or a name or digest in the store.

    The model comes from the store or is found by its name. A model named by the user must have the
    same bytes. Raises `NotFound`, `Untrusted`, `OptionError`, each naming the mismatch.
    """
    cache = options.cache_dir
    trust = trusted(None, cache)
    if not trust.keys:
        raise OptionError(
            f"no key is trusted here; put a public key (PEM) into {key_folder(cache) / 'trusted'}",
            param="profile",
        )
    folder = store_folder(None, cache)
    store = Store(folder) if folder.is_dir() else None
    rings = None if store is None else Rings(store, trust, cache)
    profile = rings.find(wanted) if rings else find_profile(wanted, None, trust)
    body = profile.body
    fits, why = compatibility(body, hardware_class())
    if fits is Compatibility.INCOMPATIBLE:
        raise OptionError(f"the profile {body.name} cannot serve here: {why}", param="profile")
    with ThreadPoolExecutor(1, "headrace-panels") as thread:  # Hashing releases the GIL.
        panels = body.model.panels if options.keep_packed else None
        found = panels and thread.submit(_find_panels, panels, store, wanted, panel_folder(cache))
        place = _place(profile, options, store)
        if found:
            found.result()
    bound = with_profile(options, body, model_path(place, [one.path for one in body.model.files]))
    outcomes = {name: gate.outcome for name, gate in body.gates.items()}
    measured = measured_of(store, trust, profile) if store else None
    promised = measured.seconds_per_token if measured else None
    served = ServedProfile(body.name, profile.digest, str(fits), why, outcomes, promised)
    return Admitted(profile, bound, served)


async def certified(
    start: Callable[[], Awaitable[ServingEngine]], admitted: Admitted
) -> ServingEngine:
    """Start the engine, check it against the profile, measure its share of the certified speed."""
    engine = await start()
    try:
        check_identity(admitted.profile.body, engine.identity)
        promised = admitted.served.seconds_per_token
        if promised is not None and (here := await seconds_per_token(engine)):
            admitted.served.share = promised / here
    except BaseException:
        await engine.close(0.0)
        raise
    return engine


def _find_panels(one: ProfileFile, store: Store | None, profile: str, folder: Path) -> None:
    """Link panels from the store, or from a cluster's mount next to the profile, into the cache,
    where the engine looks (a mount of the cache may hide them). The panels are hashed, because the
    engine checks for damage only. Raises `Untrusted`."""
    path, source = folder / one.path, Path(profile).parent.parent / folder.name / one.path
    if store is not None and store.has(Descriptor(digest=one.digest, size=one.size)):
        source = store.blob(one.digest)
    if source.exists():
        with suppress(OSError):  # The folder is read-only.
            folder.mkdir(parents=True, exist_ok=True)
            (fresh := path.with_suffix(f".{os.getpid()}{TEMPORARY}")).symlink_to(source.resolve())
            fresh.replace(path)
    if path.exists():
        check_file(path, one)


def _place(profile: SignedProfile, options: EngineOptions, store: Store | None) -> Path:
    """Return the folder of the model's files after hashing each of them."""
    model = profile.body.model
    if options.model == DEFAULT_MODEL:
        files = {one.path: Descriptor(digest=one.digest, size=one.size) for one in model.files}
        if store is not None and all(map(store.has, files.values())):
            return store.checkout(files)
        options = changed(options, model=model.name)
    folder = model_folder(options)
    check_files(profile.body, folder)
    return folder
