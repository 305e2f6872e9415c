"""The whole command over mixtures, latent heads and hybrids; peers read what it makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.torch import load_file
from test_command import command, dense, model, text  # noqa: F401 - fixtures
from test_statistic import FAMILIES

from agents.environments import LLAMA_CPP, python_of
from headrace import LLM, SamplingParams
from headrace.loader.open import open_model
from tiny.checkpoints import hf_model, save_folder

pytestmark = pytest.mark.slow
PROMPT = list(range(20, 60))
NEAR = 0.05
"""Between log-probabilities: both round activations to eight bits, in other groups."""


@pytest.mark.parametrize("to", ["w8a8", "w4a16-g32"])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", "DeepseekV3", "Lfm2"])
def test_a_family_is_quantised_whole(
    kind: str,
    to: str,
    model: Path,  # noqa: F811
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    made = hf_model(kind, **FAMILIES[kind], vocab_size=vocabulary)
    folder, out = save_folder(made, tmp_path / "model"), tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    given = ("--text", text, "--out", out, "--least-share", 0, "--windows", 2)
    done = command(folder, "--to", to, *given)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["calibrated"] == report["matrices"]
    assert report["comparison"]["kl"]["mean"] < (0.01 if to == "w8a8" else 0.3)
    exact, found = (load_file(one / "model.safetensors") for one in (folder, out))
    coded = {one["tensor"] for one in report["tensors"]}
    assert coded < exact.keys()
    factored = {name for name in exact if name.endswith("norm.weight")}
    for name in exact.keys() - coded - factored:
        assert found[name].equal(exact[name]), name
    assert open_model(str(out)).arch == open_model(str(folder)).arch


@pytest.mark.parametrize("to", ["w8a8", "w4a16-g32", "fp8", "fp8-block", "nvfp4"])
def test_transformers_reads_it_alike(to: str, model: Path, text: Path, tmp_path: Path) -> None:  # noqa: F811
    """Our tokens are as likely to transformers, with compressed-tensors' decoders and activations
    as they come. (5.24 refuses zero points, also those of llm-compressor.)"""
    import torch
    import transformers

    out = tmp_path / "out"
    given = ("--text", text, "--out", out, "--least-share", 0, "--windows", 1)
    done = command(model, "--to", to, *given)
    assert done.exit_code == 0, done.output
    ours = likely(out)
    config = json.loads((out / "config.json").read_text())
    if to != "w8a8":  # They read eight-bit weights without such activations as another format.
        config["quantization_config"]["config_groups"]["group_0"].pop("input_activations", None)
    (out / "config.json").write_text(json.dumps(config))
    dtype = torch.bfloat16 if to == "nvfp4" else torch.float32
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
    ids = torch.tensor([[*PROMPT, *(token for token, _ in ours)]])
    with torch.no_grad():
        rows = torch.log_softmax(theirs(ids).logits[0].double(), -1)
    for place, (token, logprob) in enumerate(ours, len(PROMPT) - 1):
        assert rows[place, token].item() == pytest.approx(
            logprob, abs=NEAR if to != "w8a8" else 0.2
        )


def likely(path: Path) -> list[tuple[int, float]]:
    """The greedy tokens after the prompt, with their log-probabilities."""
    how = {"kv_dtype": "float32", "max_context": 256, "threads": 1, "context_cache": "0"}
    with LLM(str(path), max_sequences=1, speculate="off", **how) as llm:
        wish = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
        (output,) = llm.generate([PROMPT], wish)
    (choice,) = output.outputs
    return [
        (token, one.logprob) for token, one in zip(choice.token_ids, choice.logprobs, strict=True)
    ]


@pytest.fixture(scope="module")
def blocks(dense: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:  # noqa: F811
    root, found = tmp_path_factory.mktemp("blocks"), {}
    for to in ("q8_0", "q6_k", "q5_k", "q4_k", "q5_0", "q4_0", "iq4_nl", "mxfp4"):
        found[to] = root / f"{to}.gguf"
        given = ("--text", text, "--out", found[to], "--least-share", 0, "--windows", 1)
        done = command(dense, "--to", to, *given)
        assert done.exit_code == 0, done.output
    return found


@pytest.fixture(scope="module")
def theirs(blocks: dict[str, Path]) -> dict[str, list[tuple[int, float]]]:
    lines = "".join(json.dumps([str(path), PROMPT, 12]) + "\n" for path in blocks.values())
    reader = Path(__file__).parents[1] / "loader" / "llamacpp_tokens.py"
    words = [str(python_of(LLAMA_CPP)), str(reader)]
    done = subprocess.run(words, input=lines, capture_output=True, text=True, check=True)
    return dict(zip(blocks, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("to", ["q8_0", "q6_k", "q5_k", "q4_k", "q5_0", "q4_0", "iq4_nl", "mxfp4"])
def test_llamacpp_reads_it_alike(to: str, blocks: dict[str, Path], theirs: dict[str, Any]) -> None:
    """The same tokens as we from one file, as likely, until two are as likely as each other."""
    assert isinstance(theirs[to], list), theirs[to]
    assert {one.tensor_type.name for one in gguf.GGUFReader(blocks[to]).tensors} > {"F32"}
    for (token, logprob), (other, theirs_) in zip(likely(blocks[to]), theirs[to], strict=True):
        if token != other:
            assert abs(logprob - theirs_) < NEAR
            break
        assert logprob == pytest.approx(theirs_, abs=NEAR)
