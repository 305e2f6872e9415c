"""A CPU serves without torch: GGUF models (all that a request can ask, but for adapters), dense
checkpoints in safetensors, encoders and cross-encoders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base.config import DEFAULT_MODEL
from headrace.base.errors import PackageAbsent
from headrace.kernels.cpu.library import LibraryAbsent, load
from tiny import encoder
from tiny.kept import Kept

try:
    load()
except LibraryAbsent as absent:
    pytest.skip(str(absent), allow_module_level=True)

SERVE = """
import sys
from pathlib import Path
sys.modules["torch"] = None  # From here on its import fails, as if it were not installed.
from headrace import LLM, SamplingParams
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.text.grammar import from_choice

everything = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
                  presence_penalty=0.3, frequency_penalty=0.3, logit_bias={7: 2.0}, min_tokens=4,
                  logprobs=3, prompt_logprobs=2, seed=1)
model, hidden = sys.argv[1:]
with LLM(model, max_context=512, max_sequences=4) as llm:
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = ["def fibonacci(n):", "The capital of France is", "1, 2, 3,"]
    alone = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
    together = [each.outputs[0].token_ids for each in llm.generate(prompts, greedy)]
    assert alone == together, (alone, together)
    drawn = SamplingParams(max_tokens=8, seed=3, n=2)
    for params in (drawn, SamplingParams(max_tokens=8, **everything)):
        for output in llm.generate(prompts, params):
            assert all(each.finish_reason in ("length", "stop") for each in output.outputs), output
            assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
    long = llm.generate([{"prompt_token_ids": list(range(100, 400))}], greedy)[0]
    assert len(long.outputs[0].token_ids) == 24
    vector, = llm.embed(["a sentence"])
    assert len(vector.vector) == int(hidden)

    core = llm._built.core
    form = from_choice(["yes", "no"], "choice")
    sampling = SamplingParams(temperature=0.0, max_tokens=60)
    core.add(Request(id="form", prompt=[1, 2, 3], spec=RequestSpec(sampling, 0, grammar=form)))
    tokens = []
    while core.has_work:
        for delta in core.turn():
            assert delta.finish != "error", delta.error
            tokens += [token for token in delta.tokens]
    text = llm.tokenizer.decode(tokens)
    assert text in ("yes", "no"), text
assert sys.modules["torch"] is None
"""


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(("model", "hidden"), [(DEFAULT_MODEL, 896), ("smollm2-135m", 576)])
def test_everything_but_adapters(model: str, hidden: int) -> None:
    command = [sys.executable, "-c", SERVE, model, str(hidden)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


SAME = """
import json, sys
if sys.argv[1] == "absent":
    sys.modules["torch"] = None
from headrace import LLM, SamplingParams

kind, model = sys.argv[2:]
with LLM(model, max_context=64, max_sequences=8, threads=2) as llm:
    if kind == "tokens":
        asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        said = [llm.generate([[5, 6, 7]], asked)[0].outputs[0].token_ids]
    elif kind == "vectors":
        said = [each.vector for each in llm.embed(["the water wheel turns", "a", "river " * 50])]
    else:
        said = [each.score for each in llm.score("where is the river", ["the mill", "a light"])]
print(json.dumps(said))
assert sys.modules.get("torch") is None, "nobody imported it"
"""


@pytest.mark.parametrize(
    "kind",
    [
        "tokens",
        pytest.param("vectors", marks=pytest.mark.slow),
        pytest.param("scores", marks=pytest.mark.slow),
    ],
)
def test_a_dense_checkpoint_gives_the_same_without(tiny: Path, kept: Kept, kind: str) -> None:
    """Torch is not imported where it is there either: the same modules run."""
    model = tiny
    if kind != "tokens":
        model = kept(encoder.make, labels=int(kind == "scores"))
    said = []
    for torch in ("absent", "there"):
        command = [sys.executable, "-c", SAME, torch, kind, str(model)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        said.append(json.loads(done.stdout))
    assert said[0] == said[1]
    assert len(said[0]) == {"tokens": 1, "vectors": 3, "scores": 2}[kind]


REFUSED = """
import sys
from pathlib import Path
sys.modules["torch"] = None
from headrace import LLM
from headrace.base.errors import PackageAbsent
try:
    LLM({model!r}, max_context=64, **{options!r})
except PackageAbsent as absent:
    print(absent.message)
"""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "ref"}, "--kernels ref"),
        ({"max_adapters": 1}, "serving adapters"),
    ],
)
def test_what_needs_it_says_so(tiny: Path, options: dict[str, str], said: str) -> None:
    code = REFUSED.format(model=str(tiny), options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert said in done.stdout
    assert "needs PyTorch, which is not installed: pip install " in done.stdout
    assert "pip install 'torch" in done.stdout


def test_a_command_that_needs_it_is_one_line_not_a_traceback() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['roofline', '--calibrate'];"
        "from headrace.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == PackageAbsent.exit_code, done.stderr
    assert done.stderr.startswith("error: a full calibration needs PyTorch")
    assert len(done.stderr.splitlines()) == 1
