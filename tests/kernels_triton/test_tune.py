"""The tuner on small shapes: every candidate is a legal cut, the fastest wins, others stay."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from headrace.kernels.triton.table import Table, load_table
from headrace.kernels.triton.tune import Problem, Shapes, merge, problems, tune, tune_all

SMALL = Shapes(out=64, width=256, heads=2, kv_heads=1, context=20, entries=1, chunk=3)


def test_the_first_candidates_of_every_bucket_run() -> None:
    torch.manual_seed(0)
    found = list(problems(Table("sm_90"), SMALL, "cpu", torch.float32))
    kernels = {problem.kernel for problem in found}
    assert kernels == {
        "product_packed",
        "product_skinny",
        "product_skinny_coded",
        "product_packed_skinny",
        "attention_decode",
        "attention_decode_coded",
        "attention_prefill",
        "attention_prefill_coded",
    }
    for problem in found:
        assert len(set(problem.candidates)) == len(problem.candidates) > 4
        if problem.up_to in (4, 16, 64):
            results = problem.run(problem.candidates[0])
            for result in results if isinstance(results, list) else [results]:
                assert torch.isfinite(result).all()
    # A bound on registers is what one bucket has and a tuner might lose.
    bounded = [p for p in found if (p.kernel, p.up_to) == ("attention_decode", 128)]
    assert {config.registers for config in bounded[0].candidates} == {None, 128}
    coded = [p for p in found if p.kernel == "attention_decode_coded"]
    assert {config.ahead for p in coded for config in p.candidates} == {False, True}
    table = copy.deepcopy(load_table())
    order: dict[object, float] = {}

    def last_wins(run) -> float:
        order[run] = -float(len(order))
        return order[run]

    best = tune(iter(found), last_wins)
    merge(table, "sm_90", best)
    for problem in found:
        row = next(b for b in table["sm_90"][problem.kernel] if b["up_to"] == problem.up_to)
        last = problem.candidates[-1]
        assert all(getattr(last, key) == value for key, value in row.items() if key != "up_to")
    assert table["sm_80"] == load_table()["sm_80"]
    assert table["sm_90"]["moe"] == load_table()["sm_90"]["moe"]


def test_what_was_tuned_is_kept_when_time_is_over(tmp_path: Path) -> None:
    table, file = Table("sm_90"), tmp_path / "table.json"
    now, other = table.decode(64), table.decode(256)
    ran: list[object] = []

    def problem(kernel: str, up_to: int | None) -> Problem:
        return Problem(kernel, up_to, [now, other], ran.append)

    def last_wins(run) -> float:
        run()
        return -float(len(ran))

    some = [problem("attention_prefill", None), problem("attention_decode", 128)]
    tune_all(iter(some), "sm_90", last_wins, file, ["attention_decode"], 60.0)
    assert ran == [now, other], "the other kernel was not asked for"
    written = json.loads(file.read_text())
    assert written["sm_90"]["attention_decode"][0]["tile"] == other.tile
    assert written["sm_90"]["attention_prefill"] == load_table()["sm_90"]["attention_prefill"]
    file.unlink()
    tune_all(iter(some), "sm_90", last_wins, file, None, -1.0)
    assert not file.exists()
    assert len(ran) == 2


def test_what_does_not_start_drops_out() -> None:
    def run(config: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    table = Table("sm_90")
    now, other = table.decode(64), table.decode(256)

    def measure(run) -> float:
        run()
        return 1.0

    good = Problem("attention_decode", 128, [now, other], lambda c: run(c) if c == now else None)
    assert tune(iter([good]), measure)["attention_decode"][0]["tile"] == other.tile
    with pytest.raises(AssertionError, match="no candidate"):
        tune(iter([Problem("attention_decode", 128, [now], run)]), measure)
