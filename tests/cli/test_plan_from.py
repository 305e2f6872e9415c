"""AIConfigurator's published examples as inputs of `headrace plan`."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from headrace.base.errors import DownloadError, InvalidRequest, ModelNotFound
from headrace.cli.plan import command
from headrace.cli.plan_from import ours
from headrace.engine.simulator import described

GUIDE = "aiconfigurator cli default --model QWEN3_32B --total_gpus 32 --system h200_sxm"
"""The example of its user guide."""


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        (GUIDE, "qwen3-32b --devices 32xh200_sxm"),
        (
            f"{GUIDE} --ttft 1000 --tpot 10 --isl 3000 --osl 512",
            "qwen3-32b --devices 32xh200_sxm --ttft 1000ms --tpot 10ms --input 3000 --output 512",
        ),
        (
            "cli default --model-path=Qwen/Qwen3-32B --total-gpus=8 --system=h100_sxm --prefix 500",
            "qwen3-32b --devices 8xh100_sxm --shared 500",
        ),
        ("--model org/own --total-gpus 2 --system l40s", "org/own --devices 2xl40s"),
    ],
)
def test_a_published_line_is_ours(line: str, arguments: str) -> None:
    assert ours(shlex.split(line)) == (shlex.split(arguments), [])


def test_what_changes_nothing_is_left_out_aloud() -> None:
    arguments, notes = ours(shlex.split(f"{GUIDE} --backend vllm"))
    assert arguments == ["qwen3-32b", "--devices", "32xh200_sxm"]
    assert len(notes) == 1
    assert "--launch" in notes[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--model QWEN3_32B --total-gpus 8", "--system"),
        (f"{GUIDE} --isll 3000", "did you mean --isl"),
        (f"{GUIDE} --isl", "--isl needs a value"),
        (f"{GUIDE} exp", "'exp' is not known"),
    ],
)
def test_a_wrong_line_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        ours(shlex.split(line))
    assert caught.value.param == "from"


def test_the_command_takes_the_line_and_our_options() -> None:
    words = ["--json", "--from", "aiconfigurator", "--", *shlex.split(GUIDE), "--osl", "0"]
    done = CliRunner().invoke(command, words)
    line = "headrace plan qwen3-32b --devices 32xh200_sxm --output 0 --json"
    assert line in done.output.splitlines()  # Refused after that, since an answer has a token.
    assert done.exit_code == 2
    for wrong in (["--from", "aiconfigurator"], ["--from", "other", "--", GUIDE], ["--from"]):
        assert isinstance(CliRunner().invoke(command, wrong).exception, InvalidRequest)


def test_a_name_near_a_known_architecture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"did you mean llama-3\.1-70b\?"):
        described.describe_model("llama3.1-70b")

    def away(*_: object) -> None:
        raise DownloadError("the hub cannot be reached")

    monkeypatch.setattr(described, "fetch_hub", away)
    with pytest.raises(DownloadError, match=r"did you mean llama-3\.1-70b\?"):
        described.describe_model("meta-llama/Llama-3.1-70B-Instruct")
    with pytest.raises(DownloadError, match=r"reached$"):
        described.describe_model("org/unlike-any-other")
