"""The evidence of one cell as a page: every stage with outcome, reason, figures and digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from .graph import Step
from .stage import Result
from .store import Descriptor

TEMPLATE = Path(__file__).with_suffix(".html")


def page(
    cell: str, steps: Sequence[Step], profile: Descriptor | None, hardware: Mapping[str, Any]
) -> bytes:
    """Return one self-contained HTML file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    rows = [_row(step) for step in steps]
    return (
        environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        .render(cell=cell, rows=rows, profile=profile, hardware=hardware)
        .encode()
    )


def _row(step: Step) -> dict[str, Any]:
    result = step.result or Result(reason=step.why)
    outcome = str(result.outcome) if step.result else "left out"
    figures = {**result.figures, **result.measured}
    return {
        "name": step.stage.name,
        "outcome": outcome,
        "mark": outcome.partition(" ")[0] if step.result else "not",
        "reason": result.reason,
        "outputs": [(name, one.digest) for name, one in sorted(result.outputs.items())],
        "figures": json.dumps(figures, indent=1, sort_keys=True) if figures else "",
    }
