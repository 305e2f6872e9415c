"""The engine's image: the same bytes from two builders, what is in it, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import marshal
import os
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from factory_cell import rewrite

from headrace.base.errors import DownloadError, InvalidRequest, ModelFileError, Untrusted
from headrace.factory import image
from headrace.factory.attest import attestation_problems, check, check_image
from headrace.factory.audit import problems
from headrace.factory.bytecode import LOADERS
from headrace.factory.image import ImageBuild
from headrace.factory.layer import debian, wheel
from headrace.factory.revoke import trusted
from headrace.factory.sbom import locked
from headrace.factory.sign import Trust, signer
from headrace.factory.store import INDEX_TYPE, REF_NAME, Descriptor, Store

HERE = {machine: name for name, machine in image.MACHINES.items()}[platform.machine()]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def archive(*members: tuple[str, bytes]) -> bytes:
    """An `ar` archive, as Debian's packages are."""
    parts = [b"!<arch>\n"]
    for name, data in members:
        head = f"{name + '/':<16}{'1700000000':<12}{'0':<6}{'0':<6}{'100644':<8}{len(data):<10}`\n"
        parts += [head.encode(), data, b"\n" * (len(data) % 2)]
    return b"".join(parts)


def deb(names: dict[str, bytes], link: tuple[str, str] | None = None) -> bytes:
    """A package with these files, as anybody's tools may have packed them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in names.items():
            one = tarfile.TarInfo(f"./{name}")
            one.size, one.mtime, one.uid, one.mode = len(data), 1_700_000_000, 1000, 0o4755
            tar.addfile(one, io.BytesIO(data))
        if link:
            one = tarfile.TarInfo(f"./{link[0]}")
            one.type, one.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(one)
    data = lzma.compress(file.getvalue())
    return archive(("debian-binary", b"2.0\n"), ("data.tar.xz", data))


def write_wheel(path: Path, names: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in names.items():
            file.writestr(name, data)
    return path


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one package, one wheel, a lock and the list of packages that is pinned."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    package = deb(
        {
            "usr/bin/python3.11": b"machine code",
            LOADERS[
                platform.machine()
            ]: f'#!/bin/sh\nshift 3\nunset PYTHONHOME\nexec {sys.executable} "$@"\n'.encode(),
            "usr/lib/python3.11/deep.py": b"wide = {'a', 'b'}\n",
            "usr/lib/python3.11/template.py": b"this is no Python\n",
            "usr/share/doc/python/copyright": b"PSF",
            "usr/share/doc/python/changelog": b"long",
            "usr/share/man/man1/python.1": b"manual",
        },
        ("usr/bin/pydoc3", "python3.11"),  # As Debian's package, without `python3`.
    )
    (folder / "python_amd64.deb").write_bytes(package)
    names = {"river.py": b"deep = 1\n", "river-1.0.data/scripts/river": b"#!python\n",
             "river-1.0.data/platlib/stone.py": b"",
             "river-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: river\nVersion: 1.0\n",
             "river-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
             "river-1.0.dist-info/RECORD": b""}  # fmt: skip
    made = write_wheel(folder / "river-1.0-py3-none-any.whl", names)
    lock = f"river==1.0 \\\n    --hash=sha256:{sha256(made.read_bytes())}\n"
    (folder / "lock").write_text(lock)
    document = {"packages": {HERE: [["pool/python_amd64.deb", sha256(package)]]}}
    (folder / "debian.json").write_text(json.dumps(document))
    monkeypatch.setattr(image, "PINNED", folder / "debian.json")
    monkeypatch.setattr(image, "unbuilt", list)  # a checkout may have this machine's level alone
    return folder


def build(store: Path, inputs: Path, **wanted: Any) -> ImageBuild:
    words = {"lock": inputs / "lock", "wheels": inputs, "mirror": str(inputs), "offline": True}
    return ImageBuild(
        Store(store), signer(None, str(inputs.parent / "cache")), [HERE], **{**words, **wanted}
    )


def pinned(inputs: Path) -> list[list[str]]:
    found: list[list[str]] = json.loads((inputs / "debian.json").read_text())["packages"][HERE]
    return found


def named(store: Store) -> Descriptor:
    (entry,) = store.index()
    return Descriptor.read(entry)


def layers(store: Store) -> list[tarfile.TarFile]:
    index = store.document(named(store).digest)
    manifest = store.document(index["manifests"][0]["digest"])
    opened = []
    for one in manifest["layers"]:
        data = gzip.decompress(store.blob(one["digest"]).read_bytes())
        opened.append(tarfile.open(fileobj=io.BytesIO(data)))  # noqa: SIM115
    return opened


@pytest.mark.slow
def test_two_builders_make_the_same_bytes(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other paths, times, rights and clocks; the second run of either has nothing to do."""
    first = build(tmp_path / "one", inputs).run()
    other = Path(
        shutil.copytree(inputs, tmp_path / "elsewhere" / "inputs", copy_function=shutil.copy)
    )
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    before = os.umask(0o077)
    try:
        second = build(tmp_path / "elsewhere" / "two", other).run()
    finally:
        os.umask(before)
    stores = [Store(tmp_path / "one"), Store(tmp_path / "elsewhere" / "two")]
    assert named(stores[0]) == named(stores[1])
    assert named(stores[0]).media_type == INDEX_TYPE
    assert all(step.ran for step in [*first, *second])
    assert not [step.stage.name for step in build(tmp_path / "one", inputs).run() if step.ran]
    image = named(stores[0])
    name = stores[0].index()[0]["annotations"][REF_NAME]
    keys = trusted(None, str(tmp_path / "cache"))
    manifest = stores[0].document(image.digest)["manifests"][0]["digest"]
    for wanted in (name, image.digest):
        found = check_image(stores[0], keys, wanted)
        assert found == {"index": image.digest, HERE: manifest}
    assert check_image(stores[0], keys, "another:0.1.0") is None
    with pytest.raises(Untrusted):
        check_image(stores[0], Trust(), name)
    # A lock that is another one makes the libraries anew, and nothing else but the image.
    with (inputs / "lock").open("a") as file:
        file.write("# the same packages\n")
    ran = [step.stage.name for step in build(tmp_path / "one", inputs).run() if step.ran]
    assert ran == [f"libraries-{HERE}", "provenance"], "the same layer: the image stays as it is"


@pytest.mark.slow
def test_a_relative_store_serves_programs_elsewhere(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image's own Python compiles what is in it, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    steps = build(Path("store"), Path("inputs")).run()
    assert all(step.ran for step in steps)
    monkeypatch.chdir("/")
    assert named(Store(tmp_path / "store")).media_type == INDEX_TYPE


@pytest.mark.slow
def test_what_is_in_the_image(tmp_path: Path, inputs: Path) -> None:
    """No manual, no script, no rights of root, no time; a user, and two folders to write in."""
    build(tmp_path / "store", inputs).run()
    store = Store(tmp_path / "store")
    base, libraries, engine = layers(store)
    for name in ("pydoc3", "python3"):  # The second is the compose file's health check.
        assert base.getmember(f"usr/bin/{name}").linkname == "python3.11"
    assert base.getmember("usr/bin/python3.11").mode == 0o755
    assert "usr/share/doc/python/copyright" in base.getnames()
    assert not {"usr/share/doc/python/changelog", "usr/share/man/man1/python.1"} & {
        *base.getnames()
    }
    assert (base.getmember("cache").uid, base.getmember("tmp").mode) == (image.USER, 0o1777)
    for name in ("river.py", "stone.py", "river-1.0.dist-info/METADATA"):
        assert f"{image.SITE}/{name}" in libraries.getnames()
    assert not [name for name in libraries.getnames() if "scripts" in name]
    assert f"{image.SITE}/headrace/factory/image.py" in engine.getnames()
    members = [one for layer in (base, libraries, engine) for one in layer.getmembers()]
    assert {one.mtime for one in members} == {0}
    assert {one.uid for one in members} == {0, image.USER}
    assert not [one.name for one in members if one.mode & 0o6000]
    compiled = [
        f"{image.SITE}/__pycache__/river.cpython-311.pyc" in libraries.getnames(),
        "usr/lib/python3.11/__pycache__/deep.cpython-311.pyc" in base.getnames(),
        f"{image.SITE}/headrace/__pycache__/__init__.cpython-311.pyc" in engine.getnames(),
    ]
    assert all(compiled)
    assert not [one for one in base.getnames() if one.endswith("template.cpython-311.pyc")]
    file = libraries.extractfile(f"{image.SITE}/__pycache__/river.cpython-311.pyc")
    assert file is not None
    code = file.read()
    assert code[4:8] == b"\1\0\0\0", "by its source's hash, which nobody asks about"
    found: dict[str, int] = {}
    exec(marshal.loads(code[16:]), found)
    assert found["deep"] == 1
    assert not [one.name for one in members if one.name.endswith((".gguf", ".safetensors"))]
    index = store.document(named(store).digest)
    manifest = store.document(index["manifests"][0]["digest"])
    config = store.document(manifest["config"]["digest"])
    assert config["config"]["User"] == f"{image.USER}:{image.USER}"
    unpacked = [
        f"sha256:{sha256(gzip.decompress(store.blob(one['digest']).read_bytes()))}"
        for one in manifest["layers"]
    ]
    assert config["rootfs"]["diff_ids"] == unpacked
    assert list(problems(store)) == []
    trust = trusted(None, str(tmp_path / "cache"))
    assert list(attestation_problems(store, trust)) == []
    packages = [(path, f"sha256:{digest}") for path, digest in pinned(inputs)]
    attested = store.attested(named(store).digest)
    assert attested is not None
    check(store, trust, attested, named(store).digest, packages)
    with pytest.raises(Untrusted, match="does not name pool/other"):
        check(store, trust, attested, named(store).digest, [("pool/other", "sha256:0")])
    path = store.root / "attested" / named(store).digest.removeprefix("sha256:")
    path.rename(tmp_path / "attested")
    assert list(attestation_problems(store, trust)) == ["image headrace:0.1.0 has no provenance"]
    (tmp_path / "attested").rename(path)
    blob = store.blob(manifest["config"]["digest"])
    data = blob.read_bytes()
    rewrite(blob, data[:-1] + b" ")
    assert any(blob.name in line and "other bytes" in line for line in problems(store))
    blob.unlink()
    with pytest.raises(Untrusted, match="is not in the store"):
        store.closure(named(store))


def test_other_bytes_than_pinned_are_refused(tmp_path: Path, inputs: Path) -> None:
    path = inputs / "python_amd64.deb"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ModelFileError, match=r"pool/python_amd64\.deb: its SHA-256 is"):
        build(tmp_path / "store", inputs).run()
    path.unlink()
    with pytest.raises(DownloadError, match="cannot be had from"):
        build(tmp_path / "store", inputs).run()
    assert Store(tmp_path / "store").index() == []


@pytest.mark.slow
def test_a_wheel_that_the_lock_does_not_know_is_refused(tmp_path: Path, inputs: Path) -> None:
    write_wheel(inputs / "river-1.0-py3-none-any.whl", {"river.py": b"import evil\n"})
    with pytest.raises(DownloadError, match="the lock's wheels for"):
        build(tmp_path / "store", inputs).run()


def test_wrong_wishes_are_named(tmp_path: Path, inputs: Path) -> None:
    store, key = Store(tmp_path / "store"), signer(None, str(tmp_path / "cache"))
    with pytest.raises(InvalidRequest, match="one of amd64, arm64, not 'mips'"):
        ImageBuild(store, key, ["mips"], lock=inputs / "lock")
    with pytest.raises(InvalidRequest, match="nowhere cannot be read: No such file"):
        build(tmp_path / "store", inputs, lock=Path("nowhere"))
    (other,) = {"amd64", "arm64"} - {HERE}
    document = json.loads((inputs / "debian.json").read_text())
    (inputs / "debian.json").write_text(json.dumps({**document, "packages": {HERE: [], other: []}}))
    with pytest.raises(DownloadError, match="make wheels"):
        ImageBuild(store, key, [other], lock=inputs / "lock", wheels=inputs)


@pytest.mark.parametrize("given", ["wheel", "here"])
def test_an_image_without_kernels_is_refused(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Made of a wheel or of what is installed, it would start and serve nothing."""
    bare, source = tmp_path / "bare" / "headrace", image.PACKAGE
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("*.so", "__pycache__", "csrc"))
    monkeypatch.setattr(image, "PACKAGE", bare)
    monkeypatch.setattr(image.sysconfig, "get_path", lambda _name: str(bare.parent))
    name, says = f"headrace-0.1.0-py3-none-linux_{platform.machine()}.whl", "what is installed here"
    if given == "wheel":
        files = {f"headrace/{one.relative_to(bare)}": one.read_bytes() for one in bare.glob("*.py")}
        write_wheel(inputs / name, files)
        says = name
    with pytest.raises(InvalidRequest, match=f"{says} has no CPU kernels") as caught:
        build(tmp_path / "store", inputs)
    assert caught.value.param == "wheels"
    kernels = bare / "kernels" / "cpu" / image.FILE.name
    kernels.write_bytes(b"machine code")
    if given == "wheel":
        write_wheel(inputs / name, {**files, str(kernels.relative_to(bare.parent)): b"code"})
    build(tmp_path / "store", inputs)


def test_an_image_of_one_machines_kernels_is_refused(
    tmp_path: Path, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install has the level of its machine; an image may run on any."""
    monkeypatch.setattr(image, "unbuilt", lambda: ["avx2"])
    with pytest.raises(
        InvalidRequest, match=r"lacks the kernels of avx2, .* --levels all`"
    ) as caught:
        build(tmp_path / "store", inputs)
    assert caught.value.param == "wheels"


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../out"])
def test_a_package_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match="leaves its folder"):
        wheel(write_wheel(tmp_path / "bad.whl", {name: b""}), image.SITE)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    package = archive(("data.tar.xz", lzma.compress(file.getvalue())))
    with pytest.raises(ModelFileError, match="leaves its folder"):
        debian("bad.deb", package)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    whole = deb({"usr/bin/python3.11": b"machine code"})
    for bad in (
        b"",
        b"!<arch>\n",
        whole[:-40],
        whole.replace(b"`\n", b"-9", 1),
        archive(("x", b"")),
    ):
        with pytest.raises(ModelFileError, match="is no package of Debian"):
            debian("bad.deb", bad)
    (tmp_path / "bad.whl").write_bytes(b"PK")
    with pytest.raises(ModelFileError, match="is no wheel"):
        wheel(tmp_path / "bad.whl", image.SITE)


def test_the_pinned_packages_are_the_same_for_both_processors() -> None:
    pinned = json.loads((Path(image.__file__).parent / "debian.json").read_text())["packages"]
    names = {
        one: [path.rpartition("/")[2].partition("_")[0] for path, _ in pinned[one]]
        for one in pinned
    }
    assert sorted(names["amd64"]) == sorted(names["arm64"])
    assert "python3.11-minimal" in names["amd64"]
    assert all(len(digest) == 64 for one in pinned for _, digest in pinned[one])


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        (
            "sources.list",
            "deb [signed-by=x] https://here.test/debian bookworm main\n",
            "https://here.test/",
        ),
        (
            "sources.list.d/a.sources",
            "# http://old.test/debian\nURIs: http://new.test/debian\n",
            "http://new.test/",
        ),
        ("sources.list", "# deb http://off.test/debian bookworm main\n", ""),
        ("sources.list", "deb http://other.test/ubuntu noble main\n", ""),
    ],
)
def test_the_mirror_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, text: str, wanted: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    monkeypatch.setattr(image, "APT", tmp_path)
    assert image.own_mirror() == wanted


def test_without_a_mirror_it_says_what_names_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inputs: Path
) -> None:
    monkeypatch.setattr(image, "APT", tmp_path / "none")
    with pytest.raises(DownloadError, match="--debian"):
        build(tmp_path / "store", inputs, mirror=None).run()


def test_the_layers_files_are_what_the_lock_says(tmp_path: Path, inputs: Path) -> None:
    """A wheel that brings a second package with it, of which the lock and its bill know nothing."""
    made = inputs / "river-1.0-py3-none-any.whl"
    hidden = b"Metadata-Version: 2.1\nName: Hidden_Stone\nVersion: 7\n"
    with zipfile.ZipFile(made, "a") as file:
        file.writestr("river-1.0.data/platlib/hidden_stone-7.dist-info/METADATA", hidden)
    (inputs / "lock").write_text(f"river==1.0 \\\n    --hash=sha256:{sha256(made.read_bytes())}\n")
    with pytest.raises(ModelFileError, match="hidden-stone 7 is in one of the lock and the layer"):
        build(tmp_path / "store", inputs).run()


@pytest.mark.slow
def test_the_flavour_for_cuda_has_a_compiler_and_a_layer_of_its_own(
    tmp_path: Path, inputs: Path
) -> None:
    compiler = deb({"usr/bin/gcc-12": b"machine code", "sbin/ldconfig": b"machine code"})
    (inputs / "gcc_amd64.deb").write_bytes(compiler)
    document = json.loads((inputs / "debian.json").read_text())
    document["cuda"] = {HERE: [["pool/gcc_amd64.deb", sha256(compiler)]]}
    (inputs / "debian.json").write_text(json.dumps(document))
    heavy = {"torch": "2.0", "nvidia-nccl-cu13": "1.0", "triton": "3.0", "torchish": "1.0"}
    for name, version in heavy.items():
        spelled = name.replace("-", "_")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        folder = f"{spelled}-{version}.dist-info"
        names = {f"{spelled}.py": b"", f"{folder}/METADATA": about, f"{folder}/RECORD": b"",
                 f"{folder}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n"}  # fmt: skip
        made = write_wheel(inputs / f"{spelled}-{version}-py3-none-any.whl", names)
        with (inputs / "lock").open("a") as file:
            file.write(f"{name}=={version} \\\n    --hash=sha256:{sha256(made.read_bytes())}\n")
    build(tmp_path / "store", inputs, flavour="cuda").run()
    store = Store(tmp_path / "store")
    (entry,) = store.index()
    assert entry["annotations"]["org.opencontainers.image.ref.name"].endswith("-cuda")
    base, cuda, libraries, engine = layers(store)
    assert base.getmember("usr/bin/cc").linkname == "gcc-12"
    assert {"sbin/ldconfig", "usr/bin/python3.11"} <= {*base.getnames()}
    found = {name for name in heavy if f"{image.SITE}/{name.replace('-', '_')}.py" in
             cuda.getnames()}  # fmt: skip
    assert found == {"torch", "nvidia-nccl-cu13", "triton"}
    assert {f"{image.SITE}/river.py", f"{image.SITE}/torchish.py"} <= {*libraries.getnames()}
    assert f"{image.SITE}/headrace/factory/image.py" in engine.getnames()
    index = store.document(named(store).digest)
    manifest = store.document(index["manifests"][0]["digest"])
    settings = store.document(manifest["config"]["digest"])["config"]["Env"]
    assert {*image.CUDA_ENVIRONMENT, "HEADRACE_CACHE=/cache"} <= {*settings}
    assert len([one for one in settings if one.startswith("PATH=")]) == 1
    assert list(problems(store)) == []


def test_a_flavour_or_a_processor_that_it_lacks_is_named(tmp_path: Path, inputs: Path) -> None:
    with pytest.raises(InvalidRequest, match="one of cpu, cuda, not 'rocm'"):
        build(tmp_path / "store", inputs, flavour="rocm")
    document = json.loads((inputs / "debian.json").read_text())
    (inputs / "debian.json").write_text(json.dumps({**document, "cuda": {"other": []}}))
    with pytest.raises(InvalidRequest, match=f"for other, not for {HERE}"):
        build(tmp_path / "store", inputs, flavour="cuda")


def test_the_locks_of_the_flavours_agree() -> None:
    """The layer below the libraries is torch's and NVIDIA's; the rest are the same packages."""
    plain, heavy = (
        {image._named(name): version for name, version, _ in locked(path.read_text(), "x86_64")}
        for path in (image.LOCK, image.CUDA_LOCK)
    )
    assert plain.items() <= heavy.items()
    below = {name for name in heavy if image._HEAVY.match(name)}
    assert {"torch", "triton", "nvidia-cublas", "nvidia-nccl-cu13"} <= below
    assert {*heavy} - below - {*plain} == {"mpmath", "networkx", "setuptools", "sympy"}
