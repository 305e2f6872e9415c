"""`headrace convert`: the same numbers in another format, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrace.base.errors import DownloadError
from headrace.cli.main import application
from headrace.factory import convert
from headrace.factory.moves import Move, held_of
from headrace.factory.to_compressed import TARGETS
from headrace.kernels.weights import BlockWeight
from headrace.loader.open import open_model
from headrace.loader.weight_source import read_weight
from headrace.loader.weights import load_weights
from headrace.quantise.blocks import FORMATS
from headrace.text.load import load_tokenizer
from headrace.text.template import ChatTemplates
from tiny import quantised, talker
from tiny.checkpoints import hf_model
from tiny.gguf_files import save_gguf

WORDS = "the quick brown fox says hello"


def command(*words: Any) -> Any:
    return CliRunner().invoke(application, ["convert", *map(str, words)])


def numbers(model: Path) -> dict[str, np.ndarray]:
    """Every number of a model, as it is loaded."""
    found = dict(load_weights(open_model(str(model))))
    return {name: held_of(read_weight(one)).values for name, one in found.items()}


def equal(first: Path, second: Path) -> bool:
    one, two = numbers(first), numbers(second)
    return one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Llama in F32 that speaks; rows of 64 and 128."""
    return talker.make(tmp_path_factory.mktemp("model") / "tiny")


def vocabulary(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(told["model"]["vocab"], key=told["model"]["vocab"].__getitem__)
    return {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in told["model"]["merges"]],
    }


@pytest.fixture(scope="module")
def make(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GGUF of a Llama whose matrices are of a type."""
    root, words = tmp_path_factory.mktemp("gguf"), vocabulary(folder)

    def made(kind: str, model: str = "Llama") -> Path:
        path = root / f"{model}-{kind}.gguf"
        if path.exists():
            return path
        size = {"vocab_size": len(words["tokenizer.ggml.tokens"]), "intermediate_size": 128}
        names = [f"attn_{one}.weight" for one in ("q", "k", "v", "output")]
        names += [f"ffn_{one}.weight" for one in ("gate", "up", "down")]
        kinds = dict.fromkeys(names, kind)
        source = hf_model(model, **size)
        return save_gguf(source, path, model.lower(), quantise=kinds, metadata=words)

    return made


@pytest.mark.parametrize(
    ("was", "to"),
    [
        ("Q4_0", "f32"), ("Q4_1", "f32"), ("Q4_0", "q8_0"), ("Q4_0", "q5_0"), ("Q5_0", "q8_0"),
        ("Q4_0", "w4a16-g32"), ("Q8_0", "safetensors"), ("F16", "f32"), ("BF16", "f32"),
    ],
)  # fmt: skip
def test_a_gguf_moves_without_loss(was: str, to: str, make: Any, tmp_path: Path) -> None:
    model = make(was)
    out = tmp_path / ("out" if to in (*TARGETS, "safetensors") else "out.gguf")
    done = command(model, "--to", to, "--out", out)
    assert done.exit_code == 0, done.output
    assert equal(model, out)
    report = json.loads((tmp_path / f"{out.name}.report.json").read_text())
    assert report["lossless"]
    assert report["moved"] >= 14
    assert report["proof"]["changed"] == 0
    assert report["proof"]["numbers"] == sum(one.size for one in numbers(model).values())
    if out.suffix == ".gguf" and to != "f32":
        kinds = {one.tensor_type.name for one in gguf.GGUFReader(out).tensors}
        assert to.upper() in kinds
        assert was not in kinds


@pytest.mark.parametrize("model", ["Llama", "Qwen2", "Qwen3"])
def test_transformers_computes_the_same_from_the_folder(
    model: str, make: Any, tmp_path: Path
) -> None:
    """A GGUF of a random model becomes a folder; theirs and the original agree bit for bit."""
    import transformers

    source, out = make("F32", model), tmp_path / "out"
    done = command(source, "--to", "safetensors", "--out", out)
    assert done.exit_code == 0, done.output
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    size = open_model(str(source)).arch.vocab_size
    exact = hf_model(model, vocab_size=size, intermediate_size=128)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, exact(ids).logits)
    words = transformers.AutoTokenizer.from_pretrained(out)
    assert words.decode(words(WORDS)["input_ids"]) == WORDS


def test_there_and_back_are_the_same_numbers(make: Any, tmp_path: Path) -> None:
    """Q4_0 to INT4 of a folder, and back to blocks; the folder to F32 and back to codes."""
    model = make("Q4_0")
    steps = {"w4": "w4a16-g32", "back.gguf": "q4_0"}
    for name, to in steps.items():
        done = command(model, "--to", to, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        assert equal(model, tmp_path / name)
        model = tmp_path / name
    for name, to in {"dense.gguf": "f32", "again.gguf": "q4_0"}.items():
        done = command(model, "--to", to, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        model = tmp_path / name
    assert equal(make("Q4_0"), model)


@pytest.mark.parametrize(
    ("form", "to"),
    [("awq", "w4a16-asym"), ("gptq", "w4a16"), ("int4 zeros", "f32"), ("int4", "q4_0")],
)
def test_a_checkpoint_of_another_tool_moves(form: str, to: str, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / ("out.gguf" if to == "q4_0" else "out")
    exact = quantised.folder(model, quantised.FORMS[form])
    if to == "q4_0":
        words = talker.make(tmp_path / "words") / "tokenizer.json"
        (model / "tokenizer.json").write_bytes(words.read_bytes())
    done = command(model, "--to", to, "--out", out)
    assert done.exit_code == 0, done.output
    assert equal(model, out)
    if to == "f32":
        found = load_file(out / "model.safetensors")
        assert all(found[name].equal(one.float()) for name, one in exact.items())


def test_mxfp4_moves_to_nvfp4_numbers() -> None:
    """Every byte of MXFP4 of a range of scales that e4m3 has."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (8, 4, 17), np.uint8)
    data[:, :, 0] = rng.integers(120, 130, (8, 4))
    weight = BlockWeight("MXFP4", data.reshape(8, 68), (8, 128))
    for kind, coding in (("nvfp4", TARGETS["nvfp4"]), ("Q8_0", None)):
        one = Move("model.layers.0.w.weight", (8, 128), "MXFP4", kind, lambda: weight, coding)
        one.data()
        assert one.changed == 0, kind


@pytest.mark.parametrize("kind", [name for name, one in FORMATS.items() if one.given])
def test_numbers_off_the_grid_are_counted(kind: str) -> None:
    w = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    one = Move("x.weight", (4, 64), "F32", kind, lambda: w)
    one.data()
    said = one.said()
    assert not said["lossless"]
    assert 0 < said["error"] < 0.02
    assert said["changed"] > 200


def test_what_would_be_lost_is_named_and_not_published(make: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = command(make("Q4_1"), "--to", "q8_0", "--out", out)
    assert done.exit_code == 1, done.output
    assert "Q4_1 to Q8_0 changes" in done.output
    assert "--lossy allows it" in done.output
    assert not [*tmp_path.iterdir()]
    done = command(make("Q4_1"), "--to", "q8_0", "--out", out, "--lossy", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["lossless"]
    assert 0 < report["proof"]["changed"] < report["proof"]["numbers"]
    lost = [one for one in report["tensors"] if not one["lossless"]]
    assert sum(one["changed"] for one in lost) == report["proof"]["changed"]
    assert all(0 < one["error"] < 1e-3 for one in lost)
    open_model(str(out))


def test_a_dry_run_makes_nothing(make: Any, tmp_path: Path) -> None:
    done = command(make("Q4_0"), "--to", "bf16", "--out", tmp_path / "out.gguf", "--dry-run")
    assert done.exit_code == 1
    assert "Q4_0 to BF16 changes" in done.output
    done = command(make("BF16"), "--to", "f32", "--out", tmp_path / "out.gguf", "--dry-run")
    assert done.exit_code == 0, done.output
    assert not [*tmp_path.iterdir()]


def test_a_folder_moves_to_a_gguf(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    done = command(folder, "--to", "gguf", "--out", out)
    assert done.exit_code == 0, done.output
    assert equal(folder, out)
    was, now = (open_model(str(one)) for one in (folder, out))
    assert (was.arch, was.chat_template) == (now.arch, now.chat_template)
    assert {*was.eos_ids} == {*now.eos_ids}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--to", "gguf"), "is of gguf already"),
        (("--to", "q4_0"), "nothing to do"),
        (("--to", "q3_x"), "must be one of"),
        (("--to", "f32", "--out", "name"), "must end in .gguf"),
        (("--to", "f32", "--out", "there.gguf"), "exists"),
    ],
)
def test_a_wrong_wish_is_one_line(
    words: tuple[str, ...], why: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.gguf").write_text("mine")
    done = command(make("Q4_0"), *words)
    assert done.exit_code in (2, 3), done.output
    assert why in done.output
    assert (tmp_path / "there.gguf").read_text() == "mine"


@pytest.mark.parametrize("name", ["out.convert", "model/out"])
def test_nothing_of_the_users_is_in_its_way(name: str, folder: Path, tmp_path: Path) -> None:
    """A folder that has the name of the work in progress, here the model itself, stays as it is;
    and no result is put into its model."""
    model = tmp_path / name.partition("/")[0]
    shutil.copytree(folder, model)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    out = tmp_path / name.removesuffix(".convert")
    done = command(model, "--to", "bf16", "--lossy", "--out", out)
    assert done.exit_code == 2, done.output
    assert "choose another with --out" in " ".join(done.output.split())
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_numbers_beyond_a_formats_range_leave_the_report_json() -> None:
    big = np.array([[1e38, 1.0, np.nan]], np.float32)
    move = Move("big.weight", big.shape, "F32", "F16", lambda: big)
    (stored,) = move.data()
    assert stored[0, :2].tolist() == [65504.0, 1.0]  # The nearest, and no infinity.
    assert move.changed == 1  # The NaN is one afterwards.
    assert move.said()["error"] is None
    json.dumps(move.said(), allow_nan=False)


def test_norms_that_a_gguf_has_with_one_added_are_counted(tmp_path: Path) -> None:
    """1 + w has fewer bits of a small w."""
    norm = np.array([2.0**-30, 0.5], np.float32)
    move = Move("norm.weight", norm.shape, "F32", "F32", lambda: norm, offset=1.0)
    assert not move.stays
    (stored,) = move.data()
    assert stored.reshape(-1).tolist() == [1.0, 1.5]
    assert move.changed == 1


def test_space_is_asked_for_the_result_alone(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(convert, "check_space", lambda path, size, option: asked.append(size))
    out = tmp_path / "out.gguf"
    assert command(make("Q4_0"), "--to", "q8_0", "--out", out).exit_code == 0
    assert 0.5 < asked[0] / out.stat().st_size <= 1.0


def test_a_mixture_stays_in_its_kind_of_file(tmp_path: Path) -> None:
    path = save_gguf(hf_model("Qwen3Moe"), tmp_path / "moe.gguf", "qwen3moe")
    done = command(path, "--to", "safetensors", "--out", tmp_path / "out")
    assert done.exit_code == 3, done.output
    assert "cannot move to the other kind of file" in done.output
    assert not (tmp_path / "out").exists()
    done = command(path, "--to", "bf16", "--out", tmp_path / "narrow.gguf", "--lossy")
    assert done.exit_code == 0, done.output
    done = command(tmp_path / "narrow.gguf", "--to", "f32", "--out", tmp_path / "wide.gguf")
    assert done.exit_code == 0, done.output
    assert equal(tmp_path / "narrow.gguf", tmp_path / "wide.gguf")


def test_a_result_that_reads_otherwise_is_not_published(folder: Path, tmp_path: Path) -> None:
    """A folder whose tokenizer GGUF has no name for."""
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    told = json.loads((other / "tokenizer.json").read_text())
    told["pre_tokenizer"] = {"type": "Whitespace"}
    (other / "tokenizer.json").write_text(json.dumps(told))
    done = command(other, "--to", "gguf", "--out", tmp_path / "out.gguf")
    assert done.exit_code == 3, done.output
    assert "tokenizer.json cannot move to a GGUF" in done.output
    assert not (tmp_path / "out.gguf").exists()


def test_tied_and_other_files_of_a_folder_stay(folder: Path, tmp_path: Path) -> None:
    tensors = {
        name: one.bfloat16() for name, one in load_file(folder / "model.safetensors").items()
    }
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    for path in folder.iterdir():
        (narrow / path.name).write_bytes(path.read_bytes())
    (narrow / "NOTICE").write_text("kept")
    save_file(tensors, narrow / "model.safetensors", {"format": "pt"})
    done = command(narrow, "--to", "f32", "--out", tmp_path / "wide")
    assert done.exit_code == 0, done.output
    assert equal(narrow, tmp_path / "wide")
    assert (tmp_path / "wide" / "NOTICE").read_text() == "kept"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_real_model_is_a_folder_that_transformers_reads_alike(name: str, tmp_path: Path) -> None:
    """Every number of their own reader of the GGUF, and the ids of a text."""
    import transformers

    try:
        source = open_model(name)
    except DownloadError as error:
        pytest.skip(str(error))
    out = tmp_path / "out"
    done = command(source.path, "--to", "safetensors", "--out", out)
    assert done.exit_code == 0, done.output
    given = {"dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, **given)
    named = {"gguf_file": source.path.name}
    other = transformers.AutoModelForCausalLM.from_pretrained(source.path.parent, **named, **given)
    mine, exact = theirs.state_dict(), other.state_dict()
    assert mine.keys() == exact.keys()
    assert [key for key, one in exact.items() if not mine[key].equal(one)] == []
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    text = f"def f(x):\n\treturn x + 12345  # {WORDS}, naïve 水 🙂\n"
    assert tokenizer(text)["input_ids"] == load_tokenizer(source.tokenizer).encode(text)
    chat = [{"role": "user", "content": WORDS}]
    ids = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    rendered = ChatTemplates(source).render(chat, add_generation_prompt=True)
    assert ids == rendered
