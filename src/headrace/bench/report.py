"""A result as one self-contained HTML page, as charts, and as lines for the terminal."""

from __future__ import annotations

import itertools
import re
from typing import Any

from ..roofline.page import cards, charts, notice, page, table
from ..roofline.plot import Chart, Series
from .checking import said
from .result import THROUGHPUT
from .workload import EMBEDDING, PICTURES

ROWS = (
    ("ttft", "Time to first token", 1e3, "ms"),
    ("itl", "Inter-token latency", 1e3, "ms"),
    ("tpot", "Time per output token", 1e3, "ms"),
    ("e2e", "End to end", 1e3, "ms"),
    ("send_delay", "Send delay (client)", 1e3, "ms"),
    ("user_throughput", "Throughput per user", 1.0, "tok/s"),
    ("input_tokens", "Input tokens", 1.0, "tok"),
    ("picture_tokens", "Picture tokens", 1.0, "tok"),
    ("output_tokens", "Output tokens", 1.0, "tok"),
)
HEADER = ("", "mean", "± (95 %)", "p50", "p90", "p95", "p99", "max")
FIGURES = {
    "output_throughput": "output throughput",
    "total_throughput": "total throughput",
    "request_throughput": "requests",
    "goodput": "goodput",
    "concurrency": "mean concurrency",
    "queue_time": "queue (server's word)",
    "failure_rate": "failures",
    "right_answers": "right answers",
    "prefix_hit_rate": "prefix hits",
    "possible_hit_rate": "possible hits",
    "joules_per_token": "energy",
    "cost_per_million_tokens": "cost",
    "roofline_share": "share of the roofline",
    "predicted_share": "share of the prediction",
}


def number(value: float) -> str:
    """Format a number with three to four significant digits."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def latency_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, title, scale, unit in ROWS:
        found = result["samples"].get(name)
        if found is None:
            continue
        low, high = found["intervals"]["mean"]
        points = found["percentiles"]
        values = [
            found["mean"],
            (high - low) / 2,
            *(points[p] for p in ("p50", "p90", "p95", "p99")),
            found["high"],
        ]
        rows.append([f"{title}, {unit}", *(number(value * scale) for value in values)])
    return rows


def figure_rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    rows, samples = [], result["samples"]
    for name, title in FIGURES.items():
        found = result["figures"].get(name)
        if found is None or (name == "output_throughput" and "output_tokens" not in samples):
            continue  # Embeddings have no output.
        if found["unit"] == "share":
            rows.append((title, f"{found['value']:.1%}"))
        else:
            rows.append((title, f"{number(found['value'])} {found['unit']}"))
    return rows


def verdict(result: dict[str, Any]) -> str:
    """Describe the run in one sentence."""
    failed = result["requests"] - result["succeeded"]
    cancelled = round(result["figures"].get("cancelled", {"value": 0})["value"])
    text = f"{result['succeeded']} of {result['requests']} requests succeeded"
    if cancelled:
        text += f", {cancelled} were cancelled on purpose"
    if failed - cancelled:
        text += f", {failed - cancelled} failed"
    slo = result.get("slo")
    if slo is not None:
        text += f"; the SLO {slo['text']} was {MET[slo['met']]}"
    if (steady := result.get("simulation", {}).get("steady")) is not None:
        text += steadiness(steady)
    elif not result["valid"]:
        text += "; INVALID: the numbers below are not the server's"
    elif result["interrupted"]:
        text += "; interrupted"
    return text


MET = {True: "met", False: "missed", None: "neither met nor missed for certain"}


def steadiness(steady: dict[str, Any]) -> str:
    """Describe a simulated load that is not steady, or is near its limit; "" otherwise."""
    offered, most = steady["offered_rate"], steady["most_rate"]
    if steady["verdict"] == "overloaded":
        late = 60 * (offered / most - 1)
        return (
            f"; OVERLOADED: {offered:g} requests/s come and at most {most:.3g} are answered, so "
            f"each minute adds {late:.2g} s to the wait"
        )
    if steady["verdict"] == "not steady" and most is not None:
        return (
            f"; NOT STEADY: {offered:g} requests/s are {offered / most:.0%} of the most that can "
            f"be done ({most:.3g}), where waits depend on how long the run is"
        )
    if steady["verdict"] == "not steady":
        return "; NOT STEADY: the run is mostly its beginning and its end"
    if most is not None:
        return f"; the load is {offered / most:.0%} of the most that can be done ({most:.3g}/s)"
    return ""


TELEMETRY = (
    ("Server: requests", "requests", 1.0, ("num_requests_running", "num_requests_waiting")),
    ("Server: KV cache in use", "%", 100.0, ("kv_cache_usage_perc",)),
    ("Server: tokens by its own counters", "tok/s", 1.0, ("generation_tokens", "prompt_tokens")),
    ("CPU", "cores", 1.0, ("machine CPU", "server's processes CPU")),
    ("Memory of the server's processes", "GB", 1e-9, ("server's processes memory",)),
    ("GPU utilisation", "%", 1.0, (" utilisation", "DCGM_FI_DEV_GPU_UTIL")),
    ("GPU memory", "GB", 1e-9, ("GPU %d memory",)),
    ("Power", "W", 1.0, (" power", "DCGM_FI_DEV_POWER_USAGE")),
)
"""(title, unit, scale, endings of its series' names); all others are in the table."""


def telemetry_charts(result: dict[str, Any]) -> list[Chart]:
    """Draw the server and its machine over the seconds of the run."""
    series = (result.get("telemetry") or {}).get("series", {})
    made = []
    for title, unit, scale, endings in TELEMETRY:
        drawn = [
            Series(name, found["seconds"], [value * scale for value in found["values"]])
            for name, found in series.items()
            if any(re.sub(r"\d+", "%d", name.partition("{")[0]).endswith(one) for one in endings)
            and len(found["values"]) > 1
        ]
        if drawn:
            made.append(Chart(title, "seconds from the start", unit, drawn[:8]))
    return made


def telemetry_rows(result: dict[str, Any]) -> list[list[str]]:
    series = (result.get("telemetry") or {}).get("series", {})
    return [
        [
            name,
            found["unit"],
            number(sum(found["values"]) / len(found["values"])),
            number(max(found["values"])),
            number(found["values"][-1]),
        ]
        for name, found in sorted(series.items())
    ]


def result_charts(result: dict[str, Any]) -> list[Chart]:
    """Draw the distributions, then the run over time."""
    made = []
    for name, title in (
        ("ttft", "Time to first token"),
        ("itl", "Inter-token latency"),
        ("e2e", "End to end"),
    ):
        found = result["histograms"][name]
        if not found["quantiles"]:
            continue
        edges = [edge * 1e3 for edge in found["edges"]]
        middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
        points = result["samples"][name]["percentiles"]
        notes = [(points[p] * 1e3, p) for p in ("p50", "p99") if points[p] * 1e3 <= edges[-1]]
        shares = [share * 100 for share in found["shares"]]
        longest = result["samples"][name]["high"] * 1e3
        label = f"ms (up to {number(longest)}, cut here)" if longest > edges[-1] else "ms"
        bars = Series(name, middles, shares, "bars")
        made.append(Chart(title, label, "% of samples", [bars], notes=notes))
    quantiles = [
        Series(name, range(101), [v * 1e3 for v in result["histograms"][name]["quantiles"]])
        for name in ("ttft", "itl", "e2e")
        if result["histograms"][name]["quantiles"]
    ]
    made.append(Chart("Quantiles", "percentile", "ms", quantiles, log_y=True))
    line = result["timeline"]
    at = "seconds from the start"
    rate = Series("tok/s", line["seconds"], line["tokens_per_second"], "area")
    flying = Series("in flight", line["seconds"], line["in_flight"], "steps")
    first = Series("ttft", line["ttft_at"], [v * 1e3 for v in line["ttft"]], "points")
    if any(line["tokens_per_second"]):
        made.append(Chart("Output rate", at, "tok/s", [rate]))
    made.append(Chart("Requests in flight", at, "requests", [flying]))
    if line["ttft"]:
        made.append(Chart("Time to first token by planned time", at, "ms", [first]))
    made += telemetry_charts(result)
    if (drawn := result.get("roofline", {}).get("chart")) is not None:
        series = [Series(**one) for one in drawn["series"]]
        made.append(Chart(**{**drawn, "series": series}))
    return made


def html_report(result: dict[str, Any]) -> str:
    """Render the whole page."""
    options, server = result["options"], result["server"]
    what = options["trace"] or options["workload"]
    load = options["arrivals"] or f"closed loop, {options['concurrency']} users"
    if kind := result.get("kind"):
        load = kind if kind == THROUGHPUT else f"{kind}, batches of {options['concurrency']}"
    size = f"{options['input']} in"
    if options["workload"] == PICTURES:
        size = f"sides of {options['picture']} pixels"
    if options["endpoint"] != EMBEDDING:
        size += f", {options['output']} out"
    if options["trace"]:
        size = f"{result['requests']} requests"
    subtitle = (
        f"{server['model']} at {server['url']} · {what}, {size} · {load} · {result['created']}"
    )
    kept = result["slo"] is None or result["slo"]["met"]
    good = result["valid"] and kept and result["succeeded"] == result["requests"]
    body = notice(verdict(result), good=good)
    if (accuracy := result.get("accuracy")) is not None:
        body += notice(said(accuracy), good=accuracy["passed"])
    body += cards(figure_rows(result))
    if latencies := latency_rows(result):
        body += table(HEADER, latencies, title="Latency")
    body += charts(result_charts(result))
    if result["slo"] is not None:
        body += table(
            ("limit", "value", "verdict"),
            [
                [
                    f"{c['metric']} p{c['percentile']:g} < {c['limit'] * 1e3:g} ms",
                    "failures" if c["value"] is None else f"{number(c['value'] * 1e3)} ms",
                    "met" if c["kept"] else "missed",
                ]
                for c in result["slo"]["checks"]
            ],
            title="SLO",
        )
    if result["findings"]:
        found = [[f["code"], f["severity"], f["text"]] for f in result["findings"]]
        body += table(("finding", "severity", "what"), found, title="Findings", left=True)
    means = result["server"].get("histograms")
    if means:
        pairs = [[name, _ms(pair["server"]), _ms(pair["client"])] for name, pair in means.items()]
        columns = ("mean, from sending", "server", "client")
        body += table(columns, pairs, title="Server and client")
    if rows := telemetry_rows(result):
        title = "Server and machine over the run"
        body += table(("series", "unit", "mean", "highest", "last"), rows, title=title)
        if left := result["telemetry"]["left_out"]:
            body += f"<p class='foot'>{len(left)} further series were not kept.</p>"
    audit = result["audit"]
    shares = ", ".join(f"{share:.0%}" for share in audit["cpu_share"])
    body += table(
        ("", "value"),
        [
            ["client: event-loop lag p99 / max", _ms(audit["loop_lag_p99"], audit["loop_lag_max"])],
            ["client: planned to sent, p99", _ms(audit["send_delay_p99"])],
            ["client: share of a core per process", shares],
            ["energy", _energy(result)],
            ["machine", f"{result['machine']['cpu']}, {result['machine']['cores']} cores"],
            ["server", _server(server)],
            ["Headrace", f"{result['headrace']} {result['commit'] or ''}"],
            ["seed", str(options["seed"])],
        ],
        title="How it was measured",
    )
    body += (
        "<p class='foot'>TTFT and end to end count from the planned time of a request, so waiting "
        "that the client or a full server causes is in them. ITL is the pause between two pieces "
        "of the answer; TPOT spreads the pauses over the tokens that the server counted.</p>"
    )
    return page("Headrace bench", subtitle, body)


def _server(server: dict[str, Any]) -> str:
    commit = server.get("commit")
    words = server.get("software"), server["version"], commit and f"commit {commit}"
    return " ".join(str(word) for word in words if word) or "tells nothing of itself"


def _energy(result: dict[str, Any]) -> str:
    found = result["figures"].get("joules_per_token")
    if found is None:
        return "absent: no counter could be read, and nothing is guessed"
    return f"{number(found['value'])} {found['unit']}, from counters"


def _ms(*values: float | None) -> str:
    return " / ".join("–" if v is None else f"{v * 1e3:.1f} ms" for v in values)
