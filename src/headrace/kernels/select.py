"""Which backend serves which operator: asked, not configured, and every answer has its reason.

A backend answers one question per operator, `supports`; `choose` composes one `Operators` object
from the first backend that says yes, in the order of the list it is given, and records a
`Decision` for each. The reference comes last and supports everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from ..base.config import Decision
from ..base.errors import OptionError
from ..base.graph import Role
from .backend import Backend, Explaining, Question
from .cpu.backend import CpuBackend
from .flashinfer.backend import FlashInferBackend
from .operators import FUSED, Dequantise, StepLimits
from .program import CallByCall, Program, Provider
from .reference_backend import ReferenceBackend
from .triton.backend import TritonBackend
from .weights import Weight

OPERATORS = (
    "embed",
    "rms_norm",
    "add_rms_norm",
    "add",
    "linear",
    "write",
    "attend",
    "gated",
    "route",
    "experts",
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
    "attend_both_sides",
)
"""What has to be served for an encoder."""


class ComposedOperators:
    """One `Operators` face over several backends: each call goes straight to its provider."""

    def __init__(self, providers: dict[str, Provider]) -> None:
        self.providers = providers
        distinct = {id(provider): provider for provider in providers.values()}
        self.name = "+".join(sorted(provider.name for provider in distinct.values()))
        self._single = self._host(list(distinct.values()))
        # An encoder has no logits, and nobody draws from it.
        self.drawing = providers.get("logits", next(iter(providers.values()))).drawing
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
    def _host(distinct: list[Provider]) -> Provider | None:
        """Who makes whole steps into programs: the only provider, or the one within which all
        others say that they run."""
        hosts = [each for each in distinct if not hasattr(each, "within")]
        if len(hosts) != 1:
            return None
        inside = all(getattr(each, "within", hosts[0].name) == hosts[0].name for each in distinct)
        return hosts[0] if inside else None

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        return self.providers["experts" if role == "moe" else role].prepare(
            weight, role, dequantise
        )

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        return None if self._single is None else self._single.compile(plain, limits)

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        return 0 if self._single is None else self._single.graph_bytes(plain, limits)


def choose(
    question: Question, wish: str = "auto", backends: Sequence[Backend] | None = None
) -> tuple[Provider, list[Decision]]:
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
    built: dict[str, Provider] = {}
    providers: dict[str, Provider] = {}
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
    return cast(Provider, ComposedOperators(providers)), decisions


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
