"""A small diffusion transformer of random weights in a folder of diffusers' `DiTPipeline`, and
diffusers' own steps with the same random numbers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 24, "in_channels": 1,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 10,
}  # fmt: skip
Scheduler = tuple[str, dict[str, Any]]
DDIM: Scheduler = ("DDIMScheduler", {"clip_sample": False})
WORDS = ["zero, nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make(folder: Path, scheduler: Scheduler = DDIM, *, seed: int = 3, **config: Any) -> Path:
    """Write a folder without a decoder; return it."""
    whole = {**CONFIG, **config}
    transformer = folder / "transformer"
    transformer.mkdir(parents=True, exist_ok=True)
    save_file(_weights(whole, seed), transformer / "diffusion_pytorch_model.safetensors")
    _write(transformer / "config.json", {"_class_name": "DiTTransformer2DModel", **whole})
    write_index(folder, scheduler)
    return folder


def write_index(folder: Path, scheduler: Scheduler, words: Sequence[str] = WORDS) -> None:
    """Write the files of a pipeline around its transformer."""
    (folder / "scheduler").mkdir(exist_ok=True)
    named = {"_class_name": scheduler[0], **scheduler[1]}
    _write(folder / "scheduler" / "scheduler_config.json", named)
    _write(
        folder / "model_index.json",
        {
            "_class_name": "DiTPipeline",
            "transformer": ["diffusers", "DiTTransformer2DModel"],
            "scheduler": ["diffusers", scheduler[0]],
            "vae": [None, None],
            "id2label": {str(number): names for number, names in enumerate(words)},
        },
    )


DECODER: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "latent_channels": 4, "norm_num_groups": 4,
    "block_out_channels": [8, 16], "layers_per_block": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
}  # fmt: skip


def add_decoder(folder: Path, *, seed: int = 5, **config: Any) -> Path:
    """Give a pipeline a decoder, by diffusers; return its folder."""
    diffusers, torch = pytest.importorskip("diffusers"), pytest.importorskip("torch")
    torch.manual_seed(seed)
    vae = diffusers.AutoencoderKL(**{**DECODER, **config})
    for name, parameter in vae.named_parameters():  # Norms and biases are ones and zeros else.
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
        assert name
    vae.save_pretrained(folder / "vae")
    _edit(folder / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    return folder


TEXTS: dict[str, Any] = {
    "vocab_size": 300, "d_model": 32, "d_kv": 12, "num_heads": 2, "d_ff": 48, "num_layers": 2,
    "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}  # fmt: skip


def make_texts(
    folder: Path, scheduler: Scheduler = DDIM, *, seed: int = 7, t5: Any = (), **config: Any
) -> Path:
    """Write a folder of PixArt-Σ, by diffusers and transformers; return it."""
    diffusers, torch = pytest.importorskip("diffusers"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    texts = {**TEXTS, **dict(t5)}
    shape = {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 20, "in_channels": 4,
        "out_channels": 8, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 40,
        "caption_channels": texts["d_model"], "use_additional_conditions": False,
    }  # fmt: skip
    model = diffusers.PixArtTransformer2DModel(**{**shape, **config})
    encoder = transformers.T5EncoderModel(transformers.T5Config(**texts))
    for parameter in (*model.parameters(), *encoder.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "transformer")
    encoder.save_pretrained(folder / "text_encoder")
    write_index(folder, scheduler)
    _edit(
        folder / "model_index.json",
        _class_name="PixArtSigmaPipeline",
        transformer=["diffusers", "PixArtTransformer2DModel"],
        text_encoder=["transformers", "T5EncoderModel"],
        tokenizer=["transformers", "T5TokenizerFast"],
        id2label=None,
    )
    (folder / "tokenizer").mkdir(exist_ok=True)
    _write(folder / "tokenizer" / "tokenizer.json", json.loads(_tokenizer().to_str()))
    return add_decoder(folder)


def _tokenizer() -> Any:
    """A tokenizer of letters whose texts end with `</s>`, as T5's do."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    made = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(word, -1.0 * (at > 2)) for at, word in enumerate(words)], 2)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return made


def _edit(path: Path, **values: Any) -> None:
    _write(path, {**json.loads(path.read_text()), **values})


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))


def _weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    width = config["num_attention_heads"] * config["attention_head_dim"]
    channels, patch = config["in_channels"], config["patch_size"]
    outputs = config.get("out_channels") or channels
    found: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        found[name] = (0.1 * draws.standard_normal(shape)).astype(np.float32)

    def linear(name: str, out: int, given: int) -> None:
        add(f"{name}.weight", out, given)
        add(f"{name}.bias", out)

    add("pos_embed.proj.weight", width, channels, patch, patch)
    add("pos_embed.proj.bias", width)
    for layer in range(config["num_layers"]):
        at = f"transformer_blocks.{layer}"
        known = f"{at}.norm1.emb"
        linear(f"{known}.timestep_embedder.linear_1", width, 256)
        linear(f"{known}.timestep_embedder.linear_2", width, width)
        classes = config["num_embeds_ada_norm"] + 1
        add(f"{known}.class_embedder.embedding_table.weight", classes, width)
        linear(f"{at}.norm1.linear", 6 * width, width)
        for part in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{at}.attn1.{part}", width, width)
        linear(f"{at}.ff.net.0.proj", 4 * width, width)
        linear(f"{at}.ff.net.2", width, 4 * width)
    linear("proj_out_1", 2 * width, width)
    linear("proj_out_2", patch * patch * outputs, width)
    return found


def opened(folder: Path) -> tuple[Any, Any]:
    """The folder's transformer and scheduler, by diffusers."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel.from_pretrained(folder / "transformer")
    return model.eval(), scheduler_of(folder)


def scheduler_of(folder: Path) -> Any:
    """The folder's scheduler, by diffusers."""
    diffusers = pytest.importorskip("diffusers")
    config = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    return getattr(diffusers, config["_class_name"]).from_config(config)


def drawn(
    folder: Path, label: int, steps: int, guidance: float, noises: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Latents [channels, size, size] after each step by diffusers, from these normal numbers."""
    import torch

    model, scheduler = opened(folder)
    module = importlib.import_module(type(scheduler).__module__)
    scheduler.set_timesteps(steps)
    first = float(getattr(scheduler, "init_noise_sigma", 1.0))
    latent, found = torch.from_numpy(noises[0])[None] * first, list[np.ndarray]()
    labels = torch.tensor([label, model.config.num_embeds_ada_norm][: 2 if guidance > 1 else 1])
    patch = pytest.MonkeyPatch()
    with torch.no_grad(), patch.context() as patched:
        for at, time in enumerate(scheduler.timesteps):
            scale = getattr(scheduler, "scale_model_input", lambda one, _: one)
            given = scale(latent, time).expand(len(labels), -1, -1, -1)
            output = model(given, timestep=time.expand(len(labels)), class_labels=labels).sample
            output = output[:, : latent.shape[1]]
            if guidance > 1:
                output = output[1:] + guidance * (output[:1] - output[1:])
            noise = torch.from_numpy(noises[at + 1])[None]
            if hasattr(module, "randn_tensor"):
                patched.setattr(module, "randn_tensor", lambda *_, one=noise, **__: one)
            latent = scheduler.step(output, time, latent).prev_sample
            found.append(latent[0].numpy())
    return found
