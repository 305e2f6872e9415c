"""Measurements of a model on this machine: its limits, its accuracy, its speed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from ..base.config import EngineOptions
from ..base.hardware import hardware
from ..base.sampling import SamplingParams
from ..bench.accuracy import Perplexity, stdlib_corpus, windows
from ..bench.gate import hold, not_held
from ..bench.reference import Reference
from ..engine.clients.async_engine import AsyncEngine
from ..engine.clients.llm import LLM
from ..engine.loop.start import explain
from ..kernels.cpu.library import LAYOUT
from ..loader.panels import panel_folder, portable
from .checks import Place, model_files, need, undecided
from .profile import PANELS_TYPE
from .source import model_path
from .speed import PROMPT, TOGETHER, TOKENS, seconds_per_token, tokens_per_second
from .stage import Outcome, Recipe, Result, Work
from .store import Descriptor

Answer = TypeVar("Answer")
CHARACTERS = 1500
"""Most characters of a window of text. For a short context: half as many as its tokens."""


def measure_limits(work: Work) -> Result:
    """Start as a server does; record the resolved limits and the identity of its answers."""

    async def ask(engine: AsyncEngine) -> Result:
        identity = engine.identity
        assert identity is not None
        figures = {
            "memory": _memory(engine),
            "max_context": engine.max_context,
            "max_sequences": engine.rows,
            "task": engine.files.arch.task,
            "format": engine.files.format,
            "identity": asdict(identity),
        }
        return Result(figures=figures)

    return _on_engine(work, ask)


def _memory(engine: AsyncEngine) -> int:
    """Return the bytes that the memory plan uses on the serving device of an otherwise idle
    machine."""
    here = hardware()
    idle = replace(here, cpu=replace(here.cpu, available=here.cpu.memory))
    limits = replace(engine.options, max_context=engine.max_context, max_sequences=engine.rows)
    _, plan = explain(limits, engine.files, idle)
    return plan.available - plan.margin_bytes


def keep_panels(work: Work) -> Result:
    """Store the weights in the CPU kernels' layout, from an engine with an empty cache."""
    with TemporaryDirectory(dir=work.store.root / "tmp") as name:
        asked = _options(work, model_files(work))
        with LLM(**asdict(replace(asked, cache_dir=name, keep_packed=True))) as llm:
            kept = portable(llm.files, panel_folder(name), LAYOUT)
        if kept is None:
            return Result(reason="repacked at each start: there are too few, or a GPU serves them")
        return Result({kept.name: work.store.put_file(kept, PANELS_TYPE)})


def measure_baseline(work: Work) -> Result:
    """Measure the perplexity before quantisation, for the accuracy gate."""
    if need(work, "limits").figures["task"] != "tokens":
        return Result()
    found = _perplexity(work, need(work, "fetch").outputs)
    return Result(figures={"perplexity": asdict(found)})


def measure_accuracy(work: Work) -> Result:
    """Compare the perplexity with the reference's, or with the model's before quantisation."""
    place: Place = work.place
    if need(work, "limits").figures["task"] != "tokens":
        return undecided("the model makes vectors; this gate reads text")
    found = _perplexity(work, model_files(work))
    figures: dict[str, Any] = {"perplexity": asdict(found)}
    reference, whose = place.reference, "the reference's"
    before = [one for name, one in work.inputs.items() if name.endswith("baseline")]
    if before:
        known, whose = Perplexity(**before[0].figures["perplexity"]), "the model's before"
        reference = Reference(place.source.name, [], [], known)
    if reference is None:
        reason = f"perplexity {found.value:.4f}; nothing to hold it against (--reference)"
        return undecided(reason, **figures)
    held = hold(reference, agreed=None, perplexity=found, scores=[])
    if lacking := not_held(reference, held, ["perplexity"], perplexity=found, scores=[]):
        return undecided("; ".join(lacking), **figures)
    share, least = held[0].share, work.stage.parameters["least_share"]
    return Result(
        outcome=Outcome.PASSED if held[0].passes(least) else Outcome.FAILED,
        reason=f"{share:.2%} of {whose}, at least {least:.1%} is asked",
        figures={**figures, "share": round(share, 6)},
    )


def _perplexity(work: Work, files: Mapping[str, Descriptor]) -> Perplexity:
    text, name = stdlib_corpus()
    characters = min(CHARACTERS, int(need(work, "limits").figures["max_context"]) // 2)
    pieces = windows(text, characters, work.stage.parameters["windows"])
    total, tokens = 0.0, 0
    with LLM(**asdict(_options(work, files))) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        for answer in llm.generate(pieces, params):
            known = [one.logprob for one in answer.prompt_logprobs or [] if one is not None]
            total, tokens = total + sum(known), tokens + len(known)
    return Perplexity(round(math.exp(-total / tokens), 6), tokens, len(pieces), name)


def measure_performance(work: Work) -> Result:
    """Measure seconds per token of one answer, and tokens per second of several at once."""
    if need(work, "limits").figures["task"] != "tokens":
        return undecided("the model makes vectors; this gate generates")

    async def ask(engine: AsyncEngine) -> tuple[float | None, float]:
        return await seconds_per_token(engine), await tokens_per_second(engine)

    alone, together = _on_engine(work, ask)
    how = {"answers": f"one alone, {TOGETHER} at once; {PROMPT} ids in, {TOKENS} tokens out"}
    measured = {
        "seconds_per_token": None if alone is None else round(alone, 9),
        "tokens_per_second": round(together, 3),
    }
    least = work.stage.parameters["at_least"]
    if least is None:
        outcome, reason = Outcome.NOT_EVALUATED, "nothing to hold the speed against (--at-least)"
    elif together >= least:
        outcome, reason = Outcome.PASSED, f"at least {least:g} tokens/s are asked"
    else:  # Nothing is signed in this case, so the figure may be reported.
        outcome = Outcome.FAILED
        reason = f"{together:.1f} tokens/s, at least {least:g} are asked"
    return Result(outcome=outcome, reason=reason, figures=how, measured=measured)


def _options(work: Work, files: Mapping[str, Descriptor]) -> EngineOptions:
    """Return the build's options, for files of the store and without the network."""
    place: Place = work.place
    path = model_path(work.store.checkout(files), list(files))
    return EngineOptions(**asdict(place.engine) | {"model": str(path), "offline": True})


def _on_engine(work: Work, ask: Callable[[AsyncEngine], Awaitable[Answer]]) -> Answer:
    async def run() -> Answer:
        engine = await AsyncEngine.start(_options(work, model_files(work)))
        try:
            return await ask(engine)
        finally:
            await engine.close(0.0)

    return asyncio.run(run())


def _measured(run: Callable[[Work], Result]) -> Recipe:
    """Make a recipe that runs the engine: its key contains all of the code and the machine."""
    libraries = ("numpy", "tokenizers", "safetensors", "torch", "llguidance")
    return Recipe(run, code=(".",), tools=libraries, measured=True)


MEASUREMENTS = {
    "limits": _measured(measure_limits),
    "panels": _measured(keep_panels),
    "baseline": _measured(measure_baseline),
    "accuracy": _measured(measure_accuracy),
    "performance": _measured(measure_performance),
}
