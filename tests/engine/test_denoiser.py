"""A diffusion transformer through the one loop, scheduler and worker: diffusers' latents, whatever
else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.base.config import EngineOptions
from headrace.base.denoising import PictureInput
from headrace.base.modelfiles import ModelFiles
from headrace.base.outputs import Picture
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.loop.build import Built, build
from headrace.loader.open import open_model
from headrace.worker.solvers import normal
from tiny import dit

diffusers = pytest.importorskip("diffusers")
EXACT: dict[str, Any] = {"device": "cpu", "threads": 2, "quantise": "none"}
SHAPE = (1, 8, 8)
SOLVERS: list[tuple[str, dict[str, Any]]] = [
    ("DDIMScheduler", {"clip_sample": False}),
    ("DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}),
    ("DDIMScheduler", {"timestep_spacing": "trailing", "prediction_type": "sample"}),
    ("DDIMScheduler", {"set_alpha_to_one": False, "steps_offset": 1, "clip_sample": False}),
    ("EulerDiscreteScheduler", {}),
    ("EulerDiscreteScheduler", {"timestep_spacing": "leading", "prediction_type": "v_prediction"}),
    ("EulerAncestralDiscreteScheduler", {"beta_schedule": "scaled_linear"}),
    ("DPMSolverMultistepScheduler", {}),
    ("DPMSolverMultistepScheduler", {"timestep_spacing": "trailing", "prediction_type": "sample"}),
    ("DPMSolverMultistepScheduler", {"timestep_spacing": "leading", "steps_offset": 1}),
    ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
]


class Engine(NamedTuple):
    built: Built
    files: ModelFiles

    def add(self, name: str, wish: PictureInput, seed: int) -> None:
        spec = RequestSpec(SamplingParams(), seed=seed, task="picture", picture=wish)
        self.built.core.add(Request(id=name, prompt=[wish.label], spec=spec))

    def turn(self, found: dict[str, list[np.ndarray]]) -> None:
        for delta in self.built.core.turn():
            assert delta.error is None, delta.error
            assert isinstance(delta.output, Picture)
            values = np.frombuffer(delta.output.values, np.float32)
            found.setdefault(delta.request_id, []).append(values)

    def drawn(self, wishes: dict[str, tuple[PictureInput, int]]) -> dict[str, list[np.ndarray]]:
        """The reported pictures of each wish; all run at once."""
        found: dict[str, list[np.ndarray]] = {}
        for name, (wish, seed) in wishes.items():
            self.add(name, wish, seed)
        while self.built.core.has_work:
            self.turn(found)
        return found


def opened(folder: Path, **options: Any) -> Engine:
    files = open_model(str(folder))
    return Engine(build(EngineOptions(model=str(folder), **{**EXACT, **options}), files), files)


def noises(seed: int, steps: int, choice: int = 0) -> list[np.ndarray]:
    return [normal(seed, choice, number, SHAPE) for number in range(steps + 1)]


@pytest.mark.parametrize("scheduler", SOLVERS, ids=lambda one: one[0].removesuffix("Scheduler"))
def test_latents_of_every_solver_and_step_are_those_of_diffusers(
    tmp_path: Path, scheduler: tuple[str, dict[str, Any]]
) -> None:
    model = dit.make(tmp_path, scheduler)
    engine = opened(tmp_path)
    for steps, guidance in ((7, 3.0), (20, 1.0)):
        found = engine.drawn({"one": (PictureInput(4, steps, guidance, 2, steps - 1), 11)})["one"]
        own = getattr(diffusers, scheduler[0])(**scheduler[1])
        wanted = dit.drawn(model, own, 4, steps, guidance, noises(11, steps, 2))
        assert len(found) == steps
        for mine, theirs in zip(found, wanted, strict=True):
            scale = max(1.0, float(np.abs(theirs).max()))
            assert np.abs(mine.reshape(SHAPE) - theirs).max() <= 1e-4 * scale
    engine.built.close()
