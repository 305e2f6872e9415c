"""The structs and numbers that Python reads from the headers are the compiler's."""

from __future__ import annotations

import ctypes
import keyword
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from headrace.base.arch import Scoring
from headrace.base.c_header import Header
from headrace.engine.ranks.launch import MOST_RANKS
from headrace.kernels.cpu.library import SOURCES
from headrace.kernels.cpu.records import HEADER, UNIT
from headrace.kernels.draws import RULE
from headrace.kernels.operators import STATE_COLUMNS

TEXT = "".join((SOURCES / name).read_text() for name in ("records.h", "library.h"))
STRUCTS = re.findall(r"^} (\w+);", TEXT, re.MULTILINE)


def claims(header: Header) -> Iterator[str]:
    """C++ expressions that hold if a struct, a number or a code is what `header` says."""
    for name in STRUCTS:
        kind = header.struct(name)
        yield f"sizeof({name}) == {ctypes.sizeof(kind)}"
        for field, *_ in kind._fields_:
            found, size = getattr(kind, field).offset, getattr(kind, field).size
            plain = field[:-1] if keyword.iskeyword(field[:-1]) else field
            yield f"offsetof({name}, {plain}) == {found}"
            yield f"sizeof({name}::{plain}) == {size}"
    for names in (header.numbers, *header.enums.values()):
        yield from (f"{name} == {number}" for name, number in names.items())
    yield from (f"HR_OP_{name} == {code}" for name, (code, _) in header.codes.items())


def compiled(header: Header, folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    checks = "\n".join(f'static_assert({claim}, "{claim}");' for claim in claims(header))
    source = folder / "claims" / "claims.cpp"  # Beside no header, which would be preferred.
    source.parent.mkdir()
    source.write_text(f'#include <stddef.h>\n#include "library.h"\n{checks}\n')
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{SOURCES}", str(source)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_compiler_agrees(tmp_path: Path) -> None:
    found = compiled(HEADER, tmp_path)
    assert not found.returncode, found.stderr


def test_nothing_of_the_headers_is_left_out() -> None:
    plain = re.sub(r"//.*", "", TEXT)
    bodies = re.findall(r"typedef struct \{(.*?)\}", plain, re.DOTALL)
    names = [name for body in bodies for name in re.findall(r"(\w+)(?:\[\w+\])?(?=[,;])", body)]
    assert len(STRUCTS) == len(bodies)
    assert len(names) == sum(len(HEADER.struct(name)._fields_) for name in STRUCTS)
    assert set(HEADER.enums) | {"HrCode"} == set(re.findall(r"enum (\w+)", plain))
    of_enums = sum(map(len, HEADER.enums.values()))
    assert len(re.findall(r"HR_\w+ = \d+", plain)) == of_enums
    assert len(re.findall(r"EACH\(\w+, \d", plain)) == len(HEADER.codes)
    assert len(re.findall(r"\bhr_\w+\(", plain)) == len(HEADER.functions)


def test_a_field_of_another_type_is_seen(tmp_path: Path) -> None:
    for name in ("records.h", "library.h"):
        text = (SOURCES / name).read_text().replace("float eps;", "double eps;", 1)
        (tmp_path / name).write_text(text)
    found = compiled(Header(tmp_path / "records.h", tmp_path / "library.h"), tmp_path)
    assert "HrNorm" in found.stderr


def test_numbers_outside_the_headers_are_equal() -> None:
    """Other backends read these, and do not know the headers."""
    assert np.dtype(HEADER.struct("HrRule")) == RULE
    assert HEADER.numbers["HR_STATE_COLUMNS"] == STATE_COLUMNS
    assert HEADER.numbers["HR_MOST_RANKS"] == MOST_RANKS
    assert len(get_args(Scoring)) == len(HEADER.enums["HrScores"])
    assert HEADER.struct("HrLane").codes.size == UNIT


def test_types_of_functions() -> None:
    at, number = ctypes.c_void_p, ctypes.c_int32
    assert HEADER.functions["hr_run"] == (number, [at, at, number, at, at])
    assert HEADER.functions["hr_team_free"] == (None, [at])
    assert HEADER.functions["hr_level"] == (ctypes.c_char_p, [ctypes.c_char_p])
    assert HEADER.functions["hr_probe_int8"] == (ctypes.c_double, [at, ctypes.c_int64])
    assert HEADER.functions["hr_built"] == (ctypes.c_char_p, [])
