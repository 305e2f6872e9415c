"""A plan as text and as JSON: the question, the results, and how far to trust each number."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..base.version import VERSION, revision
from ..engine.simulator.described import Described
from ..roofline.accuracy import Error, latency_error, throughput_error
from ..roofline.planner import Candidate, Found, Rejected
from ..roofline.prices import PriceSource
from ..roofline.steady import Demand, Goal
from ..roofline.weights import WeightBytes
from .plan_check import Checked


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """The inputs of a plan."""

    model: str
    described: Described
    demand: Demand
    goal: Goal
    formats: tuple[str, ...]
    counts: dict[str, int] | None
    prices: dict[str, float]
    source: PriceSource

    @property
    def lengths(self) -> str:
        demand = self.demand
        shared = f" ({demand.shared_tokens:,} from the cache)" if demand.shared_tokens else ""
        return f"{demand.input_tokens:,} tokens in{shared}, {demand.output_tokens:,} out"

    @property
    def limits(self) -> str:
        goal = self.goal
        parts = [f"TTFT < {_time(goal.ttft)}", f"TPOT < {_time(goal.tpot)}"]
        if goal.itl is not None:
            parts.append(f"ITL < {_time(goal.itl)}")
        return "p99 " + ", ".join(parts)

    def error(self, device: str) -> Error:
        mixture = self.described.arch.moe is not None
        return throughput_error(self.model, device, mixture=mixture)


def format_words(weights: WeightBytes) -> str:
    """Return the format of weights in words: narrow experts before the rest."""
    experts = weights.formats.get("experts")
    if experts is None or experts == weights.format:
        return weights.name
    return f"{experts} (experts; the rest {weights.format})"


def show(question: PlanQuestion, found: Found, checked: list[Checked], *, verbose: bool) -> None:
    """Print a plan. Nothing is cut: cells are folded on a narrow terminal."""
    console = Console(highlight=False, markup=False)

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, soft_wrap=not console.is_terminal)

    asked = f"{question.demand.rate:g} requests/s"
    if question.counts is not None:
        asked = ", ".join(f"{n} × {name}" for name, n in question.counts.items())
    say(f"{question.model}, {question.lengths}; {question.limits}; {asked}")
    if checked:
        devices = dict.fromkeys(one.candidate.hardware.name for one in checked)
        prices = ", ".join(f"{name} {question.prices[name]:.2f}" for name in devices)
        source = question.source
        say(
            f"prices: {source.currency} per device and hour: {prices} ({source.date}; "
            f"{source.source})"
        )
        say()
        console.print(_table(question, checked))
        if checked[0].kept:
            _say_best(say, question, checked[0])
        _say_errors(say, question, checked)
    if verbose:
        for line in rejections(found):
            say(line, "dim")
    elif found.rejected:
        count = len(found.rejected)
        what = "1 layout is" if count == 1 else f"{count:,} layouts are"
        say(f"{found.settings:,} settings; -v shows why {what} not chosen", "dim")


def _table(question: PlanQuestion, checked: list[Checked]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="simulated; latencies are p99",
        title_justify="left",
    )
    money = question.source.currency
    table.add_column("layout", overflow="fold", min_width=12)
    for column in (
        "req/s",
        "tok/s/\ndevice",
        "tok/s/\nuser",
        f"{money}/h",
        f"{money}/\nMtok",
        "TTFT\nms",
        "TPOT\nms",
        "ITL\nms",
        "SLO",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    formats = {one.candidate.case.weights.name for one in checked}
    for one in checked:
        c = one.candidate
        own = f", {format_words(c.case.weights)}" if len(formats) > 1 else ""
        table.add_row(
            f"{c}{own}",
            f"{c.rate:.3g}",
            f"{_per_device(c, question.demand):,.0f}",
            f"{one.per_user:.0f}",
            f"{c.price_per_hour:,.1f}",
            f"{c.cost_per_million(question.demand):.3f}",
            f"{one.ttft * 1e3:,.0f}",
            f"{one.tpot * 1e3:.1f}",
            f"{one.itl * 1e3:.1f}",
            "met" if one.kept else "missed",
        )
    return table


def _say_best(say: Any, question: PlanQuestion, best: Checked) -> None:
    c, demand = best.candidate, question.demand
    error = question.error(c.hardware.name)
    low, high = error.around(c.rate)
    cost = c.cost_per_million(demand)
    most = "the most within the limits" if question.counts is not None else "as asked"
    missed = f", at {best.missed:.3g} they are missed" if best.missed else ""
    plural = "" if c.devices == 1 else "s"
    say(f"{c} ({c.devices} device{plural}): {c.rate:.3g} requests/s, {most}{missed}", "bold")
    for pool in c.pools:
        role = "" if pool.role == "all" else f"{pool.role}: "
        say(
            f"  {role}weights {format_words(pool.case.weights)}, KV {pool.case.kv_dtype}, "
            f"max_sequences {pool.state.batch}, step_tokens {pool.state.step_tokens} (each engine)"
        )
    say(
        f"  {c.rate * demand.output_tokens:,.0f} output tokens/s, {_per_device(c, demand):,.0f} a "
        f"device, {best.per_user:.0f} a user, {_users(best, demand):,} users at a time; "
        f"{c.price_per_hour:,.2f} {question.source.currency} "
        f"an hour, {cost:.3f} per million output tokens"
    )
    if question.counts is not None:
        spread = f"{low:.3g} to {high:.3g} requests/s"
        cheap, dear = (
            c.price_per_hour / (rate * demand.output_tokens * 3600) * 1e6 for rate in (high, low)
        )
        say(f"  with the errors below: {spread}, {cheap:.2f} to {dear:.2f} per million tokens")
        idle = question.counts[c.hardware.name] - c.devices
        if idle:
            say(f"  {idle} devices are left over")


def _say_errors(say: Any, question: PlanQuestion, checked: list[Checked]) -> None:
    """Print the error of each column, as measured."""
    say("true over predicted, at worst:")
    for device in dict.fromkeys(one.candidate.hardware.name for one in checked):
        error = question.error(device)
        say(f"  {device}: rates, cost and TPOT {error} ({error.rows} {error.of})")
    first, pause = latency_error("ttft p99"), latency_error("itl p99")
    say(f"  TTFT p99 {first}, ITL p99 {pause} ({first.rows} {first.of})")
    for source in dict.fromkeys(one.candidate.hardware.efficiency.source for one in checked):
        say(f"  efficiencies: {source}")


def _per_device(candidate: Candidate, demand: Demand) -> float:
    return candidate.rate * demand.output_tokens / candidate.devices


def _users(best: Checked, demand: Demand) -> int:
    """Return the number of concurrent answers, by Little's law and the median user's speed."""
    seconds = demand.output_tokens / best.per_user if best.per_user else 0.0
    return max(1, round(best.candidate.rate * seconds))


def _time(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def rejections(found: Found) -> list[str]:
    """Return, per device, why layouts are impossible or miss the limits."""
    lines = []
    for device in dict.fromkeys(one.device for one in found.rejected):
        mine = [one for one in found.rejected if one.device == device]
        reasons: dict[str, list[Rejected]] = {}
        for one in mine:
            if not one.fits:
                reasons.setdefault(one.reason, []).append(one)
        parts = []
        for reason, those in sorted(reasons.items(), key=lambda item: -len(item[1])):
            more = f" and {len(those) - 1} more" if len(those) > 1 else ""
            parts.append(f"{those[0].format} on {those[0].layout}{more}: {reason}")
        slow = [one for one in mine if one.fits]
        if slow:
            parts.append(
                f"{len(slow)} miss the limits, {slow[-1].format} on {slow[-1].layout}: "
                f"{slow[-1].reason}"
            )
        lines.append(f"not on {device}: {'; '.join(parts)}")
    return lines


def document(question: PlanQuestion, found: Found, checked: list[Checked]) -> dict[str, Any]:
    """Return the inputs, the whole search and the simulations, for other programs."""
    demand = question.demand

    def one(candidate: Candidate) -> dict[str, Any]:
        return {
            "device": candidate.hardware.name,
            "efficiencies": candidate.hardware.efficiency.source,
            "pools": [
                {
                    "role": pool.role,
                    "replicas": pool.replicas,
                    **{kind: getattr(pool.case.layout, kind) for kind in ("tp", "pp", "dp")},
                    "ep": pool.case.layout.ranks if pool.case.layout.ep else 1,
                    "format": pool.case.weights.name,
                    "kv_dtype": pool.case.kv_dtype,
                    "max_sequences": pool.state.batch,
                    "step_tokens": pool.state.step_tokens,
                }
                for pool in candidate.pools
            ],
            "devices": candidate.devices,
            "requests_per_second": candidate.rate,
            "output_tokens_per_second_per_device": _per_device(candidate, demand),
            "price_per_hour": candidate.price_per_hour,
            "cost_per_million_output_tokens": candidate.cost_per_million(demand),
            "bounds": {"ttft": candidate.ttft, "tpot": candidate.tpot, "itl": candidate.itl},
        }

    return {
        "schema": "headrace.plan/2",
        "headrace": VERSION,
        "commit": revision(),
        "question": {
            "model": question.model,
            "from": question.described.source,
            "formats": list(question.formats),
            "devices": question.counts,
            "demand": asdict(demand),
            "limits": asdict(question.goal),
            "prices": {**asdict(question.source), "per_device_and_hour": question.prices},
        },
        "settings": found.settings,
        "candidates": [one(candidate) for candidate in found.candidates],
        "simulated": [
            {
                **one(c.candidate),
                "p99": {"ttft": c.ttft, "tpot": c.tpot, "itl": c.itl},
                "output_tokens_per_second_per_user": c.per_user,
                "missed_at": c.missed,
                "kept": c.kept,
                "errors": {
                    "throughput": asdict(question.error(c.candidate.hardware.name)),
                    "ttft": asdict(latency_error("ttft p99")),
                    "itl": asdict(latency_error("itl p99")),
                },
            }
            for c in checked
        ],
        "nearest": None if found.nearest is None else one(found.nearest),
        "rejected": [
            {"device": r.device, "format": r.format, "layout": str(r.layout), "reason": r.reason}
            for r in found.rejected
        ],
    }
