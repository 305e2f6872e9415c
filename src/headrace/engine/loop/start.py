"""Decisions of a start: every "auto" is decided, with its reason, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...base.config import (
    CPU_KERNELS,
    CPU_VALUES,
    MOST_THREADS,
    ROWS,
    Decision,
    EngineOptions,
    auto_kv_dtype,
    parse_size,
)
from ...base.errors import DoesNotFit, OptionError
from ...base.extras import install
from ...base.gpus import GpuFacts
from ...base.groups import group_bytes
from ...base.hardware import Hardware, torch_build
from ...base.layout import ONE, Layout
from ...base.modelfiles import ModelFiles
from ...base.split import Role
from ...base.step import MOST_DRAFTS
from ...base.textlibrary import absence
from ...base.workeroptions import WorkerOptions
from ...loader.panels import panel_folder
from ...roofline.memory import HOST_POOL_SHARE, USABLE, MemoryPlan, plan_memory
from ...speculate import names_of
from ..ranks.ranks import rank_groups, shared_by
from .context import context_cache, remote_store
from .draft_model import DraftPlan, plan_draft
from .encoder import EncoderPlan, decoding_bytes, plan_encoder
from .real import kernel_decisions
from .split import split_role
from .spoken_plan import CodecPlan, plan_codec
from .tokenizers import tokenizer_of

STEP_TOKENS = {"cpu": 512, "cuda": 8192}
"""Budget of a step: large enough for full speed of the matrix products on the device, and small
enough that one prompt's chunk does not stop the others for long."""
DEPTH = {"cpu": 1, "cuda": 2}
"""Steps in flight. A device waits for the host between two steps unless the next is planned; on a
CPU both want the same cores."""
MOST_ROWS, ROW_TOKENS = (1024, 512, 256, 128), 1024
"""On a device: as many sequences as its pool holds with so many tokens each; these bounds are tried
one after the other."""
DRAFTS = MOST_DRAFTS
"""Drafts of a sequence and step: the products of eight rows cost two steps of one."""
ENCODER_STEP_TOKENS = {"cpu": 2048, "cuda": 16384}
"""An encoder streams nothing that a long step could hold up; many inputs go together."""
_ON_CPU = {"rank": "a ranker", "picture": "a denoiser"}
"""Models that one process on a CPU serves, by their task."""
DRAWN = 256
"""Patches of a step: the products' full speed, and a text beside them waits for few."""
RANKED = 512
"""Candidates of a step: the products' full speed, and a text beside them waits for few."""


@dataclass(frozen=True, slots=True)
class Beside:
    """The other models of a server, for the memory plan of one."""

    models: int = 1
    """Models that keep KV, this one included: each has at most this part of a host's KV."""
    bytes: int = 0
    """Their memory: as planned, or the size of their files if that is to come."""
    available: int | None = None
    """Bytes that were there before any of them was loaded; None: this is the first."""


ALONE = Beside()
"""A server of one model."""


def keeping(files: Iterable[ModelFiles]) -> int:
    """Return the number of models that keep KV, which a host's memory for it is divided among."""
    return max(1, sum(one.arch.task == "tokens" for one in files))


def beside_of(plans: Sequence[MemoryPlan], coming: Sequence[ModelFiles], models: int) -> Beside:
    """Return what the memory plan of one model must know of the server's others. `plans`: of those
    that are planned; `coming`: files of those that are not; `models`: see `keeping`."""
    taken = sum(one.taken for one in plans)
    taken += sum(path.stat().st_size for one in coming for path in one.weights)
    return Beside(models, taken, plans[0].available if plans else None)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options without "auto" and None, except those that only the memory plan can decide."""

    options: EngineOptions
    decisions: tuple[Decision, ...]
    available: int
    """Bytes on the device when the plan was made, weights not yet loaded."""
    kv_memory: int | None
    draft: DraftPlan | None = None
    """The plan of the draft model."""
    encoder: EncoderPlan | None = None
    """The plan of the part that encodes inputs which are not text."""
    codec: CodecPlan | None = None
    """The plan of the codec of a model that speaks."""
    beside: Beside = ALONE


def resolve(
    options: EngineOptions, files: ModelFiles, hardware: Hardware, beside: Beside = ALONE
) -> Resolved:
    """Decide the open options. Raises `OptionError` for a value that cannot work here."""
    options.verify()
    decisions = list(files.decisions)

    def decide(name: str, value: Any, reason: str) -> Any:
        decisions.append(Decision(name, str(value), reason))
        return value

    if options.max_adapters and files.arch.task != "tokens":
        raise OptionError("an encoder takes no adapters", param="max_adapters")
    device, why = device_of(options.device, hardware)
    alone = _ON_CPU.get(files.arch.task)
    if alone is not None and device != "cpu":
        why = f"{alone} is served on a CPU only"
        if options.device != "auto":
            raise OptionError(why, param="device")
        device = "cpu"
    decide("device", device, why)
    dtype = options.dtype
    if dtype == "auto":
        dtype, why = _dtype(device, hardware)
        decide("dtype", dtype, why)
    if alone is not None:
        options = _of_one_process(options, files, alone, decide)
    if options.quantise == "none":
        options = replace(options, quantise="auto")
    if device == "cpu" and options.kernels in CPU_KERNELS:
        _verify_values(options)
    kv_dtype = options.kv_dtype
    if kv_dtype == "auto":
        kv_dtype, why = auto_kv_dtype(device, dtype, options.kernels)
        decide("kv_dtype", kv_dtype, why)
    step_tokens = options.step_tokens
    if step_tokens is None and files.arch.task != "tokens":
        step_tokens = decide(
            "step_tokens",
            max(ENCODER_STEP_TOKENS[device], files.arch.max_context),
            f"default of {device} for encoders, which compute an input in one step",
        )
    elif step_tokens is None:
        step_tokens = decide("step_tokens", STEP_TOKENS[device], f"default of {device}")
    threads = options.threads
    if threads is None:
        cpu = hardware.cpu
        threads = decide(
            "threads",
            min(cpu.physical_cores, MOST_THREADS),
            f"cores without their second hardware threads, of {cpu.cores} that this process has",
        )
    speculate, why = _drafting(options, device, files)
    if options.speculate != "off":
        decide("speculate", speculate, why)
    _verify_draft_model(options)
    depth = options.depth
    if depth is None:
        depth = decide("depth", DEPTH[device], f"default of {device}")
    if depth > 1 and options.executor == "inline":
        decide("executor", "inline", "the worker has a thread of its own, for depth 2")
    if options.max_sequences is None and device == "cpu":
        options = replace(
            options, max_sequences=decide("max_sequences", ROWS, f"default of {device}")
        )
    options = replace(options, depth=depth)
    ranks = Layout.parse(options.layout)
    if ranks != ONE:
        decide("layout", ranks, shared_by(ranks, options, files, device, threads))
    decisions.append(context_cache(options, files, device))
    if (remote := remote_store(options, decisions[-1])) is not None:
        decisions.append(remote)
    if (role := split_role(options, files, device)) is not None:
        decisions.append(role)
    kv_memory = None if options.kv_memory == "auto" else parse_size(options.kv_memory, "kv_memory")
    resolved = replace(
        options,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        step_tokens=step_tokens,
        threads=threads,
        speculate=speculate,
    )
    available = hardware.cpu.available
    if device == "cuda":
        available = _available(hardware.gpus[0])
    if beside.available is not None:
        available = beside.available
    draft = None
    if options.draft_model is not None:
        draft = plan_draft(resolved, files, available)
        decisions.append(draft.decision)
    encoder = plan_encoder(resolved, files, available)
    if encoder is not None:
        decisions.append(encoder.decision)
        resolved = _with_atom(resolved, encoder, decide)
    codec = plan_codec(files, resolved.max_sequences or ROWS)
    if codec is not None:
        decisions.append(codec.decision)
    known = tuple(decisions), available, kv_memory
    return Resolved(resolved, *known, draft, encoder, codec, beside)


def _of_one_process(
    options: EngineOptions,
    files: ModelFiles,
    named: str,
    decide: Callable[[str, Any, str], Any],
) -> EngineOptions:
    """Choose steps and products of a ranker or a denoiser. Raises `OptionError` for ranks, and for
    steps that no picture fits into."""
    if Layout.parse(options.layout) != ONE:
        raise OptionError(f"{named} is served by one process: layout must be 1", param="layout")
    why = "candidates of a step: each has a score of its own, so a request is cut anywhere"
    units = RANKED
    if files.arch.denoiser is not None:
        least = 2 * files.arch.denoiser.tokens
        if options.step_tokens is not None and options.step_tokens < least:
            raise OptionError(
                f"step_tokens is {options.step_tokens}; a step of one picture with guidance has "
                f"{least}",
                param="step_tokens",
            )
        why = "patches of a step: those of a picture and its guidance, or of several small ones"
        units = max(least, DRAWN)
    if options.step_tokens is None:
        options = replace(options, step_tokens=decide("step_tokens", units, why))
    if options.quantise == "auto" and options.kernels in CPU_KERNELS:
        why = f"the products are nearly all of the time of {named}; --quantise none keeps fp32"
        options = replace(options, quantise=decide("quantise", "int8", why))
    return options


def _with_atom(
    options: EngineOptions, encoder: EncoderPlan, decide: Callable[[str, Any, str], Any]
) -> EngineOptions:
    """Make steps large enough for tokens that see each other beside one of every sequence."""
    assert options.step_tokens is not None
    least = encoder.atom + (options.max_sequences or ROWS)
    if not encoder.atom or options.step_tokens >= least:
        return options
    why = f"one step computes the {encoder.atom} tokens of a picture, which see each other"
    return replace(options, step_tokens=decide("step_tokens", least, why))


def _verify_values(options: EngineOptions) -> None:
    """Raise `OptionError` for a value that only the reference kernels serve on a CPU.

    They take ten to a hundred times as long, so they serve only if they are asked for by name.
    """
    for param, served in CPU_VALUES.items():
        value = getattr(options, param)
        if value in ("auto", *served):
            continue
        other = "" if param == "quantise" else ", or --kernels ref, which is over ten times slower"
        raise OptionError(
            f"{param} {value} has no kernels on a CPU; choose auto or {', '.join(served)}{other}",
            param=param,
        )


def _verify_draft_model(options: EngineOptions) -> None:
    """Raise `OptionError` if a draft model has nothing to do, or is missing."""
    if options.speculate == "draft" and options.draft_model is None:
        raise OptionError("speculate is draft, so draft_model must name one", param="draft_model")
    if options.draft_model is not None and options.speculate not in ("auto", "draft"):
        raise OptionError(
            f"draft_model drafts where speculate is auto or draft, not {options.speculate}",
            param="draft_model",
        )


def _drafting(options: EngineOptions, device: str, files: ModelFiles) -> tuple[str, str]:
    """Return (drafters, reason); "auto" becomes "off" if nothing can be drafted. Raises
    `OptionError` if a drafter was asked for by name all the same."""
    wish, obstacle = options.speculate, ""
    if files.arch.task != "tokens":
        obstacle = "an encoder makes no tokens to draft"
    elif files.arch.cross is not None:
        obstacle = "what is heard is not drafted"
    elif device != "cpu":
        obstacle = f"drafts are not verified on {device} yet"
    elif Layout.parse(options.layout).pp > 1:
        obstacle = "stages do not verify drafts yet"
    elif wish == "suffix" and (why := absence()):
        obstacle = f"suffix drafts with a library: {why}"
    if obstacle and (wish not in ("off", "auto") or options.draft_model is not None):
        raise OptionError(obstacle, param="speculate")
    if obstacle or wish == "off":
        return "off", obstacle
    asked = names_of(wish)
    if options.draft_model is not None:
        asked = (*asked, "a draft model")
    names = ", ".join(asked)
    return wish, f"{names} draft; a step verifies as many as pay, at most {DRAFTS} of each"


def drafts_of(options: EngineOptions) -> int:
    """Return the drafts that one step may verify in addition to a token."""
    return 0 if options.speculate == "off" else DRAFTS


def device_of(wish: str, hardware: Hardware) -> tuple[str, str]:
    """Return (device, reason). Raises `OptionError` for a GPU that cannot be used."""
    obstacle = _without_gpu(hardware)
    if wish == "cuda" and obstacle:
        raise OptionError(f"device cuda cannot be used: {obstacle}", param="device")
    if wish != "auto":
        return wish, "asked for"
    if obstacle:
        return "cpu", obstacle
    return "cuda", hardware.gpus[0].name


def _without_gpu(hardware: Hardware) -> str:
    """Return the reason why no GPU can be used; empty if one can."""
    version, cuda = torch_build()
    if not hardware.gpus:
        return hardware.no_gpu or "no NVIDIA GPU is visible"
    if not version:
        return f"PyTorch, which a GPU needs, is not installed: {install('torch')}"
    if cuda is None:
        return f"the installed torch {version} is built without CUDA"
    wanted = int(cuda.partition(".")[0])
    if hardware.cuda[0] < wanted:
        served = ".".join(map(str, hardware.cuda))
        return (
            f"torch {version} is built for CUDA {cuda} and the driver serves {served}: update the "
            f"driver, or install a torch for CUDA {hardware.cuda[0]}"
        )
    return ""


def _dtype(device: str, hardware: Hardware) -> tuple[str, str]:
    if device == "cpu":
        return "float32", "the fastest dense type of most CPUs; quantised weights stay as they are"
    major, minor = hardware.gpus[0].capability
    if (major, minor) >= (8, 0):
        return "bfloat16", f"compute capability {major}.{minor} has it"
    return "float16", f"compute capability {major}.{minor} has no bfloat16"


def _available(gpu: GpuFacts) -> int:
    """Return the bytes that a plan may count on; of a host's memory it takes a host's share."""
    return int(gpu.free * USABLE["cpu"] / USABLE["cuda"]) if gpu.integrated else gpu.free


def weight_bytes_on_disk(resolved: Resolved, files: ModelFiles) -> int:
    """Estimate the weights' size before they are loaded: the size of their files."""
    drafts = 0 if resolved.draft is None else resolved.draft.file_bytes
    return drafts + sum(path.stat().st_size for path in files.weights)


def plan(
    resolved: Resolved,
    files: ModelFiles,
    weight_bytes: int,
    *,
    step_bytes: int = 0,
    graph_bytes: int = 0,
) -> MemoryPlan:
    """Divide the device's memory. Raises `DoesNotFit` with options that would help.

    `step_bytes` and `graph_bytes`: as a worker measured them; 0 before there is one.
    """
    options = resolved.options
    if options.max_sequences is not None:
        return _plan(resolved, files, weight_bytes, options.max_sequences, step_bytes, graph_bytes)
    found = _plan(resolved, files, weight_bytes, ROWS, step_bytes, graph_bytes)
    for most in MOST_ROWS:
        with suppress(DoesNotFit):  # More rows have larger activations and graphs.
            many = _plan(resolved, files, weight_bytes, most, step_bytes, graph_bytes)
            rows = min(many.rows, many.kv_tokens // min(ROW_TOKENS, many.max_context))
            if rows > ROWS and many.max_context >= found.max_context:
                if rows < most:
                    many = _plan(resolved, files, weight_bytes, rows, step_bytes, graph_bytes)
                found = many
                break
    why = f"as many as the pool holds with {ROW_TOKENS} tokens each, {ROWS} to {MOST_ROWS[0]}"
    decision = Decision("max_sequences", str(found.rows), why)
    return replace(found, decisions=(decision, *found.decisions))


def _plan(
    resolved: Resolved,
    files: ModelFiles,
    weight_bytes: int,
    rows: int,
    step_bytes: int,
    graph_bytes: int,
) -> MemoryPlan:
    options, draft = resolved.options, resolved.draft
    layout = Layout.parse(options.layout)
    slots = () if draft is None else draft.slots
    slot_bytes = layout.devices * group_bytes(slots, options.block_size)
    encoding_bytes = 0 if resolved.encoder is None else resolved.encoder.bytes
    codec_bytes = 0
    if resolved.codec is not None and options.device == "cpu":  # Else it takes none of the device.
        codec_bytes = resolved.codec.bytes
    part_bytes = slot_bytes + encoding_bytes + codec_bytes
    part_bytes += decoding_bytes(files.arch, rows, resolved.options.threads or 1)
    beside = resolved.beside

    def planned(kv_memory: int | None) -> MemoryPlan:
        assert options.step_tokens is not None
        assert options.depth is not None
        return plan_memory(
            files.arch,
            weight_bytes=weight_bytes + part_bytes + beside.bytes,
            available=resolved.available,
            rows=rows,
            step_tokens=options.step_tokens,
            max_context=options.max_context,
            block_size=options.block_size,
            kv_dtype=options.kv_dtype,
            dtype=options.dtype,
            kv_memory=kv_memory,
            device=options.device,
            depth=options.depth,
            step_bytes=step_bytes,
            graph_bytes=graph_bytes,
            ranks=rank_groups(layout, files.arch, options.kv_dtype),
        )

    try:
        memory = planned(resolved.kv_memory)
        share = int(resolved.available * HOST_POOL_SHARE / beside.models)
        if beside.models > 1 and resolved.kv_memory is None and memory.kv_bytes > share:
            memory = _of_several(planned(share), beside)
    except DoesNotFit as refused:
        if not beside.bytes:
            raise
        raise DoesNotFit(
            f"{files.name} does not fit beside the server's other models, whose "
            f"{beside.bytes / 2**20:,.0f} MiB count as weights here: {refused.message}",
            param=refused.param,
        ) from None
    return replace(
        memory,
        pool=replace(
            memory.pool,
            slots=slots,
            cross=() if resolved.encoder is None else resolved.encoder.cross,
        ),
        weight_bytes=weight_bytes,
        kv_bytes=memory.kv_bytes + slot_bytes,
        encoding_bytes=encoding_bytes,
        codec_bytes=codec_bytes,
        beside_bytes=beside.bytes,
    )


def _of_several(memory: MemoryPlan, beside: Beside) -> MemoryPlan:
    """Say in a plan by which rule the KV of a host is divided."""
    rule = (
        f"; 1/{beside.models} of {HOST_POOL_SHARE:.1%} of the memory, as every model of this "
        "server that keeps KV: MODEL:kv=SIZE takes another part"
    )
    decisions = tuple(
        replace(one, reason=one.reason + rule) if one.name == "kv_memory" else one
        for one in memory.decisions
    )
    return replace(memory, decisions=decisions)


def worker_settings(resolved: Resolved, memory: MemoryPlan) -> WorkerOptions:
    """Return the options of the worker."""
    options = resolved.options
    return WorkerOptions(
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        kernels=options.kernels,
        deterministic=options.deterministic,
        quantise=options.quantise,
        threads=options.threads,
        rows=memory.rows,
        step_tokens=memory.step_tokens,
        max_context=memory.max_context,
        adapters=options.max_adapters,
        adapter_rank=options.adapter_rank,
        drafts=drafts_of(options),
        drafters=options.speculate if drafts_of(options) else "auto",
        draft_model=None if resolved.draft is None else resolved.draft.path,
        lends=Role.parse(options.role).kind == "prefill",
        panels=str(panel_folder(options.cache_dir)) if options.keep_packed else None,
    )


def explain(
    options: EngineOptions, files: ModelFiles, hardware: Hardware, beside: Beside = ALONE
) -> tuple[list[Decision], MemoryPlan]:
    """Return the decisions of a start, without loading weights (their size is that of their files).

    The kernels themselves say which of them serve. The tokenizer is opened: a damaged one ends this
    as it would end a start.
    """
    resolved = resolve(options, files, hardware, beside)
    memory = plan(resolved, files, weight_bytes_on_disk(resolved, files))
    kernels = kernel_decisions(files, worker_settings(resolved, memory))
    tokenizer = tokenizer_of(files).served
    return [*resolved.decisions, *memory.decisions, *kernels, tokenizer], memory
