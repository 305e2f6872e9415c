"""Measured time of each operator of a model's steps compared with the roofline's prediction.

Both sides are mapped to common names: products by the shape of their weight. Kernels merge and
rename operators that are separate in the model's graph (a gate computed with its product, sampling
with the head, the codes of activations).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..base.step import StepPlan
from ..kernels.timing import Timed
from ..roofline.composition import compose_plan
from ..roofline.page import charts, notice, page, table
from ..roofline.plot import Chart, Series
from ..roofline.step import OperatorTime, StepModel
from .limit import NOISE

SCHEMA = "headrace.profile/1"
APART = 0.1
"""Allowed difference between the steps' time and the sum of their operators, as a share: steps also
include the batch before the operators and the tokens after them."""


@dataclass(slots=True)
class Operator:
    """All calls of one operator over all steps of one kind."""

    kind: str
    """decode: every entry computed one token; else prompt."""
    name: str
    calls: int = 0
    measured: float = 0.0
    """Seconds."""
    predicted: float = 0.0
    limit: float = 0.0
    """Least seconds that any software needs."""

    @property
    def lost(self) -> float:
        """Seconds above the limit: the most that a better kernel could gain."""
        return self.measured - self.limit


class SumCheck(NamedTuple):
    """The operators' sum compared with the steps' own time."""

    operators: float
    steps: float

    @property
    def share(self) -> float:
        return self.operators / self.steps if self.steps else 0.0

    @property
    def holds(self) -> bool:
        return abs(1 - self.share) <= APART


def table_of(timed: Iterable[Timed], plans: Sequence[StepPlan], model: StepModel) -> list[Operator]:
    """Build the table of operators by lost time, the most first."""
    found: dict[tuple[str, str], Operator] = {}
    products: dict[tuple[int, int], str] = {}
    gated = head = False

    def of(kind: str, name: str) -> Operator:
        return found.setdefault((kind, name), Operator(kind, name))

    predicted: list[tuple[str, OperatorTime]] = []
    for plan in plans:
        kind = _kind(all(count == 1 for count in plan.counts))
        for one in model.time(compose_plan(model.case.arch, plan)).operators:
            predicted.append((kind, one))
            if one.count.shape is not None:
                label = one.count.label.partition("/")[0]
                known = products.setdefault(one.count.shape, label)
                if label not in known.split("+"):
                    products[one.count.shape] = f"{known}+{label}"
    for record in timed:
        name = record.name
        if record.shape is not None:
            name = products.get(record.shape, "product {}×{}".format(*record.shape))
        gated |= record.name == "gate_up"
        head |= record.name == "head"
        if name == "sample" and head:
            name = "head"
        operator = of(_kind(record.decodes), name)
        operator.calls += 1
        operator.measured += record.seconds
    for kind, one in predicted:
        operator = of(kind, _predicted_name(one, products, gated=gated, head=head))
        operator.predicted += one.seconds
        operator.limit += one.limit_seconds
    return sorted(found.values(), key=lambda operator: -operator.lost)


def _kind(decodes: bool) -> str:
    return "decode" if decodes else "prompt"


def _predicted_name(
    one: OperatorTime, products: dict[tuple[int, int], str], *, gated: bool, head: bool
) -> str:
    count = one.count
    if count.shape is not None:
        return products[count.shape]
    if count.operator == "gated" and gated:
        return next(name for name in products.values() if "gate_up" in name.split("+"))
    if count.operator == "sample" and head:
        return next(name for name in products.values() if "head" in name.split("+"))
    return count.operator


HEADER = ("steps", "operator", "calls", "ms", "share", "predicted", "ratio", "limit", "lost")


def rows(operators: Sequence[Operator]) -> list[list[str]]:
    total = sum(one.measured for one in operators)
    return [
        [
            one.kind,
            one.name,
            str(one.calls),
            f"{one.measured * 1e3:.1f}",
            f"{one.measured / total:.1%}" if total else "–",
            f"{one.predicted * 1e3:.1f}",
            f"{one.predicted / one.measured:.2f}" if one.measured and one.predicted else "–",
            f"{one.limit * 1e3:.1f}",
            f"{one.lost * 1e3:.1f}",
        ]
        for one in operators
    ]


def document(
    operators: Sequence[Operator], check: SumCheck, about: dict[str, Any]
) -> dict[str, Any]:
    """Return everything as JSON; times in seconds."""
    return {
        "schema": SCHEMA,
        **about,
        "operators": [
            {
                "steps": one.kind,
                "operator": one.name,
                "calls": one.calls,
                "seconds": one.measured,
                "predicted_seconds": one.predicted,
                "limit_seconds": one.limit,
            }
            for one in operators
        ],
        "check": {
            "operators_seconds": check.operators,
            "steps_seconds": check.steps,
            "share": check.share,
            "holds": check.holds,
            "ceilings": too_low(operators) or "hold",
        },
    }


def said(check: SumCheck) -> str:
    """Format the check as one sentence."""
    verdict = (
        "as it should be" if check.holds else f"NOT within {APART:.0%}: do not trust the table"
    )
    return (
        f"the operators' sum is {check.share:.1%} of the steps' own time "
        f"({check.operators * 1e3:.1f} of {check.steps * 1e3:.1f} ms): {verdict}"
    )


def too_low(operators: Sequence[Operator]) -> str | None:
    """Explain why the ceilings must be wrong; None if they may be right.

    They are wrong if all operators together were faster than any software can be.
    """
    measured = sum(one.measured for one in operators)
    least = sum(one.limit for one in operators)
    if least <= measured * (1 + NOISE):
        return None
    return (
        f"measured {measured * 1e3:.1f} ms where the limit says at least {least * 1e3:.1f}: this "
        "machine's ceilings were measured too low, and so are lost times; on a quiet machine run "
        "headrace roofline --calibrate"
    )


def operators_page(operators: Sequence[Operator], check: SumCheck, subtitle: str) -> str:
    """Render charts of each kind of step, and the table."""
    drawn, kinds = [], defaultdict[str, list[Operator]](list)
    for one in operators:
        kinds[one.kind].append(one)
    for kind, found in kinds.items():
        places = [float(number) for number in range(1, len(found) + 1)]
        drawn.append(
            Chart(
                f"Where the time of {kind} steps goes",
                "operator, by lost time",
                "ms",
                [
                    Series("measured", places, [one.measured * 1e3 for one in found], "bars"),
                    Series("predicted", places, [one.predicted * 1e3 for one in found], "marked"),
                    Series("limit", places, [one.limit * 1e3 for one in found], "points"),
                ],
                names=[one.name for one in found],
            )
        )
    body = notice(said(check), good=check.holds)
    if (why := too_low(operators)) is not None:
        body += notice(why, good=False)
    body += charts(drawn)
    return page("Headrace profile", subtitle, body + table(HEADER, rows(operators)))
