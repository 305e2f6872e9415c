"""Class-conditional diffusion transformers (DiT): Peebles and Xie 2022, arXiv 2212.09748.

A token is a patch of a noisy picture. The norms and residual sums of all its tokens are modulated
by its time step and class (adaLN-Zero), which are computed once for each entry of a step. Folders
are those of diffusers' `DiTPipeline`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..base.arch import ModelArch, Rope
from ..base.arch_fields import Fields
from ..base.denoising import TIMES, Denoiser, GivenSpec, NoiseSolver
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.graph import SAMPLED, ActivationSpec, EmbedSpec, Graph, Value
from ..layers.description import Description
from ..layers.encoder import bidirectional
from ..layers.feed_forward import two_products
from .family import Config, Family, flag, integer, number, word
from .t5 import read_texts
from .vae import read_decoder

POSITIONS = "pos_embed.grid"
"""Table of the sines and cosines of each patch's place, which no file holds."""
EPS = 1e-6
"""Added to the variance in the norms before attention and before the output."""
SILU = ActivationSpec("silu")
MOST_TOKENS = 16_384
KINDS: Mapping[str, Mapping[str, Any]] = {
    "DDIMScheduler": {"kind": "ddim", "spacing": "leading"},
    "EulerDiscreteScheduler": {"kind": "euler"},
    "EulerAncestralDiscreteScheduler": {"kind": "euler_ancestral"},
    "DPMSolverMultistepScheduler": {"kind": "dpmpp_2m"},
    "PNDMScheduler": {"kind": "pndm", "spacing": "leading", "to_one": False},
    "FlowMatchEulerDiscreteScheduler": {"kind": "flow_euler"},
}
"""Classes of diffusers' schedulers → the solver with the defaults of their configs."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "trained_betas": (), "thresholding": (False,), "rescale_betas_zero_snr": (False,),
    "interpolation_type": ("linear",), "use_karras_sigmas": (False,),
    "use_exponential_sigmas": (False,), "use_beta_sigmas": (False,), "use_lu_lambdas": (False,),
    "use_flow_sigmas": (False,), "use_dynamic_shifting": (False,), "timestep_type": ("discrete",),
    "final_sigmas_type": ("zero",), "solver_order": (2,), "solver_type": ("midpoint",),
    "algorithm_type": ("dpmsolver++",), "euler_at_final": (False,), "variance_type": (),
    "lambda_min_clipped": (-math.inf, "-Infinity"), "shift_terminal": (), "invert_sigmas": (False,),
    "stochastic_sampling": (False,),
}  # fmt: skip
"""Keys of a scheduler's config that would change its steps, and their neutral values."""


def dit(arch: ModelArch) -> Graph:
    """Describe the noise of each patch, [N, patch² · channels], patch by patch."""
    denoiser = arch.denoiser
    assert denoiser is not None, "the architecture says nothing of a denoiser"
    to, hidden, area = Description(arch), arch.hidden, denoiser.patch**2
    x = patches(to, denoiser)
    times = to.node("embed", (), TIMES, spec=GivenSpec("times"), rows=SAMPLED)
    first: Value | None = None
    for layer in range(arch.layers):
        at = f"transformer_blocks.{layer}"
        known = _conditioned(to, times, f"{at}.norm1.emb", denoiser.classes + 1)
        first = first or known
        made = to.linear(known, f"{at}.norm1.linear", outputs=6 * hidden, bias=True, purpose="up")
        x = block(to, layer, x, made, EPS)
    assert first is not None, "it has layers"
    made = to.linear(first, "proj_out_1", outputs=2 * hidden, bias=True, purpose="up")
    shift, gain = to.parts(made, [hidden] * 2)
    x = to.adaptive_norm(x, gain, shift, EPS)
    out = area * denoiser.outputs
    return to.graph(hidden=to.linear(x, "proj_out_2", outputs=out, bias=True, purpose="head"))


def patches(to: Description, denoiser: Denoiser) -> Value:
    """Describe the patches with their places [N, hidden]."""
    numbers = denoiser.patch**2 * denoiser.channels
    given = to.node("embed", (), numbers, spec=GivenSpec("patches"))
    x = to.embed(POSITIONS, denoiser.tokens, EmbedSpec("positions"))
    made = to.linear(given, "pos_embed.proj", outputs=to.arch.hidden, bias=True, purpose="up")
    return to.add(x, made)


def block(
    to: Description,
    layer: int,
    x: Value,
    made: Value,
    eps: float,
    across: Callable[[Value], Value] | None = None,
) -> Value:
    """Describe a layer, modulated by `made` [R, 6 · hidden]. `across`: attention between its halves
    to something else."""
    arch, at = to.arch, f"transformer_blocks.{layer}"
    shift, gain, factor, *others = to.parts(made, [arch.hidden] * 6)
    names = [f"{at}.attn1.to_{letter}" for letter in "qkv"]
    normed = to.adaptive_norm(x, gain, shift, eps)
    mixed = bidirectional(to, layer, normed, names, f"{at}.attn1.to_out.0", bias=arch.qkv_bias)
    x = to.modulate(x, mixed, factor)
    if across is not None:
        x = to.add(x, across(x))
    shift, gain, factor = others
    normed = to.adaptive_norm(x, gain, shift, arch.norm_eps)
    products = f"{at}.ff.net.0.proj", f"{at}.ff.net.2"
    inner = two_products(to, normed, *products, ActivationSpec(arch.activation))
    return to.modulate(x, inner, factor)


def _conditioned(to: Description, times: Value, at: str, rows: int) -> Value:
    """Describe silu(time + class) of each entry."""
    time = f"{at}.timestep_embedder"
    hidden = to.arch.hidden
    inner = to.activate(
        to.linear(times, f"{time}.linear_1", outputs=hidden, bias=True, purpose="up"), SILU
    )
    known = to.embed(f"{at}.class_embedder.embedding_table", rows, EmbedSpec("labels"))
    made = to.linear(inner, f"{time}.linear_2", outputs=hidden, bias=True, purpose="up")
    return to.activate(to.add(known, made), SILU)


def _denoiser(config: Config) -> Denoiser:
    """Read the shape of a denoiser. Raises `ModelFileError` and `UnsupportedModel`."""
    fields = config.fields
    channels = fields.integer("in_channels", 1, 64, 4)
    size = fields.integer("sample_size", 1, 512, 32)
    patch = fields.integer("patch_size", 1, 64, 2)
    if size % patch:
        raise ModelFileError(
            f"{fields.where}: sample_size is {size}, which is no multiple of patch_size ({patch})",
            param="sample_size",
        )
    outputs = fields.integer("out_channels", 1, 128, channels)
    if outputs not in (channels, 2 * channels):
        raise UnsupportedModel(
            f"{fields.where}: out_channels is {outputs}; supported: in_channels ({channels}), or "
            "twice as many",
            param="out_channels",
        )
    classes, reads = 0, None
    if (texts := fields.mapping("text_encoder")) is not None:
        reads = read_texts(texts, fields.integer("texts", 1, 4096))
        fields.expect("caption_channels", reads.hidden)
        if fields.flag("use_additional_conditions", size == 128):
            raise UnsupportedModel(
                f"{fields.where}: use_additional_conditions is true (the default of sample_size "
                "128); supported: false",
                param="use_additional_conditions",
            )
    else:
        classes = fields.integer("num_embeds_ada_norm", 1, 2**20, 1000)
    vae = fields.mapping("vae")
    decoder = None if vae is None else read_decoder(vae, channels)
    solver = read_solver(fields.mapping("scheduler") or {})
    if (tokens := (size // patch) ** 2) > MOST_TOKENS:
        raise UnsupportedModel(
            f"{fields.where}: a picture has {tokens} patches; at most {MOST_TOKENS} are supported",
            param="patch_size",
        )
    stretch = fields.number("interpolation_scale", 1e-3, 1e3, max(size // 64, 1) if reads else 1)
    return Denoiser(channels, size, patch, classes, outputs, solver, decoder, reads, stretch)


def read_solver(config: Mapping[str, Any]) -> NoiseSolver:
    """Read a `scheduler_config.json`. Raises `ModelFileError` and `UnsupportedModel`."""
    fields = Fields(config, "scheduler_config.json")
    known = KINDS[fields.word("_class_name", KINDS)]
    for key, allowed in NEUTRAL.items():
        fields.expect(key, *allowed)
    plain = NoiseSolver(**known)
    trained = fields.integer("num_train_timesteps", 1, 100_000, 1000)
    if plain.kind == "flow_euler":
        return plain._replace(trained=trained, shift=fields.number("shift", 0.01, 100.0, 1.0))
    betas: Any = fields.word(
        "beta_schedule", ("linear", "scaled_linear", "squaredcos_cap_v2"), "linear"
    )
    predicts: Any = fields.word("prediction_type", ("epsilon", "sample", "v_prediction"), "epsilon")
    spacing: Any = fields.word(
        "timestep_spacing", ("leading", "linspace", "trailing"), plain.spacing
    )
    if predicts == "sample" and plain.kind in ("euler", "euler_ancestral", "pndm"):
        raise UnsupportedModel(
            "scheduler_config.json: prediction_type is sample; supported for Euler and PNDM: "
            "epsilon, v_prediction",
            param="prediction_type",
        )
    if plain.kind == "pndm":
        Fields({"skip_prk_steps": False, **config}, fields.where).expect("skip_prk_steps", True)
    clip = 0.0
    if plain.kind == "ddim" and fields.flag("clip_sample", True):
        clip = fields.number("clip_sample_range", 1e-3, 1e3, 1.0)
    return plain._replace(
        trained=trained,
        betas=betas,
        first=fields.number("beta_start", 1e-9, 0.999, 0.0001),
        last=fields.number("beta_end", 1e-9, 0.999, 0.02),
        predicts=predicts,
        spacing=spacing,
        offset=fields.integer("steps_offset", 0, min(1, trained - 1), 0),
        clip=clip,
        to_one=fields.flag("set_alpha_to_one", plain.to_one),
    )


def _hidden(config: Config) -> int:
    return int(config["heads"] * config["head_dim"])


FAMILIES = (
    Family(
        "dit", dit, {"dit": ("DiTTransformer2DModel",)},
        fields={
            "beyond.denoiser": _denoiser, "hidden": _hidden,
            "vocab_size": lambda config: config["beyond.denoiser"].classes + 1,
            "max_context": lambda config: max(8, config["beyond.denoiser"].tokens),
            "layers": integer("num_layers", "", 1, 1024, 28),
            "heads": integer("num_attention_heads", "", 1, 1024, 16),
            "kv_heads": lambda config: config["heads"],
            "head_dim": integer("attention_head_dim", "", 1, 1024, 72),
            "intermediate": lambda config: 4 * config["hidden"],
            "norm_eps": number("norm_eps", "", 1e-12, 1.0, 1e-5),
            "activation": word(
                "activation_fn", "", {"gelu-approximate": "gelu_tanh", "gelu": "gelu"},
                "gelu-approximate",
            ),
            "qkv_bias": flag("attention_bias", default=True),
            "rope": Rope(), "windows": (), "output_bias": True, "tied_embedding": False,
        },
        allowed={
            "norm_type": ("ada_norm_zero",), "norm_elementwise_affine": (False,),
            "upcast_attention": (False,),
        },
    ),
)  # fmt: skip
