"""The catalog: models known by a bare name, with every byte pinned.

Each file has its size, its SHA-256, and the places that carry the same bytes: a hub repository, and
wheels of a package index that hold it in parts. Only the hash decides: no source is trusted.
`catalog.txt` next to this module is the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASKS = {
    "chat": "Chat",
    "code": "Code",
    "text": "Completion",
    "embed": "Embeddings",
    "rerank": "Reranking",
    "speech": "Speech to text",
    "program": "Programs",
}
"""Tasks of models, each with its title."""
PROPOSED = {
    "cpu": ("phi-4-mini", "qwen3-1.7b"),
    "cuda": ("qwen3-30b-a3b", "gpt-oss-20b", "qwen3-8b", "phi-4-mini"),
}
"""Device → chat models to propose, the best first."""
SPARE = 2
"""A model is proposed if it needs at most 1 / `SPARE` of a CPU's free memory."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository."""

    repo: str
    path: str
    revision: str = "main"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """Consecutive bytes of a file, as a member of a wheel."""

    package: str
    version: str
    member: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """One file: its path in the model's folder, its expected content, its sources."""

    path: str
    size: int
    sha256: str
    hub: HubSource | None = None
    parts: tuple[WheelPart, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.sha256) == 64
        assert not self.parts or sum(part.size for part in self.parts) == self.size
        assert not self.path.startswith("/")
        assert ".." not in self.path.split("/")


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One catalog entry."""

    name: str
    what: str
    licence: str
    files: tuple[CatalogFile, ...]
    task: str = "chat"
    """Key of `TASKS`."""

    @property
    def speech(self) -> bool:
        """Flag of a transcription model: `headrace transcribe`."""
        return self.task == "speech"

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def memory(self) -> int:
        """Bytes of memory to serve it with some thousand tokens of KV, estimated; `headrace
        explain` plans them."""
        return self.size + self.size // 5 + 2**29

    @property
    def gguf(self) -> str | None:
        """Return the `.gguf` file's path if the model is one; None for a folder."""
        return next((file.path for file in self.files if file.path.endswith(".gguf")), None)


def proposed(device: str, memory: int) -> CatalogModel | None:
    """Return the best chat model for a device ("cpu" or "cuda") with `memory` bytes free."""
    usable = memory // SPARE if device == "cpu" else memory
    models = (CATALOG[name] for name in PROPOSED[device])
    return next((model for model in models if model.memory <= usable), None)


def read_catalog(text: str) -> dict[str, CatalogModel]:
    """Read the list: a heading for each model, then its files, each followed by its wheels."""
    found: dict[str, CatalogModel] = {}
    for block in text.split("\n["):
        heading, *rows = block.removeprefix("[").splitlines()
        if not heading or heading.startswith("#"):
            continue
        name, _, cells = heading.partition("] ")
        task, what, licence, hub = (cell.strip() for cell in cells.split("|"))
        assert task in TASKS
        repo, _, revision = hub.partition("@")
        files: list[tuple[str, int, str, list[WheelPart]]] = []
        for row in filter(None, rows):
            if row.startswith("+ "):
                wheel, member, size, sha256 = row[2:].split()
                package, _, version = wheel.partition("==")
                files[-1][3].append(WheelPart(package, version, member, int(size), sha256))
            else:
                path, size, sha256 = row.split()
                files.append((path, int(size), sha256, []))
        found[name] = CatalogModel(
            name,
            what,
            licence,
            tuple(
                CatalogFile(
                    path,
                    size,
                    sha256,
                    HubSource(repo, path, revision) if repo else None,
                    tuple(parts),
                )
                for path, size, sha256, parts in files
            ),
            task,
        )
    return found


CATALOG = read_catalog(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
"""Models by name: by task, and there by size."""
