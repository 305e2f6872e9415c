"""One self-contained HTML page: style, tables and charts inline, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def charts(items: Sequence[Chart]) -> str:
    return '<div class="charts">' + "".join(svg(item) for item in items) + "</div>"
