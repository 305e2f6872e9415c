"""Encoders of Qwen-VL in GGUF files: names by gguf-py's own table, cut and joined as llama.cpp's
converter does it; answers equal to those of the folder with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file

pytest.importorskip("PIL", reason="needs the extra pictures")

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.loader.gguf_model import open_gguf
from headrace.loader.pictures import open_pictures
from headrace.text import load_tokenizer
from tiny import qwen_chat
from tiny.gguf_files import metadata_of, tensors_of, write_gguf
from tiny.seeing_worker import answer, drawn, encode, prompt_of, worker_of

KINDS = {
    "qwen2_vl": ("qwen2vl", "qwen2vl_merger"),
    "qwen2_5_vl": ("qwen2vl", "qwen2.5vl_merger"),
    "qwen3_vl": ("qwen3vl", "qwen3vl_merger"),
    "qwen3_vl_moe": ("qwen3vlmoe", "qwen3vl_merger"),
}


def vision_of(oracle: Any, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of an `mmproj`, as llama.cpp's converter writes them."""
    vision = oracle.config.vision_config
    width = vision.embed_dim if kind == "qwen2_vl" else vision.hidden_size
    inner = vision.hidden_size if kind == "qwen2_vl" else vision.intermediate_size
    said: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": KINDS[kind][1],
        "clip.vision.image_size": 560,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": width,
        "clip.vision.feed_forward_length": inner,
        "clip.vision.block_count": vision.depth,
        "clip.vision.attention.head_count": vision.num_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.projection_dim": oracle.config.text_config.hidden_size,
        "clip.vision.image_mean": qwen_chat.MEAN,
        "clip.vision.image_std": qwen_chat.DEVIATION,
        "clip.vision.image_min_pixels": qwen_chat.LEAST,
        "clip.vision.image_max_pixels": qwen_chat.MOST,
    }
    if kind == "qwen2_5_vl":
        said["clip.use_silu"] = True
        said["clip.vision.n_wa_pattern"] = vision.fullatt_block_indexes[0] + 1
        said["clip.vision.window_size"] = vision.window_size
    third = kind.startswith("qwen3")
    if third:
        deep = vision.deepstack_visual_indexes
        said["clip.use_gelu"] = True
        said["clip.vision.spatial_merge_size"] = vision.spatial_merge_size
        said["clip.vision.is_deepstack_layers"] = [at in deep for at in range(vision.depth)]
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(3, vision.depth))  # For mm.2.
    patches = gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.V_ENC_EMBD_PATCH]
    tensors = {}
    for name, value in oracle.state_dict().items():
        if ".visual." not in name:
            continue
        array, own = value.float().numpy(), name.removeprefix("model.")
        if own == "visual.patch_embed.proj.weight":
            tensors[f"{patches}.weight"], tensors[f"{patches}.weight.1"] = (
                np.ascontiguousarray(array[:, :, frame]) for frame in range(2)
            )
        elif own == "visual.patch_embed.proj.bias":
            tensors[f"{patches}.bias"] = array
        elif ".qkv." in own and not third:
            for letter, part in zip("qkv", np.split(array, 3), strict=True):
                split = own.replace("qkv", letter)
                found = table.get_name(split, try_suffixes=(".weight", ".bias"))
                assert found is not None, split
                tensors[found] = part
        elif own.startswith("visual.deepstack_merger_list."):
            number, rest = own.split(".", 3)[2:]
            layer = vision.deepstack_visual_indexes[int(number)]
            tensors[f"v.deepstack.{layer}.{rest.removeprefix('linear_')}"] = array
        elif third and own.startswith("visual.merger."):
            to = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
            part, end = own.removeprefix("visual.merger.").split(".")
            tensors[f"{to[part]}.{end}"] = array
        else:
            found = table.get_name(own, try_suffixes=(".weight", ".bias"))
            assert found is not None, own
            tensors[found] = array
    return said, tensors


def text_of(oracle: Any, kind: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arch, config = KINDS[kind][0], oracle.config.text_config
    config.tie_word_embeddings = False  # Some of these configs do not say so.
    state = {
        name.replace("model.language_model.", "model."): value.float()
        for name, value in load_file(folder / "model.safetensors").items()
        if "visual." not in name
    }
    for name in [name for name in state if ".experts." in name]:
        stack, at = state.pop(name), name.rpartition(".")[0]
        down = name.endswith("down_proj")  # [outputs, inputs] in a GGUF file.
        right = (stack.shape[1] == config.hidden_size) == down
        for number, one in enumerate(stack if right else stack.transpose(1, 2)):
            names = ("down",) if down else ("gate", "up")
            for part, value in zip(names, one.chunk(len(names)), strict=True):
                state[f"{at}.{number}.{part}_proj.weight"] = value.contiguous()
    words = qwen_chat.tokenizer()
    vocabulary = sorted(words.get_vocab(with_added_tokens=True).items(), key=lambda one: one[1])
    said = {f"{arch}.{key}": value for key, value in metadata_of(config, arch).items()}
    said |= {
        f"{arch}.rope.dimension_sections": [2, 3, 3, 0],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if len(token) > 2 else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": ["Ċ Ċ"],
        "tokenizer.ggml.eos_token_id": qwen_chat.END,
        "tokenizer.chat_template": qwen_chat.TEMPLATE,
    }
    return said, tensors_of(state, config, arch)


def prompts_of(files: ModelFiles) -> PicturePrompts:
    found = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_answers_are_those_of_the_folder(tmp_path: Path, kind: str) -> None:
    oracle = qwen_chat.make(tmp_path / "folder", kind)
    (tmp_path / "gguf").mkdir()
    path = write_gguf(
        tmp_path / "gguf" / "model.gguf",
        KINDS[kind][0],
        *text_of(oracle, kind, tmp_path / "folder"),
    )
    said, tensors = vision_of(oracle, kind)
    encoder = write_gguf(tmp_path / "gguf" / "mmproj-model.gguf", "clip", said, tensors)
    files, found = open_gguf(path, "m"), []
    for each in (open_model(str(tmp_path / "folder")), files):
        prompt, worker = prompt_of(prompts_of(each), drawn(3)), worker_of(each)
        rows = encode(worker, prompt)
        found.append((prompt.ids, rows, *answer(worker, prompt, len(prompt.ids))))
    (ids, rows, tokens, told), (same, also, others, heard) = found
    assert ids == same
    assert all(np.array_equal(one, two) for one, two in zip(rows, also, strict=True))
    assert tokens == others
    for one, two in zip(told, heard, strict=True):
        assert np.abs(np.array(one.top_logprobs) - np.array(two.top_logprobs)).max() < 1e-4
    picture = open_pictures(files)
    assert picture is not None
    assert picture.videos is None
    wrong: list[dict[str, Any]] = [{"clip.vision.block_count": 5}, {"clip.vision.patch_size": 5}]
    if kind == "qwen2_5_vl":
        wrong += [{"clip.use_silu": False}, {"clip.vision.n_wa_pattern": 0}]
    if kind.startswith("qwen3"):
        wrong += [{"clip.use_gelu": False}, {"clip.vision.is_deepstack_layers": [True] * 4}]
    for change in wrong:
        write_gguf(encoder, "clip", {**said, **change}, tensors)
        with pytest.raises((ModelFileError, UnsupportedModel)):
            open_pictures(open_gguf(path, "m"))
    for name in ("v.patch_embd.weight.1", "v.position_embd.weight", "v.blk.0.attn_k.weight"):
        if name in tensors:
            write_gguf(encoder, "clip", said, {n: v for n, v in tensors.items() if n != name})
            with pytest.raises(ModelFileError):
                open_pictures(open_gguf(path, "m"))
