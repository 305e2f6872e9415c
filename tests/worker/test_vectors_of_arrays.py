"""Hidden states as numpy arrays and as tensors: the same vectors and scores, in any chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.arch import Pooling
from headrace.base.outputs import Scores, Vector
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, StepPlan, StepResult, TokenLogprobs
from headrace.kernels.program import Outputs
from headrace.worker.features import RowFeature
from headrace.worker.pooling import TILE, Pooler
from headrace.worker.prompt_scores import LOGIT_ROWS, PromptScores
from headrace.worker.rows import Rows

WIDTH, VOCAB, CONTEXT = 48, 90, 400
KINDS = {"numpy": lambda array: array.copy(), "torch": lambda array: torch.from_numpy(array.copy())}
LENGTHS = [1, 5, TILE, 3 * TILE + 7, 300]
CHUNKS = [(400,), (1, 3, TILE, 400), (TILE, TILE + 1, 400), (299, 400)]
"""Most tokens of an input that each step computes."""


def admit(rows: Rows, feature: RowFeature, *, pooling: bool) -> None:
    """A row for each input, which asks for the feature."""
    for row, length in enumerate(LENGTHS):
        tokens = [(7 * i + row) % VOCAB for i in range(length)]
        asked = SamplingParams(temperature=0, prompt_logprobs=None if pooling else row % 3)
        spec = RequestSpec(asked, 0, task="vector" if pooling else "tokens")
        admission = Admission(row, row, tokens, length, 0, spec)
        rows.admit(admission)
        assert feature.admit(admission)


def hidden_states() -> list[np.ndarray]:
    numbers = np.random.default_rng(0)
    return [numbers.standard_normal((n, WIDTH)).astype(np.float32) for n in LENGTHS]


def steps(
    states: list[np.ndarray], chunks: tuple[int, ...], kind: str
) -> list[tuple[StepPlan, Any]]:
    """Plans that go through all inputs at once, each with the hidden states of its tokens."""
    found, done = [], [0] * len(states)
    for chunk in chunks:
        live = [row for row, state in enumerate(states) if done[row] < len(state)]
        starts = [done[row] for row in live]
        counts = [min(chunk, len(states[row]) - done[row]) for row in live]
        if not live:
            break
        for row, count in zip(live, counts, strict=True):
            done[row] += count
        parts = [
            states[row][start : start + count]
            for row, start, count in zip(live, starts, counts, strict=True)
        ]
        plan = StepPlan(len(found), live, starts, counts, [True] * len(live))
        found.append((plan, KINDS[kind](np.concatenate(parts))))
    assert done == [len(state) for state in states]
    return found


def pooled(
    states: list[np.ndarray], chunks: tuple[int, ...], kind: str, pooling: Pooling, head: Any = None
) -> list[list[float]]:
    pooler = Pooler(pooling, head)
    admit(Rows(len(LENGTHS), CONTEXT, "cpu", ("pooling",)), pooler, pooling=True)
    found: dict[int, list[float]] = {}
    for plan, hidden in steps(states, chunks, kind):
        assert pooler.wants(plan).hidden == "every"
        result = StepResult(plan.number, [])
        pooler.collect(plan, Outputs(hidden=hidden), result)
        # The memory of hidden states is that of the next step's too.
        hidden[:] = float("nan")
        for entry, output in (result.outputs or {}).items():
            assert isinstance(output, Vector if head is None else Scores)
            row = plan.rows[entry]
            assert row not in found
            found[row] = output.values
    return [found[row] for row in range(len(states))]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("how", ["mean", "cls", "last"])
def test_vectors(how: str, normalise: bool) -> None:
    states, pooling = hidden_states(), Pooling(how, normalise)  # type: ignore[arg-type]
    of = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0], "last": lambda s: s[-1]}[how]
    for chunks in CHUNKS:
        ours, theirs = (pooled(states, chunks, kind, pooling) for kind in KINDS)
        assert ours == pooled(states, CHUNKS[0], "numpy", pooling), "chunks change no bit"
        assert theirs == pooled(states, CHUNKS[0], "torch", pooling)
        for state, vector, other in zip(states, ours, theirs, strict=True):
            exact = of(state.astype(np.float64))
            exact = exact / np.linalg.norm(exact) if normalise else exact
            np.testing.assert_allclose(vector, exact, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(vector, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_of_zeros_stays(kind: str) -> None:
    states = [np.zeros_like(state) for state in hidden_states()]
    assert pooled(states, (400,), kind, Pooling("mean")) == [[0.0] * WIDTH] * len(states)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_reads_the_first_vector(kind: str) -> None:
    weight = np.random.default_rng(1).standard_normal((WIDTH, 2)).astype(np.float32)
    states, given = hidden_states(), []

    def head(hidden: Any) -> Any:
        given.append(type(hidden))
        return hidden @ KINDS[kind](weight)

    found = pooled(states, CHUNKS[1], kind, Pooling("mean"), head)
    assert set(given) == {np.ndarray if kind == "numpy" else torch.Tensor}
    for state, labels in zip(states, found, strict=True):
        np.testing.assert_allclose(labels, state[0] @ weight, rtol=1e-5, atol=1e-5)


def scored(chunks: tuple[int, ...], kind: str) -> list[list[TokenLogprobs]]:
    weight = np.random.default_rng(2).standard_normal((WIDTH, VOCAB)).astype(np.float32)
    # In fp64: what a product rounds depends on how many rows it has.
    head = KINDS[kind](weight.astype(np.float64))
    most = []

    def logits(hidden: Any) -> Any:
        most.append(len(hidden))
        if kind == "numpy":
            return (hidden.astype(np.float64) @ head).astype(np.float32)
        return (hidden.double() @ head).float()

    rows = Rows(len(LENGTHS), CONTEXT, "cpu")
    scores = PromptScores(rows, logits)
    admit(rows, scores, pooling=False)
    found: list[list[TokenLogprobs]] = [[] for _ in LENGTHS]
    for plan, hidden in steps(hidden_states(), chunks, kind):
        result = StepResult(plan.number, [])
        assert scores.wants(plan).hidden == "every"
        scores.collect(plan, Outputs(hidden=hidden), result)
        entries = result.prompt_logprobs
        assert entries is not None
        hidden[:] = float("nan")
        for row, entry in zip(plan.rows, entries, strict=True):
            found[row] += entry
    assert max(most) <= LOGIT_ROWS
    return found


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_scores_of_prompts(chunks: tuple[int, ...]) -> None:
    ours, theirs = scored(chunks, "numpy"), scored(chunks, "torch")
    for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == LENGTHS[row] - 1
        assert [one.rank for one in mine] == [one.rank for one in other]
        assert [one.top_ids for one in mine] == [one.top_ids for one in other]
        assert all(len(one.top_ids) == row % 3 for one in mine)
        np.testing.assert_allclose(
            [one.logprob for one in mine], [one.logprob for one in other], atol=1e-5
        )
    assert ours == scored(CHUNKS[0], "numpy"), "chunks change nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_of_the_tokens_that_follow(kind: str) -> None:
    """By definition, for one prompt."""
    found, state = scored(CHUNKS[1], kind)[3], hidden_states()[3]
    weight = np.random.default_rng(2).standard_normal((WIDTH, VOCAB)).astype(np.float32)
    logits = torch.from_numpy(state.astype(np.float64) @ weight.astype(np.float64))
    exact = torch.log_softmax(logits, -1).numpy()
    following = [(7 * i + 3) % VOCAB for i in range(1, LENGTHS[3])]
    expected = [exact[at, token] for at, token in enumerate(following)]
    np.testing.assert_allclose([one.logprob for one in found], expected, rtol=1e-5, atol=1e-4)
