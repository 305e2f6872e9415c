"""`headrace plan`: within an SLO, the cheapest layout for a load or the most of given devices.

The search computes; the simulator decides (`plan_check`).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..base.config import parse_seconds
from ..base.errors import InvalidRequest, OptionError, file_errors, one_of
from ..bench.compare import MISSED
from ..bench.material import Material
from ..bench.options import RunOptions
from ..bench.run import make_sessions
from ..bench.workload import shareable_tokens
from ..engine.loop.draft_law import MEASURED, DraftLaw, draft_law
from ..engine.simulator.described import describe_model
from ..obs.progress import StatusLine
from ..roofline.hardware import DEVICES, Hardware
from ..roofline.hardware_files import find_hardware
from ..roofline.machine import calibration_path
from ..roofline.planner import (
    FORMATS,
    MAX_DEVICES,
    Candidate,
    Found,
    best_of_each,
    formats_of,
    frontier,
    search_each,
)
from ..roofline.prices import read_prices
from ..roofline.steady import Demand, Goal
from .flags import argument, flag
from .plan_check import Check, Checked, workers
from .plan_from import PlanCommand
from .plan_launch import ENGINES, STARTS, launch_text, write_launch
from .plan_show import PlanQuestion, document, show
from .plan_tiers import print_tiers

TRIES = 6
"""Most candidates that are simulated before giving up."""
WORTH = 3.0
"""Multiple of the best cost above which a row is useless."""
ROWS = 8
"""Most rows, each of them simulated."""
COUNTS = re.compile(r"([1-9]\d{0,4})\s*[x×*]\s*(\S+)", re.IGNORECASE)


def plan(
    model: Annotated[str, argument("Model, or the name of a known architecture.")],
    devices: Annotated[
        str | None,
        flag(
            "What there is, as in 8xH100 or 8xH100,4xH200: the most requests a second within "
            "the SLO."
        ),
    ] = None,
    rate: Annotated[
        float | None,
        flag("Instead: what this many requests a second need; none: 10, or a trace's."),
    ] = None,
    input: Annotated[int, flag("Prompt tokens, mean.", min=1)] = 1024,
    output: Annotated[int, flag("Output tokens, mean.", min=1)] = 256,
    shared: Annotated[int, flag("Prompt tokens from the prefix cache.", min=0)] = 0,
    trace: Annotated[
        str | None, flag("FORMAT:FILE: lengths, sharing and rate of recorded requests instead.")
    ] = None,
    ttft: Annotated[str, flag("Limit of the p99 TTFT.", metavar="TIME")] = "1s",
    tpot: Annotated[str, flag("Limit of the p99 TPOT.", metavar="TIME")] = "50ms",
    itl: Annotated[str | None, flag("Limit of the p99 ITL, as in 80ms.", metavar="TIME")] = None,
    hardware: Annotated[str, flag("Devices to choose from, by commas.")] = "all",
    formats: Annotated[
        str | None,
        flag(
            "Weight formats to choose from; none: as published, of wide ones "
            + " and ".join(FORMATS)
            + " (int4 and nvfp4 can cost quality: name them)."
        ),
    ] = None,
    kv_dtype: Annotated[
        str, flag("auto: fp8 beside fp8 and nvfp4 weights where the device has it.")
    ] = "auto",
    pools: Annotated[bool, flag("Also try prefill and decode pools.")] = True,
    max_devices: Annotated[int, flag("Of one replica.", min=1)] = MAX_DEVICES,
    prices: Annotated[
        Path | None, flag('JSON as in {"H200": 3.8, "currency": "EUR", "date": "2026-11-01"}.')
    ] = None,
    requests: Annotated[
        int, flag("Requests of a simulation's steady part at least.", min=50)
    ] = 100,
    speculate: Annotated[
        str,
        flag(
            f"Drafts: off, as measured of {', '.join(MEASURED)}, or a chance from 0 to 1; on "
            "CPUs, which verify them."
        ),
    ] = "off",
    tiers: Annotated[
        Path | None,
        flag(
            "Instead: what each size of RAM and disk for KV would have saved of this trace "
            "of an engine's context cache."
        ),
    ] = None,
    tiers_pool: Annotated[str, flag("RAM of the pool above the disk.")] = "1GiB",
    tiers_price: Annotated[
        float | None, flag("Of an hour of the machine: savings as money.")
    ] = None,
    launch: Annotated[
        Path | None,
        flag(f"Folder for the commands that start the best layout: {', '.join(ENGINES)}."),
    ] = None,
    start: Annotated[
        str | None,
        flag(
            f"Print nothing but what starts the best layout: {', '.join(STARTS)} (values).",
            "--command",
            metavar="NAME",
        ),
    ] = None,
    theirs: Annotated[
        str | None,
        flag("aiconfigurator -- LINE: plan what its line asks.", "--from", metavar="PLANNER"),
    ] = None,
    verbose: Annotated[
        bool, flag("Also why other layouts are not chosen.", "--verbose", "-v")
    ] = False,
    as_json: Annotated[bool, flag("Print JSON instead of tables.", "--json")] = False,
) -> None:
    """Find the cheapest hardware and layout for a load and an SLO, or the most that given devices
    do; the simulator has the last word."""
    if tiers is not None:
        print_tiers(tiers, tiers_pool, tiers_price, as_json=as_json)
        return
    if start is not None:
        _verify_command(start, as_json=as_json)
    if devices is not None and (rate is not None or trace is not None):
        other = "rate" if rate is not None else "trace"
        raise InvalidRequest(f"devices asks for the rate: leave out --{other}", param="devices")
    if devices is not None and hardware != "all":
        raise InvalidRequest("devices names the hardware: leave out --hardware", param="devices")
    if launch is not None:
        with file_errors(OptionError, f"{launch} cannot be written", "launch"):
            launch.mkdir(parents=True, exist_ok=True)
    described = describe_model(model)
    counts = None if devices is None else parse_devices(devices)
    hardwares = _hardwares(hardware if counts is None else ",".join(counts))
    if counts is not None:
        counts = {one.name: n for one, n in zip(hardwares, counts.values(), strict=True)}
    law = _law(speculate, hardwares)
    if trace is not None:
        demand = demand_of(trace, rate)
    elif shared >= input:
        raise InvalidRequest("shared must be less than input", param="shared")
    else:
        demand = Demand(10.0 if rate is None else rate, input, output, shared)
    if law is not None:
        demand = replace(demand, accepted=law.accepted)
    goal = Goal(
        parse_seconds(ttft, "ttft"),
        parse_seconds(tpot, "tpot"),
        None if itl is None else parse_seconds(itl, "itl"),
    )
    table, source = read_prices(prices, hardwares)
    chosen = re.split(",(?![a-z_]+=)", formats) if formats else formats_of(described.weights)
    question = PlanQuestion(model, described, demand, goal, tuple(chosen), counts, table, source)
    with StatusLine(sys.stderr, "planning") as said, workers() as pool:
        said(f"{len(hardwares)} kinds of device")
        found = search_each(
            pool,
            described.arch,
            demand,
            goal,
            table,
            devices=hardwares,
            formats=chosen,
            kv_dtype=kv_dtype,
            pools=pools,
            max_devices=max_devices,
            counts=counts,
        )
        check = Check(demand, goal, requests, trace, law)
        named = hardware != "all" or counts is not None
        checked = checked_rows(pool, check, found, said, named=named)
    best = checked[0] if checked and checked[0].kept else None
    if as_json:
        print(json.dumps(document(question, found, checked)))
    elif start is None or best is None:
        show(question, found, checked, verbose=verbose)
    if best is None:
        why = impossible(found, checked, demand, question.source.currency)
        print(f"error: {why}", file=sys.stderr)
        raise typer.Exit(MISSED)
    if start is not None:
        print(launch_text(start, question, best.candidate), end="")
    if launch is not None:
        for path in write_launch(launch, question, best.candidate):
            print(path, file=sys.stderr if as_json or start else sys.stdout)


def _verify_command(name: str, *, as_json: bool) -> None:
    one_of(name, STARTS, "command")
    if as_json:
        raise InvalidRequest("command prints no JSON: leave out --json", param="command")


def parse_devices(text: str) -> dict[str, int]:
    """Parse a list such as `8xH100,4xH200`; return the number of each kind of device, in order."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = COUNTS.fullmatch(part.strip())
        if match is None or match[2] in found:
            raise InvalidRequest(
                f"devices must be a list such as 8xH100 or 8xH100,4xH200, each kind once, not "
                f"{text!r:.80}",
                param="devices",
            )
        found[match[2]] = int(match[1])
    return found


def _hardwares(names: str) -> list[Hardware]:
    if names == "all":
        return list(DEVICES.values())
    found = {
        one.name: one for one in (find_hardware(n, calibration_path()) for n in names.split(","))
    }
    if len(found) < len(names.split(",")):
        raise InvalidRequest(f"{names!r:.80} names a device twice", param="hardware")
    return list(found.values())


def _law(speculate: str, devices: list[Hardware]) -> DraftLaw | None:
    if speculate == "off":
        return None
    law = draft_law(speculate)
    if others := [one.name for one in devices if one.kind != "cpu"]:
        raise InvalidRequest(
            f"drafts are not verified on {others[0]} yet: plan with --hardware this or a CPU's "
            "file, or without --speculate",
            param="speculate",
        )
    return law


def checked_rows(
    pool: Executor,
    check: Check,
    found: Found,
    watch: Callable[[str], None],
    *,
    named: bool,
) -> list[Checked]:
    """Simulate the shown rows; return them, the best first.

    These are the best of each device and better ones for more money. Devices that the user did not
    name must cost at most `WORTH` times the best.
    """
    candidates = found.candidates
    if not candidates:
        return []
    rows = best_of_each(candidates)
    if found.given:
        each = [[one for one in candidates if one.hardware is row.hardware] for row in rows]
        if len(each) == 1:
            return [_most(check, each[0], watch)]
        watch(f"the most of {len(each)} kinds of device")
        jobs = [pool.submit(_most, check, own) for own in each]
        return sorted(_ended(jobs, watch), key=lambda one: (not one.kept, -one.candidate.rate))

    def worth(best: Candidate) -> list[Candidate]:
        most = WORTH * best.cost_per_million(check.demand)
        cheap = [one for one in frontier(candidates) if one.cost_per_million(check.demand) <= most]
        own = [one for one in rows if named or one.cost_per_million(check.demand) <= most]
        return list({id(one): one for one in [*own, *cheap]}.values())

    # The others start before the cheapest is known to meet the limits.
    guessed = [one for one in worth(candidates[0]) if one is not candidates[0]][: ROWS - 1]
    begun: dict[int, Future[Checked]] = {}
    if not guessed:
        watch(str(candidates[0]))
        first = [check.verify(candidates[0])]
    else:
        watch(f"{candidates[0]} and {len(guessed)} more")
        cheapest = pool.submit(check.verify, candidates[0])
        begun = {id(one): pool.submit(check.at, one) for one in guessed}
        first = [cheapest.result()]
    for candidate in candidates[1:TRIES]:
        if first[-1].kept:
            break
        watch(str(candidate))
        first.append(check.verify(candidate))
    tried = {id(one) for one in candidates[: len(first)]}
    others = [one for one in worth(first[-1].candidate) if id(one) not in tried]
    others = others[: ROWS - len(first)]
    jobs = [begun[id(one)] if id(one) in begun else pool.submit(check.at, one) for one in others]
    made = [first[-1], *_ended(jobs, watch), *first[:-1]]
    made.sort(key=lambda one: one.candidate.price_per_hour)
    best = min(made, key=lambda one: not one.kept)  # Others may be cheaper than the first.
    return [best, *(one for one in made if one is not best)]


def _ended(jobs: list[Future[Checked]], watch: Callable[[str], None]) -> list[Checked]:
    """Wait for simulations, and report which have ended."""
    for left, job in zip(range(len(jobs) - 1, -1, -1), as_completed(jobs), strict=True):
        watch(f"{job.result().candidate} done, {left} left")
    return [job.result() for job in jobs]


def _most(
    check: Check, candidates: list[Candidate], watch: Callable[[str], None] = lambda _text: None
) -> Checked:
    """Find the most that a device's best layout does; the next layout's if it misses at any
    rate."""
    made: list[Checked] = []
    for candidate in candidates[:TRIES]:
        made.append(check.most(candidate, watch))
        if made[-1].kept:
            break
    return made[-1] if made[-1].kept else made[0]


def impossible(found: Found, checked: list[Checked], demand: Demand, currency: str) -> str:
    """Explain why no candidate meets the limits, and name the nearest one."""
    if checked:
        near = min(checked, key=lambda one: one.ttft + one.tpot)
        return (
            f"the {len(checked)} cheapest layouts missed the limits in the simulator; the nearest "
            f"was {near.candidate}: p99 TTFT {near.ttft * 1e3:.0f} ms, TPOT {near.tpot * 1e3:.1f} "
            f"ms, ITL {near.itl * 1e3:.1f} ms"
        )
    if found.nearest is None:
        reasons = Counter(one.reason for one in found.rejected)
        return "no layout can hold the model: " + reasons.most_common(1)[0][0]
    near_ = found.nearest
    return (
        f"no layout keeps these limits for {demand.input_tokens:,} + {demand.output_tokens:,} "
        f"tokens; the nearest is {near_} in {near_.case.weights.name}: TTFT "
        f"{near_.ttft * 1e3:.0f} ms, TPOT {near_.tpot * 1e3:.1f} ms, ITL {near_.itl * 1e3:.1f} ms, "
        f"{near_.price_per_hour:.2f} {currency} an hour"
    )


def demand_of(trace: str, rate: float | None) -> Demand:
    """Compute the means of a trace's requests, with its own rate unless one is given."""
    options = RunOptions(url="simulated", trace=trace)
    options.verify()
    sessions, _ = make_sessions(options, Material())
    turns = [turn for session in sessions for turn in session.turns]
    times = [session.at for session in sessions if session.at is not None]
    if rate is None:
        if len(times) < 2 or max(times) == min(times):
            raise InvalidRequest(f"{trace} has no times: say --rate", param="rate")
        rate = len(turns) / (max(times) - min(times))
    given = round(sum(turn.prompt_tokens for turn in turns) / len(turns))
    wanted = round(sum(turn.output_tokens for turn in turns) / len(turns))
    shared = round(shareable_tokens(sessions) / len(turns))
    return Demand(rate, max(1, given), max(1, wanted), min(shared, max(0, given - 1)))


command = typer.Typer(
    help="The cheapest layout that keeps an SLO, or the most that given devices do.",
    add_completion=False,
)
command.command(cls=PlanCommand)(plan)
