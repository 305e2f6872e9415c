"""Architectures of well-known models, so that one can plan without their files.

From the models' own `config.json`; what is served is always read from the files themselves.
"""

from __future__ import annotations

from ..base.arch import Mla, ModelArch, Moe
from .weights import WIDE_ENDS, WeightBytes


def _llama(layers: int, hidden: int, heads: int, intermediate: int, vocab: int) -> ModelArch:
    return ModelArch(
        family="llama",
        vocab_size=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        max_context=131_072,
        norm_eps=1e-5,
    )


def _gpt_oss(layers: int, experts: int) -> ModelArch:
    return ModelArch(
        family="gpt_oss",
        vocab_size=201_088,
        hidden=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        max_context=131_072,
        norm_eps=1e-5,
        qkv_bias=True,
        windows=(128, None) * (layers // 2),
        moe=Moe(experts, active=4, intermediate=2880),
    )


KNOWN = {
    "llama-3.1-8b": _llama(32, 4096, 32, 14_336, 128_256),
    "llama-3.1-70b": _llama(80, 8192, 64, 28_672, 128_256),
    "llama-3.1-405b": _llama(126, 16_384, 128, 53_248, 128_256),
    "qwen2.5-0.5b": ModelArch(
        family="qwen2",
        vocab_size=151_936,
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
        max_context=32_768,
        norm_eps=1e-6,
        qkv_bias=True,
        tied_embedding=True,
    ),
    "qwen3-32b": ModelArch(
        family="qwen3",
        vocab_size=151_936,
        hidden=5120,
        layers=64,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25_600,
        max_context=40_960,
        norm_eps=1e-6,
        qk_norm=True,
    ),
    "qwen3-30b-a3b": ModelArch(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        intermediate=6144,
        max_context=40_960,
        norm_eps=1e-6,
        qk_norm=True,
        moe=Moe(experts=128, active=8, intermediate=768),
    ),
    "qwen3-235b-a22b": ModelArch(
        family="qwen3_moe",
        vocab_size=151_936,
        hidden=4096,
        layers=94,
        heads=64,
        kv_heads=4,
        head_dim=128,
        intermediate=12_288,
        max_context=40_960,
        norm_eps=1e-6,
        qk_norm=True,
        moe=Moe(experts=128, active=8, intermediate=1536),
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "mixtral-8x7b": ModelArch(
        family="mixtral",
        vocab_size=32_000,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14_336,
        max_context=32_768,
        norm_eps=1e-5,
        moe=Moe(experts=8, active=2, intermediate=14_336),
    ),
    "deepseek-v2-lite": ModelArch(
        family="deepseek_v2",
        vocab_size=102_400,
        hidden=2048,
        layers=27,
        heads=16,
        kv_heads=16,
        head_dim=192,
        intermediate=10_944,
        max_context=32_768,
        norm_eps=1e-6,
        moe=Moe(experts=64, active=6, intermediate=1408, shared_intermediate=2816, dense_layers=1),
        mla=Mla(kv_rank=512, q_rank=None, rope_dim=64, nope_dim=128, v_dim=128),
    ),
    "deepseek-v3": ModelArch(
        family="deepseek_v3",
        vocab_size=129_280,
        hidden=7168,
        layers=61,
        heads=128,
        kv_heads=128,
        head_dim=192,
        intermediate=18_432,
        max_context=163_840,
        norm_eps=1e-6,
        moe=Moe(experts=256, active=8, intermediate=2048, shared_intermediate=2048, dense_layers=3),
        mla=Mla(kv_rank=512, q_rank=1536, rope_dim=64, nope_dim=128, v_dim=128),
    ),
}
"""By name; none is a name of the catalog, whose models are their files."""
PUBLISHED = {
    **dict.fromkeys(
        ("gpt-oss-20b", "gpt-oss-120b"), WeightBytes("bfloat16", formats={"experts": "mxfp4"})
    ),
    "deepseek-v3": WeightBytes("fp8", formats=WIDE_ENDS),
}
"""Formats of those whose makers publish them in others than bfloat16."""
