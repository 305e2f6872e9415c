"""From a name to a `ModelFiles`: what is read of the small files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import ModelFileError, ModelNotFound, UnsupportedModel
from headrace.engine.loop.prediction import tensor_bytes
from headrace.loader import open_model
from headrace.loader.gguf_model import END_OF_TURN, end_of_turn
from headrace.loader.hub_model import split_hub_name
from headrace.loader.weights import load_weights
from tiny.checkpoints import hf_model, save_folder
from tiny.gguf_files import VOCABULARY, save_gguf

TEMPLATE = "{{ messages }}"


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model("Qwen2")


def test_folder(model: Any, tmp_path: Path) -> None:
    save_folder(
        model,
        tmp_path,
        **{
            "generation_config.json": {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.9,
                "eos_token_id": [2, 5],
                "max_length": 100,
            },
            "README.md": "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: no\n",
            "chat_template.jinja": TEMPLATE,
        },
    )
    files = open_model(str(tmp_path))
    assert files.format == "safetensors"
    assert files.name == str(tmp_path)
    assert files.tokenizer == tmp_path / "tokenizer.json"
    assert files.chat_template == TEMPLATE
    assert files.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.bos_id == 1
    assert not files.add_bos
    assert files.eos_ids == (2, 5, 317)
    assert files.generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    assert files.licence == "apache-2.0"


HARMONY = ["<|channel|>", "<|end|>", "<|call|>", "<|return|>"]


@pytest.mark.parametrize("channels", [True, False])
def test_a_message_of_harmony_ends_no_turn(model: Any, tmp_path: Path, channels: bool) -> None:
    """The token that ends a turn elsewhere (Phi) ends a message of gpt-oss, of both kinds of
    file."""
    named = dict(enumerate(HARMONY if channels else HARMONY[1:2], 4 if channels else 5))
    added = [{"id": 1, "content": "<s>"}, {"id": 2, "content": "</s>"}]
    added += [{"id": at, "content": text} for at, text in named.items()]
    tokenizer = {
        "added_tokens": added,
        "post_processor": None,
        "model": {"type": "BPE", "vocab": {"a": 3}, "merges": []},
    }
    save_folder(model, tmp_path / "hf", **{"tokenizer.json": tokenizer})
    expected = (2, 7, 6) if channels else (2, 5)
    assert open_model(str(tmp_path / "hf")).eos_ids == expected
    tokens = [named.get(at, f"t{at}") for at in range(320)]
    assert end_of_turn(tokens.__contains__) == (
        ("<|return|>", "<|call|>", "<|endoftext|>") if channels else END_OF_TURN
    )


def test_greedy_by_the_authors(model: Any, tmp_path: Path) -> None:
    save_folder(model, tmp_path, **{"generation_config.json": {"do_sample": False}})
    assert open_model(str(tmp_path)).generation == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("found", "template"),
    [
        (TEMPLATE, TEMPLATE),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], "t"),
        ([], None),
        (None, None),
    ],
)
def test_chat_template_in_the_config(
    model: Any, tmp_path: Path, found: Any, template: str | None
) -> None:
    config = {"bos_token": "<s>", "chat_template": found}
    save_folder(model, tmp_path, **{"tokenizer_config.json": config})
    assert open_model(str(tmp_path)).chat_template == template


def test_bos_said_by_the_config_or_the_post_processor(model: Any, tmp_path: Path) -> None:
    save_folder(model, tmp_path)
    assert not open_model(str(tmp_path)).add_bos
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "Sequence",
        "processors": [
            {"type": "ByteLevel"},
            {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A"}},
                ],
            },
        ],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_model(str(tmp_path)).add_bos
    config = {"bos_token": "<s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not open_model(str(tmp_path)).add_bos


def test_gguf(model: Any, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": TEMPLATE,
        "general.license": "mit",
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.eot_token_id": 4,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 7,
    }
    files = open_model(str(save_gguf(model, tmp_path / "m.gguf", "qwen2", metadata=metadata)))
    assert files.format == "gguf"
    assert files.weights == (tmp_path / "m.gguf",)
    assert files.chat_template == TEMPLATE
    assert files.special == {"bos_token": "t1", "eos_token": "t2"}
    assert (files.bos_id, files.add_bos) == (1, True)
    assert files.eos_ids == (2, 4, 317, 318)
    assert files.generation == {"temperature": 0.5, "top_k": 7}
    assert files.licence == "mit"
    assert isinstance(files.tokenizer, dict)
    assert len(files.tokenizer["tokenizer.ggml.tokens"]) == 320


@pytest.mark.parametrize("mark", ["<turn|>", "<|eot|>", "<|eom|>", "<end_of_turn>"])
def test_a_turn_ends_with_what_ends_turns_in_its_family(
    model: Any, tmp_path: Path, mark: str
) -> None:
    """Files of Gemma 4 and Llama 4 name the end of a text alone."""
    tokens = [*VOCABULARY["tokenizer.ggml.tokens"]]
    types = [*VOCABULARY["tokenizer.ggml.token_type"]]
    tokens[9], types[9] = mark, 3
    told = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    file = save_gguf(model, tmp_path / "m.gguf", "qwen2", metadata=told)
    assert 9 in open_model(str(file)).eos_ids
    types[9] = 1  # An ordinary word.
    file = save_gguf(model, tmp_path / "n.gguf", "qwen2", metadata=told)
    assert 9 not in open_model(str(file)).eos_ids


def test_a_header_is_read_once(model: Any, tmp_path: Path) -> None:
    path = save_gguf(model, tmp_path / "m.gguf", "qwen2")
    files = open_model(str(path))
    path.unlink()
    sizes, _ = tensor_bytes(files)
    assert {name for name, _ in load_weights(files)} == set(sizes)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"tokenizer.ggml.eot_token_id": 320}, "eot_token_id is 320; must be from 0 to 319"),
        ({"split.count": 3}, "one part of 3"),
        ({"tokenizer.chat_template": 7}, "chat_template must be a string"),
    ],
)
def test_gguf_metadata_that_lies(
    model: Any, tmp_path: Path, metadata: dict[str, Any], says: str
) -> None:
    path = save_gguf(model, tmp_path / "m.gguf", "qwen2", metadata=metadata)
    with pytest.raises(ModelFileError, match=says):
        open_model(str(path))


@pytest.mark.parametrize(
    "name",
    ["", "nonsense", "a/b/c", "x\0y", "folder/file.gguf", "n" * 9999, "n" * 300, "~nobody-here/x"],
)
def test_unknown_names_say_what_is_accepted(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        open_model(name)
    assert "headrace models lists them" in str(caught.value)
    assert ".gguf file" in str(caught.value)
    assert "hub id" in str(caught.value)


def test_hub_names() -> None:
    assert split_hub_name("org/name") == ("org/name", "")
    assert split_hub_name("org/name:q8_0") == ("org/name", "q8_0")
    assert split_hub_name("org/name:a-b.gguf") == ("org/name", "a-b.gguf")
    for name in ("name", "../name", "org/..", "a/b/c", "/etc/passwd", "org/na me", "org/", "-o/x"):
        assert split_hub_name(name) is None


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_pickled_weights_are_never_read(model: Any, tmp_path: Path, suffix: str) -> None:
    save_folder(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    weights = tmp_path / f"pytorch_model{suffix}"
    weights.write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(ModelFileError, match=r"pickled.*never reads pickle.*safetensors"):
        open_model(str(tmp_path))
    with pytest.raises(ModelFileError, match=r"neither a \.gguf file nor a folder"):
        open_model(str(weights))


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no safetensors file"),
    ],
)
def test_a_folder_that_is_not_whole(model: Any, tmp_path: Path, missing: str, says: str) -> None:
    save_folder(model, tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelFileError, match=says):
        open_model(str(tmp_path))


@pytest.mark.parametrize("content", ["", "[1]", "{", "nul", "[" * 100_000])
def test_a_config_that_is_not_json(model: Any, tmp_path: Path, content: str) -> None:
    save_folder(model, tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        open_model(str(tmp_path))


@pytest.mark.parametrize(
    "mapping",
    [
        {"a": "../../etc/passwd.safetensors"},
        {"a": "/etc/x.safetensors"},
        {"a": "x.bin"},
        {"a": "gone.safetensors"},
        {},
        [],
        {"a": 3},
    ],
)
def test_an_index_that_points_elsewhere(model: Any, tmp_path: Path, mapping: Any) -> None:
    save_folder(model, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(ModelFileError, match="index"):
        open_model(str(tmp_path))


def test_a_lone_safetensors_file_and_an_unknown_architecture(model: Any, tmp_path: Path) -> None:
    save_folder(model, tmp_path)
    with pytest.raises(ModelFileError, match="name the folder"):
        open_model(str(tmp_path / "model.safetensors"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    with pytest.raises(UnsupportedModel, match=r"'rwkv'; supported: .*bert, cohere, cohere2"):
        open_model(str(tmp_path))


def test_junk_in_the_tokenizer_files(model: Any, tmp_path: Path) -> None:
    save_folder(model, tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: not UTF-8"):
        open_model(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": "x"}, 3, {}]}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 3, "chat_template": {}}')
    with pytest.raises(ModelFileError, match="chat_template"):
        open_model(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 3}')
    assert open_model(str(tmp_path)).special == {}
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": ')
    with pytest.raises(ModelFileError, match="added_tokens is not JSON"):
        open_model(str(tmp_path))
