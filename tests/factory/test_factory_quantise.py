"""Dense weights made smaller: what is written, read by others; held to what it was made of."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from factory_cell import AT_LEAST
from safetensors.torch import load_file, save_file

from headrace.base.config import EngineOptions
from headrace.base.errors import UnsupportedModel
from headrace.factory.admit import admit
from headrace.factory.artifact import weights_manifest
from headrace.factory.build import Build, BuildOptions, CellResult
from headrace.factory.fleet import read_fleet
from headrace.factory.profile import ProfileBody, read_profile
from headrace.factory.quantise import text_of
from headrace.factory.revoke import trusted
from headrace.factory.stage import Outcome, Result
from headrace.factory.store import TITLE, Store
from tiny import talker
from tiny.checkpoints import hf_model
from tiny.gguf_files import save_gguf

BARE = "accuracy,performance,sbom,advisories"


def build(root: Path, model: Path, to: str, **wanted: Any) -> tuple[Build, CellResult]:
    engine = EngineOptions(model=str(model), cache_dir=str(root / "cache"), threads=1)
    made = Build(engine, BuildOptions(**{"quantise_to": to, "at_least": AT_LEAST, **wanted}))
    return made, made.run()


def given(result: CellResult, stage: str) -> Result:
    (found,) = [one.result for one in result.steps if one.stage.name == stage]
    assert found is not None
    return found


def body(made: Build, result: CellResult) -> ProfileBody:
    assert result.profile is not None
    keys = trusted(None, made._place.engine.cache_dir)
    return read_profile(made.store.read(result.profile.digest), keys).body


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF in F16 with rows of 256, and of 96 that are no block of a K type; it speaks."""
    root = tmp_path_factory.mktemp("dense")
    told = json.loads((talker.make(root / "talker") / "tokenizer.json").read_text())
    tokens = sorted(told["model"]["vocab"], key=told["model"]["vocab"].__getitem__)
    words = {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in told["model"]["merges"]],
    }
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    path, sizes["vocab_size"] = root / "small-F16.gguf", len(tokens)
    names = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
    kinds = dict.fromkeys((*names, "ffn_up.weight", "ffn_gate.weight", "ffn_down.weight"), "F16")
    return save_gguf(hf_model("Qwen2", **sizes), path, "qwen2", quantise=kinds, metadata=words)


def test_a_gguf_keeps_its_metadata_and_its_numbers(dense: Path, tmp_path: Path) -> None:
    made, result = build(tmp_path, dense, "q4_k", without=BARE)
    outputs = given(result, "quantise").outputs
    assert list(outputs) == ["small-q4_k.gguf"]
    before = gguf.GGUFReader(dense)
    after = gguf.GGUFReader(made.store.blob(outputs["small-q4_k.gguf"].digest))
    for key, told in before.fields.items():
        if not key.startswith("GGUF."):
            assert [part.tobytes() for part in after.fields[key].parts] == [
                part.tobytes() for part in told.parts
            ]
    assert after.fields["general.file_type"].contents() == 15
    kinds = {one.name: one.tensor_type.name for one in after.tensors}
    assert kinds["token_embd.weight"] == "Q6_K"
    assert kinds["blk.0.attn_q.weight"] == "Q4_K"
    # 96 weights a row: no blocks of 256. The first layer has the types of the ends.
    assert kinds["blk.1.ffn_down.weight"] == "Q5_0"
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_q.bias"] == "F32"
    for old, new in zip(before.tensors, after.tensors, strict=True):
        exact, found = (gguf.quants.dequantize(one.data, one.tensor_type) for one in (old, new))
        assert old.name == new.name
        assert np.sqrt(((exact - found) ** 2).sum() / (exact**2).sum()) < 0.1
    profile = body(made, result)
    assert profile.model.quantised is not None
    assert profile.model.quantised.to == "q4_k"
    assert [one.path for one in profile.model.quantised.of] == ["small-F16.gguf"]
    assert [one.path for one in profile.model.files] == ["small-q4_k.gguf"]


def test_what_was_quantised_is_not_quantised_again(dense: Path, tmp_path: Path) -> None:
    made, result = build(tmp_path, dense, "q8_0", without=BARE)
    (name, one), *_ = given(result, "quantise").outputs.items()
    path = tmp_path / name
    path.write_bytes(made.store.blob(one.digest).read_bytes())
    with pytest.raises(UnsupportedModel, match="no matrix of the model is dense"):
        build(tmp_path, path, "q4_k", without=BARE)
    with pytest.raises(UnsupportedModel, match="w4a16 is made of"):
        build(tmp_path, dense, "w4a16", without=BARE)


def test_a_profile_of_quantised_weights_is_gated_signed_and_served(tmp_path: Path) -> None:
    model = talker.make(tmp_path / "tiny")
    made, result = build(tmp_path, model, "w8a8", ring="dev")
    assert given(result, "accuracy").outcome is Outcome.PASSED
    assert "of the model's before" in given(result, "accuracy").reason
    assert given(result, "accuracy").figures["share"] > 0.99
    engine = EngineOptions(cache_dir=str(tmp_path / "cache"))
    admitted = admit(made.cell, engine)
    assert "tiny-w8a8." in admitted.profile.body.name
    served = load_file(Path(admitted.options.model) / "model.safetensors")
    exact = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    found = served[name].float() * served[f"{name}_scale"].float()
    assert str(served[name].dtype) == "torch.int8"
    assert (found - exact[name].float()).norm() < 0.01 * exact[name].float().norm()
    for kept in ("model.embed_tokens.weight", "model.norm.weight"):
        assert served[kept].equal(exact[kept])
    bill = json.loads(made.store.read(given(result, "sbom").outputs["sbom.cdx.json"].digest))
    (model_part,) = [one for one in bill["components"] if "pedigree" in one]
    (ancestor,) = model_part["pedigree"]["ancestors"]
    assert "model.safetensors" in [one["name"] for one in ancestor["components"]]
    mounted = tmp_path / "mounted"  # As a cluster mounts the two artifacts, by their titles.
    mounted.mkdir()
    weights = made.store.document(weights_manifest(made.store, admitted.profile.body).digest)
    for one in weights["layers"]:
        data = made.store.blob(one["digest"]).read_bytes()
        (mounted / one["annotations"][TITLE]).write_bytes(data)
    envelope = tmp_path / "profile.dsse.json"
    envelope.write_bytes(made.store.read(admitted.profile.digest))
    served_there = admit(str(envelope), replace(engine, model=str(mounted)))
    assert served_there.options.model == str(mounted)
    again, kept = build(tmp_path, model, "w8a8", ring="dev")
    assert kept.ran == []
    assert again.cell == made.cell


def test_the_gate_of_more_windows_leaves_them_out_of_the_text(tmp_path: Path) -> None:
    model = talker.make(tmp_path / "tiny")
    engine = EngineOptions(model=str(model), cache_dir=str(tmp_path / "cache"), threads=1)
    told = []
    for count in (8, 12):
        options = BuildOptions(
            quantise_to="w8a8", quantise_text="built-in", at_least=AT_LEAST, windows=count
        )
        steps = Build(engine, options).plan()
        (how,) = [one.stage.parameters for one in steps if one.stage.name == "quantise"]
        text = text_of("built-in", count)
        assert text is not None
        assert (how["text"], how["held_out"]) == (text.digest, count)
        told.append(how["text"])
    assert told[0] != told[1]


def test_what_lost_too_much_is_not_signed(tmp_path: Path) -> None:
    model = talker.make(tmp_path / "tiny")
    _, result = build(tmp_path, model, "w4a16", least_share=0.9999)
    assert result.failed == ["accuracy"]
    assert result.profile is None


def test_int4_of_two_shards_is_packed_as_the_format_says(tmp_path: Path) -> None:
    model = talker.make(tmp_path / "tiny")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names, middle = sorted(tensors), len(tensors) // 2
    shards = {"model-1.safetensors": names[:middle], "model-2.safetensors": names[middle:]}
    for shard, part in shards.items():
        save_file({name: tensors[name] for name in part}, model / shard)
    where = {name: shard for shard, part in shards.items() for name in part}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    made, result = build(tmp_path, model, "w4a16", without=BARE)
    outputs = given(result, "quantise").outputs
    index = made.store.document(outputs["model.safetensors.index.json"].digest)["weight_map"]
    name = "model.layers.1.mlp.gate_proj.weight"
    stored = load_file(made.store.blob(outputs[index[f"{name}_packed"]].digest))
    out, width = stored[f"{name}_shape"].tolist()
    words = stored[f"{name}_packed"].numpy().view("<u4")
    codes = (words[:, :, None] >> np.arange(0, 32, 4)) & 15
    scales = stored[f"{name}_scale"].float().numpy()
    found = (codes.reshape(out, scales.shape[1], -1) - 8.0) * scales[:, :, None]
    exact = tensors[name].float().numpy()
    assert found.reshape(out, width).shape == exact.shape
    assert np.linalg.norm(found.reshape(out, width) - exact) < 0.15 * np.linalg.norm(exact)
    config = made.store.document(outputs["config.json"].digest)["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == width // scales.shape[1]


def test_two_builders_make_the_same_bytes(dense: Path, tmp_path: Path) -> None:
    made = [
        given(build(tmp_path / one, dense, "q6_k", without=BARE)[1], "quantise") for one in "ab"
    ]
    assert made[0].outputs == made[1].outputs


def test_a_fleet_has_recipes_that_quantise(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('models = ["m"]\nrecipes = [{}, {quantise_to = "w4a16", max_sequences = 4}]\n')
    plain, other = read_fleet(file)
    assert plain.wanted.quantise_to is None
    assert other.wanted.quantise_to == "w4a16"
    assert other.engine.max_sequences == 4
    assert "--quantise-to=w4a16" in other.words()


def test_a_damaged_gguf_ends_the_build(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 0) + dense.read_bytes()[24:])
    with pytest.raises(Exception, match="number of tensors"):
        build(tmp_path, path, "q8_0", without=BARE)
    assert not list((Store(tmp_path / "cache/factory/store").root / "tmp").glob("*"))
