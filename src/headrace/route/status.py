"""Status of the gateway at `/`: JSON, and a page for browsers that reloads itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

from ..base.version import VERSION
from ..obs.tasks import TaskWatch, ended
from ..roofline.page import cards, charts, page, table
from ..roofline.plot import Chart, Series
from .asked import ROUTED
from .meters import Buckets, RouteMeter, joined, quantile
from .replica import Replica
from .sources import ServerSource

KIND = b"text/html; charset=utf-8"
RENEWED = 5
"""Seconds after which a browser reloads the page."""
SAFE = (
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
     b"form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"refresh", b"%d" % RENEWED),
)  # fmt: skip
MOST_ROWS = 200
"""Rows of a table; the page reports the number of further ones."""
SERVERS = ("server", "state", "open", "load", "requests", "lost", "moved here", "4xx", "5xx",
           "models")  # fmt: skip
SHARES = (0.5, 0.95, 0.99)
DRAWN = {
    "first_part": "Seconds to the first part of an answer",
    "answer": "Seconds to the end of an answer",
    "pause": "Longest pause within an answer, seconds",
}
"""Histograms on the page, with their titles."""


class ShownGateway(Protocol):
    """State of a gateway that the status shows."""

    replicas: list[Replica]
    sources: list[ServerSource]
    times: RouteMeter
    tasks: TaskWatch
    draining: bool

    @property
    def ready(self) -> bool: ...


def described(gateway: ShownGateway, shown: bool) -> dict[str, Any]:
    """Describe the gateway; `shown`: with its replicas and sources."""
    about: dict[str, Any] = {
        "object": "gateway",
        "message": "a gateway before servers that speak OpenAI's interface",
        "version": VERSION,
        "status": "ready" if gateway.ready else "not ready",
        "routes": [f"{method} {path}" for path, method in ROUTED.items()],
    }
    if shown:
        about["replicas"] = [
            {
                "url": one.url,
                "state": one.state,
                "outstanding": one.outstanding,
                "reports_its_cache": one.tells,
                "only_prompts": one.prefills,
                "models": list(one.models),
            }
            for one in gateway.replicas
        ]
        about["sources"] = [{"source": one.name, "problem": one.problem} for one in gateway.sources]
        about["problems"] = ended(gateway.tasks.down)
    return about


def page_of(gateway: ShownGateway) -> bytes:
    """Build the page: servers, sources, models, errors, latencies; in any thread."""
    replicas = list(gateway.replicas)
    ready = sum(one.may_be_chosen for one in replicas)
    state = "draining" if gateway.draining else "ready" if gateway.ready else "not ready"
    shown = {
        "gateway": state,
        "servers ready": f"{ready} of {len(replicas)}",
        "open requests": sum(one.outstanding for one in replicas),
        "models": len({name for one in replicas for name in one.models}),
    }
    body = cards(shown.items())
    if down := ended(dict(gateway.tasks.down)):
        body += table(["what does not run"], [[down]], left=True)
    counts = gateway.times.counts()
    rows = [_row(one, counts.get(one.url, {})) for one in replicas]
    body += table(SERVERS, rows, title="Servers", left=True, most=MOST_ROWS)
    if gateway.sources:
        rows = [[one.name, one.problem or "answers"] for one in gateway.sources]
        body += table(["source", "state"], rows, title="Sources", left=True)
    body += _latencies(gateway)
    return page("Headrace route", f"version {VERSION}, renewed every {RENEWED} s", body).encode()


def _row(one: Replica, counts: dict[str, float]) -> list[str]:
    figures = [f"{counts.get(name, 0):.0f}" for name in SERVERS_COUNTED]
    load = f"{one.load}" if one.tells else ""
    return [one.url, one.state, f"{one.outstanding}", load, *figures, ", ".join(one.models)]


SERVERS_COUNTED = "requests", "lost", "migrations", "4xx", "5xx"
"""Counters in the columns of `SERVERS`."""


def _latencies(gateway: ShownGateway) -> str:
    """Draw the histograms of all servers, and list the quantiles of each."""
    found = {what: gateway.times.times(what) for what in DRAWN}
    drawn = []
    for what, title in DRAWN.items():
        if (all_of := joined(list(found[what].values()))) and all_of[-1][1]:
            drawn.append(_histogram(title, all_of))
    if not drawn:
        return ""
    rows = []
    for one in list(gateway.replicas):
        cells = [
            _shown(quantile(found[what].get(one.url, []), share))
            for what in DRAWN
            for share in SHARES
        ]
        if any(cells):
            rows.append([one.url, *cells])
    names = [f"{what.replace('_', ' ')} p{share * 100:.0f}" for what in DRAWN for share in SHARES]
    listed = table(("server", *names), rows, left=True, most=MOST_ROWS)
    return "<h2>Latencies</h2>" + charts(drawn) + listed


def _histogram(title: str, buckets: Buckets) -> Chart:
    counts = [0.0, *(up_to for _, up_to in buckets)]
    inside = [after - before for before, after in pairwise(counts)]
    xs = [float(place) for place in range(1, len(buckets) + 1)]
    names = [_shown(bound) for bound, _ in buckets]
    series = Series("answers", xs, inside, mark="bars")
    return Chart(title, "up to, seconds", "answers", [series], names=names)


def _shown(seconds: float | None) -> str:
    """Format a bucket's bound; the last bucket has none."""
    if seconds is None:
        return ""
    return "more" if seconds == float("inf") else f"{seconds:g}"
