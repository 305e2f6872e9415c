"""Names of weights: mapping from a file's names, and comparison with the model's graph.

Canonical names are Hugging Face's, `model.layers.N.self_attn.q_proj.weight` and so on. Experts are
`model.layers.N.mlp.experts.E.{gate,up,down}_proj.weight` with the router at `mlp.gate`, whatever
the checkpoint calls them. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from ..base.arch import ModelArch
from ..base.errors import ModelFileError
from ..models.registry import FAMILIES, describe

if TYPE_CHECKING:
    from .safetensors_file import StoredTensor

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_GGUF_HARMLESS = re.compile(
    r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?"
)
"""Tensors read by `open` (the rope's parameters), or recomputed from the architecture."""

_HF_HARMLESS = re.compile(r".*rotary_emb\.inv_freq|.*rotary_emb\.(cos|sin)_cached")
_KV_SCALE = re.compile(r".+\.([qkv]|kv|prob)_scale|.+\.[kv]_proj\.output_scale")
"""Scales of an FP8 cache or of its products: calibrated, but needed by no computation here."""
_POOLER = re.compile(r"pooler\.dense\.(weight|bias)")
"""Head of the pre-training: embeddings do not read it, a classifier does."""
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_MIXTRAL_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERTS = {
    ".mlp.input_linear.weight": ".mlp.experts.*.gate_up_proj.weight",
    ".mlp.output_linear.weight": ".mlp.experts.*.down_proj.weight",
    ".mlp.experts.gate_up_proj": ".mlp.experts.*.gate_up_proj.weight",
    ".mlp.experts.down_proj": ".mlp.experts.*.down_proj.weight",
    ".mlp.router.layer.weight": ".mlp.gate.weight",
    ".mlp.router.weight": ".mlp.gate.weight",
    ".mlp.router.bias": ".mlp.gate.bias",
    ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
}
"""Stacks of experts (Granite's, those of transformers 5), routers, MiniMax's bias of the choice."""
_GGUF_BLOCK = re.compile(r"blk\.(\d{1,4})\.([\w.]+)")


def from_gguf_name(name: str, arch: ModelArch) -> str | None:
    """Return the canonical name, with `*` for all experts at once; None if the tensor is not
    needed.

    An unknown name raises `ModelFileError`: no tensor is silently left out.
    """
    if _GGUF_HARMLESS.fullmatch(name):
        return None
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP and suffix in ("weight", "bias"):
        return f"{_GGUF_TOP[stem]}.{suffix}"
    match = _GGUF_BLOCK.fullmatch(name)
    if match:
        names, layer = FAMILIES[arch.family].names, int(match[1])
        if names.predicts and layer >= arch.layers:
            return None  # The head that predicts a second token.
        if match[2] in names.gguf:
            return f"model.layers.{layer}.{names.gguf[match[2]]}"
        part, _, suffix = match[2].rpartition(".")
        canonical = names.gguf.get(part) or _GGUF_LAYER.get(part)
        if canonical is not None and suffix in ("weight", "bias"):
            return f"model.layers.{layer}.{canonical}.{suffix}"
    raise ModelFileError(f"tensor {name!r:.100} is not part of a {arch.family} model")


def gguf_names(arch: ModelArch) -> dict[str, str]:
    """Return canonical name → name in a GGUF of all tensors that such a model may have; of two
    names the family's own."""
    names = FAMILIES[arch.family].names.gguf
    stems = [*_GGUF_TOP]
    for layer in range(arch.layers):
        stems += [f"blk.{layer}.{part}" for part in (*names, *_GGUF_LAYER)]
    found: dict[str, str] = {}
    for name in [f"{stem}{suffix}" for stem in stems for suffix in ("", ".weight", ".bias")]:
        with suppress(ModelFileError):
            found.setdefault(from_gguf_name(name, arch) or "", name)
    return found


def from_hf_name(name: str, arch: ModelArch) -> str | None:
    """Return the canonical name (`*` for all experts at once), or None if the tensor is not needed.

    An unknown name is returned unchanged: `check` refuses it.
    """
    names = FAMILIES[arch.family].names
    if _HF_HARMLESS.fullmatch(name) or re.fullmatch(names.unread, name):
        return None
    if arch.tied_embedding and name.endswith(HEAD):
        return None  # A copy of the embedding: see `headers.hold`.
    if names.predicts and name.startswith(f"model.layers.{arch.layers}."):
        return None  # The head that predicts a second token comes after the last layer.
    for prefix, plain in _PREFIXES.items():
        if name.startswith(prefix):
            name = plain + name[len(prefix) :]
    for foreign, own in names.hf.items():
        name = name.replace(foreign, own, 1)
    if arch.task == "vector" and _POOLER.fullmatch(name):
        return None
    if arch.moe is None:
        name = name.replace(".mlp.shared_experts.", ".mlp.", 1)
    if arch.moe is not None:
        name = name.replace(".block_sparse_moe.", ".mlp.", 1)
        for foreign, own in _EXPERTS.items():
            if name.endswith(foreign):
                return name.removesuffix(foreign) + own
        match = re.fullmatch(r"(.*\.mlp\.experts\.\d+\.)(w[123])\.weight", name)
        if match:
            name = f"{match[1]}{_MIXTRAL_EXPERT[match[2]]}.weight"
    return name


def kv_scales(stored: Mapping[str, StoredTensor]) -> list[str]:
    """List names of a KV cache's scales, each one number; the model is loaded without them."""
    return [
        name
        for name, tensor in stored.items()
        if tensor.shape in ((), (1,)) and _KV_SCALE.fullmatch(name)
    ]


def each_expert(
    name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int]]]:
    """Yield (name, shape, (expert, its first row)) of the tensors that a file's tensor becomes.

    A stack [experts, rows, width] becomes one for each expert, with gate above up two. A
    convolution's kernels [channels, 1, kernel size] lose the dimension of one.
    """
    if len(shape) == 3 and shape[1] == 1 and name.endswith(("conv.weight", "conv1d.weight")):
        yield name, (shape[0], shape[2]), (0, 0)
        return
    if "*" not in name:
        yield name, shape, (0, 0)
        return
    parts = ("gate_proj", "up_proj") if ".gate_up_proj." in name else ("",)
    if len(shape) != 3 or shape[1] % len(parts):
        raise no_stack(name, shape, 3)
    experts, rows, width = shape
    inner = rows // len(parts)
    for expert in range(experts):
        own = name.replace("*", str(expert))
        for index, part in enumerate(parts):
            named = own.replace("gate_up_proj", part) if part else own
            yield named, (inner, width), (expert, index * inner)


def no_stack(name: str, shape: tuple[int, ...], wanted: int) -> ModelFileError:
    """Make the error for a tensor of all experts or heads (`*`) that is not a stack."""
    return ModelFileError(
        f"{name} has shape {list(shape)}; must be a stack of {wanted} dimensions, the first of "
        "them for *"
    )


def check(found: Mapping[str, tuple[int, ...]], arch: ModelArch, where: str) -> None:
    """Check that every tensor of the architecture is there, in its shape, and no other. Raises
    `ModelFileError`."""
    wanted = describe(arch).tensors()
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelFileError(
            f"{where} lacks {some(missing)}, which a {arch.family} model of {arch.layers} layers "
            "needs"
        )
    extra = [name for name in found if name not in wanted]
    if extra:
        raise ModelFileError(
            f"{where} has {some(extra)}, which is not part of the {arch.family} model that its "
            "config describes"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelFileError(
                f"{where}: {name} has shape {list(found[name])}; its config says {list(shape)}"
            )


def some(names: list[str]) -> str:
    """List the first three names, and count the others."""
    rest = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
