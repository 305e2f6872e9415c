"""Launch files of a plan: our own command and Helm values, and the commands of other engines with
their names for the same settings.

`engine_flags.json` lists the names that each engine publishes, with its version; a test checks the
commands against it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from ..base.errors import OptionError, file_errors
from ..roofline.planner import Candidate, Pool
from .plan_show import PlanQuestion, format_words

FLAGS = Path(__file__).with_name("engine_flags.json")
PORT = 8000
Words = list[str]
WIDE = ("bfloat16", "float16", "float32")
AT_LOAD = {
    "headrace": ("fp8",),
    "headrace on a CPU": ("int8", "int4"),
    "vllm": ("fp8",),
    "sglang": ("fp8",),
    "dynamo": ("fp8",),
}
"""Engine → formats into which its option converts wide weights while loading, by our names."""


def write_launch(folder: Path, question: PlanQuestion, candidate: Candidate) -> list[Path]:
    """Write the files of a plan; return them. Raises `OptionError` if the folder cannot be
    written."""
    files = {"values.yaml": values(question, candidate)}
    for name in ENGINES:
        files[f"{name}.sh"] = script(name, question, candidate)
    if _attention_groups(candidate) or _narrow_kv(candidate):
        files["tensorrt-llm.yaml"] = tensorrt_config(candidate)
    with file_errors(OptionError, f"{folder} cannot be written", "launch"):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def launch_text(name: str, question: PlanQuestion, candidate: Candidate) -> str:
    """Return a plan's launch file: an engine's script, or with `HELM` our chart's values."""
    return values(question, candidate) if name == HELM else script(name, question, candidate)


def script(name: str, question: PlanQuestion, candidate: Candidate) -> str:
    """Return the shell script that starts an engine's replicas, one node after another."""
    make = ENGINES[name]
    lines = ["#!/bin/sh", *_comment(question, candidate)]
    known = json.loads(FLAGS.read_text())
    if name in known:
        flags = known[name]
        lines.append(f"# Names of the options: {name} {flags['version']}, {flags['source']}.")
    if (why := _refusal(name, question, candidate)) is not None:
        return "\n".join([*lines, f"# No command: {why}.", "exit 1", ""])
    if (
        name == "headrace"
        and candidate.case.layout.devices > 1
        and candidate.hardware.kind != "cpu"
    ):
        lines.append("# This version serves one GPU an engine and refuses the layout at start.")
    lines.append(
        f'test -n "$MODEL" || MODEL={shlex.quote(question.model)}  # A folder or a hub id.'
    )
    if name == "dynamo":
        lines.append(f"python -m dynamo.frontend --http-port {PORT} --router-mode kv &")
    if name not in AT_LOAD and (made := _quantised(question, candidate.pools[0])) is not None:
        lines.append(f"# It narrows no weights while loading: MODEL must have {made} already.")
    number = first = 0
    nodes = candidate.hardware.node_devices
    for pool in candidate.pools:
        size = pool.case.layout.devices
        if size > nodes:
            lines.append(f"# A replica of {size} devices takes several nodes of {nodes}.")
        for _ in range(pool.replicas):
            if first + size > nodes and size <= nodes:
                lines.append("# The next node:")
                first = 0
            words = make(question, pool)
            if name != "dynamo":
                words += ["--port", str(PORT + number)]
            ids = ",".join(str(first + n) for n in range(min(size, nodes)))
            lines.append(f"CUDA_VISIBLE_DEVICES={ids} {_joined(words)} &")
            first, number = first + size, number + 1
    if number > 1 and name != "dynamo":
        addresses = " ".join(f"http://127.0.0.1:{PORT + n}" for n in range(number))
        lines.append("# One address before them (other nodes: their names):")
        lines.append(f"headrace route {addresses} &")
    return "\n".join([*lines, "wait", ""])


def _joined(words: Words) -> str:
    return " ".join(word if word == '"$MODEL"' else shlex.quote(word) for word in words)


def _comment(question: PlanQuestion, candidate: Candidate) -> Iterator[str]:
    """Yield comment lines without line breaks in them: names are the user's."""
    lines = (
        f"# {question.model} in {format_words(candidate.case.weights)}: {candidate}",
        f"# planned for {candidate.rate:.3g} requests/s, {question.lengths}, {question.limits}",
    )
    yield from (" ".join(line.split()) for line in lines)


def _longest(question: PlanQuestion, pool: Pool) -> int:
    """Return the longest request: twice the mean lengths, in whole hundreds of tokens."""
    demand = question.demand
    wanted = -(-2 * (demand.input_tokens + demand.output_tokens) // 256) * 256
    return min(pool.case.arch.max_context, wanted)


def _quantised(question: PlanQuestion, pool: Pool) -> str | None:
    """Return the format into which an engine must convert wide weights while loading."""
    published = question.described.weights
    planned = pool.case.weights.name
    return planned if published.format in WIDE and planned not in (*WIDE, published.name) else None


def _lacking(name: str, question: PlanQuestion, candidate: Candidate) -> str | None:
    """Return why an engine's option for formats cannot make the plan's format, if it cannot."""
    on_cpu = name == "headrace" and candidate.hardware.kind == "cpu"
    known = AT_LOAD.get("headrace on a CPU" if on_cpu else name)
    for pool in candidate.pools:
        made = _quantised(question, pool)
        if known is not None and made is not None and made not in known:
            option = "--quantise" if name == "headrace" else "--quantization"
            return f"{option} makes no {made} of wide weights; plan for a model that has it"
    return None


def _attention_groups(candidate: Candidate) -> bool:
    return any(pool.case.layout.dp > 1 for pool in candidate.pools)


def _narrow_kv(candidate: Candidate) -> bool:
    return any(pool.case.kv_dtype == "fp8" for pool in candidate.pools)


def _refusal(name: str, question: PlanQuestion, candidate: Candidate) -> str | None:
    """Return the reason why an engine has no command for a plan."""
    if (why := _lacking(name, question, candidate)) is not None:
        return why
    if name != "dynamo" and len(candidate.pools) > 1 and name != "headrace":
        return "prefill and decode pools are in dynamo.sh"
    layouts = [pool.case.layout for pool in candidate.pools]
    if name == "headrace" and len(candidate.pools) > 1:
        return "pools are joined by --role, see docs/split.md"
    if name in ("sglang", "tensorrt-llm") and any(one.dp > 1 and one.pp > 1 for one in layouts):
        return "attention groups with pipeline stages are not in its options"
    if name == "tensorrt-llm" and any(one.dp > 1 and one.tp > 1 for one in layouts):
        return "its attention is either split or in groups of one device"
    return None


def _headrace(question: PlanQuestion, pool: Pool) -> Words:
    words = ["headrace", "serve", '"$MODEL"']
    words += [
        "--max-sequences",
        str(pool.state.batch),
        "--step-tokens",
        str(pool.state.step_tokens),
    ]
    words += ["--max-context", str(_longest(question, pool)), "--kv-dtype", pool.case.kv_dtype]
    if pool.case.layout.devices > 1:
        words += ["--layout", str(pool.case.layout).replace("·", ".")]
    if (made := _quantised(question, pool)) is not None:
        words += ["--quantise", made]
    return words


def _vllm(question: PlanQuestion, pool: Pool) -> Words:
    """Limit sequences per data-parallel rank, over all its pipeline stages, as vLLM does."""
    return ["vllm", "serve", '"$MODEL"', *_vllm_options(question, pool)]


def _vllm_options(question: PlanQuestion, pool: Pool) -> Words:
    layout = pool.case.layout
    words = ["--tensor-parallel-size", str(layout.tp)]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", str(layout.pp)]
    if layout.dp > 1:
        words += ["--data-parallel-size", str(layout.dp)]
    if layout.ep:
        words += ["--enable-expert-parallel"]
    words += ["--max-num-seqs", str(pool.state.batch * layout.pp)]
    words += ["--max-num-batched-tokens", str(pool.state.step_tokens)]
    words += ["--max-model-len", str(_longest(question, pool))]
    if pool.case.kv_dtype == "fp8":
        words += ["--kv-cache-dtype", "fp8"]
    if (made := _quantised(question, pool)) is not None:
        words += ["--quantization", made]
    return words


def _sglang(question: PlanQuestion, pool: Pool) -> Words:
    """Use ranks of all devices of a stage, and limits over all attention groups, as SGLang does."""
    layout = pool.case.layout
    words = ["python", "-m", "sglang.launch_server", "--model-path", '"$MODEL"']
    words += ["--tp-size", str(layout.ranks)]
    if layout.pp > 1:
        words += ["--pp-size", str(layout.pp)]
    if layout.dp > 1:
        words += ["--dp-size", str(layout.dp), "--enable-dp-attention"]
    if layout.ep:
        words += ["--ep-size", str(layout.ranks)]
    words += ["--max-running-requests", str(pool.state.batch * layout.dp * layout.pp)]
    words += ["--chunked-prefill-size", str(pool.state.step_tokens * layout.dp)]
    words += ["--context-length", str(_longest(question, pool))]
    if pool.case.kv_dtype == "fp8":
        words += ["--kv-cache-dtype", "fp8_e4m3"]
    if (made := _quantised(question, pool)) is not None:
        words += ["--quantization", made]
    return words


def _tensorrt(question: PlanQuestion, pool: Pool) -> Words:
    """Use a YAML file for the KV's type and attention groups, and quantised weights, as
    TensorRT-LLM requires."""
    layout = pool.case.layout
    words = ["trtllm-serve", "serve", '"$MODEL"', "--tp_size", str(layout.ranks)]
    if layout.pp > 1:
        words += ["--pp_size", str(layout.pp)]
    if layout.ep:
        words += ["--ep_size", str(layout.ranks)]
    words += ["--max_batch_size", str(pool.state.batch)]
    words += ["--max_num_tokens", str(pool.state.step_tokens), "--enable_chunked_prefill"]
    words += ["--max_seq_len", str(_longest(question, pool))]
    if layout.dp > 1 or pool.case.kv_dtype == "fp8":
        words += ["--config", "tensorrt-llm.yaml"]
    return words


def tensorrt_config(candidate: Candidate) -> str:
    """Return the settings that TensorRT-LLM reads from a file."""
    lines = []
    if _attention_groups(candidate):
        lines.append("enable_attention_dp: true")
    if _narrow_kv(candidate):
        lines += ["kv_cache_config:", "  dtype: fp8"]
    return "\n".join([*lines, ""])


def _dynamo(question: PlanQuestion, pool: Pool) -> Words:
    """Use vLLM's options, which Dynamo's worker takes."""
    words = ["python", "-m", "dynamo.vllm", "--model", '"$MODEL"']
    if pool.role != "all":
        words += ["--disaggregation-mode", pool.role]
    return words + _vllm_options(question, pool)


ENGINES: dict[str, Callable[[PlanQuestion, Pool], Words]] = {
    "headrace": _headrace,
    "vllm": _vllm,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt,
    "dynamo": _dynamo,
}
"""Engine → the command of one replica, without its port."""
HELM = "helm"
STARTS = (*ENGINES, HELM)
"""Names of `launch_text`."""


def values(question: PlanQuestion, candidate: Candidate) -> str:
    """Return values for our chart (`headrace factory chart`) that differ from its defaults."""
    pool = candidate.pools[-1]
    engine = _joined(_headrace(question, pool)[3:])
    if (why := _lacking("headrace", question, candidate)) is not None:
        engine = f"none, {why}"
    replicas = sum(one.replicas for one in candidate.pools)
    lines = [
        *_comment(question, candidate),
        "# helm install NAME CHART -f values.yaml. The engine's own options are bound by the",
        f"# profile that the chart is of: {engine}",
        f"replicas: {replicas}",
    ]
    if candidate.hardware.kind != "cpu":
        lines += ["resources:", "  limits:", f"    nvidia.com/gpu: {pool.case.layout.devices}"]
    return "\n".join([*lines, ""])
