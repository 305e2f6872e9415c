"""`headrace quantise` from a model to a published file, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from headrace.base.errors import InvalidRequest, ModelFileError, UnsupportedModel, Untrusted
from headrace.cli.main import application
from headrace.factory import compare as compare_module
from headrace.factory import to_compressed, to_gguf
from headrace.factory.compare import Comparison, Interval, compare, thresholds
from headrace.factory.quantise import Quantised, text_of
from headrace.loader import sealed
from headrace.loader.gguf import GgufFile
from headrace.loader.open import open_model
from headrace.quantise import calibrate as calibrate_module
from headrace.quantise.imatrix import Importance, write_imatrix
from headrace.quantise.text import read_text, sample
from tiny import talker
from tiny.checkpoints import hf_model
from tiny.gguf_files import save_gguf

WORDS = "the quick brown fox jumps over the lazy dog and says hello to all of them\n"


def matrix(path: Path, name: str, sums: list[float], count: int = 4) -> Path:
    """Write an importance matrix of one tensor."""
    one = Importance(np.array([sums], np.float32), np.array([count], np.int64))
    with path.open("wb") as out:
        write_imatrix(out, {name: one}, "words", 1, 4)
    return path


def command(*words: Any) -> Any:
    return CliRunner().invoke(application, ["quantise", *map(str, words)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of safetensors that speaks."""
    return talker.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF in F16 with rows of 256, and of 96 that are no block of a K type; with a second
    token's head after its last layer, which no text reaches."""
    root = tmp_path_factory.mktemp("dense")
    told = json.loads((model / "tokenizer.json").read_text())
    tokens = sorted(told["model"]["vocab"], key=told["model"]["vocab"].__getitem__)
    words = {
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in told["model"]["merges"]],
    }
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64}
    sizes["vocab_size"] = len(tokens)
    names = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
    kinds = dict.fromkeys((*names, "ffn_up.weight", "ffn_gate.weight", "ffn_down.weight"), "F16")
    path = root / "small-F16.gguf"
    return save_gguf(hf_model("Qwen2", **sizes), path, "qwen2", quantise=kinds, metadata=words)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 40)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("to", ["q4_k", "q5_k", "q8_0", "mxfp4"])
def test_a_gguf_is_made_smaller_and_reported(
    to: str, dense: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / f"out-{to}.gguf"
    done = command(dense, "--to", to, "--text", text, "--out", out, "--least-share", 0)
    assert done.exit_code == 0, done.output
    assert "tokens in" in done.output
    before, after = gguf.GGUFReader(dense), gguf.GGUFReader(out)
    assert [one.name for one in after.tensors] == [one.name for one in before.tensors]
    report = json.loads((tmp_path / f"{out.name}.report.json").read_text())
    assert report["gate"]["passed"] is True
    assert report["text"]["tokens"] > 100
    assert report["bytes"] == out.stat().st_size
    assert report["comparison"]["kl"]["mean"] >= 0
    for one in report["tensors"]:
        assert one["error"] <= one["nearest"] if one["rows"] else "error" not in one
    assert sum(one["rows"] > 0 for one in report["tensors"]) >= 14
    assert "<svg" in (tmp_path / f"{out.name}.report.html").read_text()
    assert not (tmp_path / f"{out.name}.work").exists()
    open_model(str(out))


@pytest.mark.slow
def test_the_same_command_makes_the_same_bytes_and_the_spelling_does_not_matter(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    made = []
    for name in ("quantise", "quantize"):
        out = tmp_path / f"{name}.gguf"
        words = [dense, "--to", "q4_k", "--text", text, "--out", out, "--least-share", 0]
        done = CliRunner().invoke(application, [name, *map(str, words)])
        assert done.exit_code == 0, done.output
        made.append(out.read_bytes())
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["w8a8", "w4a16-g32", "fp8", "nvfp4"])
def test_a_folder_keeps_all_its_files(to: str, model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / to
    done = command(model, "--to", to, "--text", text, "--out", out, "--least-share", 0)
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (out / path.name).read_bytes() == path.read_bytes()
    exact, found = (load_file(one / "model.safetensors") for one in (model, out))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert found[name].equal(exact[name])
    report = json.loads((tmp_path / f"{to}.report.json").read_text())
    assert all(one["rows"] for one in report["tensors"])
    opened = open_model(str(out))
    assert opened.arch == open_model(str(model)).arch


def test_what_lost_too_much_is_not_published(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    given = ("--to", "q4_0", "--text", "none", "--out", out, "--least-share", 1.5)
    done = command(dense, *given, "--windows", 2)
    assert done.exit_code == 1
    assert "150.0% is asked" in done.output
    assert not out.exists()
    report = json.loads((tmp_path / "out.gguf.report.json").read_text())
    assert report["gate"]["passed"] is False


def test_a_dry_run_says_the_size_and_makes_nothing(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "[" / "x].gguf"
    given = ("--to", "q8_0", "--text", text, "--out", out)
    done = command(dense, *given, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert [*told] == [dense.name, "q8_0"] or [*told] == ["model", "q8_0"]
    assert not list(tmp_path.iterdir())
    out.parent.mkdir()
    made = command(dense, *given, "--least-share", 0, "--windows", 1)
    assert made.exit_code == 0, made.output
    assert f"{out}: " in made.output, "a path is no markup"
    size = out.stat().st_size
    assert abs(told["q8_0"]["bytes"] - size) < 4096
    assert told["q8_0"]["decode tokens/s"] > told["model"]["decode tokens/s"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "has 0 tokens"),
        (b"\xff\xfe\x00binary", "not UTF-8 at byte 0"),
        (b"a\0b", "NUL bytes"),
    ],
)
def test_a_text_that_is_none_is_refused(
    content: bytes, why: str, dense: Path, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=why):
        sample(read_text(path), open_model(str(dense)))


def test_a_pipe_is_no_text(tmp_path: Path) -> None:
    """Nobody writes to it: to open it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="must be a file"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize("line", ["[", "{}", '{"messages": 3}', '{"text": 1}', "7"])
def test_a_line_that_is_no_document_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match=r"lines\.jsonl:2"):
        read_text(path)


def test_conversations_go_through_the_chat_template(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "say hello"}, {"role": "assistant", "content": "hello"}]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(9)))
    files = open_model(str(model))
    if not files.used_templates:
        with pytest.raises(InvalidRequest, match="no chat template"):
            sample(read_text(path), files)
        return
    found = sample(read_text(path), files)
    assert found.documents == 9
    assert len({one.tobytes() for one in found.windows}) == 1


def test_a_long_text_is_sampled_evenly(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(WORDS * 3000)
    files = open_model(str(dense))
    whole, part = sample(read_text(path), files, 10**9), sample(read_text(path), files, 2048)
    assert part.available == whole.available
    assert abs(part.tokens - 2048) <= 512
    known = [one.tobytes() for one in whole.windows]
    assert all(one.tobytes() in known for one in part.windows)


def test_documents_of_mixed_length_give_the_tokens_asked_for(dense: Path, tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [WORDS * (20 if number % 40 == 0 else 1) for number in range(400)]
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in rows))
    files = open_model(str(dense))
    found = sample(read_text(path), files, 4096)
    assert 4096 <= found.tokens < 4096 + 512
    assert len({len(one) for one in found.windows}) > 1


def test_lines_end_at_a_newline_alone(tmp_path: Path) -> None:
    """Other separators of Unicode are legal in a string of JSON; a byte order mark is no text."""
    texts = ["a\u2028b", "c\u0085d"]
    rows = "\r\n".join(json.dumps({"text": one}, ensure_ascii=False) for one in texts)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert read_text(path).documents == (*texts,)
    path = tmp_path / "plain.txt"
    path.write_bytes(b"\xef\xbb\xbfplain")
    assert read_text(path).documents == ("plain",)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--text", "none", "--imatrix", "fresh"), "imatrix needs a text"),
        (("--text", "matrix", "--imatrix", "fresh"), "imatrix needs a text"),
        (("--text", "none", "--imatrix", "there"), "there exists"),
        (("--text", "built-in", "--imatrix", "below"), "is no folder"),
    ],
)
def test_a_matrix_that_cannot_be_written_is_refused_first(
    words: tuple[str, ...], error: str, dense: Path, tmp_path: Path
) -> None:
    matrix(tmp_path / "matrix", "blk.0.attn_q.weight", [1.0] * 256)
    (tmp_path / "there").write_text("mine")
    names = {one: tmp_path / one for one in ("matrix", "fresh", "there")}
    names["below"] = tmp_path / "there" / "file"
    paths = [names.get(one, one) for one in words]
    done = command(dense, "--to", "q8_0", *paths, "--out", tmp_path / "out.gguf")
    assert done.exit_code in (2, 3), done.output
    assert error in done.output
    assert sorted(one.name for one in tmp_path.iterdir()) == ["matrix", "there"]
    assert (tmp_path / "there").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--to", "q3_x"), "must be one of"),
        (("--to", "w8a8"), "is made of .safetensors files"),
        (("--text", "/nowhere/text"), "No such file"),
        (("--text", "/"), "must be a file"),
    ],
)
def test_a_wrong_wish_is_one_line(
    words: tuple[str, ...], error: str, dense: Path, tmp_path: Path
) -> None:
    done = command(dense, *words, "--out", tmp_path / "out")
    assert done.exit_code in (2, 3)
    assert error in done.output
    assert "Traceback" not in done.output


def test_a_run_goes_on_with_its_own_text_alone(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended in its second segment. Another text is refused by its digest; its own one goes on from
    there, in a folder that the command made."""
    out, real, ended = tmp_path / "new" / "out.gguf", calibrate_module._commit, []

    def killed(folder: Any, number: int, *rest: Any) -> None:
        if number == 1 and not ended:
            ended.append(folder.done)
            raise SystemError("killed")
        real(folder, number, *rest)

    monkeypatch.setattr(calibrate_module, "_commit", killed)
    given = ("--to", "q8_0", "--out", out, "--least-share", 0, "--windows", 1, "--text")
    assert isinstance(command(dense, *given, text).exception, SystemError)
    assert ended == [1]
    other = tmp_path / "other.txt"
    other.write_text(WORDS * 39)
    done = command(dense, *given, other)
    assert done.exit_code == 2
    assert "a run with another text" in done.output
    assert "another result with --out" in " ".join(done.output.split())
    assert not out.exists()
    done = command(dense, *given, text)
    assert done.exit_code == 0, done.output
    assert open_model(str(out)).arch.task == "tokens"


def test_a_full_disk_is_one_line(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little before it begins; none where the report is written, before the result appears."""
    out = tmp_path / "out.gguf"
    given = ("--to", "q8_0", "--text", "none", "--least-share", 0, "--windows", 1, "--out", out)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        done = command(dense, *given)
    assert done.exit_code != 0
    assert "1,000 are free; free some, or choose another place with --out" in done.output
    assert not [*tmp_path.iterdir()]
    (tmp_path / "out.gguf.report.json").mkdir()
    done = command(dense, *given)
    assert done.exit_code == 2, done.output
    assert "out.gguf.report.json cannot be written: Is a directory" in done.output
    assert not out.exists()
    (tmp_path / "out.gguf.report.json").rmdir()
    assert command(dense, *given).exit_code == 0
    assert json.loads((tmp_path / "out.gguf.report.json").read_text())["gate"]["passed"] is True


@pytest.mark.parametrize("every", [False, True])
def test_rows_that_are_no_whole_blocks_are_named(every: bool, tmp_path: Path) -> None:
    """They stay dense, and the report says so; a model of nothing else is refused."""
    path, width = tmp_path / "odd-F16.gguf", 48 if every else 64
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(0)
    shapes = {"attn_q": width, "ffn_down": 48}
    for name, rows in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.random((64, rows), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    if every:
        with pytest.raises(UnsupportedModel, match=r"blocks of 32.*attn_q\.weight has rows of 48"):
            to_gguf.unfit(file)
        return
    assert to_gguf.unfit(file) == ["blk.0.ffn_down.weight"]
    made = to_gguf.tensors(file, None, "q4_k")
    assert [(one.file_name, one.kind) for one in made] == [("blk.0.attn_q.weight", "Q5_0")]
    told = Quantised({}, True, [{"kind": "Q5_0", "rows": 3}], to_gguf.unfit(file)).figures()
    assert told["dense"] == ["blk.0.ffn_down.weight"]


def test_what_is_there_is_not_overwritten(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "out.gguf").write_text("mine")
    done = command(dense, "--out", tmp_path / "out.gguf")
    assert "exists" in done.output
    assert (tmp_path / "out.gguf").read_text() == "mine"


def test_a_quantised_model_is_not_quantised_again(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "once.gguf"
    given = ("--text", "none", "--least-share", 0, "--windows", 1)
    assert command(dense, "--to", "q8_0", *given, "--out", out).exit_code == 0
    done = command(out, "--to", "q8_0", *given, "--out", tmp_path / "twice.gguf")
    assert done.exit_code == 3
    assert "no matrix of the model is dense" in done.output


def test_a_folder_in_codes_is_not_quantised_again(model: Path, tmp_path: Path) -> None:
    """Its dense rest would be, under a config that no longer says how to read what was not."""
    given = ("--text", "none", "--least-share", 0, "--windows", 1)
    assert command(model, "--to", "w8a8", *given, "--out", tmp_path / "once").exit_code == 0
    done = command(tmp_path / "once", "--to", "fp8", *given, "--out", tmp_path / "twice")
    assert done.exit_code == 3
    assert "quantised already (config.json says 'compressed-tensors')" in done.output
    assert not (tmp_path / "twice").exists()


def test_the_comparison_against_torch(model: Path, tmp_path: Path) -> None:
    """A model with one matrix changed; the figures by their definitions, in float64."""
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    noise = torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(0))
    tensors[name] = (tensors[name].float() + 0.02 * noise).to(tensors[name].dtype)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    files = [open_model(str(one)) for one in (model, other)]
    rng = np.random.default_rng(0)
    windows = [rng.integers(3, files[0].arch.vocab_size, 90) for _ in range(3)]
    found = compare(*files, windows, 1)
    scorers = [compare_module.Scorer(one, 90, 1) for one in files]
    logs = [[one.log_probabilities(one.hidden(w)) for w in windows] for one in scorers]
    p, q = (np.concatenate([x[:-1] for x in one]).astype(np.float64) for one in logs)
    wanted = np.concatenate([w[1:] for w in windows])
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert found.kl.mean == pytest.approx(kl.mean(), rel=1e-4)
    assert found.kl_999 == pytest.approx(np.quantile(kl, 0.999), rel=1e-3)
    assert found.same_top.mean == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    at = np.arange(len(wanted))
    assert found.original == pytest.approx(np.exp(-p[at, wanted].mean()), rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(-q[at, wanted].mean()), rel=1e-5)
    assert found.share.low <= found.share.mean <= found.share.high
    assert found.tokens == len(wanted)
    same = compare(files[0], files[0], windows, 1)
    assert same.kl.mean == same.flips == 0
    assert same.share.mean == same.same_top.mean == 1


def test_the_gate_names_each_figure_below_its_threshold() -> None:
    one = Interval(0.98, 0.97, 0.99)
    found = Comparison(9, 2, "int8", 10.2, 10.0, one, one, 1.0, one, 0.1)
    assert len(found.fails(*thresholds(["Q8_0"]))) == 2
    assert found.fails(0.99, 0.93) == ["98.00% of the original's perplexity, 99.0% is asked"]
    assert thresholds(["Q4_K", "Q8_0"]) == (0.99, 0.93)


WIDE = {"q8_0", "int8", "w8a8", "fp8", "fp8-tensor", "fp8-block"}
KINDS = {name: [one.format] for name, one in to_compressed.TARGETS.items()} | {
    name: [*one.inner, *one.ends] for name, one in to_gguf.TARGETS.items()
}


@pytest.mark.parametrize("to", KINDS)
def test_eight_bits_are_held_to_more(to: str) -> None:
    assert thresholds(KINDS[to]) == ((0.999, 0.99) if to in WIDE else (0.99, 0.93))


def test_a_figure_that_is_not_a_number_fails() -> None:
    one, wrong = Interval(1.0, 0.9, 1.1), Interval(math.nan, math.nan, math.nan)
    found = Comparison(9, 2, "int8", math.nan, 10.0, wrong, wrong, math.nan, wrong, 0.1)
    assert [why.split(",")[0] for why in found.fails(0.0, 0.0)] == [
        "the share of the original's perplexity is not a number",
        "the share of the same top token is not a number",
    ]
    assert Comparison(9, 2, "int8", 1.0, 1.0, one, one, 0.0, one, 0.1).fails(1.0, 1.0) == []


@pytest.mark.parametrize(("factor", "why"), [(math.nan, "not a number"), (1e4, "of the original")])
def test_a_model_that_makes_no_numbers_is_not_published(
    factor: float, why: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities that are not numbers, or whose perplexity is beyond all of them."""
    real, scorers = compare_module.Scorer.log_probabilities, []

    def broken(scorer: Any, hidden: Any) -> Any:
        scorers.append(scorer)
        return real(scorer, hidden) * (1 if scorer is scorers[0] else factor)

    monkeypatch.setattr(compare_module.Scorer, "log_probabilities", broken)
    out = tmp_path / "out.gguf"
    given = ("--to", "q8_0", "--text", "none", "--out", out)
    done = command(dense, *given, "--windows", 2)
    assert done.exit_code == 1, done.output
    assert why in done.output
    assert not out.exists()
    text = (tmp_path / "out.gguf.report.json").read_text()
    assert not {"NaN", "Infinity"} & {*text.replace(",", " ").split()}


def test_the_built_in_text_leaves_the_gate_its_windows() -> None:
    from headrace.bench.accuracy import stdlib_corpus, windows

    text = text_of("built-in")
    assert text is not None
    assert text.licence == "PSF-2.0"
    for piece in windows(stdlib_corpus()[0], 1500, 8):
        assert piece not in text.documents[0]
    longer = text_of("built-in", 12)
    assert longer is not None
    assert longer.digest != text.digest
    for piece in windows(stdlib_corpus()[0], 1500, 12):
        assert piece not in longer.documents[0]
    assert text_of("none") is None


def test_an_importance_matrix_is_written_and_read(dense: Path, text: Path, tmp_path: Path) -> None:
    """Its parts have llama.cpp's names. Read again, it needs no pass; a text beats none."""
    matrix, made = tmp_path / "words.imatrix.gguf", {}
    given = ("--to", "q4_0", "--least-share", 0, "--windows", 1)
    for name, words in {
        "text": (text, "--imatrix", matrix),
        "matrix": (matrix,),
        "none": ("none",),
    }.items():
        out = tmp_path / f"{name}.gguf"
        done = command(dense, *given, "--out", out, "--text", *words)
        assert done.exit_code == 0, done.output
        made[name] = json.loads((tmp_path / f"{name}.gguf.report.json").read_text())
    read = gguf.GGUFReader(matrix)
    assert read.fields["general.type"].contents() == "imatrix"
    assert read.fields["imatrix.chunk_count"].contents() == made["text"]["text"]["windows"]
    arrays = {one.name: one.data for one in read.tensors}
    for one in made["text"]["tensors"]:
        if not one["rows"]:
            continue
        sums, counts = (arrays[f"{one['tensor']}.{part}"] for part in ("in_sum2", "counts"))
        assert counts.reshape(-1).tolist() == [one["rows"]]
        assert sums.min() >= 0
    assert made["matrix"]["text"]["name"] == matrix.name
    found = {name: one["comparison"]["kl"]["mean"] for name, one in made.items()}
    assert found["text"] < found["none"]
    (tmp_path / "bad.gguf").write_bytes(dense.read_bytes())
    done = command(dense, *given, "--out", tmp_path / "x.gguf", "--text", tmp_path / "bad.gguf")
    assert done.exit_code == 3
    assert "must be imatrix" in done.output


def test_a_matrix_of_another_model_is_refused(dense: Path, model: Path, tmp_path: Path) -> None:
    other = matrix(tmp_path / "other.gguf", "blk.77.attn_q.weight", [1.0] * 256)
    for one, to in ((dense, "q8_0"), (model, "w8a8")):
        done = command(one, "--to", to, "--text", other, "--out", tmp_path / "out")
        assert done.exit_code == 2, done.output
        assert "blk.77.attn_q.weight" in done.output
        assert not (tmp_path / "out").exists()


def test_a_matrix_of_safetensors_is_read_again(model: Path, text: Path, tmp_path: Path) -> None:
    made, reports = tmp_path / "words.gguf", []
    given = ("--to", "w4a16-g32", "--least-share", 0, "--windows", 1)
    for name, words in {"a": (text, "--imatrix", made), "b": (made,)}.items():
        done = command(model, *given, "--out", tmp_path / name, "--text", *words)
        assert done.exit_code == 0, done.output
        reports.append(json.loads((tmp_path / f"{name}.report.json").read_text()))
    rows = [{one["tensor"]: one["rows"] for one in each["tensors"]} for each in reports]
    assert rows[0] == rows[1]
    assert min(rows[1].values()) > 0
    assert not [one for one in tmp_path.iterdir() if one.name.endswith(".part")]


@pytest.mark.parametrize(
    ("sums", "count"), [([3e38] * 256, 4), ([1.0] * 256, 2**60)], ids=["sums", "counts"]
)
def test_sums_and_counts_without_bounds_are_refused(
    sums: list[float], count: int, tmp_path: Path
) -> None:
    path = matrix(tmp_path / "wide.gguf", "blk.0.attn_q.weight", sums, count)
    with pytest.raises(ModelFileError, match=r"wide\.gguf: blk\.0\.attn_q"):
        read_text(path)


@pytest.mark.parametrize("to", ["q8_0", "w4a16-g32"])
def test_a_result_with_other_bytes_is_refused(
    to: str, dense: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.gguf" if to == "q8_0" else tmp_path / "out"
    given = ("--to", to, "--text", "none", "--out", out, "--least-share", 0, "--windows", 1)
    done = command(dense if to == "q8_0" else model, *given)
    assert done.exit_code == 0, done.output
    weights = out if out.is_file() else out / "model.safetensors"
    right = weights.read_bytes()
    for at in (len(right) // 2, len(right) - 1):
        changed = bytearray(right)
        changed[at] ^= 1
        weights.write_bytes(changed)
        with pytest.raises(Untrusted, match="other bytes than when it was quantised"):
            open_model(str(out))
    weights.write_bytes(right)
    assert open_model(str(out)).arch.task == "tokens"
    if to == "q8_0":
        # A digest of something else is no digest of this file.
        at = right.index(sealed.ENTRY) + len(sealed.ENTRY)
        weights.write_bytes(right[:at] + b"0" * 64 + right[at + 64 :])
        with pytest.raises(Untrusted, match="other bytes"):
            open_model(str(out))
        assert gguf.GGUFReader(weights).get_field(sealed.KEY) is not None
        return
    weights.write_bytes(right.replace(right[sealed.SHARD : sealed.SHARD + 64], b"x" * 64, 1))
    with pytest.raises(Untrusted, match="sha256"):
        open_model(str(out))
    # What another tool writes from it is another file, whose bytes nobody promised.
    save_file(load_file(out / "model.safetensors"), weights, {"format": "pt"})
    assert open_model(str(out)).arch.task == "tokens"
