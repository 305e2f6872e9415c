"""One folder as store and cache: an OCI image layout, and the manifest of each key.

`blobs/sha256/…`, `index.json` and `oci-layout` follow the OCI image specification 1.1, so that
other tools read the folder. Other entries are ours. `stages/<key>` names the manifest of a stage's
result, `runs/<cell>` the results of a cell's last run. `models/<digest>` has a model's blobs under
their own names. `rings` has signed pointers, `attested/<digest>` names the manifest of an
attestation about it. `locks` and `tmp` are for processes at work.

Files appear by renaming: a killed process leaves incomplete files only in `tmp`. Nothing is trusted
before its digest was computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import msgspec

from ..base.environment import cache_root
from ..base.errors import OptionError, Untrusted
from ..base.foreign import Undecodable, any_json
from ..loader.partial import file_sha256
from .key import canonical, digest_of, is_digest

LAYOUT = canonical({"imageLayoutVersion": "1.0.0"})
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"
REF_NAME = "org.opencontainers.image.ref.name"
SMALL = 16 << 20
"""Most bytes of a blob that is read at once."""
DURABLE = 1 << 20
"""Bytes from which a blob is synced to the disk before it gets its name. Smaller ones are read at
once: if a power failure damaged one, its digest shows that and it is made again."""
CHUNK = 8 << 20
DEEPEST = 32
"""Nested levels of manifests and indexes; an image has three."""
MOST_PARTS = 1_000_000
"""Most blobs named by manifests and indexes in one traversal."""


class Readable(Protocol):
    """A source of bytes, until there are no more."""

    def read(self, size: int, /) -> bytes: ...


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """OCI's descriptor: type, digest and size of a blob."""

    digest: str
    size: int
    media_type: str = "application/octet-stream"

    def document(self, **annotations: str) -> dict[str, Any]:
        """Return the JSON object that manifests and the index hold."""
        about = {"annotations": annotations} if annotations else {}
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **about}

    @classmethod
    def read(cls, document: Any) -> Descriptor:
        """Read a descriptor. Raises `Untrusted` if it is not one."""
        try:
            digest, size, kind = document["digest"], document["size"], document["mediaType"]
        except (KeyError, TypeError):
            raise Untrusted("a descriptor lacks its digest, size or mediaType") from None
        if not is_digest(digest) or not isinstance(size, int) or not isinstance(kind, str):
            raise Untrusted(f"a descriptor names {digest!r:.80}, which is no SHA-256 digest")
        return cls(digest=digest, size=size, media_type=kind)


class Store:
    """The folder; several processes may use it at once."""

    def __init__(self, root: Path) -> None:
        """Create the folder if it is absent. Raises `OptionError`, `Untrusted`."""
        # Absolute, because programs run by a stage have another working directory.
        self.root = root = root.absolute()
        self._blobs, self._at = (
            f"{root}/blobs/sha256/",
            f"{root}/",
        )  # Making a `Path` takes as long as a read.
        with self.writing():
            for name in ("blobs/sha256", "stages", "runs", "models", "rings", "locks", "tmp"):
                (root / name).mkdir(parents=True, exist_ok=True)
        if not (root / "oci-layout").exists():
            self._appear(root / "oci-layout", LAYOUT)
        if not (root / "index.json").exists():
            with self.lock("index"):
                if not (root / "index.json").exists():
                    self._write_index([])

    def blob(self, digest: str) -> Path:
        assert is_digest(digest), digest
        return self.root / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def has(self, one: Descriptor) -> bool:
        """Return whether the blob exists with its size; `problems` and `read` check its bytes."""
        return self.size(one.digest) == one.size

    def size(self, digest: str) -> int | None:
        """Return the bytes of the blob's file; None if it is absent."""
        try:
            return os.stat(self._blobs + digest.removeprefix("sha256:")).st_size
        except OSError:
            return None

    def put(self, data: bytes, media_type: str) -> Descriptor:
        """Store these bytes."""
        one = Descriptor(digest=digest_of(data), size=len(data), media_type=media_type)
        if not self._holds(one.digest, data):
            self._appear(self.blob(one.digest), data)
        return one

    def put_file(self, path: Path, media_type: str) -> Descriptor:
        """Store a copy of a file, hashed as it is read."""
        with path.open("rb") as source:
            return self.put_stream(source, media_type)

    def put_stream(
        self, source: Readable, media_type: str, wanted: Descriptor | None = None
    ) -> Descriptor:
        """Store the bytes of a source, hashed as they are read.

        Raises `Untrusted` for other bytes than the wanted ones, before they have a name.
        """
        found, size = hashlib.sha256(), 0
        with self.writing():
            handle, name = tempfile.mkstemp(dir=self.root / "tmp")
        try:
            with os.fdopen(handle, "wb") as target:
                while chunk := source.read(CHUNK):
                    found.update(chunk)
                    target.write(chunk)
                    size += len(chunk)
                    if wanted is not None and size > wanted.size:
                        break
                target.flush()
                if size >= DURABLE:
                    os.fsync(target.fileno())
            os.chmod(name, 0o444)
            one = Descriptor(digest=f"sha256:{found.hexdigest()}", size=size, media_type=media_type)
            if wanted is not None and (one.digest, size) != (wanted.digest, wanted.size):
                raise Untrusted(f"blob {wanted.digest} came with other bytes")
            os.replace(name, self.blob(one.digest))
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        return one

    def read(self, digest: str) -> bytes:
        """Read a small blob and check its digest. Raises `Untrusted` if it is absent or changed."""
        assert is_digest(digest), digest
        try:
            with open(self._blobs + digest.removeprefix("sha256:"), "rb") as file:
                data = file.read(SMALL + 1)
        except OSError:
            raise Untrusted(f"blob {digest} is not in the store") from None
        if len(data) > SMALL:
            raise Untrusted(f"blob {digest} is larger than {SMALL:,} bytes")
        if digest_of(data) != digest:
            raise Untrusted(f"blob {digest} has other bytes than its name says")
        return data

    def document(self, digest: str) -> dict[str, Any]:
        """Read a blob of JSON. Raises `Untrusted`."""
        return _object(self.read(digest), f"blob {digest}")

    def keep(self, key: str, manifest: Descriptor) -> None:
        """Record the manifest as this key's result."""
        self._appear(self.root / "stages" / key.removeprefix("sha256:"), manifest.digest.encode())

    def kept(self, key: str) -> str | None:
        """Return the digest of this key's manifest, if there is one."""
        return self._pointer(f"stages/{key.removeprefix('sha256:')}")

    def attest(self, subject: str, attestation: Descriptor) -> None:
        """Record the attestation about the subject with this digest."""
        data = attestation.digest.encode()
        self.export(f"attested/{subject.removeprefix('sha256:')}", data)

    def attested(self, subject: str) -> str | None:
        """Return the digest of the attestation about this subject, if there is one."""
        return self._pointer(f"attested/{subject.removeprefix('sha256:')}")

    def _pointer(self, path: str) -> str | None:
        try:
            with open(self._at + path, "rb") as file:
                found = file.read(80).decode(errors="replace")
        except OSError:
            return None
        if not is_digest(found):
            raise Untrusted(f"{path} names no digest")
        return found

    def remember(self, cell: str, results: Mapping[str, str]) -> None:
        """Record the manifests of a cell's last run, for `explain`."""
        self._appear(self.root / "runs" / _file_name(cell), canonical(dict(results)))

    def remembered(self, cell: str) -> dict[str, str]:
        """Return the manifests of the cell's last run by the stage's name."""
        try:
            found = json.loads((self.root / "runs" / _file_name(cell)).read_bytes())
        except (OSError, ValueError):
            return {}
        return {k: v for k, v in found.items() if is_digest(v)} if isinstance(found, dict) else {}

    def index(self) -> list[dict[str, Any]]:
        """Return the named manifests. Raises `Untrusted`."""
        try:
            data = (self.root / "index.json").read_bytes()
        except OSError:
            raise Untrusted("index.json is not in the store") from None
        manifests = _object(data, "index.json").get("manifests")
        if not isinstance(manifests, list):
            raise Untrusted("index.json has no list of manifests")
        return manifests

    def tag(self, name: str, manifest: Descriptor) -> None:
        """Give a manifest a name; a previous one with that name loses it."""
        entry = manifest.document(**{REF_NAME: name})
        with self.lock("index"):
            before = self.index()
            if entry not in before:
                self._write_index([one for one in before if name_of(one) != name] + [entry])

    def checkout(self, files: Mapping[str, Descriptor]) -> Path:
        """Make a folder with these blobs under these names, as links; always the same one.

        All of them are hashed. Raises `Untrusted` with the name of a blob that is not in the store,
        or a name that would leave the folder.
        """
        for name in files:
            if not is_file_name(name):
                raise Untrusted(f"{name!r:.80} is no name of a file in a folder")
        wanted = canonical({name: one.digest for name, one in files.items()})
        folder = self.root / "models" / digest_of(wanted).removeprefix("sha256:")[:16]

        def ready() -> bool:
            return all(
                self.has(one) and _is_own(folder, name) and _holds(folder / name, one)
                for name, one in files.items()
            )

        if ready():
            return folder
        with self.lock("models"):
            if not ready():
                fresh = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
                for name, one in files.items():
                    if not _holds(self.blob(one.digest), one):
                        raise Untrusted(f"{name}: its blob is absent or has other bytes")
                    try:
                        (fresh / name).parent.mkdir(parents=True, exist_ok=True)
                        _same(self.blob(one.digest), fresh / name)
                    except (FileExistsError, NotADirectoryError, IsADirectoryError):
                        raise Untrusted(f"{name!r:.80} cannot be a file and a folder") from None
                if folder.is_symlink():
                    folder.unlink()
                shutil.rmtree(folder, ignore_errors=True)
                fresh.replace(folder)
        return folder

    def parts(self, one: Descriptor) -> list[Descriptor]:
        """Return the descriptors in a manifest or an index; none for any other blob. Raises
        `Untrusted`."""
        if one.media_type not in (INDEX_TYPE, MANIFEST_TYPE):
            return []
        document = self.document(one.digest)
        lists = [document.get(name) or [] for name in ("manifests", "layers")]
        lists += [[document[name]] for name in ("config", "subject") if document.get(name)]
        if not all(isinstance(named, list) for named in lists):
            raise Untrusted(f"blob {one.digest} is no manifest")
        return [Descriptor.read(part) for named in lists for part in named]

    def closure(
        self, *roots: Descriptor, bring: Callable[[Descriptor], None] = lambda one: None
    ) -> list[Descriptor]:
        """Return all blobs that manifests and indexes need, each once, dependencies first. `bring`
        is called before a blob is checked.

        Raises `Untrusted` for a document that is absent, changed or invalid, a blob that is absent
        or has another size, and a graph deeper than `DEEPEST` or larger than `MOST_PARTS`.
        """
        seen: set[Descriptor] = set()
        found: dict[str, Descriptor] = {}
        path: list[tuple[Descriptor | None, Iterator[Descriptor]]] = [(None, iter(roots))]
        while path:
            owner, parts = path[-1]
            if (one := next(parts, None)) is None:
                path.pop()
                if owner is not None:
                    found[owner.digest] = owner
            elif one not in seen:
                seen.add(one)
                if len(path) > DEEPEST or len(seen) > MOST_PARTS:
                    raise Untrusted(
                        f"blob {one.digest} is beyond the bounds of what manifests may name: "
                        f"{DEEPEST} levels and {MOST_PARTS:,} blobs"
                    )
                bring(one)
                if not self.has(one):
                    raise Untrusted(f"blob {one.digest} is not in the store, or has another size")
                path.append((one, iter(self.parts(one))))
        return [*found.values()]

    @contextmanager
    def lock(self, name: str, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Hold a lock of this store; the kernel releases it when its process ends.

        `waits` is called once if another process holds it.
        """
        with self.writing():
            handle = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT, 0o644)
        with held(handle, waits):
            yield

    def export(self, path: str, data: bytes) -> Path:
        """Write a file for people into the store, atomically."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._appear(target, data)
        return target

    def _holds(self, digest: str, data: bytes) -> bool:
        try:
            return self.blob(digest).read_bytes() == data
        except OSError:
            return False

    def _write_index(self, manifests: list[dict[str, Any]]) -> None:
        named = {name_of(one): Descriptor.read(one) for one in manifests}
        self._appear(self.root / "index.json", index_document(named))

    def _appear(self, target: Path, data: bytes) -> None:
        with self.writing():
            handle, name = tempfile.mkstemp(dir=self.root / "tmp")
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if len(data) >= DURABLE:
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, target)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise `OptionError` if the folder is not writable: a store may be read-only."""
        try:
            yield
        except OSError as error:
            raise OptionError(
                f"{self.root} cannot be used as a store: {error.strerror}; choose another with "
                "--store",
                param="store",
            ) from None


def store_folder(named: str | None, cache_dir: str | None = None) -> Path:
    """Return the folder of the store; by default in the cache folder."""
    if named:
        return Path(named).expanduser()
    return (Path(cache_dir) if cache_dir else cache_root()) / "factory" / "store"


@contextmanager
def held(handle: int, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of an open file, then close it."""
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def tag_beside(root: Descriptor, what: str = "att") -> str:
    """Return the tag of a companion: an attestation, as named by cosign, or `panels`."""
    return f"{root.digest.replace(':', '-')}.{what}"


def is_file_name(name: str) -> bool:
    """Return whether a name is canonical and stays inside its folder."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name:
        return False
    return name.isprintable() and max(len(os.fsencode(part)) for part in path.parts) <= 255


def _is_own(folder: Path, name: str) -> bool:
    """Return whether the file of this name is in the folder itself, not linked from elsewhere."""
    return not folder.is_symlink() and Path(os.path.realpath(folder / name)) == Path(
        os.path.realpath(folder), name
    )


def _holds(path: Path, one: Descriptor) -> bool:
    if not path.is_file() or path.stat().st_size != one.size:
        return False
    return f"sha256:{file_sha256(path)}" == one.digest


def _same(source: Path, target: Path) -> None:
    """Give the same bytes another name: by a link, or by a copy if links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = any_json(data)
    except Undecodable:
        raise Untrusted(f"{what} is not JSON") from None
    if not isinstance(found, dict):
        raise Untrusted(f"{what} is not a JSON object")
    return found


def name_of(entry: dict[str, Any]) -> str:
    """Return the name that the index gives a manifest; "" without one."""
    return str((entry.get("annotations") or {}).get(REF_NAME, ""))


def index_document(named: Mapping[str, Descriptor]) -> bytes:
    """Return `index.json` with these names, in canonical form."""
    manifests = [one.document(**{REF_NAME: name}) for name, one in sorted(named.items())]
    return canonical({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests})


def _file_name(cell: str) -> str:
    return digest_of(cell.encode()).removeprefix("sha256:")[:32]
