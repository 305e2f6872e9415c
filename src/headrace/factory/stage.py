"""Stages as data: the work, its inputs, and its results."""

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
"""Prefix of our annotations."""


class Outcome(StrEnum):
    """The outcome of a gate; a stage that is not a gate passes or raises."""

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
    """Names of the stages whose results it uses."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON values."""


@dataclass(frozen=True)
class Result:
    """The result of a stage."""

    outputs: Mapping[str, Descriptor] = field(default_factory=dict)
    outcome: Outcome = Outcome.PASSED
    reason: str = ""
    """Reason why a gate failed or was not evaluated, with the compared values."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Findings as small plain JSON values, always the same for the same inputs."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Timings as plain JSON values, which differ from run to run: evidence (`attest.Measured`), not
    in a profile or a later stage's key."""

    @functools.cached_property
    def content(self) -> str:
        """Digest of everything except timings, for the keys of later stages. It excludes the
        recipe: if a changed recipe gives the same result, later stages need not run."""
        content = {
            "outputs": {name: one.digest for name, one in self.outputs.items()},
            "outcome": str(self.outcome),
            "reason": self.reason,
            "figures": dict(self.figures),
        }
        return digest_of(canonical(content))

    def manifest(self, stage: str, key: Descriptor) -> bytes:
        """Write an OCI manifest whose configuration is the key's document."""
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
        """Read a stage's manifest. Raises `Untrusted` if it is not one."""
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
    """The inputs of a recipe."""

    stage: Stage
    store: Store
    inputs: Mapping[str, Result]
    """Results of its dependencies, by stage name."""
    place: Any = None
    """Inputs from the graph's caller that do not change the result: folders, progress."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A function with everything that its key needs besides the stage's own parameters."""

    run: Callable[[Work], Result]
    code: tuple[str, ...] = ()
    """Files and folders of this package that affect its result."""
    tools: tuple[str, ...] = ()
    """Packages whose versions affect its result."""
    measured: bool = False
    """Whether the machine affects its result."""
    attests: bool = False
    """Whether it gets the timings."""

    def key(self, stage: Stage, inputs: Mapping[str, Result]) -> dict[str, Any]:
        """Return the document whose digest is the key."""
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
