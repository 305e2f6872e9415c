"""Architectures of well-known models, so that one can plan without their files.

From the models' own `config.json`; what is served is always read from the files themselves.
"""

from __future__ import annotations

from typing import Any

from ..base.arch import Mla, ModelArch, Moe
from .weights import WIDE_ENDS, WeightBytes

_TABLE = """
model            family       vocab hidden layers heads  kv size intermediate context  eps
llama-3.1-8b     llama       128256   4096     32    32   8  128        14336  131072 1e-5
llama-3.1-70b    llama       128256   8192     80    64   8  128        28672  131072 1e-5
llama-3.1-405b   llama       128256  16384    126   128   8  128        53248  131072 1e-5
qwen2.5-0.5b     qwen2       151936    896     24    14   2   64         4864   32768 1e-6
qwen3-32b        qwen3       151936   5120     64    64   8  128        25600   40960 1e-6
qwen3-30b-a3b    qwen3_moe   151936   2048     48    32   4  128         6144   40960 1e-6
qwen3-235b-a22b  qwen3_moe   151936   4096     94    64   4  128        12288   40960 1e-6
gpt-oss-20b      gpt_oss     201088   2880     24    64   8   64         2880  131072 1e-5
gpt-oss-120b     gpt_oss     201088   2880     36    64   8   64         2880  131072 1e-5
mixtral-8x7b     mixtral      32000   4096     32    32   8  128        14336   32768 1e-5
deepseek-v2-lite deepseek_v2 102400   2048     27    16  16  192        10944   32768 1e-6
deepseek-v3      deepseek_v3 129280   7168     61   128 128  192        18432  163840 1e-6
"""
_PARTS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {"qkv_bias": True, "tied_embedding": True},
    "qwen3-32b": {"qk_norm": True},
    "qwen3-30b-a3b": {"qk_norm": True, "moe": Moe(128, active=8, intermediate=768)},
    "qwen3-235b-a22b": {"qk_norm": True, "moe": Moe(128, active=8, intermediate=1536)},
    "gpt-oss-20b": {
        "qkv_bias": True,
        "output_bias": True,
        "sinks": True,
        "windows": (128, None) * 12,
        "moe": Moe(32, active=4, intermediate=2880, clamped=True),
    },
    "gpt-oss-120b": {
        "qkv_bias": True,
        "output_bias": True,
        "sinks": True,
        "windows": (128, None) * 18,
        "moe": Moe(128, active=4, intermediate=2880, clamped=True),
    },
    "mixtral-8x7b": {"moe": Moe(8, active=2, intermediate=14_336)},
    "deepseek-v2-lite": {
        "moe": Moe(64, active=6, intermediate=1408, shared_intermediate=2816, dense_layers=1),
        "mla": Mla(kv_rank=512, q_rank=None, rope_dim=64, nope_dim=128, v_dim=128),
    },
    "deepseek-v3": {
        "moe": Moe(256, active=8, intermediate=2048, shared_intermediate=2048, dense_layers=3),
        "mla": Mla(kv_rank=512, q_rank=1536, rope_dim=64, nope_dim=128, v_dim=128),
    },
}
"""What a model has beside the sizes that all have."""


def _read(table: str) -> dict[str, ModelArch]:
    """The columns are the first fields of `ModelArch`, in its order."""
    found = {}
    for line in table.strip().splitlines()[1:]:
        name, family, *sizes, eps = line.split()
        values = family, *map(int, sizes), float(eps)
        given: dict[str, Any] = dict(zip(ModelArch.__match_args__, values, strict=False))
        found[name] = ModelArch(**given, **_PARTS.get(name, {}))
    return found


KNOWN = _read(_TABLE)
"""By name; none is a name of the catalog, whose models are their files."""
PUBLISHED = {
    **dict.fromkeys(
        ("gpt-oss-20b", "gpt-oss-120b"), WeightBytes("bfloat16", formats={"experts": "mxfp4"})
    ),
    "deepseek-v3": WeightBytes("fp8", formats=WIDE_ENDS),
}
"""Formats of those whose makers publish them in others than bfloat16."""
