"""gpt-oss with its experts in MXFP4 answers alike from both kinds of file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.base.sampling import SamplingParams
from headrace.loader import open_model
from headrace.worker import Worker, WorkerOptions
from oracle.driving import Driver

from .test_interleaved_experts import folders

__all__ = ["folders"]


def tokens_of(path: Path, kernels: str, step_tokens: int) -> tuple[list[int], list[float]]:
    """Eight greedy tokens behind a prompt that comes in chunks, and their log-probabilities."""
    options = WorkerOptions(kernels=kernels, kv_dtype="float32", threads=1, rows=4, max_context=256)
    worker = Worker(open_model(str(path)), options)
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    prompt = [(7 * at + at * at) % 300 + 3 for at in range(90)]
    answer = Driver(worker, blocks=40, step_tokens=step_tokens).ask(prompt, asked)
    assert answer.error is None, answer.error
    return answer.tokens, [one.logprob for one in answer.logprobs]


@pytest.mark.slow
def test_both_kinds_of_file_answer_alike_on_the_cpu_kernels(
    folders: tuple[Path, Path, Path],
) -> None:
    """One model in blocks from two kinds of file, in any chunks: the same bits; the reference on
    the numbers of its blocks is as near as eight-bit activations are."""
    packed, dense, path = folders
    whole = tokens_of(packed, "cpu", 128)
    assert tokens_of(packed, "cpu", 17) == whole
    assert tokens_of(path, "cpu", 64) == whole
    exact = tokens_of(dense, "ref", 128)
    assert np.abs(np.array(exact[1][:1]) - np.array(whole[1][:1])).max() < 0.05
    assert tokens_of(packed, "ref", 128) == exact
