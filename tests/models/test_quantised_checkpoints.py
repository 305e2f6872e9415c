"""Whole models of quantised safetensors on the CPU kernels, without torch: the values of every
matrix against its definition in float64, answers against the reference and against transformers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.base.config import EngineOptions
from headrace.base.errors import HeadraceError, OptionError
from headrace.base.hardware import hardware
from headrace.engine.loop.build import build
from headrace.engine.loop.start import explain
from headrace.kernels.checkpoint_values import values
from headrace.loader import open_model
from headrace.loader.quantised_safetensors import QuantisedMatrix
from headrace.loader.weights import load_weights
from oracle.checkpoints import FORMS as FP8_FORMS
from oracle.checkpoints import fp8_folder
from tiny.checkpoints import hf_model, save_folder
from tiny.families import with_words
from tiny.formats import WORDS
from tiny.gguf_files import save_gguf
from tiny.quantised import FORMS, WIDE, folder

EVERY = [*FORMS, *(f"fp8 {form}" for form in FP8_FORMS)]
PROMPT = [(7 * at + 3) % 300 for at in range(40)]


def write(place: Path, form: str, kind: str = "Qwen2", **more: object) -> dict[str, torch.Tensor]:
    if form in FORMS:
        return folder(place, FORMS[form], kind, **more)
    dense = fp8_folder(place, form.removeprefix("fp8 "), kind, **WIDE, **more)
    with_words(place, 320)
    return dense


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Form → (folder, the values of its tensors)."""
    found = {}
    for form in EVERY:
        place = tmp_path_factory.mktemp("model")
        found[form] = place, write(place, form)
    return found


@pytest.mark.parametrize("form", EVERY)
def test_every_matrix_is_what_its_format_defines(made: Any, form: str) -> None:
    place, dense = made[form]
    found = dict(load_weights(open_model(str(place))))
    matrices = {name: one for name, one in found.items() if isinstance(one, QuantisedMatrix)}
    assert len(matrices) == 2 * 7
    for name, matrix in matrices.items():
        np.testing.assert_array_equal(values(matrix.read()), dense[name].float().numpy())


LOGPROBS = """
import json, sys
sys.modules["torch"] = None
from headrace import LLM, SamplingParams
for model in sys.argv[2:]:
    with LLM(model, max_context=128, max_sequences=4, threads=2, kv_dtype="float32") as llm:
        kernels = {one.value for one in llm.decisions if one.name.startswith("kernels.")}
        asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
        answer, = llm.generate([json.loads(sys.argv[1])], asked)
        told = [one.logprob for one in answer.prompt_logprobs if one is not None]
        print(json.dumps([told, answer.outputs[0].token_ids, "ref" in kernels]))
"""


def logprobs(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Log-probability of each token of the prompt behind the first, by transformers in fp32."""
    model = hf_model("Qwen2", **WIDE)
    model.load_state_dict({name: one.float() for name, one in state.items()})
    with torch.no_grad():
        found = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]


def test_answers_without_torch(made: Any) -> None:
    """fp8 is multiplied with floats; integers with activations in eight bits, which costs a
    hundredth in these models of random weights."""
    paths = [str(place) for place, _ in made.values()]
    command = [sys.executable, "-c", LOGPROBS, json.dumps(PROMPT), *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for (form, (_, dense)), line in zip(made.items(), done.stdout.splitlines(), strict=True):
        told, tokens, reference = json.loads(line)
        assert not reference, form
        assert len(tokens) == 8
        wanted = logprobs(dense)
        error = (torch.tensor(told) - wanted).norm() / wanted.norm()
        assert error < (2e-4 if form.startswith("fp8") else 3e-2), (form, error)


@pytest.mark.parametrize("form", ["gptq order", "awq", "int8"])
def test_chunks_and_rows_change_no_bit(made: Any, form: str) -> None:
    place, _ = made[form]
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    said = []
    for step_tokens in (16, 256):
        options = {"max_context": 128, "max_sequences": 4, "threads": 2}
        with LLM(str(place), step_tokens=step_tokens, **options) as llm:
            alone = llm.generate([PROMPT], asked)[0].outputs[0]
            others = llm.generate([PROMPT[5:], PROMPT, PROMPT[:3]], asked)[1].outputs[0]
        said += [(one.token_ids, one.logprobs) for one in (alone, others)]
    assert all(one == said[0] for one in said)


def broken() -> Iterator[Any]:
    at = "model.layers.1.mlp.up_proj."

    def case(form: str, name: str, value: Any, says: str) -> Any:
        return pytest.param(form, at + name, value, says, id=f"{form} {name} {says}")

    yield case("gptq", "scales", torch.full((2, 384), torch.nan), "scales holds numbers that")
    yield case("gptq", "scales", None, "scales is missing")
    yield case("gptq", "g_idx", torch.full((256,), 7, dtype=torch.int32), "g_idx must name a group")
    yield case("gptq order", "g_idx", torch.zeros(256, dtype=torch.int32), "for 128 inputs")
    yield case("awq", "qzeros", torch.zeros(2, 2, dtype=torch.int32), "qzeros is of shape")
    yield case("int4", "weight_scale", torch.ones(384, 8, dtype=torch.int32), "floating point")
    yield case("int8", "weight_scale", torch.ones(5), "does not fit")
    yield case("int4", "weight_shape", torch.tensor([384, 250]), "weight_shape is")


@pytest.mark.parametrize(("form", "name", "value", "says"), list(broken()))
def test_hostile_tensors_are_refused_by_name(
    tmp_path: Path, form: str, name: str, value: Any, says: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value

    folder(tmp_path, FORMS[form], change=change)
    with pytest.raises(HeadraceError, match=rf"layers\.1\.mlp\.up_proj.*{says}"):
        LLM(str(tmp_path), max_context=64)


NARROW = """
import json, sys
sys.modules["torch"] = None
from headrace import LLM, SamplingParams
model, *wishes = sys.argv[2:]
for wish in wishes:
    with LLM(model, max_context=128, threads=2, quantise=wish, kv_dtype="float32") as llm:
        asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        answer, = llm.generate([json.loads(sys.argv[1])], asked)
        told = [one.logprob for one in answer.prompt_logprobs if one is not None]
        said = [one.reason for one in llm.decisions if one.name == "quantise"]
        print(json.dumps([told, said]))
"""


def test_dense_matrices_are_made_smaller_while_loading(tmp_path: Path) -> None:
    """Without torch; what it costs is measured and said."""
    model = hf_model("Qwen2", **WIDE).to(torch.bfloat16)
    with_words(save_folder(model, tmp_path), 320)
    command = [sys.executable, "-c", NARROW, json.dumps(PROMPT), str(tmp_path)]
    done = subprocess.run([*command, "auto", "int8", "int4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    auto, *narrow = map(json.loads, done.stdout.splitlines())
    dense = torch.tensor(auto[0])
    assert auto[1] == []
    # Of normal numbers: a step is 1/127 of the largest of 32, or 1/8.
    for (told, (said,)), most, least in zip(narrow, (0.02, 0.3), (0.4, 6.0), strict=True):
        error = (torch.tensor(told) - dense).norm() / dense.norm()
        assert 0 < error < most
        found = re.match(
            r"15 dense matrices; root mean square error of a weight ([\d.]+) %, at most ([\d.]+) % "
            r"\((lm_head|model\.layers\.\d\.\w+\.\w+)\.weight\)",
            said,
        )
        assert found is not None, said
        assert least < float(found[1]) < 2 * least
        assert float(found[1]) <= float(found[2])


def test_a_device_that_does_not_make_them_smaller_says_so(tmp_path: Path) -> None:
    with_words(save_folder(hf_model("Qwen2", **WIDE), tmp_path), 320)
    with pytest.raises(OptionError, match="ref: does not quantise weights to int8"):
        LLM(str(tmp_path), max_context=64, quantise="int8", kernels="ref")


ATTENTION = [f"attn_{one}.weight" for one in ("q", "k", "v", "output")]
FEED_FORWARD = [f"ffn_{one}.weight" for one in ("gate", "up", "down")]
MATRICES = ["token_embd.weight", "output.weight", *ATTENTION, *FEED_FORWARD]


def test_what_is_narrow_already_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "narrow.gguf"
    narrow = dict.fromkeys(MATRICES, "Q8_0")
    save_gguf(hf_model("Qwen2", **WIDE), file, "qwen2", quantise=narrow, metadata=WORDS)
    options = EngineOptions(str(file), max_context=64, quantise="int4", threads=1)
    files = open_model(str(file))
    expected = "quantise int4 has no effect: "
    told = [one.reason for one in explain(options, files, hardware())[0] if one.name == "quantise"]
    assert [f"quantise {one}" for one in told] == [
        f"{expected}the weights are narrow already (Q8_0)"
    ]
    build(options, files).close()
    assert [one.getMessage()[: len(expected)] for one in caplog.records] == [expected]


def test_who_asks_for_the_reference_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_words(save_folder(hf_model("Qwen2", **WIDE), tmp_path), 320)
    options = EngineOptions(str(tmp_path), max_context=64, kernels="ref", threads=1)
    build(options, open_model(str(tmp_path))).close()
    (said,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "reference" in said.getMessage()
    assert "slow" in said.getMessage()


def test_a_number_that_is_none_in_fp8(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write(tmp_path, "fp8 hub-block")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadraceError, match=r"layers\.1\.mlp\.up_proj: .* every number finite"):
        LLM(str(tmp_path), max_context=64)


@pytest.mark.parametrize("form", ["awq", "gptq order", "int8", "fp8 block"])
def test_mixtures(tmp_path: Path, form: str) -> None:
    """Experts in codes; an order of inputs, which experts have none of, is expanded."""
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    write(tmp_path, form, "Qwen3Moe", **moe)
    asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    told = []
    for kernels in ("cpu", "ref"):
        with LLM(str(tmp_path), max_context=64, kernels=kernels) as llm:
            answer = llm.generate([PROMPT], asked)[0]
            assert answer.prompt_logprobs is not None
            each = [one.logprob for one in answer.prompt_logprobs if one is not None]
            told.append(torch.tensor(each))
    assert (told[0] - told[1]).norm() / told[1].norm() < 5e-2
