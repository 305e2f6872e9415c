"""Workloads of real text: the same for a seed, and what they ask for can be done."""

from __future__ import annotations

import ast
import random

import pytest

from headrace.bench.lengths import parse_lengths
from headrace.bench.material import Material
from headrace.bench.natural import CLASSES, _describe, _functions, _mend, _rename
from headrace.bench.workload import CHAT_ONLY, Wish, make_workload


def test_there_is_code_to_be_edited() -> None:
    assert len(_functions()) >= 40
    for function in _functions():
        ast.parse(function)


@pytest.mark.parametrize("edit", [_rename, _describe, _mend])
def test_edited_code_is_code_and_the_edit_is_needed(edit: object) -> None:
    assert callable(edit)
    for function in _functions():
        wanted, shown = edit(function)
        (parsed,) = ast.parse(shown).body
        assert isinstance(parsed, ast.FunctionDef)
        if edit is _rename:
            assert wanted.split("`")[1] in shown
            assert wanted.split("`")[3] not in shown
        elif edit is _describe:
            assert ast.get_docstring(parsed) != ast.get_docstring(ast.parse(function).body[0])  # type: ignore[arg-type]
    if edit is _mend:
        assert sum(_mend(one)[1] != one for one in _functions()) > len(_functions()) / 2


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_prompts_and_turns(name: str) -> None:
    lengths = parse_lengths("20")
    sessions = make_workload(name, Wish(30, 1, lengths, lengths, Material(), False))
    assert name in CHAT_ONLY
    assert len({session.turns[0].text for session in sessions}) > 5
    assert all(turn.text and turn.output_tokens == 20 for one in sessions for turn in one.turns)
    assert all(len(one.turns) > 1 for one in sessions) == (name in ("tool-loop", "conversation"))


def test_a_seed_decides() -> None:
    for said in CLASSES.values():
        assert said(random.Random(3)) == said(random.Random(3))
