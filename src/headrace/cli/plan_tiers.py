"""`headrace plan --tiers`: the savings of the next GB of RAM or disk."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..base.config import parse_size
from ..roofline.tiers import Saving, read_trace, savings

SIZES = [1 << power for power in range(26, 43)]
"""Sizes from 64 MiB to 4 TiB."""


def print_tiers(file: Path, pool: str, price: float | None, *, as_json: bool) -> None:
    """Print the savings of each size; with `price` (of an hour of the machine), also in money."""
    trace = read_trace(file)
    room = parse_size(pool, "tiers_pool")
    rows = list(savings(trace, room, SIZES))
    # Sizes beyond the last improvement are not shown.
    last = next(
        (at for at, (ram, disk) in enumerate(rows) if _full(ram, rows) and _full(disk, rows)),
        len(rows) - 1,
    )
    rows = rows[: last + 1]
    hours = max(trace.seconds / 3600, 1e-9)
    if as_json:
        found = [{"ram": asdict(ram), "below": asdict(disk)} for ram, disk in rows]
        print(json.dumps({"requests": len(trace.prefixes), "hours": hours, "sizes": found}))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    unit = "s an hour" if price is None else "s an hour, and worth"
    for name in ("size", "hits as RAM", unit, f"hits below {pool} of RAM", unit):
        table.add_column(name, justify="right")
    for ram, disk in rows:
        cells = [f"{ram.nbytes / (1 << 30):g} GiB"]
        for one in (ram, disk):
            worth = "" if price is None else f", {one.seconds / hours / 3600 * price:.3f}"
            cells += [f"{one.hits:.1%}", f"{one.seconds / hours:.1f}{worth}"]
        table.add_row(*cells)
    Console(markup=False).print(table)


def _full(one: Saving, rows: list[tuple[Saving, Saving]]) -> bool:
    return one.hits >= max(max(ram.hits, disk.hits) for ram, disk in rows)
