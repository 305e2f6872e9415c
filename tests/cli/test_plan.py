"""`headrace plan` as a planner reads it, and the launch files that it writes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from headrace.base.config import EngineOptions, ServerOptions, parse_seconds
from headrace.base.errors import HeadraceError, InvalidRequest, OptionError
from headrace.base.layout import Layout
from headrace.bench.metrics import parse_slo
from headrace.cli import plan_check, roofline
from headrace.cli.plan import command, parse_devices
from headrace.cli.plan_check import GROWTH, Check, Checked, grown
from headrace.cli.plan_launch import ENGINES, FLAGS, write_launch
from headrace.cli.plan_show import PlanQuestion, format_words
from headrace.engine.simulator.described import describe_model
from headrace.factory.chart import schema
from headrace.roofline.accuracy import latency_error, throughput_error
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.planner import Candidate, Pool, make_case, search
from headrace.roofline.prices import PRICES, PriceSource
from headrace.roofline.steady import Demand, Goal, State

DEMAND, GOAL = Demand(10.0, 200, 30), Goal(1.0, 0.05)
SMALL = ["llama-3.1-8b", "--formats", "fp8", "--input", "200", "--output", "30"]
SMALL += ["--requests", "50"]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1s", 1), ("80ms", 0.08), ("500us", 5e-4), ("2m", 120), ("1.5h", 5400), ("0", 0), ("1 s", 1)],
)
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_seconds(text, "ttft") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1000", "", "s", "1x", "-1s", "nan", "inf s", "1s2"])
def test_a_time_without_a_unit_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError, match="ttft") as caught:
        parse_seconds(text, "ttft")
    assert caught.value.param == "ttft"


def test_a_limit_that_nothing_keeps_ends_as_a_missed_slo() -> None:
    done = CliRunner().invoke(command, [*SMALL, "--devices", "1xH100", "--tpot", "1us"])
    assert done.exit_code == 3, done.output
    assert "no layout keeps these limits" in done.stderr
    assert "USD an hour" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_before_planning(tmp_path: Path) -> None:
    (taken := tmp_path / "file").write_text("")
    flags = ["--devices", "1xH100", "--launch", str(taken)]
    done = CliRunner().invoke(command, [*SMALL, *flags])
    assert isinstance(done.exception, OptionError)
    assert done.exception.param == "launch"
    assert "planning" not in done.stderr


def test_a_near_name_stands_alone() -> None:
    done = CliRunner().invoke(command, ["llama-3.1-8", "--devices", "1xH100"])
    assert isinstance(done.exception, HeadraceError)
    assert done.exception.message.endswith("did you mean llama-3.1-8b?")


def test_an_slo_and_a_bare_number_use_the_same_parser() -> None:
    assert parse_seconds("3", "restart", bare=True) == 3
    limits = parse_slo("ttft:p99<1.5s,tpot:p95<80ms,itl<500us").limits
    assert [one.seconds for one in limits] == pytest.approx([1.5, 0.08, 5e-4])
    with pytest.raises(HeadraceError, match="80ms"):
        parse_slo("ttft:p99<500")


def test_devices_are_counted_by_kind() -> None:
    assert parse_devices("8xH100, 4×h200") == {"H100": 8, "h200": 4}
    for wrong in ("", "8H100", "0xH100", "8xH100,2xH100", "xH100", "8x"):
        with pytest.raises(InvalidRequest, match="8xH100"):
            parse_devices(wrong)


def test_the_errors_are_those_of_the_measurements() -> None:
    """The package's rows are the results' rows; a model without its own takes those of its kind."""
    kept = json.loads((Path(FLAGS).parents[1] / "roofline" / "accuracy.json").read_text())
    rows = json.loads((RESULTS / "published.json").read_text())["rows"]
    assert kept["throughput"] == [{key: row[key] for key in kept["throughput"][0]} for row in rows]
    runs = json.loads((RESULTS / "against_server.json").read_text())["rows"]
    for name, ratios in kept["latency"].items():
        told = [run["simulated"][name] / run["server"][name] for run in runs]
        assert ratios == pytest.approx(told, abs=1e-3)
    ratios = [
        row["published"] / row["predicted"]
        for row in rows
        if (row["model"], row["device"]) == ("llama-3.1-70b", "H100")
    ]
    own = throughput_error("llama-3.1-70b", "H100", mixture=False)
    assert own.around(100.0) == pytest.approx((100 * min(1, *ratios), 100 * max(1, *ratios)))
    assert own.rows == len(ratios)
    other = throughput_error("command-r", "A100", mixture=False)
    assert "dense models" in other.of
    assert other.rows > own.rows
    assert latency_error("ttft p99").rows == len(runs)


@pytest.fixture(scope="module")
def asked() -> str:
    done = CliRunner().invoke(
        command,
        [*SMALL, "--devices", "2xH100", "--ttft", "200ms"],
        env={"COLUMNS": "80"},
    )
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_repeats_its_question_and_says_how_far_to_trust_it(asked: str) -> None:
    for part in (
        "llama-3.1-8b, 200 tokens in, 30 out",
        "p99 TTFT < 200 ms, TPOT < 50 ms",
        "2 × H100",
        "USD per device and hour: H100 3.00 (2026-",
        "the most within the limits",
        "published rows of llama-3.1-8b on H100",
        "per million output tokens",
    ):
        assert part in asked
    assert "…" not in asked, "nothing is cut at 80 columns"
    row = next(line for line in asked.splitlines() if line.startswith("H100: "))
    assert row.split()[-1] == "met", "the last column too"


def test_given_devices_keep_the_limits_up_to_a_rate() -> None:
    done = CliRunner().invoke(
        command,
        [*SMALL, "--devices", "1xH100", "--ttft", "100ms", "--json"],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["question"]["devices"] == {"H100": 1}
    assert told["question"]["demand"]["input_tokens"] == 200
    assert told["question"]["prices"]["currency"] == "USD"
    best = told["simulated"][0]
    assert best["kept"]
    assert best["p99"]["ttft"] <= 0.1
    assert best["missed_at"] is None or best["missed_at"] > best["requests_per_second"]
    assert best["cost_per_million_output_tokens"] == pytest.approx(
        3.0 / (best["requests_per_second"] * 30 * 3600) * 1e6
    )


@pytest.mark.parametrize("name", ["vllm", "helm"])
def test_the_command_of_a_plan_is_all_that_is_printed(name: str, tmp_path: Path) -> None:
    flags = [*SMALL, "--devices", "1xH100", "--command", name, "--launch", str(tmp_path)]
    done = CliRunner().invoke(command, flags)
    assert done.exit_code == 0, done.output
    file = "values.yaml" if name == "helm" else f"{name}.sh"
    assert done.stdout == (tmp_path / file).read_text()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--command", "vlm"], "vllm"),
        (["--command", "vllm", "--json"], "--json"),
        (["--devices", "8xH100", "--rate", "3"], "rate"),
        (["--devices", "8xX900"], "X900"),
        (["--devices", "eight"], "8xH100"),
        (["--devices", "8xH100", "--hardware", "H200"], "--hardware"),
        (["--ttft", "1000"], "unit"),
    ],
)
def test_a_wrong_question_is_refused_by_name(flags: list[str], named: str) -> None:
    done = CliRunner().invoke(command, ["llama-3.1-8b", *flags])
    assert isinstance(done.exception, HeadraceError)
    assert named in done.exception.message


def test_formats_of_mixtures_name_the_experts_first() -> None:
    assert format_words(known("gpt-oss-120b")[1]) == "mxfp4 (experts; the rest bfloat16)"
    assert format_words(known("deepseek-v3")[1]) == "fp8"


def test_a_device_that_is_dear_has_its_row_if_it_was_named() -> None:
    """Rows above three times the best cost are gone, but each named device has one."""
    done = CliRunner().invoke(
        command,
        [*SMALL, "--hardware", "L40S,A100", "--rate", "5", "--json"],
    )
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = told["simulated"]
    assert {one["device"] for one in rows} == {"L40S", "A100"}
    costs = [one["cost_per_million_output_tokens"] for one in rows]
    dear = [cost for cost in costs if cost > 3 * costs[0]]
    assert len(dear) <= 1


def test_the_roofline_cuts_nothing_at_80_columns() -> None:
    """Its tables fold their names instead, of a mixture with windows too."""
    for model in ("llama-3.1-8b", "gpt-oss-120b"):
        done = CliRunner().invoke(
            roofline.command, [model, "--hardware", "H100"], env={"COLUMNS": "80"}
        )
        assert done.exit_code == 0, done.output
        assert "…" not in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert done.stdout.count("share") == 3


LAYOUTS = ("1", "TP4", "TP2.PP2", "DP8.EP8", "TP2.DP2.EP4", "TP4.EP4")


def planned(
    layout: str, *, pools: bool = False, format: str = "fp8", kind: str = "gpu"
) -> tuple[PlanQuestion, Candidate]:
    model = "qwen3-235b-a22b"
    described, hardware = describe_model(model), replace(DEVICES["H200"], kind=kind)
    case = make_case(described.arch, format, hardware, Layout.parse(layout))
    state = State(64, 2048, 1.0, 0.1, 0.02, 0.03)
    roles = ("prefill", "decode") if pools else ("all",)
    found = tuple(Pool(role, case, state, 2) for role in roles)  # type: ignore[arg-type]
    candidate = Candidate(hardware, found, 0.1, 0.02, 0.03, 30.0, 12.0)
    question = PlanQuestion(model, described, DEMAND, GOAL, ("fp8",), None, PRICES, PriceSource())
    return question, candidate


def flags_of(script: str) -> list[tuple[str, list[str]]]:
    """Return (command, its options) of each line that starts something."""
    found = []
    for line in script.splitlines():
        if line.startswith("#") or not line.endswith("&"):
            continue
        words = shlex.split(line.removesuffix("&"))
        words = [word for word in words if "=" not in word.partition("-")[0]]
        options = [word for word in words if word.startswith("--")]
        found.append((" ".join(words[:3]), options))
    return found


@pytest.mark.parametrize("pools", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launch_files_use_names_that_the_engines_publish(
    tmp_path: Path, layout: str, pools: bool
) -> None:
    question, candidate = planned(layout, pools=pools)
    paths = write_launch(tmp_path, question, candidate)
    known_flags = {
        name: set(" ".join(one["flags"]).split())
        for name, one in json.loads(FLAGS.read_text()).items()
    }
    known_flags["dynamo"] |= known_flags["vllm"]
    ours = {
        "--" + spec.replace("_", "-")
        for record in (EngineOptions, ServerOptions)
        for spec in record.__dataclass_fields__
    }
    known_flags["headrace"] = ours
    starts = 0
    for name in ENGINES:
        script = (tmp_path / f"{name}.sh").read_text()
        assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
        for command_, options in flags_of(script):
            engine = "dynamo-frontend" if "dynamo.frontend" in command_ else name
            if command_.startswith("headrace route"):
                continue
            assert set(options) <= known_flags[engine], (name, options)
            starts += 1
    assert starts >= 2
    assert (tmp_path / "values.yaml") in paths


def test_settings_have_the_other_engines_meaning(tmp_path: Path) -> None:
    """Limits of a rank, of all groups, and of all stages."""
    write_launch(tmp_path, *planned("DP8.EP8"))
    vllm, sglang, tensorrt = (
        (tmp_path / f"{name}.sh").read_text() for name in ("vllm", "sglang", "tensorrt-llm")
    )
    assert "--tensor-parallel-size 1 --data-parallel-size 8 --enable-expert-parallel" in vllm
    assert "--max-num-seqs 64 --max-num-batched-tokens 2048" in vllm
    assert "--tp-size 8 --dp-size 8 --enable-dp-attention --ep-size 8" in sglang
    assert "--max-running-requests 512 --chunked-prefill-size 16384" in sglang
    assert "--tp_size 8 --ep_size 8 --max_batch_size 64" in tensorrt
    assert "enable_attention_dp: true" in (tmp_path / "tensorrt-llm.yaml").read_text()
    assert "The next node" in vllm, "two replicas of eight devices"
    write_launch(tmp_path, *planned("TP2.PP2"))
    assert "--max-num-seqs 128" in (tmp_path / "vllm.sh").read_text()
    write_launch(tmp_path, *planned("TP2.DP2.EP4"))
    assert "exit 1" in (tmp_path / "tensorrt-llm.sh").read_text()


@pytest.mark.parametrize(
    ("format", "kind", "able"),
    [
        ("bfloat16", "gpu", {"headrace", "vllm", "sglang", "dynamo", "tensorrt-llm"}),
        ("fp8", "gpu", {"headrace", "vllm", "sglang", "dynamo", "tensorrt-llm"}),
        ("nvfp4", "gpu", {"tensorrt-llm"}),
        ("int8", "gpu", {"tensorrt-llm"}),
        ("int4", "cpu", {"headrace", "tensorrt-llm"}),
        ("bfloat16,experts=mxfp4", "gpu", {"tensorrt-llm"}),
    ],
)
def test_a_format_that_an_engine_does_not_make_is_no_option(
    tmp_path: Path, format: str, kind: str, able: set[str]
) -> None:
    """TensorRT-LLM has no option of formats: its file says what the model must have."""
    write_launch(tmp_path, *planned("1", format=format, kind=kind))
    for name in ENGINES:
        script = (tmp_path / f"{name}.sh").read_text()
        assert ("exit 1" not in script) is (name in able), name
        narrow = format != "bfloat16" and name in able and name != "tensorrt-llm"
        made = re.search(r"--quanti[sz]\w+ \S+ .*&$", script, re.MULTILINE)
        assert (made is not None) is narrow, name
    said = f"MODEL must have {format} already" in (tmp_path / "tensorrt-llm.sh").read_text()
    assert said is (format != "bfloat16")
    options = re.search(
        r"profile that the chart is of: (.*)", (tmp_path / "values.yaml").read_text()
    )
    assert options is not None
    assert options[1].startswith("none") is ("headrace" not in able)


def test_values_are_those_of_our_chart(tmp_path: Path) -> None:
    write_launch(tmp_path, *planned("TP4"))
    text = (tmp_path / "values.yaml").read_text()
    found = dict(re.findall(r"^(\w+): ?(\S*)$", text, re.MULTILINE))
    given = {"replicas": int(found["replicas"]), "resources": {"limits": {"nvidia.com/gpu": 4}}}
    assert "    nvidia.com/gpu: 4" in text.splitlines()
    rules = schema()
    jsonschema.validate(given, {**rules, "required": []})


def test_a_hostile_name_stays_a_word(tmp_path: Path) -> None:
    question, candidate = planned("TP4")
    name = "a'b\n$(touch " + str(tmp_path / "x") + ")"
    write_launch(tmp_path, replace(question, model=name), candidate)
    for engine in ENGINES:
        script = (tmp_path / f"{engine}.sh").read_text()
        head = "\n".join(
            line for line in script.splitlines() if not line.endswith("&") and line != "wait"
        )
        done = subprocess.run(
            ["sh", "-c", f'{head}\nprintf %s "$MODEL"'], capture_output=True, text=True, check=True
        )
        assert done.stdout == name
    assert not (tmp_path / "x").exists()


def test_a_hostile_device_stays_a_comment(tmp_path: Path) -> None:
    question, candidate = planned("TP4")
    hardware = replace(candidate.hardware, name="a\ntouch x\r\u2028replicas: 9\nb")
    for path in write_launch(tmp_path, question, replace(candidate, hardware=hardware)):
        for line in path.read_text().splitlines():
            assert line.startswith("#") or not ("touch" in line or "replicas: 9" in line)


def test_a_candidate_is_checked_at_its_own_rate() -> None:
    """A tenth of what it can do is kept, three times as much is not."""
    check = Check(DEMAND, GOAL, 50)
    candidate = small_candidate(check)
    calm, flooded = (
        check.at(replace(candidate, rate=share * candidate.rate)) for share in (0.1, 3.0)
    )
    assert calm.kept
    assert not flooded.kept
    assert calm.per_user > flooded.per_user


def small_candidate(check: Check) -> Candidate:
    found = search(
        known("llama-3.1-8b")[0],
        check.demand,
        check.goal,
        PRICES,
        devices=[DEVICES["H100"]],
        formats=["fp8"],
        pools=False,
        max_devices=1,
        counts={"H100": 1},
    )
    return found.candidates[0]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.25, 9.0])
def test_a_growing_candidate_is_what_each_simulation_says(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capacity is measured once, and what cannot be done is not simulated: the answer is the same
    as if both were done at each size."""

    def in_full(candidate: Candidate) -> Checked:
        for _ in range(GROWTH):
            found = check.at(candidate)
            if found.kept:
                return found
            candidate = grown(candidate)
        return check.at(candidate)

    floods = []
    measure = plan_check.flood

    def counted(*given: Any) -> Any:
        floods.append(given)
        return measure(*given)

    check = Check(DEMAND, GOAL, 50)
    candidate = small_candidate(check)
    candidate = replace(candidate, rate=share * candidate.rate)
    wanted = in_full(candidate)
    monkeypatch.setattr(plan_check, "flood", counted)
    assert check.verify(candidate) == wanted
    assert len(floods) == 1
    assert wanted.kept == (share < 9)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_plans_are_those_of_2026_11_30(number: int) -> None:
    """A faster planner answers the same: rows, layouts, verdicts, and nearly the same figures. Of
    the rows that keep the limits the cheapest is the first."""
    frozen = json.loads((Path(__file__).parent / "frozen_plans.json").read_text())[number]
    done = CliRunner().invoke(command, [*frozen["asked"], "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["settings"] == frozen["settings"]
    assert len(told["candidates"]) == frozen["candidates"]
    rows = told["simulated"]
    assert rows[0]["price_per_hour"] == min(one["price_per_hour"] for one in rows if one["kept"])
    for one, wanted in zip(rows, frozen["simulated"], strict=True):
        for name, apart in {"ttft": 0.12, "tpot": 0.03, "itl": 0.06}.items():
            assert one["p99"][name] == pytest.approx(wanted["p99"][name], rel=apart)
        for name, apart in {
            "requests_per_second": 0.03,
            "output_tokens_per_second_per_user": 0.05,
        }.items():
            assert one[name] == pytest.approx(wanted[name], rel=apart)
        for name in ("device", "pools", "price_per_hour", "kept", "missed_at"):
            assert one[name] == wanted[name]
