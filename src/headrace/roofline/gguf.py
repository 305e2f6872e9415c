"""An architecture and its bytes from any GGUF header, to be planned with though not served.

The header's keys are given the names of a `config.json` and read by `config.py`. Facts that only
the file's tensors show (a gate, a bias, a tied head) are looked for there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..base.arch import ModelArch
from ..base.arch_fields import Fields
from ..base.errors import ModelFileError, UnsupportedModel
from .config import architecture
from .formats import GGML, usual_format
from .weights import WeightBytes, from_roles


class Stored(NamedTuple):
    """A tensor of the header: type by its ggml name, rows (all but the last axis), bytes."""

    type: str
    rows: int
    nbytes: int


SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "sliding_window": "attention.sliding_window",
    "attention_chunk_size": "attention.chunk_size",
}
"""Name in a `config.json` → key of the header."""
NEEDED = ("embedding_length", "block_count", "attention.head_count", "context_length")
UNPRICED = re.compile(
    r"(ssm|wkv|kda|shortconv|altup)\.|attention\.(indexer|recurrent)|full_attention_interval$"
    r"|laurel|decoder_start_token_id$|attention\.shared_kv_layers$"
)
"""Keys of parts whose work is not priced."""
PERIODS = {
    "gpt-oss": 2, "gemma2": 2, "gemma3": 6, "cohere2": 4, "exaone4": 4, "olmo2": 4,
    "smallthinker": 4,
}  # fmt: skip
"""Every n-th layer of these sees the whole context, if the header does not say which."""
_TOP = {"token_embd.weight": "embed", "output.weight": "head"}
_ROLES = (
    (r"ffn_(gate|up|down|gate_up)_exps", "experts"),
    (r"ffn_(gate|up|down)_shexp", "shared"),
    (r"ffn_gate_inp", "router"),
    (r"ffn_(gate|up)", "gate_up"),
    (r"ffn_down", "down"),
    (r"attn_output", "output"),
    (r"attn_(q|k|v|qkv|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)", "qkv"),
)
"""Roles of tensors, whatever the family: no graph names those of one that is not served."""


def read_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored]
) -> tuple[ModelArch, WeightBytes]:
    """Return (architecture, bytes by role) of a header.

    Raises `UnsupportedModel` for a part that is not priced, `ModelFileError` for a damaged header.
    """
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str):
        raise ModelFileError("GGUF: general.architecture must be a string")
    own = {
        key.removeprefix(f"{kind}."): value
        for key, value in metadata.items()
        if key.startswith(f"{kind}.")
    }
    for key, value in own.items():
        if UNPRICED.search(key) and value:
            raise UnsupportedModel(
                f"GGUF: {kind}.{key} is {value!r:.40}, which is not priced", param=key
            )
    fields = Fields(metadata, "GGUF", f"{kind}.")
    for key in NEEDED:
        if key not in own:
            raise ModelFileError(f"GGUF lacks {kind}.{key}", param=key)
    drafts = fields.integer("nextn_predict_layers", 0, 2**10, 0)
    sizes = {name: _one(kind, key, own.get(key)) for name, key in SIZES.items()}
    values = {name: size for name, size in sizes.items() if size not in (None, 0)}
    values["num_hidden_layers"] = fields.integer("block_count", 1 + drafts, 2**10) - drafts
    values.setdefault("intermediate_size", values.get("moe_intermediate_size"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, Sequence):
        values["vocab_size"] = len(tokens)
    values["vocab_size"] = own.get("vocab_size", values.get("vocab_size"))
    values |= {
        "model_type": kind,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name in tensors for name in _bias("attn_q", "attn_qkv")),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
    }
    if "kv_lora_rank" in values:
        values |= _latent(own)
    if own.get("attention.sliding_window") and "attention_chunk_size" not in values:
        values["layer_types"] = _kinds(kind, own, values["num_hidden_layers"])
    _verify_gate(kind, values, tensors)
    arch = architecture(values, "GGUF")
    return arch, _bytes(arch, tensors)


def _bias(*parts: str) -> list[str]:
    return [f"blk.0.{part}.bias" for part in parts]


def _one(kind: str, key: str, value: Any) -> Any:
    """Return the size of every layer; layers of unlike sizes are not priced."""
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        return value
    found = set(value)
    # Leading dense layers have no experts; the other layers have no width of their own.
    if key == "feed_forward_length":
        found -= {0}
    if len(found) != 1:
        raise UnsupportedModel(
            f"GGUF: {kind}.{key} is {value!r:.60}: layers of unlike sizes are not priced", param=key
        )
    return found.pop()


def _latent(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return MLA's parts: of a file for the latent cache (`…_mla`), or of an older one."""
    whole = own.get("attention.key_length_mla") or own.get("attention.key_length")
    value = own.get("attention.value_length_mla") or own.get("attention.value_length")
    rope = own.get("rope.dimension_count")
    if not all(isinstance(size, int) for size in (whole, value, rope)):
        raise ModelFileError(
            "GGUF lacks rope.dimension_count, attention.key_length or value_length"
        )
    return {
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": whole - rope,  # type: ignore[operator]
        "v_head_dim": value,
    }


def _kinds(kind: str, own: Mapping[str, Any], layers: int) -> list[str]:
    """Return each layer's kind of attention: sliding window or full."""
    pattern = own.get("attention.sliding_window_pattern", PERIODS.get(kind, 0))
    if isinstance(pattern, list) and len(pattern) >= layers:
        narrow = [bool(one) for one in pattern[:layers]]
    elif not isinstance(pattern, int):
        raise ModelFileError(
            f"GGUF: {kind}.attention.sliding_window_pattern is {pattern!r:.60}; must be an integer "
            "or have an entry for each layer"
        )
    else:
        narrow = [not pattern or (layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in narrow]


def _verify_gate(kind: str, values: Mapping[str, Any], tensors: Mapping[str, Stored]) -> None:
    """Refuse feed-forwards of two matrices; a gate may be fused into `ffn_up`."""
    ups = [name for name in tensors if re.fullmatch(r"blk\.\d+\.ffn_up\.weight", name)]
    gated = any(re.fullmatch(r"blk\.\d+\.ffn_gate\.weight", name) for name in tensors)
    if ups and not gated and tensors[ups[0]].rows != 2 * (values["intermediate_size"] or 0):
        raise UnsupportedModel(
            f"GGUF: {kind} has {ups[0]} and no ffn_gate: a feed-forward without a gate is not "
            "priced"
        )


def _bytes(arch: ModelArch, tensors: Mapping[str, Stored]) -> WeightBytes:
    formats: Counter[str] = Counter()
    sizes: list[tuple[str, int | None, float]] = []
    for name, stored in tensors.items():
        formats[GGML.get(stored.type, stored.type)] += stored.nbytes
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if name in _TOP:
            sizes.append((_TOP[name], None, stored.nbytes))
        elif block and int(block[1]) < arch.layers:
            role = next((role for mark, role in _ROLES if re.fullmatch(mark, block[2])), "")
            sizes.append((role, int(block[1]), stored.nbytes))
    return from_roles(arch, sizes, usual_format(formats, "bfloat16"))
