"""A type for each matrix of a GGUF under a budget of bytes, or of milliseconds on a machine.

The loss of a mix is the sum of its matrices' losses (`quantise.sensitivity`). For each matrix the
type with the least loss + λ · cost is taken, with the smallest λ that keeps the budget: the best
mix of its cost, up to one matrix. Matrices that a kernel multiplies in one pass share a type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.arch import ModelArch
from ..base.config import TIMES, parse_size
from ..base.errors import DoesNotFit, OptionError
from ..base.modelfiles import ModelFiles
from ..loader.progress import Progress
from ..models.registry import describe
from ..quant.ggml_types import BY_NAME
from ..quantise.statistic import Windows

if TYPE_CHECKING:
    from ..quantise.sensitivity import Read

KINDS = ("Q4_0", "Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0")
"""Types of a mix: those for which GGUF's readers have kernels."""
ROWS = 64
"""Rows of a matrix that are tried in each type."""
SAMPLE = 1024
"""Approximate number of tokens with which matrices are weighed."""
SHORT = 256
"""Most tokens of their windows."""
ERROR = 1.25
"""Factor on either side of a prediction for errors of the sample and the second-order model: an
assumption, not a measured bound."""
STEPS = 60
"""Halvings of λ's range."""
Loss = tuple[float, float]
"""KL in nats per token: lower and upper bound."""
Losses = Mapping[str, Mapping[str, Loss]]
"""By tensor and type."""
Mix = Mapping[str, str]
"""Type by tensor."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit of a result: its bytes, or the time of a step."""

    nbytes: int | None = None
    seconds: float | None = None
    """Time of a decode step of one sequence."""

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parse `400MB` or `20ms`. Raises `OptionError`."""
        found = re.fullmatch(r"\s*([0-9.]+)\s*(us|µs|ms|s)\s*", text)
        try:
            if found is None:
                return cls(nbytes=parse_size(text, "budget"))
            seconds = float(found[1]) * TIMES[found[2]]
        except (OptionError, ValueError):
            raise OptionError(
                f"budget must be a size such as 400MB or a decode step's time such as 20ms, not "
                f"{text!r:.80}",
                param="budget",
            ) from None
        if not 0 < seconds < math.inf:
            raise OptionError(f"budget is out of range: {text!r:.80}", param="budget")
        return cls(seconds=seconds)


def weigh(
    files: ModelFiles,
    windows: Windows,
    tensors: Sequence[Any],
    kinds: Sequence[str] | None,
    progress: Progress | None = None,
) -> Losses:
    """Predict the loss of each tensor in some types (None: in its own) from `SAMPLE` tokens of the
    text."""
    # Local: torch, which the plan of a build does not need.
    from ..quantise.sensitivity import gains, sensitivities

    total = sum(map(len, windows))
    # Short windows: each is one sample of the sum of its tokens' changes.
    some = [
        window[at : at + SHORT]
        for window in windows[:: max(1, total // SAMPLE)]
        for at in range(0, len(window), SHORT)
    ]
    mine: dict[str, Any] = {}
    for one in tensors:
        mine |= dict.fromkeys(one.names, one)
    found: dict[str, dict[str, Loss]] = {}
    count = sum(map(len, some))

    def visit(reads: Mapping[str, Sequence[Read]]) -> None:
        solved: dict[int, tuple[float, float]] = {}  # Products of one input have one gain.
        for one in {id(mine[name]): mine[name] for name in reads if name in mine}.values():
            table = found.setdefault(one.file_name, {})
            for kind in kinds or (one.kind,):
                if kind in BY_NAME and one.width % BY_NAME[kind].block:
                    continue
                low, high = table.get(kind, (0.0, 0.0))
                for read, loss in losses_of(one, reads, kind):
                    key = id(read.x)
                    if key not in solved:
                        solved[key] = (1.0, 1.0) if read.x is None else gains(read.x)
                    low, high = (
                        total + loss * gain / count
                        for total, gain in zip((low, high), solved[key], strict=True)
                    )
                table[kind] = float(f"{low:.4g}"), float(f"{high:.4g}")

    sensitivities(files, some, visit, progress)
    return with_unseen(found, tensors, kinds)


def with_unseen(
    losses: Losses, tensors: Sequence[Any], kinds: Sequence[str] | None
) -> dict[str, dict[str, Loss]]:
    """Add the losses of tensors that no token used: a lookup table, an expert that the router never
    picked. Nothing is known of them, so they get the others' loss per byte instead of zero;
    otherwise all would get the smallest type."""
    found = {name: dict(table) for name, table in losses.items()}
    seen = [one for one in tensors if losses.get(one.file_name)]
    for one in tensors:
        if losses.get(one.file_name):
            continue
        table = found.setdefault(one.file_name, {})
        for kind in kinds or (one.kind,):
            others = [other for other in seen if kind in losses[other.file_name]]
            fits = kind not in BY_NAME or one.width % BY_NAME[kind].block == 0
            if not others or not fits:
                continue
            share = one.dense_bytes / sum(other.dense_bytes for other in others)
            low, high = (
                share * sum(losses[other.file_name][kind][side] for other in others)
                for side in (0, 1)
            )
            table[kind] = float(f"{low:.4g}"), float(f"{high:.4g}")
    return found


def losses_of(
    tensor: Any, reads: Mapping[str, Sequence[Read]], kind: str
) -> Iterator[tuple[Read, float]]:
    """Yield each use of a tensor with the cost of rounding to the nearest in a type: KL in nats,
    summed over tokens."""
    each = max(1, len(tensor.names) // tensor.matrices)
    for number in range(tensor.matrices):
        names = dict.fromkeys(tensor.names[number * each : (number + 1) * each])
        some = [read for name in names for read in reads.get(name, ())]
        off = tensor.errors(number, kind, next((one.inputs() for one in some), None))
        yield from ((read, read.loss(off, ROWS)) for read in some)


def best_mix(
    tensors: Sequence[Any],
    arch: ModelArch,
    losses: Losses,
    cost: Callable[[Mix], float],
    budget: float,
    unit: str,
) -> Mix:
    """Return the mix of least loss whose cost is no more than the budget.

    `cost`: of a mix, linear in the bytes of each tensor. Raises `DoesNotFit` if the smallest mix
    costs more.
    """
    groups = _groups(tensors, arch)
    options = [
        [kind for kind in KINDS if all(one.width % BY_NAME[kind].block == 0 for one in group)]
        for group in groups
    ]

    def mixed(choice: Sequence[str]) -> dict[str, str]:
        pairs = zip(groups, choice, strict=True)
        return {one.file_name: kind for group, kind in pairs for one in group}

    def size(group: Sequence[Any], kind: str) -> int:
        return sum(one.bytes_as(kind) for one in group)

    least = [
        min(kinds, key=lambda kind: size(group, kind))
        for group, kinds in zip(groups, options, strict=True)
    ]
    smallest = cost(mixed(least))
    if smallest > budget:
        raise DoesNotFit(
            f"the smallest mix of types takes {smallest:,.4g} {unit}, the budget is "
            f"{budget:,.4g} {unit}",
            param="budget",
        )
    rates = []
    for number, (group, kinds) in enumerate(zip(groups, options, strict=True)):
        most = max(kinds, key=lambda kind: size(group, kind))
        more = size(group, most) - size(group, least[number])
        other = cost(mixed([*least[:number], most, *least[number + 1 :]])) - smallest
        rates.append(other / more if more else 0.0)

    def loss(group: Sequence[Any], kind: str) -> float:
        some = [losses.get(one.file_name, {}).get(kind, (0.0, 0.0)) for one in group]
        return sum(math.sqrt(low * high) for low, high in some)

    def choice(weight: float) -> list[str]:
        found = []
        for group, kinds, rate in zip(groups, options, rates, strict=True):
            price = {
                kind: (loss(group, kind) + weight * rate * size(group, kind), size(group, kind))
                for kind in kinds
            }
            found.append(min(kinds, key=price.__getitem__))
        return found

    low, high = -60.0, 60.0  # Exponents of 2.
    for _ in range(STEPS):
        middle = (low + high) / 2
        if cost(mixed(choice(2.0**middle))) <= budget:
            high = middle
        else:
            low = middle
    best = choice(2.0**high)
    found = best if cost(mixed(best)) <= budget else least
    left = float(budget - cost(mixed(found)))
    while True:  # The rest is too small for this matrix's next step, perhaps not for another's.
        steps = []
        for number, (group, kinds, rate) in enumerate(zip(groups, options, rates, strict=True)):
            was = found[number]
            for kind in kinds:
                step = rate * (size(group, kind) - size(group, was))
                gain = loss(group, was) - loss(group, kind)
                if gain > 0 and step <= left:
                    steps.append((gain / max(step, 1e-12), -number, kind, step))
        if not steps:
            return mixed(found)
        _, number, kind, step = max(steps)
        found[-number] = kind
        left -= step


def kinds_of(tensors: Iterable[Any]) -> Mix:
    """Return the types that tensors have."""
    return {one.file_name: one.kind for one in tensors}


def predicted(mix: Mix, losses: Losses) -> dict[str, float]:
    """Return the mix's KL in nats a token with its error, as plain JSON."""
    some = [losses[name][kind] for name, kind in mix.items() if kind in losses.get(name, {})]
    low, high = (sum(one[at] for one in some) for at in (0, 1))
    found = {"mean": math.sqrt(low * high), "low": low / ERROR, "high": high * ERROR}
    return {name: float(f"{one:.4g}") for name, one in found.items()}


def _groups(tensors: Sequence[Any], arch: ModelArch) -> list[list[Any]]:
    """Group the tensors that one pass of a kernel multiplies: gate and up."""
    together: dict[str, int] = {}
    refs: list[Any] = [ref for ref in describe(arch).weights() if len(ref.names) > 1]
    for number, ref in enumerate(refs):
        if ref.purpose in ("gate_up", "experts", "shared"):
            copies = [ref.copy(one).names for one in range(ref.copies)]
            together |= dict.fromkeys((name for names in copies for name in names), number)
    found: dict[object, list[Any]] = {}
    for one in tensors:
        key = next((together[name] for name in one.names if name in together), one.file_name)
        found.setdefault(key, []).append(one)
    return list(found.values())
