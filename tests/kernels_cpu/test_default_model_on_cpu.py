"""The default model, and a small one of another family, on the CPU kernels against the reference on
dequantised weights."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu.library import LAYOUT
from headrace.kernels.program import want
from headrace.loader.open import open_model
from headrace.loader.panels import PanelShelf
from headrace.models.registry import describe
from headrace.text.load import load_tokenizer
from headrace.worker.batch import make_batch
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

PROMPT = (
    "<|im_start|>user\nWrite a Python function that returns the n-th Fibonacci number, "
    "with a docstring and a test.<|im_end|>\n<|im_start|>assistant\n"
)
ROOM = 512
WINDOWS = {
    "docstrings": ("argparse", "difflib", "inspect", "subprocess"),
    "code": ("bisect", "fractions", "heapq", "textwrap"),
}
"""Modules of the standard library: text that no change here moves. A window is a module's begin."""
BOUND = 0.003
"""Largest relative difference of the perplexity over all windows: measured 0.106 % with a standard
error of 0.051 % over the windows, and three of these more."""


def start(model: str, kernels: str, panels: Path | None = None, kv_dtype: str = "auto") -> Worker:
    files = open_model(model)
    options = WorkerOptions(
        kernels=kernels, rows=1, step_tokens=ROOM, max_context=ROOM, kv_dtype=kv_dtype
    )
    shelf = None if panels is None else PanelShelf(files, panels, LAYOUT)
    worker = Worker(files, options, shelf=shelf)
    groups = graph_groups(describe(files.arch), worker._resolved.kv_dtype, ROOM // 16 + 1)
    worker.allocate(PoolShape(16, groups))
    return worker


def admit(worker: Worker, tokens: list[int]) -> None:
    worker._tables.write([BlockWrite(0, 0, 0, list(range(1, ROOM // 16 + 1)))])
    spec = RequestSpec(SamplingParams(temperature=0.0), 0)
    worker._rows.admit(Admission(0, 0, tokens, len(tokens), 0, spec))


def all_logits(worker: Worker, tokens: list[int]) -> torch.Tensor:
    """Logits after every token of a prompt, in one step."""
    with torch.inference_mode():
        admit(worker, tokens)
        plan = StepPlan(1, rows=[0], starts=[0], counts=[len(tokens)], samples=[True])
        batch = make_batch(plan, None, worker._rows, worker._tables, worker._pool)
        hidden = worker.text.program.step(batch, want(hidden="every")).hidden
        logits = tensor(worker.text.program.head(hidden)).clone()
        worker._rows.release([0])
    return logits


def greedy(worker: Worker, prompt: list[int], count: int) -> list[int]:
    """One token a step, through plans as the engine makes them."""
    spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=count), 0)
    tokens = list(prompt)
    for step in range(count):
        first = step == 0
        plan = StepPlan(
            step + 1,
            rows=[0],
            starts=[0 if first else len(tokens) - 1],
            counts=[len(tokens) if first else 1],
            samples=[True],
            admitted=[Admission(0, 0, prompt, len(prompt), 0, spec)] if first else [],
            blocks=[BlockWrite(0, 0, 0, list(range(1, ROOM // 16 + 1)))] if first else [],
        )
        result = worker.execute(plan)
        assert result.error is None, result.error
        tokens += result.tokens[0]
    worker._rows.release([0])
    return tokens


def window(kind: str, module: str) -> str:
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).read_text()
    if kind == "code":
        return source
    holders = ast.Module | ast.ClassDef | ast.FunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, holders))
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def surprises(worker: Worker, tokens: list[int]) -> torch.Tensor:
    """−log p of every token but the first, as float64 of sums in float32: right to 1e-5."""
    logits = all_logits(worker, tokens)[:-1]
    chosen = logits.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    return logits.logsumexp(-1).double() - chosen.double()


@pytest.fixture(scope="module", params=[DEFAULT_MODEL, "smollm2-135m"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def served(model: str) -> Iterator[Worker]:
    worker = start(model, "cpu")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def reference(model: str) -> Iterator[Worker]:
    worker = start(model, "ref")
    yield worker
    worker.close()


@pytest.mark.model
@pytest.mark.slow
def test_greedy(model: str, served: Worker, reference: Worker) -> None:
    """64 greedy tokens are those of the reference."""
    prompt = load_tokenizer(open_model(model).tokenizer).encode(PROMPT)
    tokens = greedy(served, prompt, 64)
    ours = all_logits(served, tokens)
    # A decoded row has the bits of the prefilled one.
    assert ours.argmax(-1).tolist()[len(prompt) - 1 : -1] == tokens[len(prompt) :]
    theirs = all_logits(reference, tokens)
    assert theirs.argmax(-1).tolist()[len(prompt) - 1 : -1] == tokens[len(prompt) :]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(1800)  # 150 s of processor time, most of it the reference's.
@pytest.mark.parametrize("model", [DEFAULT_MODEL], indirect=True)
def test_perplexity(served: Worker, reference: Worker) -> None:
    """Over windows of different text it is that of the reference but for `BOUND`.

    What differs is the rounding of activations to int8 in groups of 32 (ADR 0021), and KV in
    bfloat16. A single window says little: any change of a sum's order moves it by 0.3 %.
    """
    tokenizer = load_tokenizer(open_model(DEFAULT_MODEL).tokenizer)
    ours, theirs = [], []
    for kind, modules in WINDOWS.items():
        for module in modules:
            tokens = tokenizer.encode(window(kind, module))[:ROOM]
            assert len(tokens) == ROOM, module
            ours.append(surprises(served, tokens))
            theirs.append(surprises(reference, tokens))
            moved = float(ours[-1].mean() - theirs[-1].mean())
            print(f"{kind} of {module}: {100 * math.expm1(moved):+.3f} %")
    got, want = torch.stack(ours).mean(1), torch.stack(theirs).mean(1)
    noise = float((got - want).std() / math.sqrt(len(got)))
    moved = float(got.mean() - want.mean())
    print(
        f"perplexity {math.exp(got.mean()):.4f}, reference {math.exp(want.mean()):.4f}: "
        f"{100 * math.expm1(moved):+.3f} %, standard error {100 * noise:.3f} %"
    )
    assert abs(math.expm1(moved)) < BOUND


def means(model: str, kv_dtype: str) -> torch.Tensor:
    """The mean surprise of each window, with keys and values of this type."""
    tokenizer = load_tokenizer(open_model(model).tokenizer)
    texts = [window(kind, module) for kind, modules in WINDOWS.items() for module in modules]
    worker = start(model, "cpu", kv_dtype=kv_dtype)
    windows = [surprises(worker, tokenizer.encode(text)[:ROOM]) for text in texts]
    worker.close()
    return torch.stack(windows).mean(1)


@pytest.fixture(scope="module")
def plain_means(model: str) -> torch.Tensor:
    return means(model, "float32")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("model", [DEFAULT_MODEL], indirect=True)
@pytest.mark.parametrize(("coded", "bound"), [("int8", BOUND), ("k8v4", 0.01)])
def test_perplexity_of_keys_and_values_in_codes(
    model: str, coded: str, bound: float, plain_means: torch.Tensor
) -> None:
    """It is that of fp32 KV but for the bound, and for three standard errors of the windows: with
    the biases of Qwen2.5's keys in the codes it is 2.6 % above (ADR 0017)."""
    off = means(model, coded) - plain_means
    noise = float(off.std() / math.sqrt(len(off)))
    print(f"{100 * math.expm1(off.mean()):+.3f} %, standard error {100 * noise:.3f} %")
    assert math.expm1(off.mean()) < bound + 3 * noise
    assert noise < bound


@pytest.mark.model
@pytest.mark.slow
def test_kept_weights_give_the_same_tokens(model: str, tmp_path: Path) -> None:
    """64 greedy tokens and every logit: packed at the start, written, and mapped."""
    tokens: list[int] = []
    logits = torch.empty(0)
    for panels, where in ((None, ""), (tmp_path, "packed"), (tmp_path, "kept")):
        worker = start(model, "cpu", panels)
        decisions = {each.name: each for each in worker.facts.kernels}
        assert ("panels" in decisions) == (panels is not None)
        if panels is not None:
            assert decisions["panels"].value in ("mapped", "copied")
        if not tokens:
            tokens = greedy(worker, load_tokenizer(open_model(model).tokenizer).encode(PROMPT), 64)
            logits = all_logits(worker, tokens)
        else:
            assert greedy(worker, tokens[:-64], 64) == tokens, where
            assert torch.equal(all_logits(worker, tokens), logits), where
        worker.close()
    (kept,) = tmp_path.glob("*.panels")
    kept.unlink()
