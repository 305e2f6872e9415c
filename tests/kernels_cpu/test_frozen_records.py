"""The records of known models are those that were frozen: names, fields, buffers.

A change of the lowering that is meant to change them writes them anew (`python
tests/kernels_cpu/test_frozen_records.py`) and says why; every other leaves this test as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from frozen_models import FAMILIES, programs, tiny
from lowered import lines, summary

from headrace.base.config import DEFAULT_MODEL
from headrace.kernels.cpu import emit, records

FROZEN = Path(__file__).with_name("frozen_records.json")
WHOLE = {"default": DEFAULT_MODEL, "smollm2": "smollm2-135m", "gemma": "gemma-3-270m"}


def frozen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FROZEN.read_text())
    return found


def tiny_cases() -> Iterator[str]:
    for family in FAMILIES:
        for weights in ("packed", "mixed", "dense"):
            yield f"{family} {weights}"


def found(name: str) -> dict[str, Any]:
    """Variant → what is kept of its program."""
    family, _, weights = name.partition(" ")
    made = programs(WHOLE[family]) if family in WHOLE else tiny(family, weights)
    return {kind: None if one is None else summary(one) for kind, one in made.items()}


@pytest.mark.parametrize("name", list(tiny_cases()))
def test_records_are_the_frozen_ones(name: str) -> None:
    assert found(name) == frozen()[name]


@pytest.mark.model
@pytest.mark.parametrize("name", WHOLE)
def test_records_of_real_models_are_the_frozen_ones(name: str) -> None:
    assert found(name) == frozen()[name]


def test_the_text_tells_programs_apart() -> None:
    """Another buffer, another number, another order: none of it stays unseen."""
    program = tiny("llama", "packed")["plain"]
    assert program is not None
    text = list(lines(program))
    assert len(text) == len(program.names)
    program._emitted[1][1].eps += 1e-4
    changed = [one != two for one, two in zip(text, lines(program), strict=True)]
    assert changed == [index == 1 for index in range(len(text))]
    assert "buffer" in text[1]


def test_a_record_has_the_struct_that_the_library_casts_to() -> None:
    """No other is taken, and what is not a field's value is refused."""
    with pytest.raises(AssertionError, match="is no HrNorm"):
        emit.program([(records.CODES["ADD"], records.HEADER.struct("HrNorm")())])
    with pytest.raises(TypeError, match="too many initializers"):
        emit.record("ADD", *[0] * 9)


if __name__ == "__main__":
    names = [*tiny_cases(), *WHOLE]
    FROZEN.write_text(json.dumps({name: found(name) for name in names}, indent=1) + "\n")
