"""Every format of weights answers as transformers does with the values that the format defines.

`docs/capabilities.py` makes its table of formats from `FORMATS`, `PATHS` and `REFUSED`: a cell
stands for a test here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tiny.formats import FORMATS, ROUNDED

pytestmark = pytest.mark.slow
PROMPT = [(7 * at + 3) % 300 for at in range(40)]
PATHS = {"CPU kernels": "cpu", "reference": "ref"}
"""The CPU kernels without torch."""
NARROWED = "ref: does not quantise weights to"
REFUSED = {
    ("BF16, `--quantise int8`", "reference"): NARROWED,
    ("BF16, `--quantise int4`", "reference"): NARROWED,
}
"""(format, path) → the words of the refusal."""
TOLD = """
import json, sys
kernels, prompt, *models = sys.argv[1:]
if kernels == "cpu":
    sys.modules["torch"] = None
from headrace import LLM, SamplingParams
from headrace.base.errors import HeadraceError
asked = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
for place, quantise in zip(models[::2], models[1::2]):
    how = {"kernels": kernels, "quantise": quantise, "kv_dtype": "float32", "threads": 2}
    try:
        with LLM(place, max_context=64, max_sequences=2, **how) as llm:
            served = {one.value for one in llm.decisions if one.name.startswith("kernels.")}
            answer, = llm.generate([json.loads(prompt)], asked)
        told = [one.logprob for one in answer.prompt_logprobs if one is not None]
        print(json.dumps([told, sorted(served)]))
    except HeadraceError as error:
        print(json.dumps([str(error), []]))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, torch.Tensor]]:
    """Format → (what to open, log-probability of each token of the prompt behind the first)."""
    found = {}
    for name, form in FORMATS.items():
        place, model = form.write(tmp_path_factory.mktemp("model"))
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
        found[name] = str(place), logits[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    return found


@pytest.fixture(scope="module")
def told(made: dict[str, tuple[str, torch.Tensor]]) -> dict[tuple[str, str], Any]:
    found = {}
    for path, kernels in PATHS.items():
        models = [word for name in FORMATS for word in (made[name][0], FORMATS[name].quantise)]
        command = [sys.executable, "-c", TOLD, kernels, json.dumps(PROMPT), *models]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = map(json.loads, done.stdout.splitlines())
        found |= {(name, path): line for name, line in zip(FORMATS, lines, strict=True)}
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FORMATS)
def test_answers(name: str, path: str, made: Any, told: Any) -> None:
    said, served = told[name, path]
    if (name, path) in REFUSED:
        assert REFUSED[name, path] in said
        return
    assert isinstance(said, list), said
    assert ("ref" in served) == (path == "reference")
    wanted = made[name][1]
    # Of the spread, not of the size: what has nothing to do with the weights must be far.
    error = (torch.tensor(said) - wanted).norm() / (wanted - wanted.mean()).norm()
    assert error <= (FORMATS[name].near if path == "CPU kernels" else ROUNDED)
