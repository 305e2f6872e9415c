"""Whole pipelines through the one loop: text encoder, steps, decoder; diffusers' own pictures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_denoiser import Engine, opened, same

from headrace.base.denoising import PictureWish
from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.slices import blocks
from headrace.base.spec import RequestSpec
from headrace.engine.clients.drawing import denoiser_of, predicted, read_drawing
from headrace.engine.loop.encoder import decoding_bytes
from headrace.engine.loop.prediction import drawing_seconds, step_predictor
from headrace.loader.open import open_model
from headrace.models.t5 import describe_texts
from headrace.models.vae import describe_decoder
from headrace.text import load_tokenizer
from headrace.worker.solvers import Trajectory, normal
from tiny import dit

DPM: dit.Scheduler = ("DPMSolverMultistepScheduler", {})
TEXT, AWAY = "a small boat on the river", "fog"


@pytest.fixture
def latents(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The latents after each step of all pictures, in their order."""
    found: list[np.ndarray] = []
    advance = Trajectory.advance

    def noted(self: Trajectory, output: Any) -> None:
        advance(self, output)
        found.append(self.picture.copy())

    monkeypatch.setattr(Trajectory, "advance", noted)
    return found


def ids(folder: Path, text: str) -> tuple[int, ...]:
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    return tuple(tokenizer.encode_with_specials(text))


def wish(
    folder: Path, steps: int, guidance: float, choice: int = 0, partial: int = 0
) -> PictureWish:
    texts = tuple(ids(folder, one) for one in (TEXT, AWAY)[: 1 + (guidance > 1)])
    return PictureWish(0, steps, guidance, choice, partial, texts)


def theirs(
    folder: Path, steps: int, guidance: float, noise: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The picture [rows, columns, 3] from 0 to 1 and the latents after each step, by diffusers."""
    import diffusers
    import torch
    import transformers

    tokens = folder / "tokenizer" / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokens), pad_token="<pad>")
    transformer = diffusers.PixArtTransformer2DModel.from_pretrained(folder / "transformer")
    pipeline = diffusers.PixArtSigmaPipeline(
        tokenizer,
        transformers.T5EncoderModel.from_pretrained(folder / "text_encoder"),
        diffusers.AutoencoderKL.from_pretrained(folder / "vae"),
        transformer,
        dit.scheduler_of(folder),
    )
    pipeline.set_progress_bar_config(disable=True)
    found: list[np.ndarray] = []
    side = 2 * transformer.config.sample_size
    made = pipeline(
        TEXT,
        AWAY,
        steps,
        guidance_scale=guidance,
        height=side,
        width=side,
        latents=torch.from_numpy(noise)[None],
        output_type="np",
        callback=lambda _, __, latents: found.append(latents[0].numpy().copy()),
        clean_caption=False,
        use_resolution_binning=False,
    )
    return made.images[0], found


def shade(values: np.ndarray, side: int) -> np.ndarray:
    return np.clip(values.reshape(3, side, side).transpose(1, 2, 0) / 2 + 0.5, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("quantise", ["none", "int8"])
def test_a_text_becomes_the_picture_of_diffusers(
    tmp_path: Path, latents: list[np.ndarray], quantise: str
) -> None:
    folder = dit.make_texts(tmp_path, DPM)
    engine = opened(folder, quantise=quantise)
    latents.clear()
    for steps, guidance in ((6, 4.0), (3, 1.0)):
        mine = engine.drawn({"one": (wish(folder, steps, guidance), 5)})["one"][-1]
        picture, wanted = theirs(folder, steps, guidance, normal(5, 0, 0, (4, 8, 8)))
        within = 1e-4 if quantise == "none" else 0.1
        assert len(latents) == len(wanted) == steps
        for found, one in zip(latents, wanted, strict=True):
            assert np.abs(found - one).max() <= within * max(1.0, np.abs(one).max())
        assert np.abs(shade(mine, 16) - picture).max() <= within
        assert np.std(picture) > 0.02, "it shows something"
        latents.clear()
    engine.built.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t5", "config"),
    [
        ({"feed_forward_proj": "relu", "d_model": 48}, {"caption_channels": 48}),
        ({}, {"sample_size": 16, "patch_size": 4, "interpolation_scale": 2}),
        ({}, {"norm_eps": 0.5}),
    ],
)
def test_other_shapes(
    tmp_path: Path, latents: list[np.ndarray], t5: dict[str, Any], config: dict[str, Any]
) -> None:
    folder = dit.make_texts(tmp_path, dit.DDIM, t5=t5, **config)
    dit.add_decoder(folder, mid_block_add_attention=False, shift_factor=0.1, scaling_factor=0.5)
    engine = opened(folder)
    latents.clear()
    mine = engine.drawn({"one": (wish(folder, 3, 2.0), 1)})["one"][-1]
    side = config.get("sample_size", 8)
    engine.built.close()
    wanted = theirs(folder, 3, 2.0, normal(1, 0, 0, (4, side, side)))[1]
    for found, one in zip(latents, wanted, strict=True):
        assert np.abs(found - one).max() <= 1e-4 * max(1.0, np.abs(one).max())
    import diffusers
    import torch

    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    with torch.no_grad():
        given = torch.from_numpy(wanted[-1])[None] / 0.5 + 0.1
        picture = vae.decode(given).sample[0].numpy()
    assert np.abs(mine.reshape(picture.shape) - picture).max() <= 1e-4 * np.abs(picture).max()


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "ref"])
def test_pictures_of_classes_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    diffusers, torch = pytest.importorskip("diffusers"), pytest.importorskip("torch")
    from diffusers.pipelines.dit import pipeline_dit

    folder = dit.make(tmp_path, num_embeds_ada_norm=1000, in_channels=4, out_channels=8)
    dit.add_decoder(folder, block_out_channels=[8, 12, 16], norm_num_groups=2,
                    down_block_types=["DownEncoderBlock2D"] * 3,
                    up_block_types=["UpDecoderBlock2D"] * 3)  # fmt: skip
    engine = opened(folder, kernels=kernels)
    found = engine.drawn({"one": (PictureWish(207, 4, 4.0, partial=1), 5)})["one"]
    engine.built.close()
    assert len(found) == 2, "one of them is partial"
    noise = torch.from_numpy(normal(5, 0, 0, (4, 8, 8)))[None]
    monkeypatch.setattr(pipeline_dit, "randn_tensor", lambda *_, **__: noise)
    transformer, scheduler = dit.opened(folder)
    vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae")
    pipeline = diffusers.DiTPipeline(transformer, vae, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline([207], guidance_scale=4.0, num_inference_steps=4, output_type="np").images[0]
    assert np.abs(shade(found[-1], 32) - wanted).max() <= 1e-4


def many(folder: Path) -> dict[str, tuple[PictureWish, int]]:
    """Pictures of two texts at different numbers of steps, with guidance and without."""
    return {
        str(at): (wish(folder, 1 + at % 3, 1.0 + 2 * (at % 2), at, at % 2), at) for at in range(6)
    }


def test_bits_are_the_same_alone_and_among_others(tmp_path: Path) -> None:
    folder = dit.make_texts(tmp_path)
    wanted = None
    for options in ({}, {"step_tokens": 32}, {"threads": 1}, {"quantise": "auto"}):
        engine = opened(folder, **options)
        together = engine.drawn(many(folder))
        for name, one in many(folder).items():
            assert same(engine.drawn({name: one}), {name: together[name]})
        if "quantise" not in options:
            wanted = wanted or together
            assert same(together, wanted)
        engine.built.close()


def test_a_cancelled_picture_computes_no_further_step(tmp_path: Path) -> None:
    """In each of its phases: 2 texts of 5 slices, 2 steps, 8 slices."""
    folder = dit.make_texts(tmp_path)
    engine = opened(folder)
    for turns in (1, 4, 7, 11, 12, 13, 16):
        found: dict[str, list[np.ndarray]] = {}
        engine.add("gone", wish(folder, 2, 3.0))
        for _ in range(turns):
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
    folder = dit.make_texts(tmp_path)
    engine = opened(folder, policy="priority", max_sequences=1)
    wanted = engine.drawn({"low": (wish(folder, 2, 2.0), 9)})
    for turns in (3, 11, 15):  # In a text, a step and a slice.
        found: dict[str, list[np.ndarray]] = {}
        for name, priority in (("low", 50), ("high", -50)):
            spec = RequestSpec(
                SamplingParams(), seed=9, task="picture", picture=wish(folder, 2, 2.0)
            )
            engine.built.core.add(Request(id=name, prompt=[0], spec=spec, priority=priority))
            for _ in range(turns if name == "low" else 0):
                engine.turn(found)
        while engine.built.core.has_work:
            engine.turn(found)
        assert list(found) == ["high", "low"]
        assert same({"low": found["low"]}, wanted)
        assert same({"low": found["high"]}, wanted)
    assert engine.built.core.scheduler.stats().preemptions == 3
    engine.built.close()


def test_texts_are_encoded_once_for_the_pictures_of_a_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(dit.make_texts(tmp_path))
    worker = engine.built.core.executor.worker
    drawing = worker._steps.features.listed[0]
    begun: list[int] = []
    begin = drawing._parts["texts"].begin
    monkeypatch.setattr(
        drawing._parts["texts"], "begin", lambda *given: begun.append(1) or begin(*given)
    )
    engine.drawn({str(at): (wish(tmp_path, 2, 2.0, at), 1) for at in range(3)})
    assert len(begun) == 2
    engine.built.close()


def test_the_memory_plan_has_room_for_the_decoder(tmp_path: Path) -> None:
    engine = opened(dit.make_texts(tmp_path))
    arch = engine.files.arch
    assert arch.denoiser is not None
    assert arch.denoiser.decoder is not None
    assert len(blocks(describe_decoder(arch))) - 1 == arch.denoiser.decoder.slices
    assert arch.denoiser.reads is not None
    assert len(blocks(describe_texts(arch))) - 1 == arch.denoiser.reads.slices == 5
    worker = engine.built.core.executor.worker
    part = worker._steps.features.listed[0]._parts["decoder"]
    arena = part._run._lowering._arena
    used = sum(buffer.nbytes for _, buffer in arena.all if isinstance(buffer, np.ndarray))
    assert 0.5 * used <= decoding_bytes(arch, 0) <= 1.5 * used
    assert decoding_bytes(arch, 4) - decoding_bytes(arch, 0) == 4 * 4 * (256 * 16 + 2 * 300 * 32)
    laid = 4 * 64 * (2 * 16 + 16)  # Of 64 places with 16 numbers.
    assert decoding_bytes(arch, 0, 3) - decoding_bytes(arch, 0) == 3 * laid
    engine.built.close()


def test_texts_are_priced_and_checked(tmp_path: Path) -> None:
    folder = dit.make_texts(tmp_path)
    files = open_model(str(folder))
    types = {"device": "cpu", "dtype": "float32", "kv_dtype": "float32"}
    seconds = drawing_seconds(step_predictor(files, **types))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    engine: Any = SimpleNamespace(files=files, tokenizer=tokenizer, memory=seconds)
    denoiser = denoiser_of(files, "one")
    order = read_drawing(engine, denoiser, f"  {TEXT.upper()} ", n=2, steps=5, guidance=2.0)
    assert order.wishes[0].texts == (ids(folder, TEXT), ids(folder, ""))
    assert order.inputs == len(TEXT) + 3  # A space before it, and an end of each text.
    each = 5 * seconds["step_seconds_2"] + 2 * seconds["texts_seconds"] + seconds["decoder_seconds"]
    assert predicted(engine, order) == pytest.approx(2 * each)
    assert len(read_drawing(engine, denoiser, "", guidance=1.0).wishes[0].texts) == 1
    with pytest.raises(InvalidRequest, match="prompt has 301 tokens; at most 300"):
        read_drawing(engine, denoiser, "a" * 299)
    with pytest.raises(InvalidRequest, match="negative_prompt has 302 tokens"):
        read_drawing(engine, denoiser, "a", negative="a" * 300)
    with pytest.raises(InvalidRequest, match=r"512x512.*16x16"):
        read_drawing(engine, denoiser, "a", size="512x512")
    for found, match in (((), "prompt has no tokens"), ((3, 300), "token 300; .* from 0 to 299")):
        engine.tokenizer = SimpleNamespace(encode_with_specials=lambda _, found=found: list(found))
        with pytest.raises(InvalidRequest, match=match):
            read_drawing(engine, denoiser, "a")
    classes: Any = SimpleNamespace(files=open_model(str(dit.make(tmp_path / "classes"))))
    with pytest.raises(InvalidRequest, match="reads texts"):
        read_drawing(classes, denoiser_of(classes.files, "two"), "1", negative="2")


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("model_index.json", {"vae": ["diffusers", "AutoencoderTiny"]}, "vae is 'AutoencoderTiny'"),
        ("model_index.json", {"text_encoder": None}, "text_encoder is None"),
        ("vae/config.json", {"latent_channels": 3}, "latent_channels is 3"),
        ("vae/config.json", {"act_fn": "relu"}, "act_fn"),
        ("vae/config.json", {"block_out_channels": [8, 15]}, r"block_out_channels is \[8, 15"),
        ("vae/config.json", {"block_out_channels": [8, True]}, r"block_out_channels is \[8, T"),
        ("vae/config.json", {"block_out_channels": 8}, "block_out_channels is 8"),
        ("vae/config.json", {"block_out_channels": [8] * 7}, "supported: 1 to 6"),
        ("vae/config.json", {"up_block_types": ["AttnUpDecoderBlock2D"] * 2}, "up_block_types"),
        ("vae/config.json", {"norm_num_groups": 0}, "norm_num_groups"),
        ("vae/config.json", {"out_channels": 2}, "out_channels is 2"),
        ("vae/config.json", {"scaling_factor": 0}, "scaling_factor"),
        ("vae/config.json", {"layers_per_block": 2}, "resnets.2"),
        ("text_encoder/config.json", {"model_type": "umt5"}, "model_type is 'umt5'"),
        ("text_encoder/config.json", {"d_model": 48}, "caption_channels is 32"),
        ("text_encoder/config.json", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj"),
        ("text_encoder/config.json", {"num_layers": 3}, "block.2"),
        ("text_encoder/config.json", {"relative_attention_num_buckets": 16}, "attention_bias"),
        ("text_encoder/config.json", {"relative_attention_num_buckets": 80}, "max_distance is 20"),
        ("transformer/config.json", {"use_additional_conditions": True}, "additional_conditions"),
        ("transformer/config.json", {"sample_size": 512}, "65536 patches"),
        ("transformer/config.json", {"interpolation_scale": 0}, "interpolation_scale"),
    ],
)
def test_a_folder_that_lies_is_refused(
    tmp_path: Path, file: str, values: dict[str, Any], match: str
) -> None:
    folder = dit.make_texts(tmp_path)
    dit._edit(folder / file, **values)
    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        opened(folder).built.close()


def test_a_kernel_without_outputs_is_refused(tmp_path: Path) -> None:
    path = dit.make_texts(tmp_path) / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["decoder.conv_in.weight"] = np.zeros((0, 4, 3, 3), np.float32)
    save_file(weights, path)
    with pytest.raises(ModelFileError, match=r"conv_in\.weight has shape \(0, 36\)"):
        opened(tmp_path).built.close()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = dit.make_texts(tmp_path)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"lacks tokenizer/tokenizer\.json"):
        open_model(str(folder))


def test_numbers_that_are_none_end_their_picture_alone(tmp_path: Path) -> None:
    folder = dit.make_texts(tmp_path)
    engine: Engine = opened(folder)
    engine.add("huge", wish(folder, 1, 1.0))
    core = engine.built.core
    for _ in range(2):
        core.turn()
    drawing = core.executor.worker._steps.features.listed[0]
    next(iter(drawing._rows.values())).path.picture[:] = np.nan
    engine.add("sane", wish(folder, 1, 1.0))
    ends = {}
    while core.has_work:
        ends |= {one.request_id: one for one in core.turn() if one.finish is not None}
    assert ends["huge"].finish == "error"
    assert ends["sane"].finish == "stop"
    engine.built.close()
