"""One cell: a model with options on this machine, from its files to a signed profile."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..base.config import EngineOptions, option, verify_options
from ..base.errors import InvalidRequest, file_errors, one_of
from ..base.version import VERSION
from ..bench.accuracy import stdlib_corpus
from ..bench.reference import Reference, load_reference
from ..loader import Progress
from ..quantise.text import TOKENS, Text
from .advisories import HELD, read_advisories
from .attest import ATTESTING
from .bind import BINDING
from .checks import CHECKS, Place
from .evidence import page
from .graph import Graph, Known, Step, Watch
from .key import canonical, digest_of, hardware_class
from .measure import MEASUREMENTS
from .profile import bound_options
from .quantise import BUILT_IN, NO_TEXT, QUANTISING, TARGETS, text_of
from .release import Ring
from .sbom import LOCK, MATERIALS
from .sign import signer, until
from .source import Source, find_source
from .stage import Outcome, Stage
from .store import Descriptor, Store, store_folder

Made = TypeVar("Made")
RECIPES = {**CHECKS, **QUANTISING, **MEASUREMENTS, **MATERIALS, **HELD, **BINDING, **ATTESTING}
GATES = ("verify", "format", "licence", "accuracy", "performance", "sbom", "advisories")
OPTIONAL = ("accuracy", "performance", "sbom", "advisories")
"""Gates that a build may leave out; its profile then lacks them."""


@dataclass(slots=True)
class BuildOptions:
    """Options of a build, in addition to the engine's."""

    store: str | None = option(None, "Folder of results; none: in the cache folder.")
    key: str | None = option(None, "Ed25519 key (PEM); none: an own one, made at its first use.")
    quantise_to: str | None = option(
        None,
        "Make smaller weights of dense ones: of a GGUF (q4_k and the like) or of safetensors "
        "(w4a16, w8a8, fp8).",
        choices=TARGETS,
    )
    quantise_text: str | None = option(
        None, f"Text to calibrate on: a file, {BUILT_IN}, or {NO_TEXT} (default)."
    )
    without: str | None = option(None, f"Gates to leave out, as in {','.join(OPTIONAL)}.")
    accept_licences: str | None = option(None, "Licences that you have read, as in a,b.")
    reference: str | None = option(
        None, "What `bench accuracy --save` wrote, for the perplexity to be held against."
    )
    least_share: float = option(0.99, "Share of the reference's accuracy.", low=0, high=1)
    windows: int = option(8, "Windows of text for the perplexity.", low=1)
    at_least: float | None = option(None, "Tokens a second of eight requests at once.", low=0)
    lock: str | None = option(None, "Lock with hashes, for the bill; none: the checkout's.")
    advisories: str | None = option(
        None, "OSV's documents about Python's packages: a folder or a zip."
    )
    most_days: float = option(30.0, "Age of the newest advisory, at most.", low=0)
    accept_advisories: str | None = option(None, "Advisories that you have read, as in a,b.")
    panels: bool = option(False, "Also keep the weights as the CPU kernels lay them out.")
    valid_until: str | None = option(None, "Day of UTC from which on nobody serves the profile.")
    ring: str | None = option(None, "Ring that points to the profile then.", choices=tuple(Ring))
    fresh: str | None = option(None, "Stages to run though they are kept, as in limits,sbom.")

    def verify(self) -> None:
        """Raise `OptionError` naming the first field outside its rules."""
        verify_options(self)


@dataclass(frozen=True, slots=True)
class CellResult:
    """The outcome of a build."""

    steps: list[Step]
    profile: Descriptor | None
    """The signed envelope; None if a gate failed."""
    page: Path

    @property
    def ran(self) -> list[str]:
        return [step.stage.name for step in self.steps if step.ran]

    @property
    def failed(self) -> list[str]:
        """Names of the gates that failed."""
        ended = [(step.stage.name, step.result) for step in self.steps]
        return [name for name, one in ended if one and one.outcome is Outcome.FAILED]


class Shared:
    """Objects shared by many builds: models, stores, keys, kept results."""

    def __init__(self) -> None:
        self.known: Known = {}
        self._found: dict[Any, Any] = {}

    def once(self, about: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result of the first call of `make` for this key."""
        if about not in self._found:
            self._found[about] = make()
        made: Made = self._found[about]
        return made


class Build:
    """A planned build; `run` runs the missing stages."""

    def __init__(
        self,
        engine: EngineOptions,
        options: BuildOptions,
        progress: Progress | None = None,
        *,
        shared: Shared | None = None,
    ) -> None:
        """Find the model and make the graph. Raises the errors of a wrong model, option, reference
        or key. `shared`: objects that the cells of a fleet find once."""
        self._known = shared.known if shared else None
        shared = shared or Shared()
        self.store = shared.once(
            (folder := store_folder(options.store, engine.cache_dir)), lambda: Store(folder)
        )
        without = _listed(options.without, OPTIONAL, "without")
        without += ("advisories",) if "sbom" in without else ()
        without += () if options.panels else ("panels",)
        about = engine.model, engine.cache_dir, engine.offline
        source = shared.once(about, lambda: find_source(engine, progress))
        reference = options.reference and load_reference(Path(options.reference))
        lock = Path(options.lock) if options.lock else LOCK if LOCK.is_file() else None
        with file_errors(InvalidRequest, f"{lock} cannot be read", "lock"):
            text = shared.once(lock, lambda: lock.read_text(encoding="utf-8")) if lock else None
        path, cache = Path(options.key) if options.key else None, engine.cache_dir
        key = shared.once((path, cache), lambda: signer(path, cache))
        known = read_advisories(Path(options.advisories)) if options.advisories else None
        calibration = text_of(options.quantise_text, _gate_windows(options, reference or None))
        place = Place(
            source, engine, key, reference or None, text, progress, known, options.quantise_text
        )
        self.cell = cell_name(source, engine, options.quantise_to)
        self._place = place
        self._graph = Graph(_stages(self.cell, options, without, place, calibration), RECIPES)
        self._fresh = _listed(options.fresh, [one.name for one in self._graph.stages], "fresh")

    def plan(self) -> list[Step]:
        """Return the steps that `run` would find or do."""
        steps = self._graph.plan(self.store, fresh=self._fresh, known=self._known)
        if all(step.result for step in steps):
            return steps
        before = self.store.remembered(self.cell)
        return self._graph.plan(self.store, before=before, fresh=self._fresh, known=self._known)

    def run(self, watch: Watch = lambda _what, _step: None) -> CellResult:
        """Run the missing stages, name the profile in the store, write the evidence."""
        before = self.store.remembered(self.cell)
        steps = self._graph.run(
            self.store, place=self._place, before=before, fresh=self._fresh, watch=watch
        )
        done = {step.stage.name: step for step in steps}
        self.store.remember(
            self.cell, {name: one.manifest.digest for name, one in done.items() if one.manifest}
        )
        signed, profile = done["sign"], None
        if signed.result is not None and signed.manifest is not None:
            profile = signed.result.outputs["profile.dsse.json"]
            self.store.tag(self.cell, signed.manifest)
            self.store.export(f"profiles/{self.cell}.json", self.store.read(profile.digest))
            if (made := done["provenance"].result) is not None:
                self.store.attest(profile.digest, made.outputs["attestation"])
        html = page(self.cell, steps, profile, hardware_class())
        self.store.put(html, "text/html")
        return CellResult(steps, profile, self.store.export(f"evidence/{self.cell}.html", html))


def cell_name(source: Source, engine: EngineOptions, quantised: str | None = None) -> str:
    """Return a readable name: model, target of its quantisation, processor, and a digest of the
    options that are set."""
    here, options = hardware_class(), bound_options(engine)
    model = re.sub(r"[^a-z0-9.]+", "-", source.name.lower()).strip("-.") or "model"
    parts = [
        f"{model}-{quantised}" if quantised else model,
        f"{here['machine']}-{here['level']}".replace("_", "-"),
    ]
    if options:
        parts.append(digest_of(canonical(options)).removeprefix("sha256:")[:8])
    return ".".join(parts)


def _stages(
    cell: str,
    wanted: BuildOptions,
    without: Collection[str],
    place: Place,
    calibration: Text | None,
) -> list[Stage]:
    source, reference = place.source, place.reference
    files, options = source.parameters(), bound_options(place.engine)
    model = {"model": source.name, "licence": source.licence}
    accepted = _names(wanted.accept_licences)
    accuracy: dict[str, Any] = {
        "options": options,
        "windows": _gate_windows(wanted, reference),
        "least_share": wanted.least_share,
        "reference": wanted.reference and digest_of(Path(wanted.reference).read_bytes()),
        "corpus": (corpus := _corpus_digest()),
    }
    lock = place.lock and _text_digest(place.lock)
    known, days = place.advisories, wanted.most_days
    advisories = {
        "data": known and known.digest,
        "accepted": _names(wanted.accept_advisories),
        # Data that passed becomes too old after these days.
        "stale": known is not None and known.older_than(days),
        "most_days": days,
    }
    machine = hardware_class()["machine"]
    gates = [one for one in (*GATES, "panels") if one not in without]
    dated = {"valid_until": end} if (end := until(wanted.valid_until)) else {}
    weights: tuple[str, ...] = ("fetch",)
    before: tuple[str, ...] = ()
    found = [
        Stage("fetch", "fetch", (), files),
        Stage("verify", "verify", ("fetch",), files),
        Stage("format", "format", ("fetch",)),
        Stage("licence", "licence", (), {"licence": source.licence, "accepted": accepted}),
    ]
    if wanted.quantise_to:
        how = {
            "to": wanted.quantise_to,
            "text": calibration and calibration.digest,
            "tokens": TOKENS,
            "held_out": accuracy["windows"],
        }
        found.append(Stage("quantise", "quantise", ("fetch", "verify", "format"), how))
        weights = ("fetch", "quantise")
        if reference is None and "accuracy" not in without:
            before = ("baseline",)
            told_of = {"options": options, "windows": accuracy["windows"], "corpus": corpus}
            found.append(Stage("baseline", "baseline", ("fetch", "limits"), told_of))
    found += [
        Stage("limits", "limits", (*weights, "verify", "format"), {"options": options}),
        Stage("panels", "panels", (*weights, "limits"), {"options": options}),
        Stage("accuracy", "accuracy", (*weights, "limits", *before), accuracy),
        Stage(
            "performance",
            "performance",
            (*weights, "limits"),
            {"options": options, "at_least": wanted.at_least},
        ),
        Stage("sbom", "sbom", weights, {**model, "lock": lock, "machine": machine}),
        Stage("advisories", "advisories", ("sbom",), advisories),
        Stage(
            "profile",
            "profile",
            (*weights, "limits", *gates),
            {**model, "name": cell, "options": options, **dated},
        ),
    ]
    assert place.key is not None
    key = {"key": place.key.public_key.keyid}
    found.append(Stage("sign", "sign", ("profile",), key))
    all_of = tuple(one.name for one in found if one.name not in without)
    found.append(Stage("provenance", "provenance", all_of, {**key, "headrace": VERSION}))
    return [one for one in found if one.name not in without]


def _gate_windows(wanted: BuildOptions, reference: Reference | None) -> int:
    """Return the number of windows of the accuracy gate: the reference's, if it has any."""
    theirs = None if reference is None else reference.perplexity
    return wanted.windows if theirs is None else theirs.windows


@functools.lru_cache(maxsize=1)
def _text_digest(text: str) -> str:
    return digest_of(text.encode())


@functools.cache
def _corpus_digest() -> str:
    """Hash the accuracy corpus, once per process: it takes a tenth of a second."""
    return digest_of("\n".join(stdlib_corpus()).encode())


def _names(text: str | None) -> list[str]:
    return sorted(one.strip() for one in (text or "").split(",") if one.strip())


def _listed(text: str | None, known: Collection[str], param: str) -> tuple[str, ...]:
    found = tuple(_names(text))
    for one in found:
        one_of(one, known, param)
    return found
