"""Architectures of known models, as numbers."""

from __future__ import annotations

from headrace.base.arch import Mla, ModelArch, Moe

QWEN_05B = ModelArch(
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
)
LLAMA_8B = ModelArch(
    family="llama",
    vocab_size=128_256,
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    max_context=131_072,
    norm_eps=1e-5,
)
GEMMA_270M = ModelArch(
    family="gemma3",
    vocab_size=262_144,
    hidden=640,
    layers=18,
    heads=4,
    kv_heads=1,
    head_dim=256,
    intermediate=2048,
    max_context=32_768,
    norm_eps=1e-6,
    activation="gelu_tanh",
    windows=tuple(None if layer % 6 == 5 else 512 for layer in range(18)),
    qk_norm=True,
    tied_embedding=True,
    embedding_scale=640**0.5,
    norm_offset=1.0,
)
QWEN_30B_A3B = ModelArch(
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
)
DEEPSEEK_LITE = ModelArch(
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
)
MISTRAL_WINDOWED = ModelArch(
    family="mistral",
    vocab_size=32_000,
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    max_context=32_768,
    norm_eps=1e-5,
    windows=(4096,) * 32,
)
ALL = {
    "qwen-0.5b": QWEN_05B,
    "llama-8b": LLAMA_8B,
    "gemma-270m": GEMMA_270M,
    "qwen-30b-a3b": QWEN_30B_A3B,
    "deepseek-lite": DEEPSEEK_LITE,
    "mistral": MISTRAL_WINDOWED,
}
