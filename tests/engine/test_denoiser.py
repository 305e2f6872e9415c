"""A diffusion transformer through the one loop, scheduler and worker: diffusers' latents, whatever
else runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from headrace.base.config import EngineOptions
from headrace.base.denoising import PictureWish
from headrace.base.errors import ModelFileError, OptionError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.base.outputs import PictureOutput
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import StepPlan
from headrace.engine.clients.drawing import denoiser_of, predicted, read_drawing
from headrace.engine.loop.build import Built, build
from headrace.engine.loop.prediction import drawing_seconds, step_predictor
from headrace.loader.open import open_model
from headrace.worker.solvers import normal
from tiny import dit

EXACT: dict[str, Any] = {"device": "cpu", "threads": 2, "quantise": "none"}
SOLVERS: list[dit.Scheduler] = [
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
Wishes = dict[str, tuple[PictureWish, int]]
"""Wish and seed of each picture by name."""


class Engine(NamedTuple):
    built: Built
    files: ModelFiles

    def add(self, name: str, wish: PictureWish, seed: int = 0) -> None:
        spec = RequestSpec(SamplingParams(), seed=seed, task="picture", picture=wish)
        self.built.core.add(Request(id=name, prompt=[wish.label], spec=spec))

    def turn(self, found: dict[str, list[np.ndarray]]) -> None:
        """Do a step; add the pictures that it reports."""
        for delta in self.built.core.turn():
            assert delta.error is None, delta.error
            if isinstance(delta.output, PictureOutput):
                values = np.frombuffer(delta.output.values, np.float32)
                found.setdefault(delta.request_id, []).append(values)

    def drawn(self, wishes: Wishes) -> dict[str, list[np.ndarray]]:
        """The reported pictures of each wish; all run at once."""
        found: dict[str, list[np.ndarray]] = {}
        for name, (wish, seed) in wishes.items():
            self.add(name, wish, seed)
        while self.built.core.has_work:
            self.turn(found)
        return found

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self.built.core.scheduler._step


def opened(folder: Path, **options: Any) -> Engine:
    files = open_model(str(folder))
    return Engine(build(EngineOptions(model=str(folder), **{**EXACT, **options}), files), files)


def many(count: int = 12) -> Wishes:
    """Pictures at different numbers of steps, with guidance and without."""
    return {
        str(at): (PictureWish(at % 10, 3 + at % 5, 1.0 + at % 3, at, at % 3), 7 * at)
        for at in range(count)
    }


def same(first: dict[str, list[np.ndarray]], second: dict[str, list[np.ndarray]]) -> bool:
    return first.keys() == second.keys() and all(
        len(first[name]) == len(second[name])
        and all(np.array_equal(*pair) for pair in zip(first[name], second[name], strict=True))
        for name in first
    )


def check(folder: Path, engine: Engine, shape: tuple[int, ...], *, within: float = 1e-4) -> None:
    """Hold the latents of every step to diffusers', relative to the largest of a noisy picture."""
    for steps, guidance in ((7, 3.0), (20, 1.0)):
        wish = PictureWish(4, steps, guidance, 2, steps - 1)
        found = engine.drawn({"one": (wish, 11)})["one"]
        noises = [normal(11, 2, number, shape) for number in range(steps + 1)]
        wanted = dit.drawn(folder, 4, steps, guidance, noises)
        assert len(found) == steps
        for mine, theirs in zip(found, wanted, strict=True):
            scale = max(1.0, float(np.abs(theirs).max()))
            assert np.abs(mine.reshape(shape) - theirs).max() <= within * scale


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(SOLVERS)))
def test_latents_of_every_solver_and_step_are_those_of_diffusers(
    tmp_path: Path, place: int
) -> None:
    engine = opened(dit.make(tmp_path, SOLVERS[place]))
    check(tmp_path, engine, (1, 8, 8))
    engine.built.close()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "ref"])
def test_colours_variances_and_odd_sizes(tmp_path: Path, kernels: str) -> None:
    shape = {"in_channels": 3, "out_channels": 6, "sample_size": 12, "patch_size": 3}
    more = {"attention_head_dim": 10, "num_layers": 3, "activation_fn": "gelu"}
    engine = opened(dit.make(tmp_path, **shape, **more), kernels=kernels)
    check(tmp_path, engine, (3, 12, 12))
    engine.built.close()


@pytest.mark.slow
def test_pictures_are_those_of_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """diffusers' `DiTPipeline`, whose class of nothing is 1000, with a decoder that does
    nothing."""
    diffusers = pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    engine = opened(dit.make(tmp_path, num_embeds_ada_norm=1000, out_channels=1))
    found = engine.drawn({"one": (PictureWish(207, 9, 4.0), 5)})["one"][-1]
    engine.built.close()

    class Nothing(torch.nn.Module):
        config = SimpleNamespace(scaling_factor=1.0)
        device, dtype = torch.device("cpu"), torch.float32

        def decode(self, latents: Any) -> Any:
            return SimpleNamespace(sample=latents)

    from diffusers.pipelines.dit import pipeline_dit

    noise = torch.from_numpy(normal(5, 0, 0, (1, 8, 8)))[None]
    monkeypatch.setattr(pipeline_dit, "randn_tensor", lambda *_, **__: noise)
    transformer, scheduler = dit.opened(tmp_path)
    pipeline = diffusers.DiTPipeline(transformer, Nothing(), scheduler)
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline([207], guidance_scale=4.0, num_inference_steps=9, output_type="np").images[0]
    mine = np.clip(found.reshape(8, 8, 1) / 2 + 0.5, 0, 1)
    assert np.abs(mine - wanted).max() <= 1e-4


def test_bits_are_the_same_alone_and_among_others(tmp_path: Path) -> None:
    dit.make(tmp_path, ("EulerAncestralDiscreteScheduler", {}))
    wanted = None
    for options in ({}, {"step_tokens": 32}, {"threads": 1}, {"quantise": "auto"}):
        engine = opened(tmp_path, **options)
        together = engine.drawn(many())
        for name, one in many().items():
            assert same(engine.drawn({name: one}), {name: together[name]})
        if "quantise" not in options:
            wanted = wanted or together
            assert same(together, wanted)
        engine.built.close()


def test_several_pictures_at_different_times_share_a_step(tmp_path: Path) -> None:
    engine = opened(dit.make(tmp_path))  # 256 patches a step, of which a picture has 16 or 32.
    before = engine.steps
    engine.drawn({str(at): (PictureWish(at, 5 + at, 2.0), at) for at in range(8)})
    assert engine.steps - before == 12
    before, found = engine.steps, dict[str, list[np.ndarray]]()
    engine.add("long", PictureWish(1, 9, 2.0))
    for _ in range(3):
        engine.turn(found)
    engine.add("late", PictureWish(2, 4, 1.0))
    while engine.built.core.has_work:
        engine.turn(found)
    assert engine.steps - before == 9
    assert same(found, engine.drawn({"long": (PictureWish(1, 9, 2.0), 0)}) | engine.drawn(
        {"late": (PictureWish(2, 4, 1.0), 0)}
    ))  # fmt: skip
    engine.built.close()


def test_a_cancelled_picture_computes_no_further_step(tmp_path: Path) -> None:
    engine, found = opened(dit.make(tmp_path)), dict[str, list[np.ndarray]]()
    engine.add("gone", PictureWish(1, 500, 3.0))
    for _ in range(4):
        engine.turn(found)
    before = engine.steps
    engine.built.core.abort("gone")
    while engine.built.core.has_work:
        engine.turn(found)
    assert engine.steps - before <= 1
    assert not found
    engine.built.core.scheduler.check_integrity()
    engine.built.close()


def test_a_preempted_picture_begins_again_with_the_same_bits(tmp_path: Path) -> None:
    engine = opened(dit.make(tmp_path), policy="priority", max_sequences=1)
    wanted = engine.drawn({"low": (PictureWish(3, 6, 2.0), 9)})
    found: dict[str, list[np.ndarray]] = {}
    spec = RequestSpec(SamplingParams(), seed=9, task="picture", picture=PictureWish(3, 6, 2.0))
    engine.built.core.add(Request(id="low", prompt=[3], spec=spec, priority=50))
    for _ in range(3):
        engine.turn(found)
    urgent = RequestSpec(SamplingParams(), seed=1, task="picture", picture=PictureWish(4, 2, 2.0))
    engine.built.core.add(Request(id="high", prompt=[4], spec=urgent, priority=-50))
    ended = []
    while engine.built.core.has_work:
        engine.turn(found)
        ended += [name for name in found if name not in ended]
    assert ended == ["high", "low"]
    assert engine.built.core.scheduler.stats().preemptions == 1
    assert same({"low": found["low"]}, wanted)
    engine.built.close()


def test_numbers_that_are_none_end_their_picture_alone(tmp_path: Path) -> None:
    engine = opened(dit.make(tmp_path, ("FlowMatchEulerDiscreteScheduler", {})))
    engine.add("huge", PictureWish(1, 30, 99.0))
    core = engine.built.core
    core.turn()
    drawing = core.executor.worker._steps.features.listed[0]
    next(iter(drawing._rows.values())).path.picture[:] = np.inf
    engine.add("sane", PictureWish(2, 3, 1.0))
    ends = {}
    while core.has_work:
        ends |= {one.request_id: one for one in core.turn() if one.finish is not None}
    assert ends["huge"].finish == "error"
    assert "not finite" in (ends["huge"].error or "")
    assert ends["sane"].finish == "stop"
    engine.built.close()


def test_a_picture_is_priced_before_it_starts(tmp_path: Path) -> None:
    files = open_model(str(dit.make(tmp_path, num_layers=4, attention_head_dim=64)))
    types = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32"}
    exact, coded = (step_predictor(files, **types, coded=coded) for coded in (False, True))
    seconds = drawing_seconds(exact)
    assert 0 < seconds["step_seconds_1"] < seconds["step_seconds_2"] < 2 * seconds["step_seconds_1"]
    assert drawing_seconds(coded)["step_seconds_2"] < seconds["step_seconds_2"]
    engine: Any = SimpleNamespace(memory=seconds, files=files)
    denoiser = denoiser_of(files, "one")
    order = read_drawing(engine, denoiser, "3", n=3, steps=10, guidance=2.0)
    assert predicted(engine, order) == pytest.approx(30 * seconds["step_seconds_2"])
    assert predicted(SimpleNamespace(memory={}), order) is None  # type: ignore[arg-type]
    assert exact is not None
    plan = StepPlan(0, [0, 1], [64, 900], [32, 16], [False, True])
    assert exact(plan).seconds == exact.drawing(3).seconds, "whatever was done before"


def test_where_it_is_not_served(tmp_path: Path) -> None:
    dit.make(tmp_path)
    with pytest.raises(OptionError, match="layout must be 1"):
        opened(tmp_path, layout="tp2")
    with pytest.raises(OptionError, match="step_tokens is 31"):
        opened(tmp_path, step_tokens=31)


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("model_index.json", {"_class_name": "FluxPipeline"}, "FluxPipeline.*supported: DiT"),
        ("model_index.json", {"vae": ["diffusers", "VQModel"]}, "vae is 'VQModel'"),
        ("model_index.json", {"transformer": None}, "transformer is None"),
        ("model_index.json", {"id2label": {"10": "ten"}}, "id2label has '10'"),
        ("model_index.json", {"id2label": {"-1": "x"}}, "id2label has '-1'"),
        ("model_index.json", {"id2label": [1]}, "id2label must be an object"),
        ("transformer/config.json", {"_class_name": "UNet2DModel"}, "^config.json: _class_name"),
        ("transformer/config.json", {"sample_size": 9}, "no multiple of patch_size"),
        ("transformer/config.json", {"sample_size": 10**9}, "sample_size is 1000000000"),
        ("transformer/config.json", {"num_layers": 3}, "transformer_blocks.2"),
        ("transformer/config.json", {"num_layers": 1}, "does not know: transformer_blocks.1"),
        ("transformer/config.json", {"num_layers": "2"}, "num_layers"),
        ("transformer/config.json", {"in_channels": 4}, "in_channels is 4"),
        ("transformer/config.json", {"out_channels": 5}, "out_channels is 5"),
        ("transformer/config.json", {"attention_head_dim": 25}, "the width is 50"),
        ("transformer/config.json", {"num_attention_heads": 10**6}, "num_attention_heads"),
        ("transformer/config.json", {"norm_type": "ada_norm_single"}, "norm_type"),
        ("transformer/config.json", {"activation_fn": "geglu"}, "activation_fn"),
        ("scheduler/scheduler_config.json", {"_class_name": "PNDMScheduler"}, "skip_prk_steps"),
        ("scheduler/scheduler_config.json", {"_class_name": "LMSDiscreteScheduler"}, "LMSDis"),
        ("scheduler/scheduler_config.json", {"thresholding": True}, "thresholding"),
        ("scheduler/scheduler_config.json", {"beta_end": 2}, "beta_end"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 0}, "num_train_timesteps"),
        (
            "scheduler/scheduler_config.json",
            {"num_train_timesteps": 1, "steps_offset": 1},
            "steps_offset is 1",
        ),
        ("scheduler/scheduler_config.json", {"beta_start": 1e-9}, "leave from 1 to"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**5}, "to 0 of a picture"),
    ],
)
def test_a_folder_that_lies_is_refused(
    tmp_path: Path, file: str, values: dict[str, Any], match: str
) -> None:
    dit.make(tmp_path)
    changed(tmp_path / file, **values)
    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        opened(tmp_path).built.close()


@pytest.mark.parametrize("file", ["model_index.json", "transformer/config.json"])
@pytest.mark.parametrize("text", ["", "[]", "{", "\ufeff{}", "[" * 100_000])
def test_files_that_are_no_objects(tmp_path: Path, file: str, text: str) -> None:
    dit.make(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises((ModelFileError, UnsupportedModel)):
        open_model(str(tmp_path))
