"""The default model on the CPU kernels against the reference on dequantised weights."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.base.config import DEFAULT_MODEL
from headrace.base.sampling import SamplingParams
from headrace.base.step import Admission, BlockWrite, GroupShape, PoolShape, StepPlan
from headrace.kernels.arrays import tensor
from headrace.kernels.cpu.library import LAYOUT
from headrace.loader.open import open_model
from headrace.loader.panels import PanelShelf
from headrace.text.load import load_tokenizer
from headrace.worker.batch import make_batch
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

PROMPT = (
    "<|im_start|>user\nWrite a Python function that returns the n-th Fibonacci number, "
    "with a docstring and a test.<|im_end|>\n<|im_start|>assistant\n"
)
ROOM = 512


def start(kernels: str, panels: Path | None = None) -> Worker:
    files = open_model(DEFAULT_MODEL)
    options = WorkerOptions(kernels=kernels, rows=1, step_tokens=ROOM, max_context=ROOM)
    shelf = None if panels is None else PanelShelf(files, panels, LAYOUT)
    worker = Worker(files, options, shelf=shelf)
    layers = tuple(range(files.arch.layers))
    worker.allocate(PoolShape(16, (GroupShape("full", layers, None, ROOM // 16 + 1),)))
    return worker


def admit(worker: Worker, tokens: list[int]) -> None:
    worker._tables.write([BlockWrite(0, 0, 0, list(range(1, ROOM // 16 + 1)))])
    worker._rows.admit(Admission(0, 0, tokens, len(tokens), SamplingParams(temperature=0.0)))


def all_logits(worker: Worker, tokens: list[int]) -> torch.Tensor:
    """Logits after every token of a prompt, in one step."""
    with torch.inference_mode():
        admit(worker, tokens)
        plan = StepPlan(1, rows=[0], starts=[0], counts=[len(tokens)], samples=[True])
        batch = make_batch(plan, worker._rows, worker._tables, worker._pool)
        batch.every_hidden = True
        hidden, _ = worker._runner.run(batch)
        places = np.arange(len(tokens))
        rows = places if isinstance(hidden, np.ndarray) else torch.from_numpy(places)
        logits = tensor(worker._runner.logits(hidden, rows)).clone()
        worker._rows.release([0])
    return logits


def greedy(worker: Worker, prompt: list[int], count: int) -> list[int]:
    """One token a step, through plans as the engine makes them."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count)
    tokens = list(prompt)
    for step in range(count):
        first = step == 0
        plan = StepPlan(
            step + 1, rows=[0], starts=[0 if first else len(tokens) - 1],
            counts=[len(tokens) if first else 1], samples=[True],
            admitted=[Admission(0, 0, prompt, len(prompt), sampling)] if first else [],
            blocks=[BlockWrite(0, 0, 0, list(range(1, ROOM // 16 + 1)))] if first else [],
        )  # fmt: skip
        result = worker.execute(plan)
        assert result.error is None, result.error
        tokens += result.tokens[0]
    worker._rows.release([0])
    return tokens


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    scores = torch.log_softmax(logits[:-1].double(), -1)
    chosen = scores.gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return math.exp(-float(chosen.mean()))


@pytest.mark.model
@pytest.mark.slow
def test_greedy_and_perplexity() -> None:
    """64 greedy tokens are those of the reference; perplexity differs by less than 0.5 %.

    What differs is the rounding of activations to int8 in groups of 32 (ADR 0070).
    """
    served = start("cpu")
    tokenizer = load_tokenizer(open_model(DEFAULT_MODEL).tokenizer)
    prompt = tokenizer.encode(PROMPT)
    text = tokenizer.encode(Path(__file__).read_text())[: ROOM - 1]
    tokens = greedy(served, prompt, 64)
    ours, ours_text = all_logits(served, tokens), all_logits(served, text)
    # A decoded row has the bits of the prefilled one.
    assert ours.argmax(-1).tolist()[len(prompt) - 1 : -1] == tokens[len(prompt) :]
    reference = start("ref")
    theirs, theirs_text = all_logits(reference, tokens), all_logits(reference, text)
    assert theirs.argmax(-1).tolist()[len(prompt) - 1 : -1] == tokens[len(prompt) :]
    got, want = perplexity(ours_text, text), perplexity(theirs_text, text)
    print(f"perplexity {got:.4f}, reference {want:.4f}, {100 * (got / want - 1):+.3f} %")
    assert abs(got / want - 1) < 0.005


@pytest.mark.model
@pytest.mark.slow
def test_kept_weights_give_the_same_tokens(tmp_path: Path) -> None:
    """64 greedy tokens and every logit: packed at the start, written, and mapped."""
    tokens: list[int] = []
    logits = torch.empty(0)
    for panels, where in ((None, ""), (tmp_path, "packed"), (tmp_path, "kept")):
        worker = start("cpu", panels)
        decisions = {each.name: each for each in worker.facts.kernels}
        assert ("panels" in decisions) == (panels is not None)
        if panels is not None:
            assert decisions["panels"].value in ("mapped", "copied")
        if not tokens:
            tokens = greedy(worker, load_tokenizer(open_model(DEFAULT_MODEL).tokenizer).encode(
                PROMPT), 64)  # fmt: skip
            logits = all_logits(worker, tokens)
        else:
            assert greedy(worker, tokens[:-64], 64) == tokens, where
            assert torch.equal(all_logits(worker, tokens), logits), where
        worker.close()
    (kept,) = tmp_path.glob("*.panels")
    kept.unlink()
