"""One engine, built in phases: plan, load, allocate, warm up, prove."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ...base import environment
from ...base.config import Decision, EngineOptions
from ...base.denoising import Denoiser
from ...base.encodings import EncoderShape
from ...base.errors import EngineFault, ModelFileError, OptionError, Overloaded
from ...base.facts import WorkerFacts
from ...base.hardware import Hardware, cpu, hardware
from ...base.identity import Identity
from ...base.items import ItemCatalogue, RetrievalWish
from ...base.layout import Layout
from ...base.modelfiles import ModelFiles
from ...base.outputs import FoundItems, Scores, Vector
from ...base.ranking import Ranker, blank
from ...base.request import Request, SequenceDelta
from ...base.sampling import SamplingParams
from ...base.spec import RequestSpec, Task
from ...kv import KvManager
from ...kv.handover import Handovers
from ...kv.holdings import Holdings
from ...loader.content import content_digest
from ...obs.flight import FlightRecorder
from ...roofline.memory import MemoryPlan
from ...sched import Limits, Scheduler
from ...sched.limits import Policy
from ...sched.resource import Resource
from ..catalogue import open_catalogue
from .adapters import AdapterSlots
from .calibration import calibrate_quickly, needs_calibration
from .context import ContextCache, has_tiers, open_context_cache
from .core import EngineCore
from .encodings import encodings_of
from .executor import Executor, InlineExecutor
from .gpu_start import alone_on
from .grammar import GrammarResource
from .prediction import computing, draft_prices, step_predictor
from .real import REAL_WORKER, worker_loader
from .start import (
    ALONE,
    Beside,
    Resolved,
    device_of,
    drafts_of,
    plan,
    resolve,
    weight_bytes_on_disk,
    worker_settings,
)
from .tokenizers import tokenizer_of

if TYPE_CHECKING:
    from .lending import Lender
    from .spoken import CodecPart

log = logging.getLogger("headrace.engine")

OnPhase = Callable[[str, float], None]
_PROOF_SALT = "headrace start"
KEPT_PREFIXES = 0.25
"""Share of a CPU's pool that cached prefixes fill before blocks without memory are taken. A pool is
sized for full load, and memory that a quieter engine never needs is left alone."""


def unheard(name: str, seconds: float) -> None:
    """Take a phase of a start that nobody waits for."""


@dataclass(slots=True)
class Built:
    """A core that has served its first tokens, and its parts."""

    core: EngineCore
    memory: MemoryPlan
    facts: WorkerFacts
    decisions: list[Decision]
    identity: Identity
    holdings: Holdings
    context: ContextCache | None = None
    lender: Lender | None = None
    encoder: EncoderShape | None = None
    """Shape of the part that encodes inputs which are not text."""
    codec: CodecPart | None = None
    """The loaded codec of a model that speaks."""

    def close(self) -> None:
        if self.codec is not None:
            self.codec.lane.executor.close()
        if self.lender is not None:
            self.lender.close()
        if self.context is not None:
            self.context.close()
        self.core.executor.close()


def build(
    options: EngineOptions,
    files: ModelFiles,
    *,
    worker: str = REAL_WORKER,
    flight: FlightRecorder | None = None,
    on_phase: OnPhase = unheard,
    beside: Beside = ALONE,
    executor: Executor | None = None,
) -> Built:
    """Start an engine. Raises `OptionError`, `DoesNotFit`, `ModelFileError`, `UnsupportedModel`.

    The memory plan is made twice. The first, with the size of the files, gives the worker's
    settings; the second, with the actual size of the weights, gives the memory left for KV.
    `beside`, `executor`: the server's other models, and the executor of one of them that is loaded.
    """
    with ExitStack() as stack:
        if options.device != "cpu" and device_of(options.device, there := hardware())[0] != "cpu":
            stack.enter_context(alone_on(there.gpus[0]))
        loaded = load(BuildOrder(options, files, worker, beside, executor), on_phase)
        return whole(finish(loaded, flight, on_phase, stack.close))


def whole(pieces: Generator[None, None, Built]) -> Built:
    """Do all pieces of a start at once."""
    while True:
        try:
            next(pieces)
        except StopIteration as done:
            built: Built = done.value
            return built


class BuildOrder(NamedTuple):
    """An engine that is to be built: see `build`."""

    options: EngineOptions
    files: ModelFiles
    worker: str
    beside: Beside = ALONE
    executor: Executor | None = None
    aside: bool = False
    """Loading in a thread of its own while the other models compute, with threads of
    its own."""


class LoadedEngine(NamedTuple):
    """An engine whose weights are loaded."""

    wanted: BuildOrder
    resolved: Resolved
    wish: MemoryPlan
    """The plan with the size of the files."""
    executor: Executor
    facts: WorkerFacts
    codec: CodecPart | None = None

    def close(self) -> None:
        """Give everything back."""
        if self.codec is not None:
            self.codec.lane.executor.close()
        self.executor.close()


@contextmanager
def _phase(name: str, on_phase: OnPhase) -> Iterator[None]:
    begin = time.monotonic()
    yield
    on_phase(name, time.monotonic() - begin)


def load(wanted: BuildOrder, on_phase: OnPhase) -> LoadedEngine:
    """Decide the options, plan the memory and load the weights. Raises as `build`."""
    options, files, _, beside, _, _ = wanted
    with _phase("plan", on_phase):
        found = hardware()
        resolved = resolve(options, files, found, beside)
        if beside != ALONE and resolved.options.device != "cpu":
            raise OptionError("several models are served on a CPU only", param="device")
        if resolved.options.device == "cpu" and options.device == "auto":
            _warn_of_gpus(found, resolved)
        if options.kernels == "ref":
            log.warning("the reference kernels serve, as asked: over ten times slower than others")
        wish = plan(resolved, files, weight_bytes_on_disk(resolved, files))
    executor = _executor(resolved, wish, wanted)
    try:
        begin = time.monotonic()
        facts = executor.load()
        _warn(resolved.options, facts.kernels)
        for name, seconds in facts.phases.items():
            on_phase(name, seconds)
        on_phase("load_other", time.monotonic() - begin - sum(facts.phases.values()))
        codec = None
        if resolved.codec is not None:
            with _phase("load_codec", on_phase):
                from .spoken import load_codec  # Local: text does without the codec's imports.

                codec = load_codec(resolved.codec, executor, resolved.options.threads or 1)
    except BaseException:
        executor.close()
        raise
    return LoadedEngine(wanted, resolved, wish, executor, facts, codec)


def finish(
    loaded: LoadedEngine,
    flight: FlightRecorder | None,
    on_phase: OnPhase,
    on_memory: Callable[[], None] = lambda: None,
) -> Generator[None, None, Built]:
    """Allocate, warm up and prove a loaded engine, in pieces; return it. Raises as `build`.

    `on_memory` is called when nothing more will be allocated.
    """
    (options, files, worker, _, _, _), resolved, wish, executor, facts, codec = loaded
    try:
        resolved = replace(
            resolved,
            options=replace(
                resolved.options, max_sequences=wish.rows, max_context=options.max_context
            ),
        )
        memory = plan(
            resolved,
            files,
            facts.weight_bytes,
            step_bytes=facts.step_bytes,
            graph_bytes=facts.graph_bytes,
        )
        memory = replace(memory, max_context=min(memory.max_context, wish.max_context))
        device = resolved.options.device
        if worker == REAL_WORKER and needs_calibration(device):
            with _phase("calibrate", on_phase):
                # For the whole machine, whatever share this start was given: the file is kept for
                # good.
                calibrate_quickly(cpu().cores)
        yield
        with _phase("kv_pool", on_phase):
            executor.allocate(memory.pool)
            on_memory()
            decided = [*resolved.decisions, *wish.decisions, *memory.decisions, *facts.kernels]
            decisions = list({decision.name: decision for decision in decided}.values())
            options = resolved.options
            catalogue = open_catalogue(options, files, partial(tokenizer_of, files))
            digest = "" if catalogue is None else catalogue.digest
            identity = Identity.of(content_digest(files), files.arch, options, decisions, digest)
            core, context, kv, lender = _core(
                resolved, memory, executor, flight, facts, files, identity, catalogue
            )
        yield
        with _phase("warm_up", on_phase):
            executor.warm_up()
        begin = time.monotonic()
        if files.arch.cross is None:  # Else its first text needs an input.
            yield from proving(
                core,
                memory.max_context,
                vocabulary=files.arch.vocab_size,
                generates=files.arch.task == "tokens",
                features=facts.features,
                ranker=files.arch.ranker,
                denoiser=files.arch.denoiser,
                catalogue=catalogue,
            )
        on_phase("first_token", time.monotonic() - begin)
    except BaseException:
        loaded.close()
        raise
    shape = None if resolved.encoder is None else resolved.encoder.shape
    parts = shape, codec
    return Built(core, memory, facts, decisions, identity, kv.holdings, context, lender, *parts)


def _warn_of_gpus(found: Hardware, resolved: Resolved) -> None:
    """Log why a GPU that is there does not serve."""
    why = next(one.reason for one in resolved.decisions if one.name == "device")
    if found.gpus:
        log.warning("%s is left alone: %s", found.gpus[0].name, why)
    elif found.broken_driver:
        log.warning("a GPU, if there is one, is left alone: %s", why)


def _warn(options: EngineOptions, kernels: list[Decision]) -> None:
    """Log surprising choices of the kernels that serve."""
    decided = {one.name: one for one in kernels}
    slow = [
        one for one in decided.values() if one.name.startswith("kernels.") and one.value == "ref"
    ]
    if slow and options.kernels != "ref":
        names = ", ".join(one.name.removeprefix("kernels.") for one in slow)
        why = slow[0].reason
        log.warning("the reference kernels, which are slow, serve %s: %s", names, why)
    narrowed = decided.get("quantise")
    if narrowed is not None and narrowed.value != options.quantise:
        log.warning("quantise %s", narrowed.reason)


def _executor(resolved: Resolved, wish: MemoryPlan, wanted: BuildOrder) -> Executor:
    settings = worker_settings(resolved, wish)
    _, files, worker, _, beside, aside = wanted
    if resolved.options.layout != "1" or resolved.options.executor == "multiproc":
        # Local: imports the channels between processes, which nothing else here needs.
        from ..ranks.layouts import in_processes

        tiers = has_tiers(_decided(resolved), resolved.options)
        return in_processes(files, settings, worker, resolved.options, share_pool=tiers)
    if beside is not None:
        assert isinstance(beside, InlineExecutor), "several models have their worker here"
        other = None if aside else beside.worker
        return InlineExecutor(
            lambda: worker_loader(worker)(files, settings, beside=other), beside=beside, aside=aside
        )
    return InlineExecutor(
        lambda: worker_loader(worker)(files, settings), threaded=(resolved.options.depth or 1) > 1
    )


def _core(
    resolved: Resolved,
    memory: MemoryPlan,
    executor: Executor,
    flight: FlightRecorder | None,
    facts: WorkerFacts,
    files: ModelFiles,
    identity: Identity,
    catalogue: ItemCatalogue | None,
) -> tuple[EngineCore, ContextCache | None, KvManager, Lender | None]:
    options = resolved.options
    types = {"dtype": options.dtype, "kv_dtype": options.kv_dtype}
    coded = files.arch.denoiser is not None and options.quantise == "int8"
    predict = step_predictor(files, device=options.device, **types, coded=coded)
    stages = Layout.parse(options.layout).pp
    depth = max(options.depth or 1, stages)
    limits = Limits(
        rows=memory.rows,
        step_tokens=memory.step_tokens,
        max_context=memory.max_context,
        max_waiting=options.max_waiting,
        policy=cast(Policy, options.policy),
        depth=depth,
        stages=stages,
        drafts=drafts_of(options),
        atom=0 if resolved.encoder is None else resolved.encoder.atom,
        cuts=files.arch.ranker is not None,
        catalogue=catalogue,
        denoiser=files.arch.denoiser,
    )
    # On a CPU blocks get their memory when they are first written: see `kv.pool`.
    keep = KEPT_PREFIXES if options.device == "cpu" else 1.0
    resources: list[Resource] = []
    if "grammar" in facts.features:
        resources.append(GrammarResource(executor.prepare_grammar))
    adapters = AdapterSlots(options.max_adapters) if "adapter" in facts.features else None
    if adapters is not None:
        resources.append(adapters)
    kv = KvManager(
        memory.pool,
        prefix_cache=options.prefix_cache,
        keep=keep,
        identity=identity.fingerprint,
        adapter_content=str if adapters is None else adapters.content,
    )
    if options.kv_events is not None:
        kv.holdings.log_blocks()
    seconds = computing(predict, memory.step_tokens)
    lends = None
    if options.role != "both":
        from . import lending  # Local: only an engine with a role pays for this import.

        lends = lending.borrowed(options, kv, memory.pool, identity)
    context = open_context_cache(
        _decided(resolved), options, kv, memory.pool, executor, seconds, lends
    )
    if context is not None:
        resources.append(context)
    prices = draft_prices(predict) if limits.drafts else None
    encodings = None
    if resolved.encoder is not None:
        encodings = encodings_of(resolved.encoder, predict, memory.step_tokens, options.device)
        if predict is not None:
            predict.slices = encodings.prices.slice_seconds
    scheduler = Scheduler(limits, kv, resources, prices=prices, encodings=encodings)
    if lends is not None and context is not None:
        scheduler.split = lends.stats
        context.tiers.handovers = Handovers(lends, seconds, lambda: scheduler.pressure, lends.stats)
    core = EngineCore(
        scheduler,
        executor,
        depth=depth,
        flight=flight,
        check=environment.check_plans(),
        adapters=adapters,
        predict=predict,
    )
    named = adapters.named if adapters is not None else lambda content: None
    lender = None
    if options.role != "both":
        vocabulary = files.arch.vocab_size
        lender = lending.lender(options, kv, identity, executor, seconds, named, vocabulary)
    if lender is not None:
        scheduler.split = lender.stats
    return core, context, kv, lender


def _decided(resolved: Resolved) -> Decision:
    return next(one for one in resolved.decisions if one.name == "context_cache")


def prove(
    core: EngineCore,
    max_context: int,
    *,
    vocabulary: int,
    generates: bool = True,
    features: Collection[str] = (),
) -> None:
    """Do all of `proving` at once."""
    given: dict[str, Any] = {"generates": generates, "features": features}
    for _ in proving(core, max_context, vocabulary=vocabulary, **given):
        pass


def proving(
    core: EngineCore,
    max_context: int,
    *,
    vocabulary: int,
    generates: bool,
    features: Collection[str],
    ranker: Ranker | None = None,
    denoiser: Denoiser | None = None,
    catalogue: ItemCatalogue | None = None,
) -> Iterator[None]:
    """Send a real token through every serving path: greedy, and sampled with filters and logprobs.
    Send a vector, a ranking, a picture or a search, too, if the worker makes them. Yields before
    each step.

    Raises `EngineFault` if one ends otherwise than it should, `ModelFileError` if its results are
    not finite.
    """
    length = min(8, max_context - (2 if catalogue is None else max(2, catalogue.levels)))
    paths = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
        "sampled": SamplingParams(
            max_tokens=2,
            top_k=20,
            top_p=0.9,
            repetition_penalty=1.1,
            seed=1,
            logprobs=1,
            prompt_logprobs=0,
            ignore_eos=True,
        ),
    }
    if not generates:
        paths = {}
    if "pooling" in features:
        paths["pooling"] = SamplingParams(max_tokens=1)
    if ranker is not None:
        paths["ranking"] = SamplingParams(max_tokens=1)
    if denoiser is not None:
        paths["picture"] = SamplingParams(max_tokens=1)
    if catalogue is not None:
        paths["items"] = SamplingParams(max_tokens=1, temperature=0.0)
    tasks: dict[str, Task] = {"pooling": "vector", "ranking": "rank"}
    tasks |= {"picture": "picture", "items": "items"}
    coming = [
        Request(
            id=f"headrace-start-{name}",
            prompt=[place % vocabulary for place in range(1, length + 1)],
            spec=RequestSpec(
                sampling,
                seed=1,
                task=tasks.get(name, "tokens"),
                ranking=None if ranker is None else blank(ranker, length),
                picture=None if denoiser is None else denoiser.proof(),
                retrieval=RetrievalWish(1, 2) if name == "items" else None,
            ),
            cache_salt=_PROOF_SALT,
            arrival=time.monotonic(),
        )
        for name, sampling in paths.items()
    ]
    tokens = dict.fromkeys(paths, 0)
    while coming or core.has_work:
        with suppress(Overloaded):  # The others come when there is room.
            while coming:
                core.add(coming[0])
                del coming[0]
        yield
        for delta in core.turn():
            if delta.finish in ("error", "abort"):
                raise EngineFault(f"the first request ended with: {delta.error or delta.finish}")
            if not all(map(math.isfinite, _numbers(delta))):
                raise ModelFileError(
                    "the model computes no numbers from its first tokens (NaN or infinity): its "
                    "weights are damaged, or too large for their type",
                    param="model",
                )
            made = len(delta.tokens) + 2 * (delta.output is not None)
            tokens[delta.request_id.removeprefix("headrace-start-")] += made
    if set(tokens.values()) != {2}:
        raise EngineFault(f"the first requests gave {tokens} tokens instead of 2 each")


def _numbers(delta: SequenceDelta) -> Iterator[float]:
    """Yield the numbers in a delta."""
    if isinstance(delta.output, Vector | Scores):
        yield from delta.output.values
    if isinstance(delta.output, FoundItems):
        yield from delta.output.scores
    for position in delta.logprobs or ():
        yield position.logprob
