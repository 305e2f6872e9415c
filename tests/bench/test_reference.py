"""Agreement with a reference, task sets and the gate: figures that can be worked out by hand."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.base.errors import HeadraceError, InvalidRequest
from headrace.bench.accuracy import Perplexity
from headrace.bench.gate import hold
from headrace.bench.job import Target
from headrace.bench.reference import (
    Agreement,
    Answer,
    Reference,
    agreement,
    answers_of,
    divergence,
    load_reference,
    read_answer,
    save_reference,
)
from headrace.bench.tasks import BUILT_IN, TaskScore, last_number, load_task, score_task
from headrace.cli.bench import command


class Speaker(BaseHTTPRequestHandler):
    """Continues with "a b"; does sums, and is wrong where told to be."""

    protocol_version = "HTTP/1.1"
    second = " b"
    wrong = False

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "messages" in body:
            text = body["messages"][0]["content"]
            a, sign, b = re.findall(r"(\d+) ([+-]) (\d+)", text)[0]
            value = int(a) + int(b) if sign == "+" else int(a) - int(b)
            answer = f"It is {value + self.wrong}."
            choice: dict[str, Any] = {"message": {"content": answer}, "finish_reason": "stop"}
        else:
            count = len(body["prompt"].split())
            likely = {"a": math.log(0.8), "z": math.log(0.1)}
            choice = {
                "text": "a" + self.second,
                "logprobs": {
                    "tokens": ["a", self.second],
                    "top_logprobs": [likely, likely],
                    "token_logprobs": [None, *([-2.0] * (count - 1)), -9.0],
                },
            }
        self._send({"choices": [choice]})

    def _send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Speaker.second, Speaker.wrong = " b", False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaker)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def plain(*answers: str) -> list[Answer]:
    return [Answer(list(text), []) for text in answers]


def test_answers(url: str) -> None:
    (answer,) = answers_of(Target(url, "m"), ["x y"], 2)
    assert answer.tokens == ["a", " b"]
    assert answer.top[0]["a"] == pytest.approx(math.log(0.8))


def test_both_forms_of_log_probabilities() -> None:
    likely = [{"token": "a", "logprob": -0.1, "bytes": [97]}]
    chat = {"content": [{"token": "a", "logprob": -0.1, "top_logprobs": likely}]}
    assert read_answer({"choices": [{"logprobs": chat}]}) == Answer(["a"], [{"a": -0.1}])
    old = {"tokens": ["a"], "top_logprobs": None}
    assert read_answer({"choices": [{"logprobs": old}]}) == Answer(["a"], [])
    with pytest.raises(HeadraceError, match="tells no tokens"):
        read_answer({"choices": [{"text": "a"}]})


def test_agreement() -> None:
    reference = plain("abcd", "ef", "g")
    assert agreement(reference, reference) == Agreement(3, 3, 1.0, None)
    found = agreement(plain("abXd", "ef", "h"), reference)
    assert found.equal == 1
    assert found.token_match == pytest.approx((0.5 + 1 + 0) / 3)
    assert found.first_difference == 2
    with pytest.raises(InvalidRequest):
        agreement([], reference)


def logs(**shares: float) -> dict[str, float]:
    return {token: math.log(share) for token, share in shares.items()}


def test_divergence_is_a_lower_bound() -> None:
    assert divergence(logs(a=0.5, b=0.25), logs(a=0.5, b=0.25)) == 0
    # Of a whole distribution it is the divergence itself.
    known = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(logs(a=0.75, b=0.25), logs(a=0.5, b=0.5)) == pytest.approx(known)
    rng = random.Random(3)
    for _ in range(50):
        ours, theirs = ([rng.random() ** 3 + 1e-6 for _ in range(12)] for _ in range(2))
        ours, theirs = ([value / sum(side) for value in side] for side in (ours, theirs))
        true = sum(p * math.log(p / q) for p, q in zip(theirs, ours, strict=True))
        best = [sorted(range(12), key=lambda n, s=s: -s[n])[:5] for s in (theirs, ours)]  # type: ignore[misc]
        tops = [
            {str(n): math.log(side[n]) for n in kept}
            for side, kept in zip((theirs, ours), best, strict=True)
        ]
        assert -1e-12 <= divergence(*tops) <= true + 1e-9


def test_divergence_is_taken_while_the_context_is_the_same() -> None:
    same, other = logs(a=0.6, b=0.4), logs(a=0.4, b=0.6)
    reference = [Answer(["a", "a", "a"], [same, same, same])]
    found = agreement([Answer(["a", "b", "a"], [same, other, other])], reference)
    # The third place has another context on each side.
    assert found.places == 2
    assert found.kl_max == pytest.approx(0.6 * math.log(1.5) + 0.4 * math.log(1 / 1.5))
    assert found.kl_mean == pytest.approx((found.kl_max or 0) / 2)


def test_references_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    whole = Reference(
        "m",
        ["p"],
        [Answer(["a"], [{"a": -0.5}])],
        Perplexity(3.0, 9, 2, "c"),
        {"arithmetic/5": 0.8},
    )
    save_reference(path, whole)
    assert load_reference(path) == whole
    text = path.read_text()
    for broken, match in (
        ("{}", "schema"),
        (text[: len(text) // 2], "no reference"),
        (text.replace('"prompts": ["p"]', '"prompts": []'), "0 prompts, 1 answers"),
        (text.replace("reference/1", "reference/9"), "reference/9"),
    ):
        path.write_text(broken)
        with pytest.raises(InvalidRequest, match=match):
            load_reference(path)
    with pytest.raises(HeadraceError, match="No such file"):
        save_reference(tmp_path / "nowhere" / "r.json", whole)


def test_the_gate() -> None:
    reference = Reference("m", [], [], Perplexity(10.0, 9, 2, "c"), {"arithmetic/50": 0.8})
    agreed = Agreement(4, 3, 0.995, 7.0)
    scores = [TaskScore("arithmetic", 50, 36, 0), TaskScore("copying", 50, 9, 0)]
    held = hold(reference, agreed=agreed, perplexity=Perplexity(10.05, 9, 2, "c"), scores=scores)
    assert [one.name for one in held] == ["token match", "perplexity", "arithmetic"]
    assert held[1].share == pytest.approx(10 / 10.05)
    assert [one.passes(0.99) for one in held] == [True, True, False]
    assert [one.passes(0.999) for one in held] == [False, False, False]
    # A reference without a right answer cannot be missed, and the share is a number of JSON.
    nothing = replace(reference, tasks={"arithmetic/50": 0.0})
    for right in (0, 36):
        scores = [TaskScore("arithmetic", 50, right, 0)]
        (one,) = hold(nothing, agreed=None, perplexity=None, scores=scores)
        assert one.share == 1.0
        json.dumps(asdict(one), allow_nan=False)
    # Another text, another number of questions: nothing to be held against.
    none = hold(
        reference,
        agreed=None,
        perplexity=Perplexity(10.0, 8, 2, "c"),
        scores=[TaskScore("arithmetic", 10, 9, 0)],
    )
    assert none == []


def test_task_sets_are_functions_of_their_seed() -> None:
    for name in BUILT_IN:
        first, again, other = (load_task(name, 8, seed) for seed in (0, 0, 1))
        assert [item.question for item in first] == [item.question for item in again]
        assert [item.question for item in first] != [item.question for item in other]
    assert last_number("so 1,234.5 it is.") == 1234.5
    assert last_number("-3") == -3
    assert last_number("none") is None


def test_what_is_right() -> None:
    (words,) = load_task("copying", 1)
    wanted = words.question.rpartition(": ")[2]
    assert words.right(f"Here:\n{wanted.title()}\n")
    assert not words.right(wanted.replace(" ", ", "))
    (fact,) = load_task("extraction", 1)
    name, age, town = re.findall(r"(\w+) is (\d+) years old and lives in (\w+)", fact.question)[0]
    good = json.dumps({"name": name, "age": int(age), "town": town})
    assert fact.right(f"```json\n{good}\n```")
    assert not fact.right(good.replace(age, f'"{age}"'))
    assert not fact.right(good[:-3])


def test_scores_and_their_interval(url: str) -> None:
    items = load_task("arithmetic", 20)
    score = score_task(Target(url, "m"), "arithmetic", items)
    assert (score.right, score.score) == (20, 1.0)
    low, high = score.interval
    assert low == pytest.approx(0.839, abs=1e-3)
    assert high == 1.0
    Speaker.wrong = True
    assert score_task(Target(url, "m"), "arithmetic", items).right == 0


def test_gsm8k_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "g.jsonl"
    path.write_text(json.dumps({"question": "Two and two?", "answer": "2+2\n#### 1,004"}) + "\n")
    (item,) = load_task(f"gsm8k:{path}", 5)
    assert item.right("so it is 1004")
    path.write_text('{"question": "x"}\n')
    with pytest.raises(InvalidRequest, match="line 1"):
        load_task(f"gsm8k:{path}", 5)
    for name in ("gsm8k:/nowhere", "chess"):
        with pytest.raises(InvalidRequest) as error:
            load_task(name, 5)
        assert error.value.param == "tasks"


def test_the_command_and_its_gate(url: str, tmp_path: Path) -> None:
    runner, file = CliRunner(), tmp_path / "r.json"
    common = [
        "accuracy",
        "--url",
        url,
        "--prompts",
        "3",
        "--tasks",
        "arithmetic",
        "--items",
        "5",
        "--limit",
        "2",
    ]
    saved = runner.invoke(command, [*common, "--save", str(file)])
    assert saved.exit_code == 0, saved.output
    assert "5 of 5 right" in saved.output
    again = runner.invoke(command, [*common, "--reference", str(file), "--json"])
    assert again.exit_code == 0, again.output
    document = json.loads(again.stdout)
    assert [one["share"] for one in document["held"]] == [1.0, 1.0, 1.0]
    assert document["agreement"]["kl_max"] == 0
    Speaker.second = " c"
    other = runner.invoke(command, [*common, "--reference", str(file)])
    assert other.exit_code == 3
    assert "below 99.0% of the reference: token match" in other.output
    for more in (["--at-least", "0.4"], ["--gate", "tasks,perplexity"]):
        assert runner.invoke(command, [*common, "--reference", str(file), *more]).exit_code == 0
    bad = runner.invoke(command, [*common, "--reference", str(file), "--gate", "speed"])
    assert isinstance(bad.exception, InvalidRequest)
