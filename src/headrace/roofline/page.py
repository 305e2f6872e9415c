"""One self-contained HTML page: style, tables and charts inline, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence

from .plot import Chart, svg

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--dim:#5b6470;--line:#d9dee4;--paper:#fff;
--soft:#f4f6f8;
--good:#1a7f37;--bad:#c0342b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--dim:#9aa4b0;--line:#363d46;
--paper:#15181c;
--soft:#1e2329;--good:#57c26f;--bad:#ff7b72}svg.chart{filter:brightness(1.3)}}
*{box-sizing:border-box}body{margin:0 auto;padding:28px 24px 60px;max-width:1120px;color:var(--ink);
background:var(--paper);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:34px 0 10px}
p.sub{color:var(--dim);margin:0 0 16px;overflow-wrap:anywhere}
p.foot{color:var(--dim);margin:18px 0 0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));
gap:18px;margin-top:18px}
svg.chart{width:100%;max-width:760px;height:auto;background:var(--soft);border-radius:8px;color:var(--ink)}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .title{font-size:14px;font-weight:600}
svg .tick{font-size:11px;fill:var(--dim)}svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .grid{stroke:var(--line);stroke-width:1}svg .note{stroke:var(--dim);stroke-dasharray:3 3}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child,table.left th,table.left td{text-align:left}
th{color:var(--dim);font-weight:600;white-space:nowrap}
td:first-child{min-width:9em}table.left td:first-child{min-width:0}
.wide{overflow-x:auto}.cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.card{background:var(--soft);border-radius:8px;padding:10px 16px;min-width:130px}
.card b{display:block;font-size:21px}.card span{color:var(--dim);font-size:13px}
.verdict{padding:10px 14px;border-radius:8px;background:var(--soft);
border-left:4px solid var(--good);
margin:16px 0}.verdict.bad{border-color:var(--bad)}code{font-size:13px}
pre{background:var(--soft);padding:12px;border-radius:8px;overflow-x:auto}
@media(max-width:600px){body{padding:18px 14px 40px}.card{flex:1 1 40%}.card b{font-size:18px}
svg text,svg .tick{font-size:17px}svg .title{font-size:20px}}
"""


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
