"""The graph of stages: planned without running anything, continued from the kept results.

A stage runs if nothing is kept under its key, or if the kept result is damaged. One process runs
one stage at a time, under the lock of its key. Another process that needs the same stage waits and
then finds its result. A process killed in a stage leaves all earlier stages intact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from ..base.errors import InvalidRequest, Untrusted
from .key import canonical, changed, digest_of
from .stage import KEY_TYPE, Outcome, Recipe, Result, Stage, Work
from .store import MANIFEST_TYPE, Descriptor, Store


@dataclass(frozen=True, slots=True)
class Step:
    """One stage of a plan or of a run."""

    stage: Stage
    document: Mapping[str, Any] | None = None
    """The document of its key; None while a stage that it needs has yet to run."""
    manifest: Descriptor | None = None
    result: Result | None = None
    ran: bool = False
    why: str = ""
    """Reason why it runs, has run, or cannot run."""

    @property
    def key(self) -> str | None:
        return None if self.document is None else digest_of(canonical(self.document))


Watch = Callable[[str, Step], None]
"""Callback for each step: "kept", "starts", "waits", "ended" or "blocked"."""


Known = dict[str, tuple[Descriptor, Result]]
"""Kept results by key, once read and found complete."""


class Graph:
    """Stages in an order in which each comes after its dependencies."""

    def __init__(self, stages: Iterable[Stage], recipes: Mapping[str, Recipe]) -> None:
        """Raise `InvalidRequest` for a duplicate name, a missing need, or a cycle."""
        named: dict[str, Stage] = {}
        for stage in stages:
            if stage.name in named:
                raise InvalidRequest(f"two stages are called {stage.name}")
            if stage.recipe not in recipes:
                raise InvalidRequest(f"{stage.name}: there is no recipe {stage.recipe!r}")
            named[stage.name] = stage
        for stage in named.values():
            if missing := [name for name in stage.needs if name not in named]:
                raise InvalidRequest(f"{stage.name}: there is no stage {missing[0]!r} to need")
        order = _order(tuple((stage.name, stage.needs) for stage in named.values()))
        self.stages = [named[name] for name in order]
        self.recipes = recipes

    def plan(
        self,
        store: Store,
        *,
        before: Mapping[str, str] | None = None,
        fresh: Collection[str] = (),
        known: Known | None = None,
    ) -> list[Step]:
        """Return the steps that a run would find or do; nothing runs.

        `before`: manifests of an earlier run by stage, which show what has changed. `fresh`: stages
        to run even if a result is kept. `known`: results that other graphs of one fleet found; then
        only the size of key documents is checked.
        """
        done: dict[str, Step] = {}
        for stage in self.stages:
            done[stage.name] = self._look(store, stage, done, before or {}, fresh, known)
        return list(done.values())

    def run(
        self,
        store: Store,
        *,
        place: Any = None,
        before: Mapping[str, str] | None = None,
        fresh: Collection[str] = (),
        watch: Watch = lambda _what, _step: None,
    ) -> list[Step]:
        """Run the missing stages; return every stage with its result.

        A stage that needs a failed gate is skipped and reported. An exception of a recipe ends the
        run; all earlier results are kept.
        """
        done: dict[str, Step] = {}
        for stage in self.stages:
            step = self._look(store, stage, done, before or {}, fresh)
            if step.result is not None:
                watch("kept", step)
            elif step.document is None:
                watch("blocked", step)
            else:
                step = self._run(store, step, done, place, fresh, watch)
            done[stage.name] = step
        return list(done.values())

    def _look(
        self,
        store: Store,
        stage: Stage,
        done: Mapping[str, Step],
        before: Mapping[str, str],
        fresh: Collection[str],
        known: Known | None = None,
    ) -> Step:
        needed = {name: done[name] for name in stage.needs}
        for name, step in needed.items():
            if step.result is not None and step.result.outcome is Outcome.FAILED:
                return Step(stage, why=f"{name} failed")
        for name, step in needed.items():
            if step.result is None:
                blocked = step.document is None and step.why.endswith(("failed", "left out"))
                why = f"{name} is left out" if blocked else f"{name} comes first"
                return Step(stage, why=why)
        inputs = {name: step.result for name, step in needed.items() if step.result is not None}
        document = self.recipes[stage.recipe].key(stage, inputs)
        if stage.name in fresh:
            return Step(stage, document, why="asked for anew")
        key = digest_of(canonical(document))
        found = (known or {}).get(key) or kept(store, key, quick=known is not None)
        if known is not None and not isinstance(found, str):
            known[key] = found
        if isinstance(found, str):
            return Step(stage, document, why=found or _reason(store, stage, document, before))
        manifest, result = found
        return Step(stage, document, manifest, result)

    def _run(
        self,
        store: Store,
        step: Step,
        done: Mapping[str, Step],
        place: Any,
        fresh: Collection[str],
        watch: Watch,
    ) -> Step:
        stage, document = step.stage, step.document
        assert document is not None
        key = digest_of(canonical(document))
        with store.lock(key.removeprefix("sha256:")[:2], lambda: watch("waits", step)):
            found = kept(store, key)
            if not isinstance(found, str) and stage.name not in fresh:
                step = Step(stage, document, *found)  # Another process was quicker.
                watch("kept", step)
                return step
            watch("starts", step)
            inputs = {name: done[name].result for name in stage.needs}
            given = {name: one for name, one in inputs.items() if one is not None}
            result = self.recipes[stage.recipe].run(Work(stage, store, given, place))
            described = store.put(canonical(document), KEY_TYPE)
            manifest = store.put(result.manifest(stage.name, described), MANIFEST_TYPE)
            store.keep(key, manifest)
        step = Step(stage, document, manifest, result, ran=True, why=step.why)
        watch("ended", step)
        return step


@lru_cache(maxsize=64)
def _order(needs: tuple[tuple[str, tuple[str, ...]], ...]) -> list[str]:
    """Order names so that each comes after its dependencies; the cells of a fleet share the
    result."""
    try:
        return list(TopologicalSorter(dict(needs)).static_order())
    except CycleError as error:
        raise InvalidRequest(f"stages need each other: {' → '.join(error.args[1])}") from None


def kept(store: Store, key: str, quick: bool = False) -> tuple[Descriptor, Result] | str:
    """Return (manifest, result) under a key, or why there is none: "" if nothing is kept.

    `quick`: check only the size of the key's document, which is not read here.
    """
    try:
        digest = store.kept(key)
        if digest is None:
            return ""
        data = store.document(digest)
        config = Descriptor.read(data.get("config"))
        if config.digest != key:
            return f"what is kept under {key[:19]} is of another key"
        if not quick or not store.has(config):
            store.read(key)
        result = Result.read(data)
    except Untrusted as error:
        return f"what was kept is damaged: {error.message}"
    lost = [name for name, one in result.outputs.items() if not store.has(one)]
    if lost:
        return f"what was kept is damaged: {lost[0]} is absent or has another size"
    size = store.size(digest) or 0
    return Descriptor(digest=digest, size=size, media_type=MANIFEST_TYPE), result


def _reason(
    store: Store, stage: Stage, document: Mapping[str, Any], before: Mapping[str, str]
) -> str:
    if stage.name not in before:
        return "never run"
    try:
        old = store.document(store.document(before[stage.name])["config"]["digest"])
    except (Untrusted, KeyError, TypeError):
        return "the earlier run is no longer in the store"
    differences = changed(old, dict(document))
    return "; ".join(differences[:3]) + ("; …" if len(differences) > 3 else "") or "was removed"
