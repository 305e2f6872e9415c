"""The evidence of one cell as a page: every stage with outcome, reason, figures and digests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

from .graph import Step
from .stage import Result
from .store import Descriptor

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ cell }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
td, th { text-align: left; vertical-align: top; padding: .4rem .8rem .4rem 0;
  border-bottom: 1px solid #8884; }
code, pre { font: 13px/1.4 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
.passed { color: #1a7f37; } .failed { color: #cf222e; font-weight: 600; }
.not { color: #9a6700; }
</style></head><body>
<h1>{{ cell }}</h1>
<p>{% if profile %}Signed profile <code>{{ profile.digest }}</code>{% else %}
<span class="failed">No profile was signed.</span>{% endif %}</p>
<p>Measured on {{ hardware.cpu }}, level {{ hardware.level }}, {{ hardware.cores }} cores
{%- for gpu in hardware.gpus %}, {{ gpu }}{% endfor %}.</p>
<table><thead><tr><th>stage</th><th>outcome</th><th>why</th><th>what came out</th></tr></thead>
<tbody>
{% for row in rows %}<tr id="{{ row.name }}"><td>{{ row.name }}</td>
<td class="{{ row.mark }}">{{ row.outcome }}</td><td>{{ row.reason }}</td>
<td>{% for title, digest in row.outputs %}<code>{{ title }} {{ digest }}</code><br>{% endfor %}
{% if row.figures %}<details><summary>figures</summary><pre>{{ row.figures }}</pre></details>
{% endif %}</td></tr>
{% endfor %}</tbody></table>
<p>A gate that was <span class="not">not evaluated</span> has not passed: the profile says so, and
whoever serves it decides.</p>
</body></html>
"""


def page(
    cell: str, steps: Sequence[Step], profile: Descriptor | None, hardware: Mapping[str, Any]
) -> bytes:
    """Return one self-contained HTML file."""
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    rows = [_row(step) for step in steps]
    return (
        environment.from_string(_PAGE)
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
