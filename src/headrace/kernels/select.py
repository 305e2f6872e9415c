"""Choice of the backend for each kind of node, by asking the backends, each with its reason.

A backend answers one question per kind of the model's graph, `supports`; `choose` composes one
`Operators` object from the first supporting backend in its list, and records a `Decision` for each
kind. The reference comes last and serves every kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..base.config import Decision
from ..base.errors import OptionError
from ..base.graph import Role
from .backend import Backend, Explaining, Question
from .cpu.backend import AmxBackend, CpuBackend, PairsBackend, RoundedBackend
from .operators import Dequantise, StepLimits
from .program import CallByCall, Program, Provider
from .reference_backend import ReferenceBackend
from .triton.backend import TritonBackend
from .weights import Weight

DENSE = frozenset({"float32", "float16", "bfloat16"})
"""Kinds of weights that `quantise` narrows."""


class ComposedOperators:
    """One `Operators` object over several backends: each call goes straight to its provider."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        """`providers`: by kind of node; operators of other kinds are never called."""
        self.providers = providers
        distinct = list({id(provider): provider for provider in providers.values()}.values())
        self.name = "+".join(sorted(provider.name for provider in distinct))
        self.host = all(provider.host for provider in distinct)
        self._single = distinct[0] if len(distinct) == 1 else None
        """The one provider, if it serves all nodes: it compiles steps into programs."""
        self.team = getattr(self._single, "team", None)

        def of(kind: str) -> Provider:
            return providers.get(kind, distinct[0])

        self._of = of
        self.drawing = of("linear").drawing
        self.embed, self.select, self.add = of("embed").embed, of("select").select, of("add").add
        self.scatter = of("embed").scatter
        self.rms_norm, self.layer_norm = of("norm").rms_norm, of("norm").layer_norm
        self.add_rms_norm = of("norm").add_rms_norm
        self.linear, self.logits = of("linear").linear, of("linear").logits
        self.write, self.attend = of("write").write, of("attend").attend
        self.planner = of("attend").planner
        self.gated, self.activate = of("gated").gated, of("activate").activate
        self.multiply = of("multiply").multiply
        self.absorb, self.unpack = of("absorb").absorb, of("unpack").unpack
        self.short_conv = of("short_conv").short_conv
        self.recur = of("delta_rule" if "delta_rule" in providers else "ssm").recur
        self.route, self.experts = of("route").route, of("experts").experts
        together = {id(of(kind)) for kind in ("linear", "norm", "add", "gated")}
        self.joined = of("linear").joined if len(together) == 1 else None

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        kind = {"embed": "embed", "bag": "embed", "moe": "experts", "heads": "absorb"}.get(
            role, "linear"
        )
        return self._of(kind).prepare(weight, role, dequantise)

    @property
    def told(self) -> list[Decision]:
        """Decisions made while loading the weights."""
        return list(getattr(self._single, "told", ()))

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        return None if self._single is None else self._single.compile(plain, limits)

    def compile_kernels(self, plain: CallByCall, limits: StepLimits) -> None:
        for provider in {id(each): each for each in self.providers.values()}.values():
            provider.compile_kernels(plain, limits)

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        return 0 if self._single is None else self._single.graph_bytes(plain, limits)


def choose(
    question: Question, wish: str = "auto", backends: Sequence[Backend] | None = None
) -> tuple[Provider, list[Decision]]:
    """Compose the operators that answer `question`.

    `wish` is "auto" or the name of a backend ("ref", "cpu", "triton" …). The reference serves the
    kinds that it does not support, with the reason. Raises `OptionError` if it supports nothing.
    """
    candidates = list(known_backends() if backends is None else backends)
    if wish != "auto":
        candidates += [factory() for factory in _BY_NAME if backends is None]
        wished = [backend for backend in candidates if backend.name == wish]
        if not wished:
            names = ", ".join(["auto", *(backend.name for backend in candidates)])
            raise OptionError(
                f"kernels {wish!r} are not built into this installation; there are: {names}",
                param="kernels",
            )
        candidates = [*wished, *(b for b in candidates if b.name == "ref" and b not in wished)]
        question = replace(question, asked=True)
    built: dict[str, Provider] = {}
    providers: dict[str, Provider] = {}
    decisions = []
    for kind in dict.fromkeys(node.kind for node in question.graph.nodes):
        refusals = []
        for backend in candidates:
            refusal = backend.supports(kind, question)
            if refusal is None:
                break
            refusals.append(f"{backend.name}: {refusal}")
        else:
            raise OptionError(f"no kernel for {kind}: {'; '.join(refusals)}", param="kernels")
        if backend.name not in built:
            built[backend.name] = backend.build(question)
        providers[kind] = built[backend.name]
        reason = "; ".join(refusals) if refusals else "first choice for this device"
        decisions.append(Decision(f"kernels.{kind}", backend.name, reason))
    for backend in candidates:
        if backend.name in built and isinstance(backend, Explaining):
            decisions += backend.decisions()
    if question.quantise != "auto" and not question.weights & DENSE:
        kinds = ", ".join(sorted(question.weights))
        reason = f"{question.quantise} has no effect: the weights are narrow already ({kinds})"
        decisions.append(Decision("quantise", "auto", reason))
    if wish != "auto" and wish not in built:
        raise OptionError(
            f"kernels {wish!r} can serve nothing here: {decisions[0].reason}", param="kernels"
        )
    return ComposedOperators(providers), decisions


def known_backends() -> list[Backend]:
    """Return the backends of this installation, best first; each loads its library when it is
    built."""
    return [factory() for factory in _FACTORIES]


_FACTORIES: list[Callable[[], Backend]] = [CpuBackend, TritonBackend, ReferenceBackend]
"""A new backend is a line here, before the reference."""
_BY_NAME: list[Callable[[], Backend]] = [PairsBackend, AmxBackend, RoundedBackend]
"""Backends whose results have different bits. They serve, and are mentioned, only if named."""
