"""Checks of whole paths on the device: graphs, overlapping steps, a model's answers, memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from gpu_kernels import error
from gpu_models import ARCHS, Step, build, make_batch, make_cache, seeded, windows_of
from gpu_worker import Setup, block_bytes, make_worker, pool_of

from headrace.base.arch import ModelArch, Moe
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import StepPlan, StepResult
from headrace.kernels.cuda_graphs import CudaGraphMaker, GraphMaker, GraphProgram, Replay
from headrace.kernels.draws import DrawParameters
from headrace.kernels.operators import KvCache, StepLimits
from headrace.kernels.program import BEST, RULES, CallByCall, want
from headrace.kernels.reference import ReferenceOperators
from headrace.kernels.triton.operators import TritonOperators
from headrace.kv import KvManager
from headrace.sched import Limits, Scheduler
from headrace.worker import Worker

SMALL = replace(
    ARCHS["llama-3.1-8b"],
    hidden=256,
    layers=2,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=512,
    vocab_size=1000,
    max_context=512,
)
SMALL_MOE = replace(
    SMALL,
    family="qwen3_moe",
    qk_norm=True,
    moe=Moe(experts=8, active=2, intermediate=256),
)


class Rerun:
    """Where there are no graphs: replays by running again."""

    def capture(self, run: Callable[[], None]) -> Replay:
        run()
        return run

    def memory(self) -> int:
        return 0


STEPS = (
    Step("decode 3", ((20, 1), (7, 1), (300, 1))),
    Step("mixed", ((0, 30), (12, 1))),
    Step("decode 24", tuple((5 + 17 * place, 1) for place in range(24))),
    Step("decode 3", ((33, 1), (150, 1), (9, 1))),
)
"""Alternating: whoever reads before it was written finds the numbers of another step and not its
own again, in the inputs of a graph and in the memory that all of them share."""
LIMITS = StepLimits(tokens=64, entries=24, max_context=512)
ROUNDS = 20


def graphs(arch: ModelArch, weights: str, kv: str) -> Callable[[str, torch.dtype], float]:
    """Captured steps, one after another of another kind, give what they give call by call."""

    def check(device: str, dtype: torch.dtype) -> float:
        ops = TritonOperators(dtype, quantise="fp8" if weights == "fp8" else "auto")
        model = build(arch, ops, device=device, weights=weights, max_context=512, dtype=dtype)
        stored = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kv, dtype)
        cuda = device == "cuda"
        batches = [make_batch(step, windows_of(arch), device) for step in STEPS]
        for number, batch in enumerate(batches):
            batch.tokens.add_(number).remainder_(arch.vocab_size)
        blocks = 1 + max(int(batch.groups[0].tables.max()) for batch in batches)
        caches = [make_cache(arch, blocks, device, stored) for _ in range(2)]
        _fill(*caches)
        plain, calls = (CallByCall(model, ops, cache, ops.drawing) for cache in caches)
        maker: GraphMaker = CudaGraphMaker(torch.device(device)) if cuda else Rerun()
        program = GraphProgram(calls, LIMITS, maker)
        program.capture()
        asked, worst = want(logits=True, hidden="sampled"), 0.0
        for batch in batches * (ROUNDS if cuda else 1):
            batch.plan = batch.draws = None
            expected = plain.step(batch, asked)
            batch.plan = None
            actual = program.step(batch, asked)
            # Padding may choose another kernel of the library: near, not equal.
            worst = max(worst, error(actual.hidden, expected.hidden, 0.02))
            worst = max(worst, error(actual.logits, expected.logits, 0.02))
            assert actual.logits is not None
            logits = actual.logits.clone()
            for draws in (None, _draws(len(logits), device), None):
                batch.draws = draws
                found = program.step(batch, BEST if draws is None else RULES).tokens
                draw, argmax = ops.drawing.draw, ops.drawing.argmax
                wanted = argmax(logits) if draws is None else draw(logits, draws)
                worst = max(worst, 2.0 * int((found != wanted).sum()))
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            # Padding writes into the first block.
            for a, b in ((one.k[1:], other.k[1:]), (one.v[1:], other.v[1:])):
                worst = max(worst, error(b.float(), a.float(), 0.02))
        replays = 4 * len(batches) * (ROUNDS if cuda else 1)
        assert program.facts.replayed == replays, program.facts
        return worst

    return check


def _draws(rows: int, device: str) -> DrawParameters:
    """Every other row is drawn, without filters."""
    drawn = torch.arange(rows, device=device) % 2 == 0
    one = torch.ones(rows, device=device)
    uniform = torch.linspace(0.1, 0.9, rows, device=device, dtype=torch.float64)
    return DrawParameters(
        torch.where(drawn, 0.8, one),
        None,
        None,
        torch.where(drawn, 0.0, one),
        torch.where(drawn, uniform, 0.0),
    )


def _fill(first: KvCache, second: KvCache) -> None:
    """The same numbers in both, and scales as if nothing had been written."""
    generator = seeded(first.layers[0].k.device, 5)
    for one, other in zip(first.layers, second.layers, strict=True):
        for name in ("k", "v"):
            target = getattr(one, name)
            values = torch.randn(target.shape, device=target.device, generator=generator)
            getattr(one, name).copy_(values.to(target.dtype))
            getattr(other, name).copy_(values.to(target.dtype))
        for scales in (one.k_scale, one.v_scale, other.k_scale, other.v_scale):
            if scales is not None:
                scales.fill_(1)


def logits_near(arch: ModelArch, weights: str, allowed: float) -> Callable[..., float]:
    """A model's logits against the reference in fp32 with the same numbers."""

    def check(device: str, dtype: torch.dtype) -> float:
        ops = TritonOperators(dtype, quantise="fp8" if weights == "fp8" else "auto")
        ref = ReferenceOperators(torch.float32)
        results = []
        for each, kind, wide in ((ops, dtype, False), (ref, torch.float32, True)):
            form = "bfloat16" if wide and weights == "fp8" else weights
            model = build(arch, each, device=device, weights=form, max_context=512, dtype=kind)
            batch = make_batch(Step("", ((0, 60), (0, 7))), windows_of(arch), device)
            results.append(model.forward(each, batch, make_cache(arch, 64, device, kind))[1])
        norm = float((results[0].float() - results[1]).norm() / results[1].norm())
        return norm / allowed

    return check


def setup_of(device: str, dtype: torch.dtype, arch: ModelArch = SMALL, **more: object) -> Setup:
    name = str(dtype).removeprefix("torch.")
    values = {"kv": name, "dtype": name, "rows": 8, "step_tokens": 128, "max_context": 256, **more}
    return Setup("check", arch, device=device, **values)  # type: ignore[arg-type]


def answers(worker: Worker, depth: int) -> dict[str, list[int]]:
    """A load of requests through the real scheduler, `depth` steps in flight."""
    pool = pool_of(worker, 160)
    worker.allocate(pool)
    kv = KvManager(pool, prefix_cache=True)
    limits = Limits(rows=8, step_tokens=64, max_context=256, max_waiting=64, depth=depth)
    scheduler = Scheduler(limits, kv)
    found: dict[str, list[int]] = {}
    for number, length in enumerate((40, 1, 90, 7, 33, 40, 12, 3, 5, 64)):
        sampled = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        if number % 6 == 0:
            sampled["top_k"] = 20
        params = SamplingParams(max_tokens=12, ignore_eos=True, **{"temperature": 0, **sampled})
        ids = [1 + (number * 13 + place * 7) % 900 for place in range(length)]
        scheduler.add(Request(f"r{number}", ids, RequestSpec(params, number)))
    flying: deque[tuple[StepPlan, Callable[[], StepResult]]] = deque()
    while scheduler.has_work or flying:
        while len(flying) < depth:
            plan = scheduler.schedule()
            if plan is None:
                break
            flying.append((plan, worker.launch(plan)))
        if not flying:
            break
        plan, finish = flying.popleft()
        result = finish()
        assert result.error is None, result.error
        for delta in scheduler.update(plan, result):
            found.setdefault(delta.request_id, []).extend(delta.tokens)
    return found


def overlap(device: str, dtype: torch.dtype) -> float:
    """Two steps in flight give what one gives.

    Deterministic: the steps are composed otherwise, and the library rounds by the batch."""
    worker = make_worker(setup_of(device, dtype, deterministic=True))
    single = answers(worker, 1)
    assert len(single) == 10, f"{len(single)} of 10 answered"
    assert all(len(tokens) == 12 for tokens in single.values())
    double = answers(worker, 2)
    return 2.0 * sum(single[name] != double[name] for name in single)


def greedy_tokens(device: str, dtype: torch.dtype) -> float:
    """The same tokens as the reference path on the same device, but for near ties."""
    if device != "cuda":
        dtype = torch.float32
    ours, theirs = (
        answers(make_worker(setup_of(device, dtype, kernels=kernels)), 1)
        for kernels in ("triton", "ref")
    )
    greedy = [name for number, name in enumerate(sorted(ours)) if int(name[1:]) % 3]
    first = sum(ours[name][0] != theirs[name][0] for name in greedy)
    # In bf16 two of the random model's logits may round to the same; then texts part ways.
    return first / (0.5 if dtype == torch.float32 else 1.5)


def memory(device: str, dtype: torch.dtype) -> float:
    """What the worker says of its memory is what the device says."""
    setup = setup_of(device, dtype)
    worker = make_worker(setup)
    worker.allocate(pool_of(worker, 64))
    worker.warm_up()
    if device != "cuda":
        return 0.0
    held = torch.cuda.memory_allocated()
    least = worker.facts.weight_bytes + 64 * block_bytes(setup)
    return 0.0 if least <= held <= least + 2**30 else 2.0


PATHS = {
    "graphs equal eager, bf16": graphs(SMALL, "bfloat16", "bf16"),
    "graphs equal eager, fp8": graphs(SMALL, "fp8", "fp8"),
    "graphs equal eager, int4, int8 KV": graphs(SMALL, "int4", "int8"),
    "graphs equal eager, experts": graphs(SMALL_MOE, "bfloat16", "bf16"),
    "model near the reference, bf16": logits_near(SMALL, "bfloat16", 0.04),
    "model near the reference, fp8": logits_near(SMALL, "fp8", 0.15),
    "model near the reference, experts in int4": logits_near(SMALL_MOE, "int4", 0.1),
    "two steps in flight": overlap,
    "greedy tokens": greedy_tokens,
    "memory": memory,
}
