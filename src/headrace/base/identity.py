"""Everything but the request that an answer depends on: weights, options, kernels, version.

Two engines of equal identity give the same answer to the same request. It is the same bit for bit
if bits are promised at all (`Identity.exact`). The digest of an identity is the
`system_fingerprint` of every answer; `headrace replay` compares identities part by part.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

from .arch import ModelArch
from .config import Decision, EngineOptions
from .version import VERSION

OPTIONS = ("device", "dtype", "kv_dtype", "quantise", "deterministic")
"""Options that change an answer's bits. The others decide when something is computed."""


@dataclass(frozen=True)
class Identity:
    """The parts, by name."""

    weights: str
    """Digest of the model's files (`loader.content`)."""
    architecture: str
    """Digest of the parsed `base.arch.ModelArch`, and of the factors of a long rope for this
    context."""
    options: dict[str, str]
    """Resolved values of `OPTIONS`."""
    kernels: dict[str, str]
    """Backend of each operator, and the digest of the CPU kernels' sources. Not the instruction
    set: every level of the CPU kernels gives the same bits."""
    version: str = VERSION

    @classmethod
    def of(
        cls,
        weights: str,
        arch: ModelArch,
        options: EngineOptions,
        decisions: list[Decision],
        items: str = "",
    ) -> Identity:
        """Make the identity of an engine with these resolved options and decisions. `items`: digest
        of its catalogue."""
        decided = {decision.name: decision.value for decision in decisions}
        read = repr(arch)
        if arch.rope.kind == "long":
            read += repr(arch.rope.divisors(options.max_context or arch.max_context))
        return cls(
            weights=weights,
            architecture=hashlib.sha256(read.encode()).hexdigest()[:16],
            options={name: str(getattr(options, name)).lower() for name in OPTIONS}
            | ({"items": items} if items else {}),
            kernels={
                name.removeprefix("kernels."): value
                for name, value in sorted(decided.items())
                if name.startswith("kernels.") and name != "kernels.level"
            },
        )

    @cached_property
    def fingerprint(self) -> str:
        """`fp_` and 16 hexadecimal digits: equal for equal identities."""
        digest = hashlib.sha256()
        for name, value in self._parts().items():
            digest.update(f"{name}={value};".encode())
        return f"fp_{digest.hexdigest()[:16]}"

    @property
    def exact(self) -> bool:
        """Whether this engine gives the same bits for any batch."""
        return self.options.get("device") == "cpu" or self.options.get("deterministic") == "true"

    def differences(self, other: Identity) -> list[str]:
        """Return one line for each part in which `other` differs: name, value here, value there."""
        here, there = self._parts(), other._parts()
        return [
            f"{name}: {here.get(name, 'absent')}, now {there.get(name, 'absent')}"
            for name in dict.fromkeys((*here, *there))
            if here.get(name) != there.get(name)
        ]

    def _parts(self) -> dict[str, str]:
        return {
            "weights": self.weights,
            "architecture": self.architecture,
            **{f"option {name}": value for name, value in self.options.items()},
            **{f"kernel of {name}": value for name, value in self.kernels.items()},
            "version": self.version,
        }
