"""Loading of our libraries: functions of their sources, the first file that fits, plain errors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.base import textlibrary
from headrace.base.c_header import Header
from headrace.base.native import LibraryAbsent, LibraryStale, loaded

pytestmark = pytest.mark.skipif(textlibrary.library() is None, reason=str(textlibrary.absence()))


@pytest.fixture
def header(tmp_path: Path) -> Callable[[str], Header]:
    def made(text: str) -> Header:
        file = tmp_path / "some.h"
        file.write_text(text)
        return Header(file)

    return made


def accept(_library: ctypes.CDLL, _file: Path) -> None:
    """Accept any library."""


def built() -> Path:
    library = textlibrary.library()
    assert library is not None
    return Path(library._name)


def test_functions_have_the_types_of_their_declarations(header: Callable[[str], Header]) -> None:
    declared = header("API int32_t hrt_version();\nAPI void hrt_bpe_free(void* bpe) { }\n")
    library = loaded((built(),), declared, accept)
    assert library is not None
    assert library.hrt_version.restype is ctypes.c_int32
    assert library.hrt_bpe_free.argtypes == [ctypes.c_void_p]
    assert library.hrt_version() == textlibrary.VERSION


def test_a_library_without_a_function_is_stale(header: Callable[[str], Header]) -> None:
    with pytest.raises(LibraryStale, match=r"is of other sources .*hrt_gone"):
        loaded((built(),), header("API void hrt_gone();\n"), accept)


def test_the_first_file_that_fits_is_taken(header: Callable[[str], Header], tmp_path: Path) -> None:
    broken, plain = tmp_path / "broken.so", header("API int32_t hrt_version();\n")
    broken.write_bytes(b"no library")
    assert loaded((tmp_path / "none.so",), plain, accept) is None
    found = loaded((tmp_path / "none.so", broken, built()), plain, accept)
    assert found is not None
    assert found._name == str(built())

    def refuse(_library: ctypes.CDLL, file: Path) -> None:
        raise LibraryAbsent(f"{file.name} is refused")

    with pytest.raises(LibraryAbsent, match=r"broken\.so cannot be loaded"):
        loaded((broken, built()), plain, refuse)
    with pytest.raises(LibraryAbsent, match="is refused"):
        loaded((built(), broken), plain, refuse)
