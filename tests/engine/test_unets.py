"""Stable Diffusion through the one loop: CLIP's encoder, a UNet's steps, a decoder; diffusers' own
latents and pictures."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_denoiser import opened, same
from test_pipelines import latents, shade

from headrace.base.denoising import NoiseSolver, PictureWish
from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from headrace.base.graph import Node
from headrace.base.layout import Layout
from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.engine.clients.drawing import denoiser_of, read_drawing
from headrace.engine.loop.prediction import drawing_seconds, step_predictor
from headrace.loader.open import open_model
from headrace.models.pipeline import parts_beside
from headrace.models.reader import from_hf
from headrace.models.registry import describe
from headrace.models.t5 import GRID
from headrace.roofline.composition import compose
from headrace.roofline.counts import Case
from headrace.roofline.memory_parts import values_bytes
from headrace.roofline.operators import count_step
from headrace.roofline.weights import WeightBytes
from headrace.text import load_tokenizer
from headrace.worker.solvers import normal
from tiny import dit, stable

__all__ = ["latents"]
WIDE = {"intermediate_size": 3072, "num_hidden_layers": 12}
TEXTS = "The boat at 3!", "fog, the fog"
V: dit.Scheduler = (
    "DDIMScheduler",
    {"prediction_type": "v_prediction", "clip_sample": False, "beta_schedule": "scaled_linear"},
)
EULER: dit.Scheduler = (
    "EulerDiscreteScheduler",
    {"timestep_spacing": "leading", "steps_offset": 1, "beta_schedule": "scaled_linear"},
)
PNDM: dit.Scheduler = (
    "PNDMScheduler",
    {"skip_prk_steps": True, "set_alpha_to_one": False, "beta_schedule": "scaled_linear"},
)
PNDM_V: dit.Scheduler = (
    "PNDMScheduler",
    {**PNDM[1], "prediction_type": "v_prediction", "set_alpha_to_one": True},
)
DPM: dit.Scheduler = ("DPMSolverMultistepScheduler", {"beta_schedule": "scaled_linear"})


def ids(folder: Path, text: str) -> tuple[int, ...]:
    files = open_model(str(folder))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    found = tuple(tokenizer.encode_with_specials(text))
    assert files.arch.denoiser is not None
    reads = files.arch.denoiser.reads
    assert reads is not None
    assert reads.pad is not None
    return found + (reads.pad,) * (reads.most - len(found))


def wish(
    folder: Path, steps: int, guidance: float, choice: int = 0, partial: int = 0
) -> PictureWish:
    texts = tuple(ids(folder, one) for one in TEXTS[: 1 + (guidance > 1)])
    return PictureWish(0, steps, guidance, choice, partial, texts)


def check(folder: Path, found: list[np.ndarray], within: float = 1e-4, **options: Any) -> None:
    """Hold latents and pictures to diffusers', with guidance and without."""
    engine = opened(folder, **options)
    shape = engine.files.arch.denoiser
    assert shape is not None
    noise = normal(5, 0, 0, (shape.channels, shape.size, shape.size))
    for steps, guidance in ((6, 4.0), (2, 1.0), (1, 1.0)):
        found.clear()
        runs = shape.solver.evaluations(steps)
        mine = engine.drawn({"one": (wish(folder, runs, guidance), 5)})["one"][-1]
        picture, wanted = stable.drawn(folder, TEXTS, steps, guidance, noise)
        assert len(found) == len(wanted) == runs
        for one, other in zip(found, wanted, strict=True):
            assert np.abs(one - other).max() <= within * max(1.0, np.abs(other).max())
        assert np.abs(shade(mine, len(picture)) - picture).max() <= within
        assert np.std(picture) > 0.02, "it shows something"
    engine.built.close()


@pytest.mark.slow
@pytest.mark.parametrize("solver", [dit.DDIM, V, EULER, DPM, PNDM, PNDM_V])
def test_a_text_becomes_the_picture_of_diffusers(
    tmp_path: Path, latents: list[np.ndarray], solver: dit.Scheduler
) -> None:
    check(stable.make(tmp_path, solver), latents)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "ref"])
@pytest.mark.parametrize(
    ("clip", "config"),
    [
        # Three sizes, the odd 7, 4 and 2; attention on the largest alone; a layer list.
        (
            {"hidden_act": "gelu", "hidden_size": 40, "num_attention_heads": 4},
            {
                "sample_size": 7,
                "block_out_channels": [8, 12, 20],
                "layers_per_block": [1, 2, 1],
                "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D", "DownBlock2D"],
                "up_block_types": ["UpBlock2D", "UpBlock2D", "CrossAttnUpBlock2D"],
                "attention_head_dim": [1, 3, 5],
                "use_linear_projection": True,
            },
        ),
        # Attention on the smaller size alone, two layers of it, not the same way up as down.
        (
            {},
            {
                "layers_per_block": 2,
                "transformer_layers_per_block": [1, 2],
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
                "norm_eps": 0.01,
                "norm_num_groups": 8,
            },
        ),
        # One size, without a block in the middle.
        (
            {"hidden_act": "gelu"},
            {
                "sample_size": 5,
                "block_out_channels": [16],
                "down_block_types": ["CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D"],
                "mid_block_type": None,
            },
        ),
    ],
)
def test_other_shapes(
    tmp_path: Path,
    latents: list[np.ndarray],
    clip: dict[str, Any],
    config: dict[str, Any],
    kernels: str,
) -> None:
    stable.make(tmp_path, EULER, clip=clip, **config)
    # diffusers draws sizes that are multiples of 8 alone: four sizes of the decoder.
    blocks = {f"{way.lower()}_block_types": [f"{way}{kind}Block2D"] * 4
              for way, kind in (("Down", "Encoder"), ("Up", "Decoder"))}  # fmt: skip
    dit.add_decoder(tmp_path, block_out_channels=[8, 8, 8, 16], **blocks)
    check(tmp_path, latents, kernels=kernels)


@pytest.mark.slow
def test_eight_bits(tmp_path: Path, latents: list[np.ndarray]) -> None:
    """Widths of whole units, so that products have int8 codes; weights are stored in fp16."""
    config = {"block_out_channels": [32, 64], "cross_attention_dim": 32}
    clip = {"hidden_size": 32, "intermediate_size": 64}
    stable.make(tmp_path, DPM, clip=clip, **config)
    check(tmp_path, latents, 0.15, quantise="int8")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that no test changes."""
    return stable.make(tmp_path_factory.mktemp("plain"), EULER)


def many(folder: Path) -> dict[str, tuple[PictureWish, int]]:
    """Pictures of two texts at different numbers of steps, with guidance and without."""
    return {
        str(at): (wish(folder, 1 + at % 3, 1.0 + 2 * (at % 2), at, at % 2), at) for at in range(5)
    }


def test_bits_are_the_same_alone_and_among_others(plain: Path) -> None:
    wanted, wishes = None, many(plain)
    for options in ({}, {"step_tokens": 128}, {"threads": 1}, {"quantise": "auto"}):
        engine = opened(plain, **options)
        together = engine.drawn(wishes)
        for name in ("0", "3"):
            assert same(engine.drawn({name: wishes[name]}), {name: together[name]})
        if "quantise" not in options:
            wanted = wanted or together
            assert same(together, wanted)
        engine.built.close()


def test_preempted_and_cancelled_pictures(plain: Path) -> None:
    engine = opened(plain, policy="priority", max_sequences=1)
    wanted = engine.drawn({"low": (wish(plain, 2, 2.0), 9)})
    found: dict[str, list[np.ndarray]] = {}
    for name, priority, turns in (("low", 50, 14), ("high", -50, 0)):
        spec = RequestSpec(SamplingParams(), seed=9, task="picture", picture=wish(plain, 2, 2.0))
        engine.built.core.add(Request(id=name, prompt=[0], spec=spec, priority=priority))
        for _ in range(turns):
            engine.turn(found)
    while engine.built.core.has_work:
        engine.turn(found)
    assert list(found) == ["high", "low"]
    assert same({"low": found["low"]}, wanted)
    assert same({"low": found["high"]}, wanted)
    engine.add("gone", wish(plain, 50, 2.0))
    for _ in range(16):
        engine.turn(found)
    before = engine.steps
    engine.built.core.abort("gone")
    while engine.built.core.has_work:
        engine.turn(found)
    assert engine.steps - before <= 1
    engine.built.core.scheduler.check_integrity()
    engine.built.close()


def test_texts_are_padded_and_checked(plain: Path) -> None:
    files = open_model(str(plain))
    tokenizer = load_tokenizer(files.tokenizer, files.arch.vocab_size)
    engine: Any = SimpleNamespace(files=files, tokenizer=tokenizer)
    denoiser = denoiser_of(files, "one")
    order = read_drawing(engine, denoiser, f"  {TEXTS[0]}", steps=5, guidance=2.0, negative="é")
    theirs = stable.tokenizer_of(plain, denoiser.texts)
    for mine, text in zip(order.wishes[0].texts, (TEXTS[0], "é"), strict=True):
        padded = {"padding": "max_length", "max_length": denoiser.texts, "truncation": True}
        assert list(mine) == theirs(text, **padded).input_ids
    assert len(read_drawing(engine, denoiser, "", guidance=1.0).wishes[0].texts) == 1
    pndm = denoiser._replace(solver=NoiseSolver("pndm"))
    runs = [read_drawing(engine, pndm, "a", steps=steps).wishes[0].steps for steps in (1, 2, 20)]
    assert runs == [1, 3, 21], "its second step is done twice"
    with pytest.raises(InvalidRequest, match="prompt has 33 tokens; at most 32"):
        read_drawing(engine, denoiser, "a " * 31)
    with pytest.raises(InvalidRequest, match=r"512x512.*16x16"):
        read_drawing(engine, denoiser, "a", size="512x512")


def test_a_step_is_priced_from_its_graph(plain: Path) -> None:
    arch = open_model(str(plain)).arch
    case = Case(arch, WeightBytes("float32"), "float32", "float32", Layout(), 0.0)
    counts = count_step(case, compose(arch, [0], [64]))
    products = [node for node in describe(arch).nodes if node.kind in ("conv", "linear")]
    rows = {"N": 64, "R": 1, "T": 32}

    def of(node: Node) -> int:
        own = node.out[0].rows
        return rows[own.name] if own.name != "N" else own.of(64)

    wanted = sum(2 * of(one) * one.weights[0].numbers for one in products)
    assert sum(one.flops * one.calls for one in counts if one.kind == "product") == wanted
    attends = [node for node in describe(arch).nodes if node.kind == "attend"]
    pairs = sum(
        of(one) * (32 if len(one.reads) > 1 else of(one)) * (4 * one.out[0].width + 5 * 2)
        for one in attends
    )
    assert sum(one.flops * one.calls for one in counts if one.kind == "attention") == pairs
    views = [node for node in describe(arch).nodes if node.kind == "part"]
    assert sum(one.calls for one in counts) == len(describe(arch).nodes) - len(views)
    seconds = drawing_seconds(
        step_predictor(open_model(str(plain)), device="cpu", dtype="float32", kv_dtype="float32")
    )
    assert seconds["step_seconds_2"] == pytest.approx(2 * seconds["step_seconds_1"])


def test_the_memory_plan_has_room_for_one_entry(plain: Path) -> None:
    """Whatever is in the step: its values lie in the memory of one entry."""
    for quantise in ("none", "int8"):
        engine = opened(plain, quantise=quantise)
        program = engine.built.core.executor.worker._steps.program
        arena = program._pieces._lowering._arena
        rooms = [room.base if isinstance(room, np.ndarray) else room.data for _, room in arena.all]
        used = sum(room.nbytes for room in rooms)
        assert 0.9 * used <= engine.built.memory.activation_bytes <= 1.5 * used
        assert used < 3 * values_bytes(describe(engine.files.arch), 64, 32)
        engine.built.close()


@pytest.mark.parametrize(
    ("file", "values", "match"),
    [
        ("model_index.json", {"unet": ["diffusers", "UNet2DModel"]}, "unet is 'UNet2DModel'"),
        ("model_index.json", {"text_encoder": [None, None]}, "text_encoder is None"),
        ("model_index.json", {"vae": ["diffusers", "VQModel"]}, "vae is 'VQModel'"),
        ("unet/config.json", {"sample_size": 200}, "sample_size is 200, 40000 places"),
        ("unet/config.json", {"sample_size": [8, 9]}, "sample_size"),
        ("unet/config.json", {"in_channels": 9, "out_channels": 4}, "out_channels is 4"),
        ("unet/config.json", {"block_out_channels": [16, 30]}, r"block_out_channels is \[16, 30"),
        ("unet/config.json", {"block_out_channels": [16] * 9}, "1 to 8 multiples of 4"),
        ("unet/config.json", {"block_out_channels": []}, "1 to 8 multiples of 4"),
        ("unet/config.json", {"block_out_channels": "16"}, "block_out_channels is '16'"),
        ("unet/config.json", {"block_out_channels": [16, 32, 32]}, "down_block_types"),
        ("unet/config.json", {"norm_num_groups": 0}, "norm_num_groups is 0"),
        ("unet/config.json", {"norm_num_groups": 5}, "multiples of 5"),
        ("unet/config.json", {"down_block_types": ["AttnDownBlock2D"] * 2}, "down_block_types"),
        ("unet/config.json", {"up_block_types": ["UpBlock2D"]}, "up_block_types"),
        ("unet/config.json", {"mid_block_type": "UNetMidBlock2D"}, "mid_block_type"),
        ("unet/config.json", {"attention_head_dim": 3}, r"attention_head_dim is \[3, 3\]"),
        ("unet/config.json", {"attention_head_dim": [2]}, "attention_head_dim"),
        ("unet/config.json", {"attention_head_dim": 0}, "attention_head_dim"),
        ("unet/config.json", {"layers_per_block": 10**9}, "layers_per_block"),
        ("unet/config.json", {"layers_per_block": 2}, r"resnets\.1"),
        ("unet/config.json", {"transformer_layers_per_block": 2}, r"transformer_blocks\.1"),
        ("unet/config.json", {"cross_attention_dim": 32}, "cross_attention_dim is 32"),
        ("unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type"),
        ("unet/config.json", {"addition_embed_type": "text_time"}, "addition_embed_type"),
        ("unet/config.json", {"time_cond_proj_dim": 256}, "time_cond_proj_dim"),
        ("unet/config.json", {"resnet_time_scale_shift": "scale_shift"}, "scale_shift"),
        ("unet/config.json", {"norm_eps": 0}, "norm_eps"),
        ("scheduler/scheduler_config.json", {"_class_name": "PNDMScheduler"}, "skip_prk_steps"),
        ("scheduler/scheduler_config.json", {"_class_name": "LMSDiscreteScheduler"}, "LMSDis"),
        ("text_encoder/config.json", {"model_type": "t5"}, "model_type is 't5'"),
        ("text_encoder/config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ("text_encoder/config.json", {"num_attention_heads": 5}, "num_attention_heads is 5"),
        ("text_encoder/config.json", {"vocab_size": 80}, "vocab_size is 80"),
        ("text_encoder/config.json", {"vocab_size": 91}, "token_embedding"),
        ("text_encoder/config.json", {"max_position_embeddings": 10**6}, "max_position"),
        ("text_encoder/config.json", {"num_hidden_layers": 3}, r"layers\.2"),
        ("tokenizer/tokenizer_config.json", {"pad_token": "<pad>"}, "no token '<pad>'"),
        ("tokenizer/tokenizer_config.json", {"pad_token": 3}, "no token 3"),
        ("tokenizer/tokenizer_config.json", {"model_max_length": 20}, "model_max_length is 20"),
        ("tokenizer/vocab.json", {"a": "b"}, r"vocab\.json"),
    ],
)
def test_a_folder_that_lies_is_refused(
    tmp_path: Path, plain: Path, file: str, values: dict[str, Any], match: str
) -> None:
    folder = shutil.copytree(plain, tmp_path / "folder")
    path = folder / file
    if not path.exists():
        path.write_text("{}")
    dit._edit(path, **values)
    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        opened(folder).built.close()


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("tokenizer/merges.txt", None, r"lacks tokenizer/tokenizer\.json"),
        ("tokenizer/merges.txt", "a b c", "a line is no pair"),
        ("tokenizer/merges.txt", "q zz", "tokenizer"),
        ("tokenizer/vocab.json", "{}", "no token '<|endoftext|>'"),
        ("tokenizer/vocab.json", "[1]", r"vocab\.json"),
        ("tokenizer/tokenizer.json", "{}", "tokenizer"),
        ("unet/diffusion_pytorch_model.safetensors", None, "no safetensors file"),
        ("unet/config.json", None, "config.json"),
        ("text_encoder/model.safetensors", "{}", "model.safetensors"),
    ],
)
def test_files_that_lack_or_lie(
    tmp_path: Path, plain: Path, file: str, content: str | None, match: str
) -> None:
    folder = shutil.copytree(plain, tmp_path / "folder")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)

    def start() -> None:
        files = open_model(str(folder))
        load_tokenizer(files.tokenizer, files.arch.vocab_size)
        opened(folder).built.close()

    with pytest.raises((ModelFileError, UnsupportedModel), match=match):
        start()


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (16, 4, 1, 1), (16, 4, 3), (16, 4, 3, 3, 1)])
def test_kernels_of_another_shape_are_refused(
    tmp_path: Path, plain: Path, shape: tuple[int, ...]
) -> None:
    folder = shutil.copytree(plain, tmp_path / "folder")
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["conv_in.weight"] = np.zeros(shape, np.float32)
    save_file(weights, path)
    with pytest.raises(ModelFileError, match=r"conv_in\.weight"):
        opened(folder).built.close()


def test_the_first_stable_diffusion_has_its_numbers() -> None:
    """Version 1.5's own configs: 859,520,964 numbers in the UNet, 123,060,480 in CLIP's encoder."""
    levels = ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"]
    vae = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}
    arch = from_hf(
        {
            "model_type": "unet",
            "block_out_channels": [320, 640, 1280, 1280],
            "down_block_types": levels,
            "up_block_types": [one.replace("Down", "Up") for one in reversed(levels)],
            "cross_attention_dim": 768,
            "pad": 49407,
            "text_encoder": {"hidden_size": 768, "num_attention_heads": 12, **WIDE},
            "vae": {**vae, "up_block_types": ["UpDecoderBlock2D"] * 4},
            "scheduler": {"_class_name": PNDM[0], **PNDM[1], "beta_end": 0.012},
        }
    )
    graph, parts = describe(arch), parts_beside(arch)
    assert sum(one.numbers for one in graph.weights()) == 859_520_964
    texts = sum(one.numbers for one in parts["texts"][0].weights() if GRID not in one.names)
    assert texts == 123_060_480
    assert arch.denoiser is not None
    assert arch.denoiser.shape == (3, 512, 512)
    assert values_bytes(graph, 4096, 77) < 600 << 20, "less than a fifth of the weights"
