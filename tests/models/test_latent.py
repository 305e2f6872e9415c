"""DeepSeek's latent attention in whole models: both kinds of file, every KV type, one array."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.base.errors import ModelFileError
from headrace.loader.open import open_model
from headrace.worker import Worker, WorkerOptions
from models.test_on_the_cpu_kernels import logits_of
from oracle.asks import prompt
from oracle.reference import Oracle
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import save_gguf
from tiny.kept import Kept

SIZES = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "head_dim": 32,
}
BLOCKS = dict.fromkeys(("_b.weight", "_exps.weight", "output.weight"), "Q8_0")


def files(folder: Path) -> None:
    """One model as a folder, and as GGUF with the matrix of its latents whole and by head."""
    model = hf_model("DeepseekV3", **SIZES)
    save_folder(model, folder / "hf")
    for name, quantise in (("dense", None), ("blocks", BLOCKS)):
        save_gguf(model, folder / f"{name}.gguf", "deepseek2", quantise=quantise)
        whole = {
            f"blk.{layer}.attn_kv_b.weight": attention.kv_b_proj.weight.detach().numpy()
            for layer, attention in enumerate(each.self_attn for each in model.model.layers)
        }
        split = [f"blk.{layer}.attn_{part}_b.weight" for layer in range(2) for part in "kv"]
        path = folder / f"{name}-whole.gguf"
        save_gguf(model, path, "deepseek2", quantise=quantise, drop=tuple(split), extra=whole)


@pytest.fixture
def folder(kept: Kept) -> Path:
    return kept(files)


def worker_of(path: Path, **options: object) -> Worker:
    settings = {"kernels": "cpu", "kv_dtype": "float32", "threads": 1, "rows": 4}
    return Worker(
        open_model(str(path)),
        WorkerOptions(**{**settings, "step_tokens": 256, "max_context": 512, **options}),
    )


def asked(length: int) -> list[int]:
    """Ids of the small vocabulary."""
    return [token % 300 for token in prompt(length)]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_every_file_against_transformers(folder: Path) -> None:
    tokens = asked(70)
    theirs = Oracle(folder / "hf").logits(tokens)
    first = None
    for name in ("hf", "dense.gguf", "dense-whole.gguf"):
        worker = worker_of(folder / name)
        ours = logits_of(worker, tokens, 256)
        assert worker.text.program.lowered
        assert distance(ours, theirs) <= 2e-4, name
        first = ours if first is None else first
        assert torch.equal(ours, first), name


def test_blocks_by_head_and_whole(folder: Path) -> None:
    """Rows of values keep their blocks; keys that lie across them become fp32."""
    tokens = asked(70)
    wanted = logits_of(worker_of(folder / "blocks.gguf", kernels="ref"), tokens, 256)
    for name in ("blocks.gguf", "blocks-whole.gguf"):
        worker = worker_of(folder / name)
        ours = logits_of(worker, tokens, 256)
        assert worker.text.program.lowered
        assert distance(ours, wanted) <= 0.03, name
        for chunk in (1, 7, 64):
            assert torch.equal(logits_of(worker, tokens, chunk), ours), (name, chunk)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.02), ("int8", 0.03)])
def test_latents_in_narrow_types(folder: Path, kv_dtype: str, bound: float) -> None:
    tokens = asked(133)
    wanted = logits_of(worker_of(folder / "hf"), tokens, 256)
    worker = worker_of(folder / "hf", kv_dtype=kv_dtype)
    ours = logits_of(worker, tokens, 256)
    assert 0 < distance(ours, wanted) <= bound
    for chunk in (1, 7, 64):
        assert torch.equal(logits_of(worker, tokens, chunk), ours), chunk


def test_a_token_keeps_one_vector(folder: Path) -> None:
    worker = worker_of(folder / "hf", kv_dtype="bfloat16")
    logits_of(worker, asked(1), 256)
    layer = worker.cache.layers[0]
    assert layer.k is layer.v
    assert layer.k.shape[1:2] + layer.k.shape[3:] == (1, 96)


def test_a_matrix_of_latents_of_another_shape_is_named(tmp_path: Path) -> None:
    model = hf_model("DeepseekV3", **SIZES)
    wrong = {"blk.1.attn_k_b.weight": torch.zeros(4, 64, 16).numpy()}
    path = save_gguf(model, tmp_path / "m.gguf", "deepseek2", extra=wrong)
    with pytest.raises(ModelFileError, match=r"layers\.1\.self_attn\.k_b_proj\.0\.weight"):
        worker_of(path)
