"""Work of every kind under one scheduler that never has nothing to do."""

from __future__ import annotations

import os
import random
from dataclasses import replace

from control_plane_harness import VOCAB, Driver, pool_of, request_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_encodings import SHAPE, spans_of, with_inputs

from headrace.sched import ALL, Limits

EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "15"))
WAITING = 6
"""Requests that wait at any time."""


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(2, 6),
    step_tokens=st.integers(31, 64),
    depth=st.sampled_from([1, 2]),
    blocks=st.integers(16, 48),
    slices=st.integers(1, 6),
    policy=st.sampled_from(["fcfs", "priority"]),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_nothing_starves_among_text_vectors_and_encodings(
    seed: int, rows: int, step_tokens: int, depth: int, blocks: int, slices: int, policy: str
) -> None:
    """A request ends within the steps that those before it and those in rows can take, however
    many come after it. The worker of the harness asserts that no encoding is computed twice or
    read by another tenant; the scheduler's own checks count what is kept."""
    shape = SHAPE._replace(slices=slices)
    limits = Limits(rows, step_tokens, 64, 100, policy, depth)  # type: ignore[arg-type]
    d = Driver(limits, pool_of((None, blocks)), seed=seed, encoder=shape)
    rng = random.Random(seed)
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    # Items go slice by slice, one after the other; then its own prompt and tokens.
    most = (WAITING + rows) * (3 * slices + 2) + 40
    for step in range(400):
        while d.scheduler.waiting < WAITING:
            add(d, rng, f"r{len(began)}")
            began[f"r{len(began)}"] = step
        d.step()
        for name, _ in list(d.finish)[len(ended) :]:
            ended.setdefault(name, step)
        late = {name for name, at in began.items() if step - at > most} - set(ended)
        assert not late, f"after {most} steps"
    d.run()
    d.check_answers()
    stats = d.scheduler.stats().encodings
    assert stats is not None
    assert stats.waiting == 0
    assert stats.bytes <= shape.bound


def add(d: Driver, rng: random.Random, name: str) -> None:
    """A request of a random kind: text, text about inputs, or a vector in atoms."""
    kind = rng.choice(["text", "inputs", "inputs", "vector"])
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))]
    salt = rng.choice(["", "other"])
    if kind == "vector":
        request = request_of(name, prompt, task="vector", cache_salt=salt)
        request.spec = replace(request.spec, sampling=replace(request.spec.sampling, n=1))
        d.add_once(request, rng.choice([1, 3, ALL]))
        return
    request = request_of(name, prompt, max_tokens=rng.choice([1, 3, 9]), cache_salt=salt)
    if kind == "inputs":
        with_inputs(request, *spans_of(rng, len(prompt)), handle=rng.randrange(3))
    d.add(request)
