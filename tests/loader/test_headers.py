"""A config against the headers of its weights: heads of their own, scales of a KV cache, shapes."""

from __future__ import annotations

import json
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.errors import ModelFileError
from headrace.base.hardware import hardware
from headrace.engine.loop.start import explain
from headrace.engine.messages import WireFiles
from headrace.engine.simulator.described import describe_model
from headrace.kernels.checkpoint_values import values
from headrace.loader import open_model
from headrace.loader.quantised_safetensors import QuantisedMatrix
from headrace.loader.weights import load_weights
from headrace.roofline.weights import total_bytes
from tiny.checkpoints import hf_model, save_folder
from tiny.families import make, with_words
from tiny.quantised import FORMS, folder, quantise

HEAD = "lm_head.weight"
Tensors = dict[str, torch.Tensor]
PROMPT = [(7 * at + 3) % 300 for at in range(20)]


def tensors(place: Path, change: Callable[[Tensors], object]) -> None:
    held = {name: one.clone() for name, one in load_file(place / "model.safetensors").items()}
    change(held)
    save_file(held, place / "model.safetensors", metadata={"format": "pt"})


def tied(place: Path, kind: str = "Qwen2") -> Path:
    more = {"sliding_window": 8} if kind == "Gemma3Text" else {}
    return with_words(save_folder(hf_model(kind, tie_word_embeddings=True, **more), place), 320)


def own(held: Tensors) -> None:
    torch.manual_seed(1)
    held[HEAD] = torch.randn(320, 64) * 0.1


def answers(place: Path) -> list[int]:
    with LLM(place, kernels="ref", kv_dtype="float32", max_context=64, threads=1) as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        return list(llm.generate([PROMPT], asked)[0].outputs[0].token_ids)


def of_transformers(place: Path) -> list[int]:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in ids[0, len(PROMPT) :]]


@pytest.mark.parametrize("kind", ["Qwen2", "Llama", "Cohere", "Gemma3Text"])
def test_a_head_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path, kind: str) -> None:
    place = tied(tmp_path / "m", kind)
    before = answers(place)
    tensors(place, own)
    files = open_model(str(place))
    assert not files.arch.tied_embedding
    assert answers(place) == of_transformers(place) != before


def test_an_equal_copy_stays_tied(tmp_path: Path) -> None:
    place = tied(tmp_path / "m")
    table = "model.embed_tokens.weight"
    tensors(place, lambda held: held.update({HEAD: held[table].clone()}))
    files = open_model(str(place))
    assert files.arch.tied_embedding
    assert not files.decisions
    assert HEAD not in dict(load_weights(files))

    def last_number(held: Tensors) -> None:
        held[HEAD][-1, -1] += 1

    tensors(place, last_number)
    assert not open_model(str(place)).arch.tied_embedding


def test_it_is_said_and_counted(tmp_path: Path) -> None:
    place = tied(tmp_path / "m")
    before = describe_model(str(place))
    tensors(place, own)
    after = describe_model(str(place))
    assert after.files is not None
    more = 320 * 64 * 4
    assert total_bytes(after.arch, after.weights) - total_bytes(before.arch, before.weights) == more
    options = EngineOptions(model=str(place), device="cpu", max_context=64)
    decisions, _ = explain(options, after.files, hardware())
    told = next(one for one in decisions if one.name == "head")
    assert told.value == "own"
    assert HEAD in told.reason
    # A process that is sent the files says it too.
    assert WireFiles.of(after.files).open().decisions == after.files.decisions


def test_a_head_of_a_text_model_inside_another(tmp_path: Path) -> None:
    place = tied(tmp_path / "m", "Gemma3Text")

    def outer(held: Tensors) -> None:
        own(held)
        for name in list(held):
            held[f"language_model.{name}"] = held.pop(name)

    tensors(place, outer)
    files = open_model(str(place))
    assert not files.arch.tied_embedding
    assert HEAD in dict(load_weights(files))


@pytest.mark.parametrize("form", ["gptq", "gptq order", "awq", "int4", "int8"])
def test_a_quantised_head_of_a_tied_config(tmp_path: Path, form: str) -> None:
    found: list[Any] = []

    def head(held: Tensors) -> None:
        torch.manual_seed(1)
        parts, exact = quantise(FORMS[form], torch.randn(320, 256) * 0.1)
        held.update({f"lm_head.{suffix}": part for suffix, part in parts.items()})
        found.append(exact)

    folder(tmp_path, FORMS[form], change=head, tie_word_embeddings=True)
    files = open_model(str(tmp_path))
    assert not files.arch.tied_embedding
    assert "lm_head." in files.decisions[0].reason
    loaded = dict(load_weights(files))[HEAD]
    assert isinstance(loaded, QuantisedMatrix)
    np.testing.assert_array_equal(values(loaded.read()), found[0].astype(np.float32))
    assert len(answers(tmp_path)) == 6


SCALES = [
    "self_attn.k_scale",
    "self_attn.v_scale",
    "self_attn.q_scale",
    "self_attn.prob_scale",
    "self_attn.kv_scale",
    "self_attn.attn.k_scale",
    "self_attn.k_proj.k_scale",
    "self_attn.v_proj.output_scale",
]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_a_kv_cache_are_left_out(tmp_path: Path, shape: tuple[int, ...]) -> None:
    place = tied(tmp_path / "m")
    before = answers(place)
    named = [f"model.layers.{layer}.{name}" for layer in range(2) for name in SCALES]
    tensors(place, lambda held: held.update({name: torch.full(shape, 0.5) for name in named}))
    files = open_model(str(place))
    (told,) = files.decisions
    assert (told.name, told.value) == ("kv_scales", "left out")
    assert f"and {len(named) - 3} more" in told.reason
    assert answers(place) == before


def test_a_scale_of_each_channel_is_none_of_a_cache(tmp_path: Path) -> None:
    place, name = tied(tmp_path / "m"), "model.layers.0.self_attn.k_scale"
    tensors(place, lambda held: held.update({name: torch.ones(16)}))
    with pytest.raises(ModelFileError, match=r"has model\.layers\.0\.self_attn\.k_scale, which is"):
        list(load_weights(open_model(str(place))))


@pytest.mark.parametrize("groups", [True, False])
def test_a_scheme_of_the_kv_cache_in_the_config(tmp_path: Path, groups: bool) -> None:
    """Beside quantised matrices, and alone."""
    if groups:
        folder(tmp_path, FORMS["int8"])
    else:
        tied(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantised = config.setdefault(
        "quantization_config",
        {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}},
    )
    quantised["kv_cache_scheme"] = scheme
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv"]
    tensors(tmp_path, lambda held: held.update({name: torch.tensor(0.5) for name in names}))
    assert open_model(str(tmp_path)).decisions[0].name == "kv_scales"
    assert len(answers(tmp_path)) == 6
    assert describe_model(str(tmp_path / "config.json")).weights.format in ("int8", "float32")


def test_every_tensor_of_the_wrong_number_of_dimensions_is_named(tmp_path: Path) -> None:
    """Each tensor of the file in turn without its dimensions, and with one too many."""
    place = save_folder(hf_model("Qwen2"), tmp_path)
    whole = (place / "model.safetensors").read_bytes()
    names = list(load_file(place / "model.safetensors"))
    assert len(names) > 20
    for name in names:
        for shape in ((), (1, 320, 64, 1)):
            tensors(place, lambda held, at=name, as_=shape: held.update({at: torch.zeros(as_)}))
            with pytest.raises(ModelFileError) as caught:
                list(load_weights(open_model(str(place))))
            assert f"{name} has shape {list(shape)}; its config says [" in str(caught.value)
            (place / "model.safetensors").write_bytes(whole)


@pytest.mark.parametrize("family", ["qwen3_next", "mixtral", "gpt_oss", "deepseek_v3", "lfm2"])
def test_no_family_counts_dimensions_that_are_not_there(tmp_path: Path, family: str) -> None:
    """Stacks of experts, heads of latents, matrices that are cut by rows, taps."""
    make(tmp_path, family)
    files = open_model(str(tmp_path))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    names = [name for name in header if name != "__metadata__" and ".1." not in name]
    list(load_weights(files))
    for name in names:
        tensors(tmp_path, lambda held, at=name: held.update({at: torch.tensor(1.0)}))
        with pytest.raises(ModelFileError, match=r"\[\]|lacks"):
            list(load_weights(files))
        path.write_bytes(whole)
