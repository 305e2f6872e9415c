"""Folders of heads that draft are hostile files, too: what is wrong is said by its name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.base.errors import HeadraceError
from headrace.loader.heads import head_weights, open_head, said_ids, tap_weights
from headrace.loader.open import open_model
from tiny import families, heads
from tiny.kept import Kept


@pytest.fixture(scope="module")
def target(kept: Kept):
    return open_model(str(kept(heads.target)))


@pytest.fixture
def folder(kept: Kept, tmp_path: Path) -> Path:
    """A head of the kind eagle3, to be changed."""
    shutil.copytree(kept(heads.make, "eagle3"), tmp_path / "head")
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"speculators_model_type": "mlp"}, "speculators_model_type is 'mlp'; supported: eagle, "),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": [1]}, "transformer_layer_config is .*; must be an object"),
        ({"norm_before_fc": True}, "norm_before_fc is True; supported: False"),
        ({"target_hidden_size": 64}, "target_hidden_size is 64; supported: 192"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; must be from 1 to 1000"),
        ({"norm_before_residual": 1}, "norm_before_residual is 1; must be true or false"),
        ({"eagle_aux_hidden_state_layer_ids": [4]}, r"is \[4\]; must be one to eight numbers"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "must be one to eight numbers"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "must be one to eight numbers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised|fp8"),
    ],
)
def test_a_config_that_is_not_served(folder: Path, target, change: Any, why: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(HeadraceError, match=why):
        open_head(str(folder), target)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 96), ("vocab_size", 900)])
def test_a_head_of_another_model(folder: Path, target, key: str, value: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadraceError, match=f"{key} is {value}; must be"):
        open_head(str(folder), target)


def changed(folder: Path, target, change: Any) -> Any:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = open_head(str(folder), target)
    assert found is not None
    return found


def test_ids_outside_of_the_vocabulary(folder: Path, target) -> None:
    found = changed(folder, target, lambda tensors: tensors["d2t"].add_(families.VOCAB))
    with pytest.raises(HeadraceError, match="d2t points outside"):
        said_ids(found)
    found = changed(folder, target, lambda tensors: tensors.update(d2t=tensors["d2t"][:7].clone()))
    with pytest.raises(HeadraceError, match=r"d2t must be 400 whole numbers, not I64 \[7\]"):
        said_ids(found)
    found = changed(folder, target, lambda tensors: tensors.pop("d2t"))
    with pytest.raises(HeadraceError, match="lacks d2t"):
        said_ids(found)


def test_matrices_that_are_not_side_by_side(folder: Path, target) -> None:
    def cut(tensors: Any) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, :7].clone()
        name = "layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name][:, :7].clone()

    found = changed(folder, target, cut)
    with pytest.raises(HeadraceError, match="is not 3 side by side"):
        list(tap_weights(found))
    with pytest.raises(HeadraceError, match="is not 2 side by side"):
        list(head_weights(found))
    found = changed(folder, target, lambda tensors: tensors.pop("fc.weight"))
    with pytest.raises(HeadraceError, match=r"must have fc\.weight"):
        list(tap_weights(found))


def test_a_head_without_logits_of_its_own(folder: Path, target) -> None:
    with pytest.raises(HeadraceError, match=r"needs lm_head\.weight"):
        changed(folder, target, lambda tensors: tensors.pop("lm_head.weight"))


def test_what_is_no_head(target, tmp_path: Path) -> None:
    assert open_head(str(target.path), target) is None
    assert open_head("nothing", target) is None


def test_a_further_layer_that_is_not_there(target, kept: Kept, tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="llama model that predict further tokens are not read"):
        open_head("mtp", target)
    for change, why in (
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0"),
        ({"num_hidden_layers": 3}, r"lacks the layer model\.layers\.3"),
    ):
        folder = families.make(tmp_path / why[:8], "glm4_moe")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(HeadraceError, match=why):
            open_head("mtp", open_model(str(folder)))
