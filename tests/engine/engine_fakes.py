"""A worker without a model, for tests: deterministic, and it misbehaves when a prompt says so."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.base.facts import WorkerFacts
from headrace.base.modelfiles import ModelFiles
from headrace.base.step import Admission, PoolShape, StepPlan, StepResult, TokenLogprobs
from headrace.base.workeroptions import WorkerOptions
from headrace.obs.threads import THREADS

HANG, CRASH, RAISE, SLOW, LOCK, CRAWL = 290, 291, 292, 293, 294, 295
"""Prompt tokens that make a step hang, kill the process, raise, take 20 ms, hang with the
interpreter locked, or take a quarter of a second until the test lets go: an answer that is not
done while anybody looks at it."""
NOTES = "HEADRACE_TEST_NOTES"
"""Variable with the folder in which a test and its fake tell each other how far they are."""
LET_GO, HUNG, HOLD_START = "let-go", "hung-", "hold-start"
"""Files there: crawling is over; the process with this id hangs from now on; a start waits while
this is there."""
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "kv_memory": "2MiB",
    "max_sequences": 64,
    "step_tokens": 256,
    "offline": True,
}
"""Options of an engine on the tiny model."""
FAKE = "engine_fakes:load"
SICK_THREAD = "engine_fakes:load_with_a_sick_thread"


def next_token(tokens: list[int]) -> int:
    """A lower-case letter that depends on all that came before."""
    return 97 + sum((place + 1) * token for place, token in enumerate(tokens)) % 26


def continuation(prompt: list[int], count: int) -> list[int]:
    """Return the fake's answer to a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def note(name: str) -> Path | None:
    """The file `name` of the notes between test and fake; None: the test keeps none."""
    folder = os.environ.get(NOTES)
    return None if folder is None else Path(folder) / name


def noted(name: str) -> bool:
    path = note(name)
    return path is not None and path.exists()


def tell(name: str) -> None:
    if path := note(name):
        path.touch()


class FakeWorker:
    def __init__(self, step_seconds: float = 0.0) -> None:
        self.rows: dict[int, list[int]] = {}
        self.admissions: dict[int, Admission] = {}
        self.step_seconds = step_seconds
        self.steps = 0

    def allocate(self, pool: PoolShape) -> None:
        self.pool = pool

    def warm_up(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        for row in plan.released:
            self.rows.pop(row, None)
        for admission in plan.admitted:
            self.rows[admission.row] = list(admission.tokens)
            self.admissions[admission.row] = admission
        prompts = [self.rows[row][: self.admissions[row].prompt_length] for row in plan.rows]
        if any(HANG in prompt for prompt in prompts):
            tell(f"{HUNG}{os.getpid()}")
            time.sleep(3600)
        if any(LOCK in prompt for prompt in prompts):
            tell(f"{HUNG}{os.getpid()}")
            # Takes longer than the universe is old, and never lets another thread run.
            re.match(r"(a+)+$", "a" * 200 + "b")
        if any(CRASH in prompt for prompt in prompts):
            os._exit(9)
        if any(RAISE in prompt for prompt in prompts):
            raise RuntimeError("the fake raises")
        if any(SLOW in prompt for prompt in prompts):
            time.sleep(0.02)
        if any(CRAWL in prompt for prompt in prompts) and not noted(LET_GO):
            time.sleep(0.25)
        time.sleep(self.step_seconds)
        tokens: list[list[int]] = [[] for _ in plan.rows]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.rows]
        prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in plan.rows]
        for entry, row in enumerate(plan.rows):
            known = self.rows[row]
            admission = self.admissions[row]
            end = plan.starts[entry] + plan.counts[entry]
            assert end <= len(known), "a step computes tokens that nobody knows"
            if admission.spec.sampling.prompt_logprobs is not None:
                for place in range(plan.starts[entry] + 1, min(end + 1, admission.prompt_length)):
                    prompt_logprobs[entry].append(TokenLogprobs(-1.0, 2, [known[place]], [-1.0]))
            if plan.samples[entry]:
                assert end == len(known)
                token = next_token(known)
                known.append(token)
                tokens[entry] = [token]
                if admission.spec.sampling.logprobs is not None:
                    logprobs[entry] = [TokenLogprobs(-0.5, 1, [token], [-0.5])]
        return StepResult(
            plan.number, tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, seconds=0.001
        )

    def close(self) -> None:
        pass


def load(
    files: ModelFiles, settings: WorkerOptions, beside: Any = None
) -> tuple[FakeWorker, WorkerFacts]:
    while noted(HOLD_START):
        time.sleep(0.01)
    return FakeWorker(), WorkerFacts(
        weight_bytes=1000, device_memory=10**9, phases={"weights": 0.0}
    )


def load_with_a_sick_thread(
    files: ModelFiles, settings: WorkerOptions
) -> tuple[FakeWorker, WorkerFacts]:
    """A thread of its process raises whenever it runs, until the test lets go."""

    def work() -> None:
        if not noted(LET_GO):
            raise ValueError("the thread is sick")

    THREADS.keep("sick", work)
    return load(files, settings)


class CompilingWorker(FakeWorker):
    """Its grammars are done once one that is called "release" is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.released = False
        self.told: list[Callable[[], None]] = []

    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        if source == "release":
            self.released = True
            for told in self.told:
                told()
        elif done is not None:
            self.told.append(done)
        return self.released


def load_compiling(files: ModelFiles, settings: WorkerOptions) -> tuple[FakeWorker, WorkerFacts]:
    return CompilingWorker(), WorkerFacts(weight_bytes=1000, device_memory=10**9)


class DyingWorker(FakeWorker):
    """Its process ends when a pool is allocated for the third time: at the first waking."""

    allocations = 0

    def allocate(self, pool: PoolShape) -> None:
        self.allocations += 1
        if self.allocations == 3:
            os._exit(9)
        super().allocate(pool)


def load_dying(files: ModelFiles, settings: WorkerOptions) -> tuple[FakeWorker, WorkerFacts]:
    return DyingWorker(), WorkerFacts(weight_bytes=1000, device_memory=10**9)


def load_at_leisure(files: ModelFiles, settings: WorkerOptions) -> tuple[FakeWorker, WorkerFacts]:
    """The first process takes 0.2 s a step; the next does not start before the file `go`."""
    marker = files.path / "started-once"
    if not marker.exists():
        marker.touch()
        return FakeWorker(step_seconds=0.2), load(files, settings)[1]
    while not (files.path / "go").exists():
        time.sleep(0.02)
    return load(files, settings)


def load_after_failures(
    files: ModelFiles, settings: WorkerOptions
) -> tuple[FakeWorker, WorkerFacts]:
    """Fails to load from the second process on: a restart that does not succeed."""
    marker = files.path / "started-once"
    if marker.exists():
        raise RuntimeError("the device is gone")
    marker.touch()
    return load(files, settings)
