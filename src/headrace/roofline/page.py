"""One self-contained HTML page: style, tables and charts inline, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from .plot import Chart, svg

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def page(title: str, subtitle: str, body: str) -> str:
    """Build a whole, self-contained HTML page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{html.escape(title)}</h1><p class="sub">{html.escape(subtitle)}</p>'
        f"{body}</main></body></html>\n"
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    left: bool = False,
    most: int | None = None,
) -> str:
    """Build a table, under its title. `left`: its cells are text. `most`: rows that are shown."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in rows[:most]
    )
    above = title and f"<h2>{html.escape(title)}</h2>"
    kind = ' class="left"' if left else ""
    hidden = 0 if most is None else max(0, len(rows) - most)
    more = f"<p>{hidden} more are not shown.</p>" if hidden else ""
    return f'{above}<div class="wide"><table{kind}><tr>{head}</tr>{body}</table></div>{more}'


def cards(shown: Iterable[tuple[str, object]]) -> str:
    """Build boxes of a title and a value each."""
    boxes = "".join(
        f'<div class="card"><span>{html.escape(name)}</span><b>{html.escape(str(value))}</b></div>'
        for name, value in shown
    )
    return f'<div class="cards">{boxes}</div>'


def notice(text: str, *, good: bool) -> str:
    """Build a sentence that is marked as good or bad."""
    kind = "verdict" if good else "verdict bad"
    return f'<div class="{kind}">{html.escape(text)}</div>'


def charts(items: Sequence[Chart]) -> str:
    return '<div class="charts">' + "".join(svg(item) for item in items) + "</div>"
