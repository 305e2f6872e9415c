"""Stages as data: what runs, on what, and what came out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..base.errors import Untrusted
from ..base.foreign import any_json
from .key import canonical, code_digest, digest_of, hardware_class, versions
from .store import MANIFEST_TYPE, TITLE, Descriptor, Store

KEY_TYPE = "application/vnd.headrace.key.v1+json"
STAGE_TYPE = "application/vnd.headrace.stage.v1+json"
NOTE = "dev.headrace."
"""What our annotations begin with."""


class Outcome(StrEnum):
    """How a gate ended; a stage that is no gate passes or raises."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_EVALUATED = "not evaluated"


@dataclass(frozen=True, slots=True)
class Stage:
    """One node of the graph."""

    name: str
    recipe: str
    """Name of the recipe that runs it."""
    needs: tuple[str, ...] = ()
    """Names of the stages whose results it takes."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values."""


@dataclass(frozen=True)
class Result:
    """What a stage gave."""

    outputs: Mapping[str, Descriptor] = field(default_factory=dict)
    outcome: Outcome = Outcome.PASSED
    reason: str = ""
    """Why a gate failed or was not evaluated; what it held against what."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values, small: what was found, of the same inputs always the same."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values of a clock, which differ from run to run: evidence (`attest.Measured`), in
    no profile and in no later stage's key."""

    @functools.cached_property
    def content(self) -> str:
        """Digest for the keys of later stages, of all but what a clock measured. Not of how it was
        made, so that a recipe that is changed and gives the same ends the work there."""
        told = {
            "outputs": {name: one.digest for name, one in self.outputs.items()},
            "outcome": str(self.outcome),
            "reason": self.reason,
            "figures": dict(self.figures),
        }
        return digest_of(canonical(told))

    def manifest(self, stage: str, key: Descriptor) -> bytes:
        """An OCI manifest whose configuration is the key's document."""
        return canonical(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "artifactType": STAGE_TYPE,
                "config": key.document(),
                "layers": [
                    one.document(**{TITLE: name}) for name, one in sorted(self.outputs.items())
                ],
                "annotations": {
                    f"{NOTE}stage": stage,
                    f"{NOTE}outcome": str(self.outcome),
                    f"{NOTE}reason": self.reason,
                    f"{NOTE}figures": canonical(dict(self.figures)).decode(),
                    f"{NOTE}measured": canonical(dict(self.measured)).decode(),
                },
            }
        )

    @classmethod
    def read(cls, manifest: Mapping[str, Any]) -> Result:
        """Raise `Untrusted` where it is no manifest of a stage."""
        try:
            notes = manifest["annotations"]
            return cls(
                outputs={
                    one["annotations"][TITLE]: Descriptor.read(one) for one in manifest["layers"]
                },
                outcome=Outcome(notes[f"{NOTE}outcome"]),
                reason=notes[f"{NOTE}reason"],
                figures=any_json(notes[f"{NOTE}figures"]),
                measured=any_json(notes.get(f"{NOTE}measured", "{}")),
            )
        except (KeyError, TypeError, ValueError):
            raise Untrusted("a manifest is not that of a stage") from None


@dataclass(frozen=True, slots=True)
class Work:
    """What a recipe is given."""

    stage: Stage
    store: Store
    inputs: Mapping[str, Result]
    """Results of the stages it needs, by their names."""
    place: Any = None
    """What does not change the result, by the one who runs the graph: folders, progress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function with all that its key needs beside the stage's own parameters."""

    run: Callable[[Work], Result]
    code: tuple[str, ...] = ()
    """Files and folders of this package that decide what it gives."""
    tools: tuple[str, ...] = ()
    """Packages whose versions do."""
    measured: bool = False
    """Does the machine decide too?"""
    attests: bool = False
    """Whether it takes what a clock measured, too."""

    def key(self, stage: Stage, inputs: Mapping[str, Result]) -> dict[str, Any]:
        """The document whose digest is the key."""
        return {
            "stage": stage.name.rpartition("/")[2],
            "recipe": stage.recipe,
            "code": code_digest(self.code),
            "tools": versions(self.tools),
            "parameters": dict(stage.parameters),
            "inputs": {name.rpartition("/")[2]: self._taken(one) for name, one in inputs.items()},
            "hardware": hardware_class() if self.measured else None,
        }

    def _taken(self, one: Result) -> str:
        if not self.attests or not one.measured:
            return one.content
        return digest_of(canonical([one.content, dict(one.measured)]))
