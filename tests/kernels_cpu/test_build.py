"""The build of the kernels: which levels, what is kept, and what is said meanwhile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.kernels.cpu import build, kept, library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down each run, and kept objects of this test alone."""
    real = shutil.which("c++") or shutil.which("g++")
    if real is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(kept, "KEPT", tmp_path / "objects")
    wrapper = tmp_path / "compiler"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo . >> {tmp_path}/runs\n{real} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


def compile_in(folder: Path, compiler: Path, source: Path, *options: str) -> tuple[bytes, str]:
    """An object and the list of what it was made of, both made through the launcher in `folder`."""
    folder.mkdir(exist_ok=True)
    made, needs = folder / "a.o", folder / "a.o.d"
    places = ["-MD", "-MT", f"{folder.name}/a.o", "-MF", str(needs), "-o", str(made)]
    assert kept.main([str(compiler), *options, *places, "-c", str(source)]) == 0
    return made.read_bytes(), needs.read_text()


def test_an_object_is_compiled_once(compiler: Path, tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    sources.mkdir()
    source, header = sources / "a.cpp", sources / "a.h"
    source.write_text('#include "a.h"\nint f() { return NUMBER; }\n')
    header.write_text("#define NUMBER 1\n")

    def runs() -> int:
        return (tmp_path / "runs").read_text().count(".")

    first, needs = compile_in(tmp_path / "one", compiler, source, "-O1")
    again, others = compile_in(tmp_path / "two", compiler, source, "-O1")
    assert (runs(), again) == (1, first)
    assert others == needs.replace("one/a.o", "two/a.o")
    assert str(header) in others  # so that a later change of it is seen by the build itself
    assert compile_in(tmp_path / "three", compiler, source, "-O1", "-fPIC", "-DX")[0]
    assert runs() == 2
    header.write_text("#define NUMBER 2\n")
    assert compile_in(tmp_path / "two", compiler, source, "-O1")[0] != first
    assert runs() == 3


def test_what_fails_to_compile_is_not_kept(compiler: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("no language\n")
    places = ["-MD", "-MT", "a.o", "-MF", str(tmp_path / "a.d"), "-o", str(tmp_path / "a.o")]
    assert kept.main([str(compiler), *places, "-c", str(source)]) != 0
    assert not kept.KEPT.exists()


def test_only_so_many_objects_are_kept(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "MOST", 2)
    source = tmp_path / "a.cpp"
    source.write_text("int f() { return X; }\n")
    for number in range(4):
        compile_in(tmp_path / "one", compiler, source, f"-DX={number}")
    assert len(list(kept.KEPT.glob("*.o"))) == len(list(kept.KEPT.glob("*.d"))) == 2


def configured(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_build_for_this_host_has_its_level(tmp_path: Path) -> None:
    ran = configured(tmp_path, "-DHEADRACE_KERNELS=host")
    assert ran.returncode == 0, ran.stderr
    found = re.search(r"Levels of the CPU kernels: (\S+)", ran.stdout)
    assert found is not None
    built = found.group(1).split(";")
    best = [name for name in library.LEVELS if library.refused(name) is None][-1]
    assert built[0] == best
    assert not set(library.LEVELS) & set(built[1:])


def test_a_level_that_is_none_ends_the_build(tmp_path: Path) -> None:
    ran = configured(tmp_path, "-DHEADRACE_KERNELS=avx2;avx9")
    assert ran.returncode != 0
    assert "HEADRACE_KERNELS: no level avx9, but all, host," in ran.stderr


def test_a_build_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    of = "src/headrace/kernels/cpu/csrc/attention_codes.cpp.o"
    for line in (
        f"[3/24] Building CXX object CMakeFiles/kernels_vnni.dir/{of}",
        f"[ 12%] Building CXX object CMakeFiles/kernels_vnni.dir/{of}",
        "[ 16%] Building CXX object CMakeFiles/headrace_text.dir/src/headrace/text/csrc/bpe.cpp.o",
        "[100%] Linking CXX shared library _headrace_cpu.so",
        "a.h:1: warning: something",
    ):
        build.progress(line)
    assert capsys.readouterr().out.splitlines() == [
        "[3/24] kernels: vnni attention_codes",
        "[ 12%] kernels: vnni attention_codes",
        "[ 16%] text: bpe",
        "a.h:1: warning: something",
    ]


def test_a_level_that_was_not_built_says_what_builds_it() -> None:
    """Emulated tiles are in test builds alone."""
    why = library.refused("amx-emulated")
    if library.refused("bf16") == "the CPU has no bf16":
        assert why == "the CPU has no amx-emulated"
        return
    assert why is not None
    assert why.startswith("level amx-emulated was not built; ")
    assert "build --levels all`" in why
    with pytest.raises(library.LibraryAbsent, match="level amx-emulated was not built"):
        library.Team(1, "amx-emulated")
    assert library.refused("avx9") == "there is no level avx9"


def test_the_library_of_these_sources_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One in place is older than the one that pip installed, or the other way round."""
    real, stale = Path(library.load()._name), tmp_path / "stale.so"
    stale.write_bytes(real.read_bytes().replace(library.sources().encode(), b"0" * 16))
    for file, installed in ((stale, real), (real, stale)):
        monkeypatch.setattr(library, "FILE", file)
        monkeypatch.setattr(library, "INSTALLED", installed)
        assert library.load.__wrapped__()._name == str(real)
    monkeypatch.setattr(library, "FILE", stale)
    with pytest.raises(library.LibraryStale, match="was built from other sources"):
        library.load.__wrapped__()
