"""Which backend serves which operator: asked, not configured, and every answer has its reason.

A backend answers one question per operator, `supports`; `choose` composes one `Operators` object
from the first backend that says yes, in the order of the list it is given, and records a
`Decision` for each. The reference comes last and supports everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from ..base.config import Decision
from ..base.errors import OptionError
from ..base.graph import Role
from .backend import Backend, Explaining, Question
from .cpu.backend import CpuBackend
from .draws import Drawing
from .flashinfer.backend import FlashInferBackend
from .model import Bound, Model
from .operators import (
    FUSED,
    AdaptedProgram,
    AdaptingOperators,
    Dequantise,
    KvCache,
    Operators,
    Program,
    StepLimits,
)
from .reference_backend import ReferenceBackend
from .triton.backend import TritonBackend
from .weights import LoraWeight, Weight

OPERATORS = (
    "embed",
    "rms_norm",
    "add_rms_norm",
    "add",
    "linear",
    "rope_and_cache",
    "attention",
    "gated",
    "moe",
    "select",
    "logits",
)
"""What has to be served for a decoder."""
ENCODER_OPERATORS = (
    "embed",
    "add",
    "linear",
    "select",
    "layer_norm",
    "activate",
    "encoder_attention",
)
"""What has to be served for an encoder."""


class ComposedOperators:
    """One `Operators` face over several backends: each call goes straight to its provider."""

    def __init__(self, providers: dict[str, Operators]) -> None:
        self.providers = providers
        distinct = {id(provider): provider for provider in providers.values()}
        self.name = "+".join(sorted(provider.name for provider in distinct.values()))
        self._single = self._host(list(distinct.values()))
        self._alone = len(distinct) == 1
        self.host = all(provider.host for provider in distinct.values())
        for operator, provider in providers.items():
            setattr(self, operator, getattr(provider, operator))
        # What joins these four operators: only where one provider has them all.
        ends = {id(providers.get(name)) for name in ("linear", "rms_norm", "add_rms_norm", "gated")}
        if len(ends) == 1 and "linear" in providers:
            for name in FUSED:
                if hasattr(providers["linear"], name):
                    setattr(self, name, getattr(providers["linear"], name))

    @staticmethod
    def _host(distinct: list[Operators]) -> Operators | None:
        """Who makes whole steps into programs: the only provider, or the one within which all
        others say that they run."""
        hosts = [each for each in distinct if not hasattr(each, "within")]
        if len(hosts) != 1:
            return None
        inside = all(getattr(each, "within", hosts[0].name) == hosts[0].name for each in distinct)
        return hosts[0] if inside else None

    def _bound(self, model: Model) -> Model:
        """`model` by all providers, whoever makes the program."""
        return model if self._alone else Bound(model, cast(Operators, self))

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        return self.providers[role].prepare(weight, role, dequantise)

    def compile(self, model: Model, cache: KvCache, limits: StepLimits) -> Program | None:
        if self._single is None:
            return None
        return self._single.compile(self._bound(model), cache, limits)

    def graph_bytes(self, model: Model, cache: KvCache, limits: StepLimits) -> int:
        """What graphs made by `compile` will take of the device; 0 without graphs."""
        estimate = getattr(self._single, "graph_bytes", None)
        return 0 if estimate is None else int(estimate(self._bound(model), cache, limits))

    def compile_adapted(
        self,
        model: Model,
        cache: KvCache,
        limits: StepLimits,
        additions: Mapping[tuple[str, ...], LoraWeight],
        beside: Program | None,
    ) -> AdaptedProgram | None:
        """See `AdaptingOperators`; None where the backend makes no such programs."""
        if not isinstance(self._single, AdaptingOperators):
            return None
        return self._single.compile_adapted(model, cache, limits, additions, beside)


def choose(
    question: Question, wish: str = "auto", backends: Sequence[Backend] | None = None
) -> tuple[Operators, list[Decision]]:
    """Compose the operators that answer `question`.

    `wish` is "auto", or the name of the backend that shall serve ("ref", "cpu", "triton" …):
    what that one cannot do falls to the reference, with the reason; a wish for a backend that can
    serve nothing is refused with `OptionError`.
    """
    candidates = list(known_backends() if backends is None else backends)
    if wish != "auto":
        wished = [backend for backend in candidates if backend.name == wish]
        if not wished:
            names = ", ".join(["auto", *(backend.name for backend in candidates)])
            raise OptionError(
                f"kernels {wish!r} are not built into this installation; there are: {names}",
                param="kernels",
            )
        beside = (*getattr(wished[0], "beside", ()), "ref")
        candidates = [*wished, *(b for b in candidates if b.name in beside and b not in wished)]
        question = replace(question, asked=True)
    wanted = ENCODER_OPERATORS if question.encoder else OPERATORS
    built: dict[str, Operators] = {}
    providers: dict[str, Operators] = {}
    decisions = []
    for operator in wanted:
        refusals = []
        for backend in candidates:
            refusal = backend.supports(operator, question)
            if refusal is None:
                break
            refusals.append(f"{backend.name}: {refusal}")
        else:
            raise OptionError(f"no kernel for {operator}: {'; '.join(refusals)}", param="kernels")
        if backend.name not in built:
            built[backend.name] = backend.build(question)
        providers[operator] = built[backend.name]
        reason = "; ".join(refusals) if refusals else "first choice for this device"
        decisions.append(Decision(f"kernels.{operator}", backend.name, reason))
    for backend in candidates:
        if backend.name in built and isinstance(backend, Explaining):
            decisions += backend.decisions()
    if wish != "auto" and wish not in built:
        raise OptionError(
            f"kernels {wish!r} can serve nothing here: {decisions[0].reason}", param="kernels"
        )
    return cast(Operators, ComposedOperators(providers)), decisions


def drawing_of(operators: Operators) -> Drawing:
    """Who draws tokens from the logits that `operators` make: the same backend, if it can."""
    provider = operators
    if isinstance(operators, ComposedOperators):
        # An encoder has no logits, and nobody draws from it.
        provider = operators.providers.get("logits", provider)
    found = getattr(provider, "drawing", None)
    if found is None:
        from .sampling import REFERENCE  # Local: it computes on tensors.

        return REFERENCE
    assert isinstance(found, Drawing)
    return found


def known_backends() -> list[Backend]:
    """The backends of this installation, best first; each loads its library when it is built."""
    return [factory() for factory in _FACTORIES]


_FACTORIES: list[Callable[[], Backend]] = [
    CpuBackend,
    FlashInferBackend,
    TritonBackend,
    ReferenceBackend,
]
"""A new backend is a line here, before the reference."""
