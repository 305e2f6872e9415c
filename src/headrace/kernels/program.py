"""One call: a step's batch, and what is wanted of it → tokens, logits, hidden states.

A `Program` is a model bound to its operators and its KV. `CallByCall` is the one that every
backend has: operator after operator, which is also what the others do beyond their limits, so that
no program ever refuses a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """What a whole step is asked for. One object per question, so that `is` compares: `want`."""

    tokens: Tokens
    """"best": the most likely of each row in `StepBatch.sample_rows`, of equals the smallest id;
    "rules": by `StepBatch.rules` or `StepBatch.draws`."""
    logits: bool
    """Must they be readable afterwards? Whoever masks them chooses the tokens too."""
    hidden: Hidden
    """After the last norm: of `sample_rows`, or of every token."""


_KNOWN: dict[Want, Want] = {}


def want(tokens: Tokens = "none", *, logits: bool = False, hidden: Hidden = "none") -> Want:
    """The one object of this question."""
    made = Want(tokens, logits, hidden)
    return _KNOWN.setdefault(made, made)


BEST = want("best")
RULES = want("rules")
LOGITS = want(logits=True)
EVERY = want(hidden="every")


@dataclass(slots=True)
class Outputs:
    """What a step gave. Valid until the next call of its program: that may use the object again."""

    tokens: Array | None = None
    """[R] int64. -1: this one could not be drawn; then logits are there. A row whose logits are no
    numbers gets any token of the vocabulary."""
    logits: Array | None = None
    """[R, V] fp32; there where wanted, and in every step without tokens."""
    hidden: Array | None = None
    """[R, D], or [N, D] where every one was wanted."""
    states: Array | None = None
    """The output `states` of the model's graph, in as many rows; `hidden` where it has none."""


class Program(Protocol):
    """A model's step."""

    host: bool
    """Are its arrays the host's (numpy)?"""
    lowered: bool
    """Does a step compute nothing on tensors?"""

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        """Compute a step: the KV of its tokens, and what is wanted. `batch.adapters` add to the
        products of their tokens."""
        ...

    def head(self, hidden: Array) -> Array:
        """hidden [R, D] of any rows → what the model's head says of them. The caller sees to it
        that their logits have room."""
        ...


class Provider(Operators, Protocol):
    """What a backend builds: operators, and whole steps of them."""

    drawing: Drawing
    """Makes tokens of the logits that these operators make."""

    def compile(self, plain: CallByCall, limits: StepLimits) -> Program | None:
        """A faster way to run whole steps than `plain` (a recorded program, graphs), or None.

        Asked only when one backend serves every operator. What is beyond its limits the program
        hands to `plain`.
        """
        ...

    def planner(self, cache: KvCache, drafts: int = 0) -> Planner | None:
        """Maker of the lists by which attention on this cache is shared out, where entries verify
        up to `drafts` drafts; None: nobody reads any."""
        ...

    def graph_bytes(self, plain: CallByCall, limits: StepLimits) -> int:
        """What graphs that `compile` makes will take of the device, in bytes; 0 without graphs."""
        ...


def choose(drawing: Drawing, logits: Array, batch: StepBatch) -> Array:
    """Tokens [R] of logits [R, V], by the rules of the batch; without any, the most likely."""
    if batch.draws is not None:
        return drawing.draw(logits, batch.draws)
    if batch.rules is not None:
        return by_rules(drawing, logits, batch.rules, batch.next_places())
    return drawing.argmax(logits)


class CallByCall:
    """A step by the operators, one after the other."""

    host = lowered = False

    def __init__(
        self,
        model: Model,
        operators: Provider,
        cache: KvCache,
        drawing: Drawing,
        additions: Mapping[tuple[str, ...], LoraWeight] | None = None,
    ) -> None:
        """`drawing` makes tokens of the logits that `operators` make. `additions`: what adapters
        may add to products, by the names of their tensors."""
        self.model, self.operators, self.cache, self.drawing = model, operators, cache, drawing
        self.additions: Mapping[tuple[str, ...], LoraWeight] = additions or {}
        self.times: OperatorTimes | None = None

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        adding: Adding | None = None
        if batch.adapters is not None:
            from . import adapted  # Local: imports torch; operators called one by one take tensors.

            adding = adapted.adding(self.additions, batch)
        times, every = self.times, want.hidden == "every"
        if times is not None:
            times.begin(decodes=batch.max_count == 1)
        hidden, logits, *more = self.model.forward(
            self.operators, batch, self.cache, adding, every=every, times=times
        )
        states = more[0] if more else hidden
        if want.tokens == "none":
            return Outputs(None, logits, hidden, states)
        make = partial(self._choose, logits, batch, best=want.tokens == "best")
        tokens = make() if times is None else times.run("sample", None, make)
        return Outputs(tokens, logits, hidden, states)

    def _choose(self, logits: Array, batch: StepBatch, *, best: bool) -> Array:
        return self.drawing.argmax(logits) if best else choose(self.drawing, logits, batch)

    def head(self, hidden: Array) -> Array:
        return self.model.logits(self.operators, hidden)
