"""The engine's image without a daemon: a few layers for each processor, and an index over them.

base: Python and its libraries from Debian's packages, by their digests in `debian.json`. libraries:
the wheels of the lock, by its hashes. engine: this package, from a wheel or as installed here. The
image has no shell and no model. It runs as user 65532 and writes only to `/cache` and `/tmp`. The
CUDA flavour has a compiler in its base, which Triton needs for launchers, and below the others a
layer with torch and NVIDIA's libraries, which engine releases do not change.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import sysconfig
import zlib
from dataclasses import dataclass
from email import message_from_bytes
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx

from ..base.errors import DownloadError, InvalidRequest, ModelFileError, file_errors, one_of
from ..base.version import VERSION
from ..kernels.cpu.library import BUILD_ALL, FILE, unbuilt
from .attest import CONFIG_TYPE, attestation, provenance
from .bytecode import compiled, unpacked
from .checks import need
from .graph import Graph, Step, Watch
from .key import PACKAGE, canonical, digest_of
from .layer import Entry, debian, folder, pack, wheel
from .sbom import PYTHON, locked
from .spdx import Pin
from .stage import Recipe, Result, Stage, Work
from .store import INDEX_TYPE, MANIFEST_TYPE, Descriptor, Store

if TYPE_CHECKING:
    from securesystemslib.signer import CryptoSigner

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Processors: OCI's name, and the usual one."""
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
"""Folder of packages that Debian's Python searches by default."""
_METADATA = re.compile(rf"{SITE}/[^/]+\.dist-info/METADATA")
GLIBC = range(17, 37)
"""Versions 2.x that a wheel may require, up to that of the base."""
LOCK = PACKAGE.parents[1] / "deploy" / "image.lock"
"""Lock of a checkout, with the packages that check profiles; `make lock` writes it."""
CUDA_LOCK = LOCK.with_name("image-cuda.lock")
"""Lock of the flavour for CUDA."""
FLAVOURS = {"cpu": LOCK, "cuda": CUDA_LOCK}
_HEAVY = re.compile(r"(torch|triton|nvidia|cuda)(-|$)")
"""Packages of the layer `cuda`."""
PINNED = Path(__file__).parent / "debian.json"
"""Pinned packages, written by `deploy/debian.py`."""
APT = Path("/etc/apt")
"""Folder of apt's configuration, which names mirrors."""
PARTS = ("base", "libraries", "engine")
CUDA_PARTS = ("base", "cuda", "libraries", "engine")
"""Layers of an image, the lowest first."""
ENVIRONMENT = (
    "PATH=/usr/bin",
    "LANG=C.UTF-8",
    "PYTHONDONTWRITEBYTECODE=1",
    "HEADRACE_CACHE=/cache",
)
CUDA_ENVIRONMENT = (
    "PATH=/usr/bin:/sbin",
    "TRITON_CACHE_DIR=/cache/triton",
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
)
"""The last two are read by NVIDIA's container runtime."""
USER = 65532
"""Unprivileged user id, as in other images without a shell."""
MOST_SECONDS = 300
"""Most seconds for the download of one package."""


@dataclass(frozen=True)
class ImagePlace:
    """Sources of packages. They do not affect the result: packages are identified by digest."""

    mirror: str
    """URL or folder of Debian's packages; empty if none is known."""
    lock: str
    """Text of the lock."""
    wheels: Path | None
    """Folder with wheels: of this package, and of the lock's if no index is used."""
    offline: bool
    room: Path
    """A folder that is removed after the run."""
    own: list[list[str]]
    """(path, SHA-256) of Debian's packages for this machine; their Python compiles all layers."""

    @cached_property
    def packages(self) -> dict[str, Entry]:
        """Entries unpacked from the own packages."""
        return _unpacked(self, self.own)

    @cached_property
    def python(self) -> Path:
        """Folder with those packages unpacked."""
        unpacked(self.packages, root := self.room / "python")
        return root


def own_mirror() -> str:
    """Return the base address of this machine's apt mirror of Debian, with a slash; empty if
    none."""
    for file in (*sorted(APT.glob("sources.list.d/*")), APT / "sources.list"):
        text = file.read_text(errors="replace") if file.is_file() else ""
        if found := re.search(r"^(?:deb|URIs:)[^\n#]*?(https?://\S+/)debian/?\s", text, re.M):
            return found[1]
    return ""


class ImageBuild:
    """A planned image; `run` runs the missing stages."""

    def __init__(
        self,
        store: Store,
        key: CryptoSigner,
        architectures: list[str],
        *,
        flavour: str = "cpu",
        lock: Path | None = None,
        wheels: Path | None = None,
        mirror: str | None = None,
        offline: bool = False,
    ) -> None:
        """Plan the image. Raises `InvalidRequest` for an unknown architecture or flavour, or an
        unreadable file."""
        one_of(flavour, FLAVOURS, "flavour")
        lock = lock or FLAVOURS[flavour]
        for one in architectures:
            one_of(one, MACHINES, "architectures")
        with file_errors(InvalidRequest, f"{lock} cannot be read", "lock"):
            text = lock.read_text(encoding="utf-8")
        pinned = json.loads(PINNED.read_bytes())
        more = pinned.get(flavour, {}) if flavour != "cpu" else None
        if more is not None and (lacking := [one for one in architectures if one not in more]):
            raise InvalidRequest(
                f"the flavour {flavour} is made for {', '.join(more)}, not for {lacking[0]}",
                param="architectures",
            )
        self.store = store
        self.name = f"headrace:{VERSION}" + (f"-{flavour}" if more is not None else "")
        machine = {there: one for one, there in MACHINES.items()}.get(platform.machine(), "")
        if machine not in pinned["packages"] or sys.platform != "linux":
            raise InvalidRequest(
                f"an image is made on Linux on {' or '.join(MACHINES.values())}, whose Python "
                "compiles what is in it"
            )
        self._wheels = wheels
        self._place = partial(
            ImagePlace,
            mirror or own_mirror(),
            text,
            wheels,
            offline,
            own=pinned["packages"][machine],
        )
        packing = {"zlib": zlib.ZLIB_RUNTIME_VERSION}
        parts = PARTS if more is None else CUDA_PARTS
        stages, used = [], [("image.lock", digest_of(text.encode()))]
        for one in architectures:
            packages = [*pinned["packages"][one], *(more[one] if more else ())]
            used += [(path, f"sha256:{sha256}") for path, sha256 in packages]
            about = {"architecture": one, **packing}
            engine = {
                name: digest_of(entry.read())
                for name, entry in self._engine(one).items()
                if entry.read
            }
            used.append((f"headrace-{one}", digest_of(canonical(engine))))
            asked: dict[str, dict[str, Any]] = {
                "base": {"packages": packages},
                "cuda": {"lock": digest_of(text.encode()), "heavy": True},
                "libraries": {"lock": digest_of(text.encode())},
                "engine": {"files": digest_of(canonical(engine))},
            }
            if more is not None:
                asked["libraries"]["heavy"] = False
            stages += [Stage(f"{part}-{one}", part, (), {**about, **asked[part]}) for part in parts]
        needs = tuple(stage.name for stage in stages)
        contents = {"architectures": architectures}
        if more is not None:
            contents["parts"] = list(parts)
        stages.append(Stage("image", "image", needs, contents))
        recipes = {
            "base": Recipe(_base, code=_CODE),
            "cuda": Recipe(_libraries, code=_CODE),
            "libraries": Recipe(_libraries, code=_CODE),
            "engine": Recipe(self._pack_engine, code=_CODE),
            "image": Recipe(_image, code=_CODE),
            "provenance": Recipe(self._attest, code=("factory/image.py", "factory/attest.py")),
        }
        parameters = {"key": key.public_key.keyid, "headrace": VERSION, "used": used}
        stages.append(Stage("provenance", "provenance", ("image",), parameters))
        self._key, self._graph = key, Graph(stages, recipes)

    def run(self, watch: Watch = lambda _what, _step: None) -> list[Step]:
        """Run the missing stages; name the image in the store."""
        with TemporaryDirectory(dir=self.store.root / "tmp") as room:
            place = self._place(room=Path(room))
            steps = self._graph.run(self.store, place=place, watch=watch)
        outputs = {
            name: one for step in steps if step.result for name, one in step.result.outputs.items()
        }
        self.store.attest(outputs["index.json"].digest, outputs["attestation"])
        self.store.tag(self.name, outputs["index.json"])
        return steps

    def _engine(self, architecture: str) -> dict[str, Entry]:
        """Return the package's files: from its wheel for this processor, otherwise as installed
        here."""
        machine = MACHINES[architecture]
        wheels = sorted((self._wheels or Path()).glob(f"headrace-*{machine}.whl"))
        if not wheels and machine != platform.machine():
            raise DownloadError(
                f"there is no headrace-*{machine}.whl; `make wheels` makes it, --wheels names its "
                "folder"
            )
        found = wheel(wheels[0], SITE) if wheels else folder(PACKAGE, f"{SITE}/headrace")
        built = Path(sysconfig.get_path("platlib"), "headrace")
        # An editable install leaves the sources where they are.
        if not wheels and built != PACKAGE:
            found = {**folder(built, f"{SITE}/headrace"), **found}
        if f"{SITE}/headrace/kernels/cpu/{FILE.name}" not in found:
            raise InvalidRequest(
                f"{wheels[0].name if wheels else 'what is installed here'} has no CPU kernels, and "
                "an image without them serves nothing; `python -m headrace.kernels.cpu.build` "
                "builds them, `make wheels` whole wheels",
                param="wheels",
            )
        if not wheels and (lacking := unbuilt()):
            raise InvalidRequest(
                f"what is installed here lacks the kernels of {', '.join(lacking)}, which other "
                f"processors need; {BUILD_ALL} builds them, `make wheels` whole wheels",
                param="wheels",
            )
        return found

    def _attest(self, work: Work) -> Result:
        """Attest the image: Debian's packages, the lock, the engine's files."""
        made = need(work, "image").outputs
        index = made["index.json"]
        built = [(self.name, index.digest)]
        built += [(name, one.digest) for name, one in made.items() if name.startswith("manifest-")]
        names = [one.removeprefix("manifest-") for one, _ in built[1:]]
        used, asked = work.stage.parameters["used"], {"architectures": names}
        envelope = provenance("image", built, used, self._key, asked=asked, found={})
        return Result({"attestation": attestation(work.store, index, [envelope])})

    def _pack_engine(self, work: Work) -> Result:
        return _layer(work, self._engine(work.stage.parameters["architecture"]))


def _base(work: Work) -> Result:
    """Unpack Debian's packages; add a user and the two writable folders."""
    place: ImagePlace = work.place
    packages = work.stage.parameters["packages"]
    entries: dict[str, Entry] = {}
    rest = packages
    if all(one in packages for one in place.own):
        entries, rest = dict(place.packages), [one for one in packages if one not in place.own]
    entries |= _unpacked(place, rest)
    entries.setdefault("usr/bin/python3", Entry(link=f"python{PYTHON}"))  # Health checks call it.
    if "usr/bin/gcc-12" in entries:
        entries["usr/bin/cc"] = entries["usr/bin/gcc"] = Entry(link="gcc-12")
        entries["etc/debian_version"] = Entry(b"12\n".__bytes__)  # NVIDIA's runtime asks for it.
    user = f"root:x:0:0::/:/\nheadrace:x:{USER}:{USER}::/cache:/\n".encode()
    group = f"root:x:0:\nheadrace:x:{USER}:\n".encode()
    entries["etc/passwd"], entries["etc/group"] = Entry(user.__bytes__), Entry(group.__bytes__)
    entries["tmp"] = Entry(mode=0o1777)
    entries["cache"] = Entry(mode=0o755, owner=USER)
    return _layer(work, entries)


def _unpacked(place: ImagePlace, packages: list[list[str]]) -> dict[str, Entry]:
    entries = {}
    with httpx.Client(timeout=MOST_SECONDS, follow_redirects=True) as client:
        for path, sha256 in packages:
            data = _fetched(client, place, path)
            if digest_of(data) != f"sha256:{sha256}":
                raise ModelFileError(
                    f"{path}: its SHA-256 is {digest_of(data)[7:23]}…, not {sha256[:16]}…"
                )
            entries.update(debian(path.rpartition("/")[2], data))
    return entries


def _fetched(client: httpx.Client, place: ImagePlace, path: str) -> bytes:
    """Fetch one of Debian's packages from the mirror or a folder."""
    if not place.mirror:
        raise DownloadError(
            "no mirror of Debian is known here; --debian takes an address or a folder of packages"
        )
    try:
        if "://" not in place.mirror:
            return (Path(place.mirror) / path.rpartition("/")[2]).read_bytes()
        if place.offline:
            raise DownloadError(f"{path} is not here, and the network may not be used")
        return client.get(place.mirror + path).raise_for_status().content
    except (OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadError(f"{path} cannot be had from {place.mirror}: {error}") from None


def _libraries(work: Work) -> Result:
    """Unpack the lock's wheels, which pip fetches by their hashes, also for the other processor."""
    place: ImagePlace = work.place
    machine = MACHINES[work.stage.parameters["architecture"]]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC] + [f"manylinux2014_{machine}"]
    with TemporaryDirectory(dir=work.store.root / "tmp") as name:
        wheels, lock = Path(name), Path(name) / "lock"
        pins = locked(place.lock, machine)  # pip would evaluate conditions for its own Python.
        if (heavy := work.stage.parameters.get("heavy")) is not None:
            pins = [pin for pin in pins if bool(_HEAVY.match(_named(pin[0]))) == heavy]
        lock.write_text("".join(map(_requirement, pins)), encoding="utf-8")
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        words += ["--require-hashes", "--only-binary=:all:", "--requirement", str(lock)]
        words += ["--implementation", "cp", "--python-version", PYTHON]
        words += [word for tag in tags for word in ("--platform", tag)]
        if place.wheels is not None:
            words += ["--find-links", str(place.wheels)]
        words += ["--no-index"] if place.offline else []
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise DownloadError(f"the lock's wheels for {machine} cannot be had: {said:.300}")
        entries: dict[str, Entry] = {}
        for path in sorted(wheels.glob("*.whl")):
            entries.update(wheel(path, SITE))
        wanted = {(_named(name), version) for name, version, _ in pins}
        for name, version in sorted(_installed(entries) ^ wanted):
            raise ModelFileError(
                f"{name} {version} is in one of the lock and the layer's files and not in the other"
            )
        return _layer(work, entries)


def _requirement(pin: Pin) -> str:
    name, version, hashes = pin
    return " ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes)]) + "\n"


def _installed(entries: dict[str, Entry]) -> set[tuple[str, str]]:
    """Return (package, version) named by the files, as an image scanner would."""
    found = set()
    for name, entry in entries.items():
        if _METADATA.fullmatch(name) and entry.read is not None:
            about = message_from_bytes(entry.read())
            found.add((_named(str(about["Name"])), str(about["Version"])))
    return found


def _named(package: str) -> str:
    """Return a package's name in the index's normalised spelling."""
    return re.sub("[-_.]+", "-", package).lower()


def _layer(work: Work, entries: dict[str, Entry]) -> Result:
    place: ImagePlace = work.place
    with TemporaryDirectory(dir=place.room) as room:
        whole = compiled(entries, place.python, PYTHON, Path(room))
    layer, inside = pack(work.store, whole)
    return Result({"layer": layer}, figures={"diff_id": inside, "bytes": layer.size})


def _image(work: Work) -> Result:
    """Write the configuration and manifest of each processor, and the index over them."""
    parts = work.stage.parameters.get("parts", PARTS)
    manifests: list[object] = []
    outputs: dict[str, Descriptor] = {}
    environment = [*ENVIRONMENT]
    if "cuda" in parts:
        environment = [*ENVIRONMENT[1:], *CUDA_ENVIRONMENT]
    for one in work.stage.parameters["architectures"]:
        layers = [need(work, f"{part}-{one}") for part in parts]
        config = {
            "architecture": one,
            "os": "linux",
            "config": {
                "User": f"{USER}:{USER}",
                "Env": environment,
                "Entrypoint": [f"/usr/bin/python{PYTHON}", "-m", "headrace"],
                "Cmd": ["serve", "--host", "0.0.0.0"],
                "ExposedPorts": {"8000/tcp": {}},
                "WorkingDir": "/cache",
            },
            "rootfs": {"type": "layers", "diff_ids": [one.figures["diff_id"] for one in layers]},
            "history": [{"created_by": f"headrace factory image: {part}"} for part in parts],
        }
        described = work.store.put(canonical(config), CONFIG_TYPE)
        blobs = [layer.outputs["layer"] for layer in layers]
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": described.document(),
            "layers": [blob.document() for blob in blobs],
        }
        made = work.store.put(canonical(manifest), MANIFEST_TYPE)
        where = {"architecture": one, "os": "linux"}
        manifests.append({**made.document(), "platform": where})
        outputs |= {f"manifest-{one}": made, f"config-{one}": described}
    index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
    outputs["index.json"] = work.store.put(canonical(index), INDEX_TYPE)
    return Result(outputs)


_CODE = ("factory/image.py", "factory/layer.py", "factory/bytecode.py", "factory/sbom.py")
