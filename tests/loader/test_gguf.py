"""The GGUF reader against the reference package, and against files that are damaged or lie."""

from __future__ import annotations

import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.base.errors import HeadraceError, ModelFileError
from headrace.base.strings import StringArray
from headrace.base.textlibrary import library
from headrace.loader.gguf import GgufFile
from headrace.loader.panelfile import _of_mapping


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of everything that the format has."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grün 🌱")
    writer.add_array("a.strings", ["", "eins", "zwei 二", "\n"] * 3)
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [0.25] * 5000)
    rng = np.random.default_rng(0)
    writer.add_tensor("dense", rng.normal(size=(3, 5)).astype(np.float32))
    writer.add_tensor("half", rng.normal(size=(4, 32)).astype(np.float16))
    q8 = gguf.quants.quantize(
        rng.normal(size=(6, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("blocks", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", np.arange(7, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_everything_equals_the_reference_reader(sample: Path) -> None:
    ours, theirs = GgufFile(sample), gguf.GGUFReader(sample)
    wanted = {key: f.contents() for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(wanted)
    for key, value in wanted.items():
        assert ours.metadata[key] == value, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert info.offset == tensor.data_offset
        assert info.nbytes == tensor.n_bytes
        np.testing.assert_array_equal(ours.view(tensor.name), tensor.data)


def test_views_are_private_and_outlive_the_reader(sample: Path) -> None:
    before = sample.read_bytes()
    view = GgufFile(sample).view("dense")
    view[:] = 0
    assert sample.read_bytes() == before


def test_string_array_is_a_sequence(sample: Path) -> None:
    strings = GgufFile(sample).metadata["a.strings"]
    assert isinstance(strings, StringArray)
    plain = ["", "eins", "zwei 二", "\n"] * 3
    assert list(strings) == plain
    assert strings == plain
    assert strings != plain[1:]
    assert strings[-1] == "\n"
    assert strings[1:3] == plain[1:3]
    assert strings.index("zwei 二") == 2
    assert strings.find("zwei 二") == 2
    assert strings.find("wei") is None
    assert "eins" in strings
    assert pickle.loads(pickle.dumps(strings)) == plain
    with pytest.raises(IndexError):
        strings[12]


def test_find_is_not_fooled_by_a_string_that_holds_a_length(tmp_path: Path) -> None:
    inner = struct.pack("<Q", 2).decode("latin-1") + "ab"
    path = tmp_path / "x.gguf"
    path.write_bytes(file_bytes([("s", 9, array(8, [string(inner), string("x"), string("ab")]))]))
    assert GgufFile(path).metadata["s"].find("ab") == 2


def test_reads_without_torch(sample: Path) -> None:
    import subprocess

    code = (
        "import sys; from pathlib import Path; from headrace.loader import open_model; "
        "from headrace.loader.gguf import GgufFile; GgufFile(Path(sys.argv[1])); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(sample)], check=False).returncode == 0


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return struct.pack("<IQ", kind, len(items) if count is None else count) + b"".join(items)


def file_bytes(
    entries: list[tuple[str, int, bytes]] = (),  # type: ignore[assignment]
    tensors: list[tuple[str, tuple[int, ...], int, int]] = (),  # type: ignore[assignment]
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    magic: bytes = b"GGUF",
) -> bytes:
    n_tensors, n_entries = counts or (len(tensors), len(entries))
    out = magic + struct.pack("<IQQ", version, n_tensors, n_entries)
    for key, kind, value in entries:
        out += string(key) + struct.pack("<I", kind) + value
    for name, dims, kind, offset in tensors:
        out += string(name) + struct.pack("<I", len(dims))
        out += b"".join(struct.pack("<Q", n) for n in dims) + struct.pack("<IQ", kind, offset)
    out += b"\0" * (-len(out) % 32)
    return out + data


U32 = struct.pack("<I", 7)
HUGE = 2**63


@pytest.fixture(params=["the library walks", "Python walks"])
def walker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over arrays of strings: by the text library, where it was built, and without it."""
    if request.param == "Python walks":
        monkeypatch.setattr("headrace.loader.gguf.walk_strings", lambda *arguments: None)
    elif library() is None:
        pytest.skip("the text library was not built")


@pytest.mark.usefixtures("walker")
@pytest.mark.parametrize(
    "texts", [[], ["a"], ["", "é", ""], ["x" * 300] * 50, [str(i) for i in range(1000)]]
)
def test_arrays_of_strings(tmp_path: Path, texts: list[str]) -> None:
    items = [string(text) for text in texts]
    path = tmp_path / "m.gguf"
    path.write_bytes(file_bytes([("k", 9, array(8, items)), ("last", 4, struct.pack("<I", 7))]))
    file = GgufFile(path)
    assert isinstance(file.metadata["k"], StringArray)
    assert list(file.metadata["k"]) == texts
    assert file.metadata["k"].starts.tolist() == np.cumsum([0, *map(len, items)]).tolist()
    assert file.metadata["last"] == 7


@pytest.mark.usefixtures("walker")
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "too short"),
        (b"GGUF", "too short"),
        (file_bytes(magic=b"GGML"), "not a GGUF file"),
        (file_bytes(version=1), "version 1"),
        (file_bytes(version=99), "version 99"),
        (file_bytes(version=3 << 24), "big-endian"),
        (file_bytes(counts=(HUGE, 0)), "number of tensors"),
        (file_bytes(counts=(0, HUGE)), "number of metadata entries"),
        (file_bytes(counts=(0, 5)), "ends inside"),
        (file_bytes(counts=(5, 0)), "ends inside"),
        (file_bytes([("k", 99, b"")]), "unknown type 99"),
        (file_bytes([("k", 8, struct.pack("<Q", HUGE))]), "length of k"),
        (file_bytes([("k", 8, struct.pack("<Q", 1 << 20))]), "ends inside k"),
        (file_bytes([("k", 9, array(8, [], HUGE))]), "length of k"),
        (file_bytes([("k", 9, array(8, [string("a")], 1000))]), "ength of k|ends inside k"),
        (file_bytes([("k", 9, array(8, [struct.pack("<Q", HUGE)] * 2))]), "ends inside k"),
        (file_bytes([("k", 9, array(8, [struct.pack("<Q", 2**64 - 8)] * 9))]), "ends inside k"),
        (file_bytes([("k", 9, array(4, [], 1 << 23))]), "ends inside k"),
        (file_bytes([("k", 9, array(9, [array(4, [U32])]))]), "array of type 9"),
        (file_bytes([("k", 4, U32), ("k", 4, U32)]), "appears twice"),
        (file_bytes([("k", 8, struct.pack("<Q", 2) + b"\xff\xfe")]), "not UTF-8"),
        (file_bytes([("general.alignment", 4, struct.pack("<I", 3))]), "general.alignment"),
        (file_bytes([("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment"),
        (file_bytes(tensors=[("t", (4,), 0, 0)]), "truncated"),
        (file_bytes(tensors=[("t", (4,), 0, HUGE)]), "truncated"),
        (file_bytes(tensors=[("t", (2**40, 2**40, 2**40), 0, 0)]), "truncated"),
        (file_bytes(tensors=[("t", (4,), 0, 5)], data=b"\0" * 64), "alignment"),
        (file_bytes(tensors=[("t", (0, 4), 0, 0)]), "shape"),
        (file_bytes(tensors=[("t", (1,) * 5, 0, 0)]), "5 dimensions"),
        (file_bytes(tensors=[("t", (4,), 77, 0)]), "unknown type 77"),
        (file_bytes(tensors=[("t", (40,), 8, 0)]), "multiple of Q8_0"),
        (file_bytes(tensors=[("t", (8,), 0, 0)] * 2, data=b"\0" * 64), "appears twice"),
        (file_bytes(tensors=[("a", (16,), 0, 0), ("b", (8,), 0, 32)], data=b"\0" * 64), "overlap"),
    ],
)
def test_a_lying_file_is_refused_by_field(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "lies.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says):
        GgufFile(path)


def test_every_truncation_is_refused(sample: Path, tmp_path: Path) -> None:
    whole = sample.read_bytes()
    end = max(info.offset + info.nbytes for info in GgufFile(sample).tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 700, 7), *range(700, end, max(1, (end - 700) // 60)), end - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            GgufFile(cut)


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 1400), st.integers(0, 255)), max_size=4))
def test_damage_is_found_or_harmless(
    sample: Path, tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    """Any bytes: a typed error or a file whose every view stays inside the file."""
    content = bytearray(sample.read_bytes())
    for at, value in flips:
        content[at] = value
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    try:
        file = GgufFile(path)
        for value in file.metadata.values():
            if isinstance(value, StringArray):
                list(value)
    except HeadraceError:
        return
    for name, info in file.tensors.items():
        assert info.offset + info.nbytes <= len(content)
        assert file.view(name).nbytes == info.nbytes


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ModelFileError, match="cannot be read"):
            GgufFile(path)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(file_bytes([("k", 4, U32)], [("t", (8,), 0, 0)], b"\0" * 32, version=2))
    file: Any = GgufFile(path)
    assert file.version == 2
    assert file.metadata == {"k": 7}


@pytest.mark.skipif(sys.platform != "linux", reason="smaps are Linux's")
def test_a_header_does_not_stay_mapped(tmp_path: Path) -> None:
    words = [f"word {number}" * 8 for number in range(10_000)]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_array("a.words", words)
    writer.add_tensor("dense", np.ones((3, 5), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "m.gguf")
    assert file.metadata["a.words"] == words
    assert file.tensors["dense"].offset > 500_000
    address = file.view("dense").ctypes.data - file.tensors["dense"].offset
    assert bool((file.view("dense") == 1).all())
    assert _of_mapping(address, "Rss:") < 200_000
