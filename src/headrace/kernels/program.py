"""One call: a step's batch and the wanted outputs → tokens, logits, hidden states.

A `Program` is a model bound to its operators and its KV. Every backend has `CallByCall`: operator
after operator. The other programs use it for steps beyond their limits, so that no program ever
refuses a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol

from .arrays import Array
from .attention_plan import Planner
from .draws import Drawing, by_rules
from .interpret import Adding
from .model import Model
from .operators import KvCache, Operators, StepBatch, StepLimits
from .timing import OperatorTimes
from .weights import LoraWeight

Tokens = Literal["none", "best", "rules"]
Hidden = Literal["none", "sampled", "every"]


class Want(NamedTuple):
    """Wanted outputs of a step. One object per combination, so that `is` compares them: `want`."""

    tokens: Tokens
    """"best": the most likely of each row in `StepBatch.sample_rows`, the smallest id among equals;
    "rules": by `StepBatch.rules` or `StepBatch.draws`."""
    logits: bool
    """Whether they must be readable afterwards. A caller that masks them also picks tokens."""
    hidden: Hidden
    """Hidden states after the last norm: of `sample_rows`, or of every token."""


_KNOWN: dict[Want, Want] = {}


def want(tokens: Tokens = "none", *, logits: bool = False, hidden: Hidden = "none") -> Want:
    """Return the one object of this combination."""
    made = Want(tokens, logits, hidden)
    return _KNOWN.setdefault(made, made)


BEST = want("best")
RULES = want("rules")
LOGITS = want(logits=True)
EVERY = want(hidden="every")


@dataclass(slots=True)
class Outputs:
    """Outputs of a step. Valid until the next call of its program, which may reuse the object."""

    tokens: Array | None = None
    """[R] int64. -1 in a host array: the token could not be drawn; then logits are present. -1 in a
    device tensor: the row's logits are NaN. On a CPU such a row gets an arbitrary token."""
    logits: Array | None = None
    """[R, V] fp32; present if wanted, and in every step without tokens."""
    hidden: Array | None = None
    """[R, D], or [N, D] if all were wanted."""
    states: Array | None = None
    """The output `states` of the model's graph, with as many rows; `hidden` if it has none."""
    more: Mapping[str, Array] = field(default_factory=dict)
    """Outputs of the graph by other names, [N, width]; present if all hidden states were wanted."""


class Program(Protocol):
    """Runner of a model's steps."""

    host: bool
    """Whether its arrays are the host's (numpy)."""
    lowered: bool
    """Whether a step computes nothing on tensors."""

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        """Compute a step: the KV of its tokens, and the wanted outputs. `batch.adapters` add to
        their tokens' products."""
        ...

    def head(self, hidden: Array) -> Array:
        """Apply the model's head to hidden [R, D] of any rows. The caller ensures room for the
        logits."""
        ...


class Provider(Operators, Protocol):
    """Operators of a backend, and compilers of whole steps."""

    drawing: Drawing
    """Functions that make tokens from the logits of these operators."""

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        """Return a faster way to run whole steps than `plain` (a recorded program, graphs), or
        None.

        Called only if one backend serves every operator. The program passes steps beyond its limits
        to `plain`.
        """
        ...

    def compile_kernels(self, plain: CallByCall, limits: StepLimits) -> None:
        """Compile the kernels of all steps, before the first one is computed."""
        ...

    def planner(self, cache: KvCache, drafts: int = 0) -> Planner | None:
        """Return the maker of attention lists for this cache, with up to `drafts` drafts per entry;
        None: lists are not used."""
        ...

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        """Return the device bytes that graphs made by `compile` will take; 0 without graphs."""
        ...


def choose(drawing: Drawing, logits: Array, batch: StepBatch) -> Array:
    """Choose tokens [R] for logits [R, V] by the batch's rules, by default the most likely."""
    if batch.draws is not None:
        return drawing.draw(logits, batch.draws)
    if batch.rules is not None:
        return by_rules(drawing, logits, batch.rules, batch.next_places())
    return drawing.argmax(logits)


class CallByCall:
    """A step run operator by operator."""

    host = lowered = False

    def __init__(
        self,
        model: Model,
        operators: Provider,
        cache: KvCache,
        drawing: Drawing,
        additions: Mapping[tuple[str, ...], LoraWeight] | None = None,
    ) -> None:
        """`drawing` makes tokens from the logits of `operators`. `additions`: LoRA weights that
        adapters may add to products, by the names of their tensors."""
        self.model, self.operators, self.cache, self.drawing = model, operators, cache, drawing
        self.additions: Mapping[tuple[str, ...], LoraWeight] = additions or {}
        self.times: OperatorTimes | None = None

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        adding: Adding | None = None
        if batch.adapters is not None:
            from . import adapted  # Local: imports torch, for single operators only.

            adding = adapted.adding(self.additions, batch)
        times, every = self.times, want.hidden == "every"
        if times is not None:
            times.begin(decodes=batch.max_count == 1)
        hidden, logits, *rest = self.model.forward(
            self.operators, batch, self.cache, adding, every=every, times=times
        )
        more = dict(zip(self.model.further(every=every), rest, strict=True))
        states = more.pop("states", hidden)
        if want.tokens == "none":
            return Outputs(None, logits, hidden, states, more)
        make = partial(self._choose, logits, batch, best=want.tokens == "best")
        tokens = make() if times is None else times.run("sample", None, make)
        return Outputs(tokens, logits, hidden, states, more)

    def _choose(self, logits: Array, batch: StepBatch, *, best: bool) -> Array:
        return self.drawing.argmax(logits) if best else choose(self.drawing, logits, batch)

    def head(self, hidden: Array) -> Array:
        return self.model.logits(self.operators, hidden)
