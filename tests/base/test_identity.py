"""An identity names what an answer's bits depend on, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.base.arch import ModelArch, Rope
from headrace.base.config import Decision, EngineOptions
from headrace.base.identity import Identity
from headrace.base.modelfiles import ModelFiles
from headrace.loader.content import SAMPLE_BYTES, content_digest

ARCH = ModelArch(
    family="llama",
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab_size=100,
    max_context=128,
    norm_eps=1e-6,
)
OPTIONS = EngineOptions(device="cpu", dtype="float32", kv_dtype="bfloat16")
DECISIONS = [
    Decision("kernels.linear", "cpu", ""),
    Decision("kernels.sources", "0123456789abcdef", ""),
    Decision("kernels.level", "avx2", ""),
    Decision("tokenizer", "library", ""),
]
IDENTITY = Identity.of("weights", ARCH, OPTIONS, DECISIONS)


LONG = replace(ARCH, rope=Rope(kind="long", original_context=64, short=(1.0,) * 8, long=(2.0,) * 8))


def test_which_factors_of_a_long_rope_serve_is_part_of_it() -> None:
    short, long, whole = (
        Identity.of("weights", LONG, replace(OPTIONS, max_context=context), DECISIONS)
        for context in (64, 65, None)
    )
    assert long.differences(short)[0].startswith("architecture")
    assert long == whole


def with_decision(name: str, value: str) -> list[Decision]:
    return [*(d for d in DECISIONS if d.name != name), Decision(name, value, "")]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Identity.of("others", ARCH, OPTIONS, DECISIONS), "weights"),
        (Identity.of("weights", replace(ARCH, layers=3), OPTIONS, DECISIONS), "architecture"),
        (
            Identity.of("weights", ARCH, replace(OPTIONS, kv_dtype="int8"), DECISIONS),
            "option kv_dtype",
        ),
        (
            Identity.of("weights", ARCH, OPTIONS, with_decision("kernels.linear", "reference")),
            "kernel of linear",
        ),
        (
            Identity.of("weights", ARCH, OPTIONS, with_decision("kernels.sources", "f" * 16)),
            "kernel of sources",
        ),
        (replace(IDENTITY, version="0.0.1"), "version"),
    ],
)
def test_what_is_in_the_bits_is_in_the_fingerprint_and_named(other: Identity, named: str) -> None:
    assert other.fingerprint != IDENTITY.fingerprint
    (line,) = IDENTITY.differences(other)
    assert line.startswith(f"{named}: ")


@pytest.mark.parametrize(
    "other",
    [
        Identity.of("weights", ARCH, replace(OPTIONS, step_tokens=64, depth=2), DECISIONS),
        Identity.of("weights", ARCH, OPTIONS, with_decision("kernels.level", "bf16")),
        Identity.of("weights", ARCH, OPTIONS, with_decision("tokenizer", "own")),
    ],
)
def test_what_is_in_no_bit_is_not(other: Identity) -> None:
    assert other.fingerprint == IDENTITY.fingerprint
    assert not IDENTITY.differences(other)


def test_bits_are_promised_on_a_cpu_and_by_the_deterministic_mode() -> None:
    on_gpu = replace(OPTIONS, device="cuda")
    assert IDENTITY.exact
    assert not Identity.of("", ARCH, on_gpu, []).exact
    assert Identity.of("", ARCH, replace(on_gpu, deterministic=True), []).exact


def test_content_is_told_by_bytes_and_not_by_place_or_time(tmp_path: Path) -> None:
    def digest(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        files = ModelFiles(
            name="m",
            format="gguf",
            path=path,
            weights=(path,),
            arch=ARCH,
            tokenizer={},
            chat_template=None,
        )
        return content_digest(files)

    content = bytes(range(256)) * (SAMPLE_BYTES // 64)
    assert digest("a", content) == digest("b", content)
    assert digest("a", content) != digest("b", content + b"\0")
    assert digest("a", content) != digest("b", content[:-1] + b"\0")
