"""Encoders of pictures in GGUF files (`mmproj`): names by gguf-py's own table, answers equal to
those of the folder with the same values."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="needs the extra pictures")

from headrace.base.errors import ModelFileError, UnsupportedModel
from headrace.base.modelfiles import ModelFiles
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.loader import open_model
from headrace.loader.gguf_model import open_gguf
from headrace.loader.pictures import open_pictures
from headrace.loader.towers import open_tower
from headrace.speech.finding import sees
from headrace.text import load_tokenizer
from tiny import gemma_chat, seeing_chat
from tiny.gguf_files import metadata_of, tensors_of, write_gguf
from tiny.seeing_worker import answer, drawn, encode, prompt_of, worker_of

KINDS = {"smolvlm": ("llama", "idefics3"), "gemma3": ("gemma3", "gemma3")}
TEXT = {"smolvlm": "model.text_model.", "gemma3": "model.language_model."}


class Twins(NamedTuple):
    kind: str
    oracle: Any
    folder: ModelFiles
    path: Path


def vision_of(oracle: Any, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and tensors of an `mmproj`, as llama.cpp's converter writes them."""
    vision, config = oracle.config.vision_config, oracle.config
    tiny: Any = seeing_chat if kind == "smolvlm" else gemma_chat
    said: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.projector_type": KINDS[kind][1],
        "clip.use_gelu": True,
        "clip.vision.image_size": vision.image_size,
        "clip.vision.patch_size": vision.patch_size,
        "clip.vision.embedding_length": vision.hidden_size,
        "clip.vision.feed_forward_length": vision.intermediate_size,
        "clip.vision.block_count": vision.num_hidden_layers,
        "clip.vision.attention.head_count": vision.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": float(vision.layer_norm_eps),
        "clip.vision.projection_dim": config.text_config.hidden_size,
        "clip.vision.image_mean": tiny.MEAN,
        "clip.vision.image_std": tiny.DEVIATION,
    }
    if kind == "smolvlm":
        said |= {
            "clip.vision.preproc_image_size": seeing_chat.LONGEST,
            "clip.vision.projector.scale_factor": config.scale_factor,
        }
    else:
        across = vision.image_size // vision.patch_size
        side = int(config.mm_tokens_per_image**0.5)
        said["clip.vision.projector.scale_factor"] = across // side
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, vision.num_hidden_layers)
    tensors = {}
    for name, value in oracle.state_dict().items():
        if not any(part in name for part in ("vision", "connector", "multi_modal_projector")):
            continue
        if ".head." in name:
            continue  # The language model reads nothing of it.
        # The converter reads names of the older layout.
        old = name.removeprefix("model.") if kind == "gemma3" else name
        old = old.replace("mm_input_projection_weight", "mm_input_projection.weight")
        if kind == "gemma3" and "vision_model" not in old:
            old = old.replace("vision_tower.", "vision_tower.vision_model.")
        found = table.get_name(old, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        array = value.float().numpy()
        tensors[found] = array + np.float32(1) if "soft_emb_norm" in found else array
    return said, tensors


def text_of(oracle: Any, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arch, tiny = KINDS[kind][0], seeing_chat if kind == "smolvlm" else gemma_chat
    config = oracle.config.text_config
    state = {
        name.replace(TEXT[kind], "model."): value.float()
        for name, value in oracle.state_dict().items()
        if name.startswith(TEXT[kind]) or name == "lm_head.weight"
    }
    if kind == "gemma3":
        state.pop("lm_head.weight", None)
    words = tiny.tokenizer()
    vocabulary = sorted(words.get_vocab(with_added_tokens=True).items(), key=lambda one: one[1])
    controls = {token.content for token in words.get_added_tokens_decoder().values()}
    end = words.token_to_id("<end_of_utterance>" if kind == "smolvlm" else "<end_of_turn>")
    said = {f"{arch}.{key}": value for key, value in metadata_of(config, arch).items()}
    said |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if token in controls else 1 for token, _ in vocabulary],
        "tokenizer.ggml.merges": ["Ċ Ċ"] if kind == "smolvlm" else ["Ċ Ċ", "ĊĊ Ċ", "ĊĊ ĊĊ"],
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.chat_template": tiny.TEMPLATE,
    }
    return said, tensors_of(state, config, arch)


@pytest.fixture(scope="module", params=list(KINDS))
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twins:
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    layers = ["sliding_attention"] * 5 + ["full_attention"]  # GGUF files state no others.
    text = {"layer_types": layers, "num_hidden_layers": len(layers)}
    oracle = seeing_chat.make(folder) if kind == "smolvlm" else gemma_chat.make(folder, text=text)
    beside = tmp_path_factory.mktemp(f"{kind}_gguf")
    path = write_gguf(beside / "model.gguf", KINDS[kind][0], *text_of(oracle, kind))
    write_gguf(beside / "mmproj-model.gguf", "clip", *vision_of(oracle, kind))
    return Twins(kind, oracle, open_model(str(folder)), path)


def prompts_of(files: ModelFiles) -> PicturePrompts:
    found = open_picture_prompts(files, load_tokenizer(files.tokenizer, files.arch.vocab_size))
    assert found is not None
    return found


def test_answers_are_those_of_the_folder(twins: Twins) -> None:
    files = open_model(str(twins.path))
    assert sees(twins.path)
    assert [path.name for path in files.weights] == ["model.gguf", "mmproj-model.gguf"]
    pictures, found = drawn(3), []
    for each in (twins.folder, files):
        prompt, worker = prompt_of(prompts_of(each), pictures), worker_of(each)
        tower = open_tower(each)
        assert tower is not None
        layers = 1 + twins.oracle.config.vision_config.num_hidden_layers
        rows = encode(worker, prompt, (layers,))
        found.append((prompt.ids, rows, *answer(worker, prompt, len(prompt.ids))))
    (ids, rows, tokens, told), (same, also, others, heard) = found
    assert ids == same
    assert all(np.array_equal(one, two) for one, two in zip(rows, also, strict=True))
    assert tokens == others
    for one, two in zip(told, heard, strict=True):
        assert np.abs(np.array(one.top_logprobs) - np.array(two.top_logprobs)).max() < 1e-4


@pytest.mark.parametrize("type_", ["F16", "Q8_0"])
def test_smaller_types_are_read(twins: Twins, tmp_path: Path, type_: str) -> None:
    said, tensors = vision_of(twins.oracle, twins.kind)
    (tmp_path / "model.gguf").symlink_to(twins.path)
    kinds = {"attn_q.weight": type_, "attn_out.weight": type_, "ffn_up.weight": type_}
    write_gguf(tmp_path / "model-mmproj.gguf", "clip", said, tensors, kinds)
    rows = []
    for path in (twins.path, tmp_path / "model.gguf"):
        files = open_gguf(path, "model")
        prompt = prompt_of(prompts_of(files), drawn(1))
        layers = 1 + twins.oracle.config.vision_config.num_hidden_layers
        rows.append(np.concatenate(encode(worker_of(files), prompt, (layers,))))
    far = np.abs(rows[0] - rows[1]).max() / np.abs(rows[0]).max()
    assert 0 < far < (0.01 if type_ == "F16" else 0.2)


def test_files_that_do_not_fit(twins: Twins, tmp_path: Path) -> None:
    said, tensors = vision_of(twins.oracle, twins.kind)
    model, encoder = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    model.symlink_to(twins.path)
    assert not sees(model)
    for wrong in ({"clip.projector_type": "mlp"}, {"clip.vision.projection_dim": 7}):
        write_gguf(encoder, "clip", {**said, **wrong}, tensors)
        assert open_pictures(open_gguf(model, "m")) is None, "the language model serves alone"
    other = next(kind for _, kind in KINDS.values() if kind != said["clip.projector_type"])
    write_gguf(encoder, "clip", {**said, "clip.projector_type": other}, tensors)
    assert open_pictures(open_gguf(model, "m")) is None, "of the same width, for another vocabulary"
    encoder.write_bytes(b"GGUF and nothing")
    assert open_pictures(open_gguf(model, "m")) is None
    for key in ("clip.vision.block_count", "clip.vision.image_mean", "clip.use_gelu"):
        less = {name: value for name, value in said.items() if name != key}
        write_gguf(encoder, "clip", less, tensors)
        with pytest.raises((ModelFileError, UnsupportedModel)):
            open_pictures(open_gguf(model, "m"))
    for key, value in (("clip.vision.block_count", 3), ("clip.vision.patch_size", 5)):
        write_gguf(encoder, "clip", {**said, key: value}, tensors)
        with pytest.raises((ModelFileError, UnsupportedModel)):
            open_pictures(open_gguf(model, "m"))
    kinds = {"v.blk.0.ffn_up.weight": "Q4_0"}
    write_gguf(encoder, "clip", said, tensors, kinds)
    with pytest.raises(ModelFileError, match="F32, F16, BF16 and Q8_0 are read"):
        open_pictures(open_gguf(model, "m"))
    assert torch.is_tensor(twins.oracle.state_dict()["lm_head.weight"])
